"""The two dataclasses that everything passes on: `Batch` (tokens) and `Features` (what the base computed for them).

S sequence, B micro-batch, H base hidden size, K captured layers, C = K * H.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_spec.runtime.context import ContextShard
from megatron_spec.runtime.platform import to_device


@dataclass
class Batch:
    """One micro-batch of token sequences, the same on every tensor parallel rank.

    Attributes:
        tokens_BS: int64 token ids; padding may hold any id inside the vocabulary.
        positions_BS: int64 rotary positions, restarting at 0 in every document.
        turns_BS: int32 supervision: 0 for tokens that are not supervised (system, user, padding), and a number
            greater than 0 that is unique in the row for the tokens of each assistant turn (its end-of-turn token
            included).
        documents_BS: int32 document number inside the row, from 0; -1 for padding.
        sample_ids: indices in the dataset of the samples in each row, in order (features on disk are found by them).
        context: which rows of the sequence this rank computes, when several share it; the tensors here are whole on
            every rank, only activations are spread.
        host: the same tensors in the host's memory, when they are on a GPU: counting there avoids a synchronisation.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    turns_BS: Tensor
    documents_BS: Tensor
    sample_ids: tuple[tuple[int, ...], ...] | None = None
    context: ContextShard | None = None
    host: Batch | None = None

    def __post_init__(self) -> None:
        assert self.host is None or self.host.context is self.context, "rows are counted on the host: set context first"

    @property
    def single_document(self) -> bool:
        """True when every row holds one document that starts at 0 (padding only after it)."""
        return int((self.host or self).documents_BS.max()) <= 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(((self.host or self).documents_BS >= 0).sum())

    def document_lengths(self) -> Tensor:
        """int64 [B, S] tokens of the document that each token lies in."""
        number_BS = self.documents_BS.long() + 1
        counts = number_BS.new_zeros(number_BS.shape[0], number_BS.shape[1] + 1)
        return counts.scatter_add_(1, number_BS, torch.ones_like(number_BS)).gather(1, number_BS)

    def local(self, x_BS: Tensor) -> Tensor:
        """Columns of a [B, S] tensor that this rank computes."""
        return x_BS if self.context is None else self.context.part(x_BS, 1)

    def whole_rows(self, rows_R: Tensor) -> Tensor:
        """Rows of this rank (s * B + b, s counted among its own) as rows of the whole sequence."""
        if self.context is None:
            return rows_R
        B, S = self.tokens_BS.shape
        return self.context.rows(S, rows_R.device)[rows_R // B] * B + rows_R % B

    def to(self, device: torch.device | str) -> Batch:
        """Copy on another device."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {k: to_device(v, device) for k, v in values.items() if isinstance(v, Tensor)}
        kept = self if self.tokens_BS.device.type == "cpu" else self.host
        return dataclasses.replace(self, **moved, host=kept if torch.device(device).type != "cpu" else None)


@dataclass
class Features:
    """One micro-batch with what the frozen base computed for it: all that a draft is trained from.

    Attributes:
        batch: the tokens (full sequence on every tensor parallel rank).
        captures_SBC: [S, B, K*H] outputs of the captured base layers, ascending, before any norm. Under sequence
            parallelism the first axis holds this rank's S / TP rows, under context parallelism those of `batch.context`
            (and S / CP / TP under both).
        state_SBH: [S, B, H] base state after its final norm: what the base head reads. Sharded as captures.
        argmax_SB: int64 [S, B] the base's argmax (never sharded), where it was computed already: the teacher then needs
            no product with the whole vocabulary.
    """

    batch: Batch
    captures_SBC: Tensor
    state_SBH: Tensor
    argmax_SB: Tensor | None = None

    def argmax_of(self, rows_U: Tensor) -> Tensor | None:
        """[U] the base's argmax at flattened rows (s * B + b), when known."""
        return None if self.argmax_SB is None else self.argmax_SB.flatten()[rows_U]
