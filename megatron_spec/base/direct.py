"""The layers of the frozen base as a short list of products and element-wise operations, without modules or autograd.

Computes what the stage's megatron-core layers compute, on the same weights, with one of three sets of operators
(`operators.py`). A step of decoding takes its attention, or whole layers, from `decode_layers.py`.

S sequence, B micro-batch, R = S * B rows, H hidden, N query and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.base.decode_layers import DecodeLayers
from megatron_spec.base.moe import MixtureOfExperts
from megatron_spec.base.operators import Fp8Operators, KernelOperators, Norms, PlainOperators
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.ops import backend
from megatron_spec.ops.fp8 import padded
from megatron_spec.ops.overlap import RankSums, Wait
from megatron_spec.ops.rope import rotary_angles
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import Paths


def _experts(layer: Any) -> torch.nn.Module:
    """The layer's mixture of experts; an empty module for a dense layer."""
    return layer.mlp if isinstance(layer.mlp, MixtureOfExperts) else torch.nn.Module()


class DirectForward:
    """Forward of one stage's layers.

    Under tensor parallelism the rows of a training batch go through a layer in two pieces, so that the sums over ranks
    of one run beside the products of the other (`ops/overlap.py`). Under sequence parallelism the layers have all rows,
    since a forward without gradients keeps no activations: only what comes in and goes out is sharded.

    Args:
        layers: megatron-core TransformerLayers with this package's local spec.
        final_norm: weight of the final norm on the last stage.
        paths: fast paths of the base, with `base_direct` on.
    """

    def __init__(
        self, config: BaseConfig, layers: list[Any], final_norm: Tensor | None, tp: dist.ProcessGroup, paths: Paths
    ) -> None:
        self.config, self.layers, self.final_norm, self.tp = config, layers, final_norm, tp
        self.sums = RankSums(tp)
        self.sequence_parallel = paths.setting.parallel.sequence_parallel
        heads = (config.num_attention_heads // tp.size(), config.num_key_value_heads // tp.size())
        kind = paths.kernels("base_direct")
        self.operators: PlainOperators = PlainOperators(config, *heads)
        if kind != "none":
            self.operators = KernelOperators(config, *heads, backend.load(kind), paths.on("product_epilogues"))
        kind = paths.kernels("decode_kernels")
        self.decode: DecodeLayers | None = None
        if kind != "none":
            self.decode = DecodeLayers(config, heads, backend.load(kind), paths.on("decode_products"))
        experts = {m for layer in layers for m in _experts(layer).modules()}  # run as modules, hooks included
        self._parts = [m for layer in layers for m in layer.modules() if m not in experts]

    def untouched(self) -> bool:
        """True if no module has hooks (quantisers, observers), which bypassing the modules would skip."""
        return not any(m._forward_pre_hooks or m._forward_hooks for m in self._parts)

    def can_run(self, visibility: Visibility) -> bool:
        """True if the operators serve this forward and no module has hooks."""
        return self.operators.serves(visibility) and self.untouched()

    @torch.no_grad()
    def __call__(
        self, hidden_SBH: Tensor, positions_BS: Tensor, inv_freq: Tensor, captured: Collection[int],
        visibility: Visibility | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run all layers.

        Args:
            captured: indices in `layers` of the outputs to capture.
            visibility: key visibility; default: causal.

        Returns:
            (state after the last layer and, on the last stage, the final norm; captured outputs), all [S, B, H]
            ([S / TP, B, H], as `hidden_SBH`, under sequence parallelism).
        """
        (_, B, H), do = hidden_SBH.shape, self.operators
        hidden_SBH = self._all_rows(hidden_SBH)
        visibility, S = visibility or Visibility.causal(), len(hidden_SBH)
        angles, whole, recorded = rotary_angles(positions_BS, inv_freq), hidden_SBH.reshape(S * B, H), []
        decode = self.decode if self.decode is not None and self.decode.serves(visibility) else None
        if decode is not None and decode.whole(visibility):
            return self._few_rows(decode, whole, decode.tables(angles), captured, visibility)
        tables = do.tables(angles, hidden_SBH.dtype) if decode is None else decode.tables(angles)
        parts = self._pieces(S * B, visibility)
        x, training = [whole[part] for part in parts], visibility.cache is None
        delta: list[Wait | None] = [None] * len(parts)
        for i, layer in enumerate(self.layers):
            x, qkv = self._projected(x, delta, layer, parts, decode is None)
            if i - 1 in captured:
                recorded.append(self._own_rows(x, B))
            attention = layer.self_attention
            if decode is not None:
                attended = decode.attend(qkv, attention, tables, visibility, i)
            else:
                attended = do.attend(qkv, tables, S, B, visibility, i, self._head_norms(attention))
            if self._adds(attention.linear_proj, training):  # the caller and a capture keep their tensors
                x = [do.add_product(x[0], attended, attention.linear_proj, keep=i == 0 or i - 1 in captured)]
                delta = [None]
            else:
                delta = [self._summed(do.activation(attended[part]), attention.linear_proj) for part in parts]
            for n, summed in enumerate(delta):
                norm = layer.pre_mlp_layernorm.weight
                x[n], normed = do.add_norm(x[n], None if summed is None else summed(), norm)
                delta[n] = self._mlp(x, n, layer.mlp, normed, S, training)
        x, out = self._last(x, delta)
        if len(self.layers) - 1 in captured:
            recorded.append(self._own_rows(x, B))
        return self._own_rows(out, B), recorded

    def _few_rows(
        self, decode: DecodeLayers, x_RH: Tensor, tables: tuple[Tensor, Tensor], captured: Collection[int],
        visibility: Visibility,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """`__call__` for few rows over a cache."""
        assert visibility.slots_BS is not None
        (B, S), recorded, x = visibility.slots_BS.shape, [], x_RH
        for i, layer in enumerate(self.layers):
            x = decode.layer(layer, x, tables, visibility, i)
            if i in captured:
                recorded.append(x.view(S, B, -1))
        out = x if self.final_norm is None else self.operators.final(x, None, self.final_norm)[1]
        return out.view(S, B, -1), recorded

    def _pieces(self, rows: int, visibility: Visibility) -> list[slice]:
        dense = visibility.cache is None and self.config.moe is None
        return self.sums.pieces(rows) if dense else [slice(0, rows)]

    def _projected(
        self, x: list[Tensor], delta: list[Wait | None], layer: Any, parts: list[slice], biased: bool
    ) -> tuple[list[Tensor], Tensor]:
        """(input of a layer in pieces, its projection [R, (N + 2G) * D], with its bias if `biased`)."""
        do, linear, weight = self.operators, layer.self_attention.linear_qkv, layer.input_layernorm.weight
        width = (do.heads + 2 * do.kv_heads) * self.config.head_dim
        found, qkv = [], None
        for piece, summed, part in zip(x, delta, parts, strict=True):
            total, normed = do.add_norm(piece, None if summed is None else summed(), weight)
            found.append(total)
            if len(parts) > 1 and qkv is None:
                qkv = total.new_empty(parts[-1].stop, width)
            out = do.linear(normed, linear, linear.bias if biased else None, None if qkv is None else qkv[part])
        return found, out if qkv is None else qkv

    def _last(self, x: list[Tensor], delta: list[Wait | None]) -> tuple[list[Tensor], list[Tensor]]:
        """(state after the last layer, the same after the final norm on the last stage), in pieces."""
        sums = [None if summed is None else summed() for summed in delta]
        if self.final_norm is None:
            x = [a if b is None else a + b for a, b in zip(x, sums, strict=True)]
            return x, x
        both = [self.operators.final(a, b, self.final_norm) for a, b in zip(x, sums, strict=True)]
        return [a for a, _ in both], [b for _, b in both]

    def _all_rows(self, hidden_SBH: Tensor) -> Tensor:
        if not self.sequence_parallel or self.tp.size() == 1:
            return hidden_SBH
        whole = hidden_SBH.new_empty(self.tp.size() * len(hidden_SBH), *hidden_SBH.shape[1:])
        dist.all_gather_into_tensor(whole, hidden_SBH.contiguous(), group=self.tp)
        return whole

    def _own_rows(self, x: list[Tensor], B: int) -> Tensor:
        """[S, B, H] of pieces; this rank's rows under sequence parallelism."""
        whole = (torch.cat(x) if len(x) > 1 else x[0]).unflatten(0, (-1, B))
        if not self.sequence_parallel or self.tp.size() == 1:
            return whole
        return whole.chunk(self.tp.size())[self.tp.rank()].clone()  # does not keep the other rows

    def _mlp(self, x: list[Tensor], n: int, mlp: Any, normed: Any, S: int, training: bool) -> Wait | None:
        """[R, H] output of a dense MLP by the operators, or of experts by their modules; None if `x[n]` has it now."""
        if isinstance(mlp, MixtureOfExperts):
            mixed: Tensor = mlp(normed.view(S, -1, normed.shape[-1]))[0]
            return lambda: mixed.flatten(0, 1)
        gated = self.operators.gated_product(normed, mlp.linear_fc1, training)
        if not self._adds(mlp.linear_fc2, training):
            return self._summed(gated, mlp.linear_fc2)
        self.operators.add_product(x[n], gated, mlp.linear_fc2, keep=False)
        return None

    def _adds(self, module: Any, training: bool) -> bool:
        """True if the product with this module includes the residual sum."""
        return self.tp.size() == 1 and self.operators.includes(module, training)

    def _head_norms(self, attention: Any) -> Norms:
        return (attention.q_layernorm.weight, attention.k_layernorm.weight) if self.config.qk_norm else None

    def _summed(self, activation: Any, module: Any) -> Wait:
        """Output of a row-parallel module: partial products summed over ranks, plus the replicated bias."""
        if self.tp.size() == 1:
            out = self.operators.linear(activation, module, module.bias)
            return lambda: out
        wait = self.sums.start(self.operators.linear(activation, module, None))
        return wait if module.bias is None else lambda: wait().add_(module.bias)


def run_in_fp8(base: Any) -> None:
    """Convert the linears of a loaded `FrozenBase` to fp8 (E4M3), in place: twice the arithmetic rate, half the memory.

    Scales are per output channel for weights and per row for activations, computed on the fly. Head and embedding are
    unchanged; the teacher reads a copy of the head in fp8 where the path `teacher_fp8` is on. The path `base_fp8` must
    be available (`paths.check` raises what blocks it).

    Raises:
        UserError: the base has fake quantisers or layers of its own.
    """
    paths: Paths = base.paths.asked_for("base_fp8")
    paths.check()
    direct: DirectForward | None = base.direct
    if direct is None or not direct.can_run(Visibility.causal()):
        raise UserError("--base-fp8: this base has fake quantisers, or layers of its own; leave --base-fp8 out")
    assert isinstance(direct.operators, KernelOperators)
    kernels = direct.operators.kernels
    direct.operators, base.paths = Fp8Operators(direct.operators, direct.layers), paths
    if paths.on("teacher_fp8"):
        head = base.head_weight[: base.vocab_size]
        base.head_fp8 = kernels.quantize(F.pad(head, (0, 0, 0, padded(len(head)) - len(head))))


def reads_by_sequence(direct: DirectForward | None) -> bool:
    """True if a step of decoding reads as much of the cache as each sequence has, whatever the longest one has."""
    return direct is not None and direct.decode is not None and direct.untouched()
