"""Linear layers and norms of a draft, sharded over the tensor parallel group (Megatron-LM, arXiv 1909.08053).

Communication is explicit: `enter` before the column-sharded linears of a block, which share their input, and
`RowLinear` at its end. Both support sequence parallelism (arXiv 2205.05198), where activations between blocks have
S / TP rows per rank.

S sequence, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn

from megatron_spec.config import UserError
from megatron_spec.config.structure import share
from megatron_spec.drafts.contract import mark_replicated, mark_sharded
from megatron_spec.ops.embedding import embed

if TYPE_CHECKING:
    from megatron_spec.drafts.engine import TransformerEngine

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x, weight, bias) -> x W^T (+ b), as `F.linear`."""


class _CopyToRanks(torch.autograd.Function):
    """Identity whose gradient is summed over the group.

    megatron-core's version reduces in place, which leaves a non-contiguous gradient unreduced.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The input, unchanged."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, summed over the group."""
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity on every rank; the gradient is summed over ranks."""
    if group.size() == 1:
        return x
    out: Tensor = _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def enter(x_SBH: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Input of column-sharded linears: the full sequence on every rank, gradients summed over ranks."""
    if sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(x_SBH, tensor_parallel_output_grad=True, group=group)
    return copy_to_ranks(x_SBH, group)


@dataclass(frozen=True)
class Placement:
    """Sharding, device and dtype of a draft's parameters on this rank.

    Attributes:
        group: tensor parallel group.
        sequence_parallel: activations between the sharded linears are split over the sequence.
        engine: source of linears and norms; None: torch.
        exact: linears stay in high precision where others compute in fp8.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    engine: TransformerEngine | None = None
    exact: bool = False

    @property
    def in_high_precision(self) -> Placement:
        """The same, for linears that stay in high precision."""
        return replace(self, exact=True)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter that is NaN until initialised or loaded, so that a missing one is noticed."""
        return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device))

    def matrix(self, outputs: int, inputs: int) -> tuple[nn.Parameter, Product]:
        """A weight [outputs, inputs] of this rank, unmarked, and the product with it."""
        if self.engine is None:
            return self.empty(outputs, inputs), F.linear
        return self.engine.linear(outputs, inputs, self.dtype, self.device, self.exact)

    def replicated(self, *shape: int) -> nn.Parameter:
        """A replicated parameter."""
        return mark_replicated(self.empty(*shape), self.sequence_parallel)

    def divide(self, total: int, what: str) -> int:
        """This rank's share of `total`. Raises UserError, naming `what`, if it cannot be split evenly."""
        parts = self.group.size()
        if total % parts:
            raise UserError(
                f"{what} {total} is not a multiple of --tensor-model-parallel-size {parts}: "
                "choose a size that divides it"
            )
        return total // parts

    def vocabulary(self, rows: int, width: int) -> nn.Parameter:
        """This rank's rows of an LM head or an embedding; see `structure.share`.

        Raises UserError for a vocabulary so small that a rank would have no rows.
        """
        mine = len(share(rows, self.group.size(), self.group.rank()))
        if not len(share(rows, self.group.size(), self.group.size() - 1)):
            raise UserError(
                f"a vocabulary of {rows} leaves some of {self.group.size()} tensor parallel ranks without a token: "
                "use a smaller --tensor-model-parallel-size"
            )
        return mark_sharded(self.empty(mine, width), 0, rows)


def pad_logits(logits_SBV: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """[S, B, ceil(V / TP)] logits of this rank's vocabulary shard, padded with -inf where it is shorter."""
    missing = -(-vocab_size // group.size()) - logits_SBV.shape[-1]
    return F.pad(logits_SBV, (0, missing), value=float("-inf")) if missing else logits_SBV


def hooked(module: nn.Module) -> bool:
    """True if calling the module does more than its class says: it has hooks, or a `forward` of its own."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks) or "forward" in vars(module)


class _Linear(nn.Module):
    """y = x W^T (+ b), with optional fake quantisation of input and weight."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None, product: Product = F.linear) -> None:
        super().__init__()
        self.weight, self.bias, self._product = weight, bias, product
        self.input_quantizer: Callable[[Tensor], Tensor] | None = None
        self.weight_quantizer: Callable[[Tensor], Tensor] | None = None

    def quantized_input(self, x: Tensor) -> Tensor:
        """x, fake-quantised if this layer has an input quantiser."""
        return x if self.input_quantizer is None else self.input_quantizer(x)

    def quantized_weight(self) -> Tensor:
        """The weight, fake-quantised if this layer has a weight quantiser."""
        return self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)

    @property
    def plain(self) -> bool:
        """True if the product is torch's, not Transformer Engine's."""
        return self._product is F.linear

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """This rank's product, with inputs and weight as quantised."""
        return self._product(self.quantized_input(x), self.quantized_weight(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Linear map of the last axis."""
        return self.product(x, self.bias)


def attached_quantizers(linears: Iterable[nn.Module]) -> list[Any]:
    """The fake quantisers of these modules; other modules are passed over."""
    places = ("input_quantizer", "weight_quantizer")
    return [q for m in linears for q in (getattr(m, place, None) for place in places) if q is not None]


class Linear(_Linear):
    """Replicated weight [out, in]; under sequence parallelism each rank computes its own rows of activations."""

    def __init__(self, inputs: int, outputs: int, place: Placement, bias: bool = False) -> None:
        weight, product = place.matrix(outputs, inputs)
        own_bias = place.replicated(outputs) if bias else None
        super().__init__(mark_replicated(weight, place.sequence_parallel), own_bias, product)


class ColumnLinear(_Linear):
    """Column parallel: weight [out / TP, in]. The input comes from `enter`, the output stays split."""

    def __init__(self, inputs: int, outputs: int, what: str, place: Placement, bias: bool = False) -> None:
        rows = place.divide(outputs, what)
        own_bias = mark_sharded(place.empty(rows), dim=0) if bias else None
        weight, product = place.matrix(rows, inputs)
        super().__init__(mark_sharded(weight, dim=0), own_bias, product)


class RowLinear(_Linear):
    """Row parallel: weight [out, in / TP]. Partial products are summed over ranks.

    Under sequence parallelism the sum is reduce-scattered over the sequence.
    """

    def __init__(self, inputs: int, outputs: int, what: str, place: Placement, bias: bool = False) -> None:
        weight, product = place.matrix(outputs, place.divide(inputs, what))
        super().__init__(mark_sharded(weight, dim=1), place.replicated(outputs) if bias else None, product)
        self.group, self.sequence_parallel = place.group, place.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, in / TP] -> [S, B, out], or [S / TP, B, out] under sequence parallelism."""
        return self.reduced(self.product(x))

    def reduced(self, partial: Tensor) -> Tensor:
        """The output from this rank's product [S, B, out]: the sum over ranks, and the bias."""
        if self.sequence_parallel:
            total = mappings.reduce_scatter_to_sequence_parallel_region(partial, group=self.group)
        else:
            total = mappings.reduce_from_tensor_model_parallel_region(partial, group=self.group)
        return total if self.bias is None else total + self.bias


class VocabLinear(_Linear):
    """Vocabulary-parallel LM head [V / TP, in]. The input comes from `enter`, the output stays split."""

    def __init__(self, inputs: int, vocab_size: int, place: Placement) -> None:
        super().__init__(place.vocabulary(vocab_size, inputs))
        self.vocab_size, self.group = vocab_size, place.group

    def forward(self, x: Tensor) -> Tensor:
        """[.., V / TP] logits; see `pad_logits`."""
        return pad_logits(super().forward(x), self.vocab_size, self.group)


class VocabEmbedding(nn.Module):
    """Vocabulary-parallel embedding [V / TP, size]."""

    def __init__(self, vocab_size: int, size: int, place: Placement) -> None:
        super().__init__()
        self.weight, self.vocab_size = place.vocabulary(vocab_size, size), vocab_size
        self.group, self.sequence_parallel = place.group, place.sequence_parallel

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """[S, B, size], or [S / TP, B, size] under sequence parallelism."""
        return embed(tokens_BS, self.weight, self.group, self.sequence_parallel, self.vocab_size)


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last axis (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.eps, self._norm = eps, None
        if place.engine is None:
            self.weight = place.replicated(size)
        else:
            weight, self._norm = place.engine.norm(size, eps, place.dtype, place.device)
            self.weight = mark_replicated(weight, place.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight, same shape and dtype."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps) if self._norm is None else self._norm(x)
