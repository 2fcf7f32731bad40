"""Interface of drafts, and of the frozen base's ends that they use.

T draft steps, S sequence, B micro-batch, H base hidden size, V padded base vocabulary, TP tensor parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megatron_spec.batch import Batch, Features
from megatron_spec.config import ObjectiveConfig
from megatron_spec.ops.fp8 import Fp8Matrix
from megatron_spec.planning.paths import NO_PATHS, Paths

if TYPE_CHECKING:
    from megatron_spec.drafts.engine import TransformerEngine
    from megatron_spec.drafts.vocab import DraftVocab

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [S,B,N,D], k [S,B,G,D], v [S,B,G,D]), q and k rotated -> [S, B, N*D]. Training passes the attention of the
training-time test, decoding one over a cache; a draft works with either."""


class BaseEnds(Protocol):
    """Frozen embedding and LM head of the base, sharded over the vocabulary, on every pipeline rank."""

    vocab_size: int
    """Vocabulary size without padding."""
    head_fp8: Fp8Matrix | None
    """The LM head in fp8, without padding but for rows of zeros at its end; None: the teacher is in bf16."""

    @property
    def head_weight(self) -> Tensor:
        """[V / TP, H] rows tp_rank * V/TP, ... of the base's LM head; rows >= vocab_size are padding."""
        ...

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """[S, B, H] token embeddings; scattered to [S / TP, B, H] under sequence parallelism."""
        ...

    def logits(self, state_SBH: Tensor) -> Tensor:
        """[S, B, V / TP] logits of this rank's vocabulary shard (full sequence); padding rows are -inf."""
        ...


@dataclass
class DraftLosses:
    """Sums over the supervised rows of one micro-batch on this rank, before any division or reduction.

    Attributes:
        total: scalar with gradient, sum over steps of step weight * loss sum. Complete: equal on all tensor parallel
            ranks.
        loss_T: detached loss sum per step.
        correct_T: rows whose draft argmax is the base's argmax.
        overlap_T: sum over rows of sum_v min(p, q), the expected acceptance under sampling.
        rows_T: supervised rows per step (the denominator of loss and accuracy; in_vocab_only does not change it).
        counted: scalar, rows of the first step that in_vocab_only keeps in the loss; None: all.
    """

    total: Tensor
    loss_T: Tensor
    correct_T: Tensor
    overlap_T: Tensor
    rows_T: Tensor
    counted: Tensor | None = None


class Draft(nn.Module):
    """A draft model, trained on `Features` and sharded over the tensor parallel group.

    Every parameter has megatron-core's attributes: `tensor_model_parallel` and `partition_dim` if it is a shard,
    `sequence_parallel` if its gradient must be summed over tensor parallel ranks. Parameter names are those of the
    export format if one exists, so that checkpoint, quantisation and export share them.

    A class outside this package (`convert(draft_class=...)`) is built as Class(config, vocab, place), with a
    `linear.Placement`, and keeps the first two as attributes. Parameters that its `initialize` leaves alone need values
    from the start.
    """

    config: Any
    """Architecture (`config.DraftConfig`); an algorithm of one's own takes that of the kind it resembles most."""
    vocab: DraftVocab
    """Its vocabulary."""
    row_loss: Any = None
    """A loss of one's own in place of the objective's: an `OwnLoss` of `losses.vocab_parallel`, as a staticmethod.

    Steps are weighted, and rows left out, as for any loss; it runs without kernels."""
    draws = False
    """True if training draws anchors, rows or noise, which tensor and context parallel ranks have to agree on."""
    paths: Paths = NO_PATHS
    """The fast paths it may use; set by `drafts.build_draft`."""
    engine: TransformerEngine | None = None
    """Source of its linears and norms, if not torch; set by `drafts.build_draft`."""

    def __init_subclass__(cls) -> None:
        """Raise TypeError for logits of its own that training would not use."""
        trains = next(owner for owner in cls.__mro__ if "forward" in vars(owner))
        if getattr(cls, "logits", None) is not getattr(trains, "logits", None) and hasattr(trains, "logits"):
            raise TypeError(
                f"{cls.__name__} overrides logits, which training does not call (losses take rows and the weight of "
                "the LM head): override forward, too"
            )

    def forward(self, features: Features, ends: BaseEnds, objective: ObjectiveConfig) -> DraftLosses:
        """Unroll over the micro-batch and return the loss sums."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward` under `weights_fixed`; in training, with Transformer Engine's fp8 where it is asked for."""
        training = self.engine is not None and self.training and torch.is_grad_enabled()
        with self.weights_fixed(), self.engine.fp8() if training else nullcontext():  # type: ignore[union-attr]
            return super().__call__(*args, **kwargs)

    def prepare(self, batch: Batch, objective: ObjectiveConfig) -> None:
        """Called before the step that trains on a micro-batch: a draft may begin, in a thread, what it computes from
        the batch alone."""

    def initialize(
        self, ends: BaseEnds, base_layer_tensors: Mapping[str, Tensor] | None = None, seed: int = 1234
    ) -> None:
        """Set the initial values; here nothing. See `recurrent.RecurrentDraft.initialize`."""

    @contextmanager
    def weights_fixed(self) -> Iterator[None]:
        """Parameters do not change in this block, so fake-quantised weights are rounded once, not at every draft step.

        Enter it around the micro-batches of an optimizer step to round once for all of them.
        """
        places = ("weight_quantizer", "input_quantizer")
        quantizers: list[Any] = [getattr(m, p, None) for m in self.modules() for p in places]
        held = [(q, q.hold()) for q in quantizers if hasattr(q, "hold")]
        try:
            yield
        finally:
            for quantizer, first in held:
                if first:
                    quantizer.release()
                else:
                    quantizer.forget_input()


def mark_sharded(parameter: nn.Parameter, dim: int, whole: int | None = None) -> nn.Parameter:
    """Mark a parameter as this rank's shard along `dim`, for megatron-core's optimizer and checkpoints.

    Args:
        whole: full size of the dimension, if shards may differ in size (`structure.share`).
    """
    parameter.partition_whole = whole  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
    return parameter


def mark_replicated(parameter: nn.Parameter, sequence_parallel: bool) -> nn.Parameter:
    """Mark a parameter as replicated; under sequence parallelism its gradient is partial on each rank."""
    parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter


def shift(x: Tensor, k: int, dim: int, fill: float | int = 0) -> Tensor:
    """x[j + k] at row j along `dim`; rows past the end are `fill` and never supervised."""
    if k == 0:
        return x
    size = x.shape[dim]
    tail_shape = list(x.shape)
    tail_shape[dim] = min(k, size)
    tail = torch.full(tail_shape, fill, dtype=x.dtype, device=x.device)
    return torch.cat([x.narrow(dim, min(k, size), max(size - k, 0)), tail], dim=dim)
