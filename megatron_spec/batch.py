"""The two dataclasses that layers pass on: `Batch` (tokens) and `Features` (the base's outputs for them).

S sequence, B micro-batch, H base hidden size, K captured layers, C = K * H.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.runtime.context import ContextShard
from megatron_spec.runtime.platform import to_device


@dataclass
class Batch:
    """One micro-batch of token sequences, equal on all tensor parallel ranks.

    Attributes:
        tokens_BS: int64 token ids; padding may have any id of the vocabulary.
        positions_BS: int64 rotary positions, from 0 in every document.
        turns_BS: int32 supervision: 0 for unsupervised tokens (system, user, padding), else a positive number that is
            unique in the row to each assistant turn (which includes its end-of-turn token).
        documents_BS: int32 index of the document in the row, from 0; -1 for padding.
        sample_ids: dataset indices of the samples in each row, in order (keys of features on disk).
        context: which rows of the sequence this rank computes under context parallelism; only activations are split,
            the tensors here are complete on every rank.
        rejected_BS: bool, tokens that the base put in place of a rejected draft token, as recorded with the data; None:
            there are none in this micro-batch.
        host: host copy of the tensors if they are on a GPU: index computations there avoid a synchronisation.
        planned: what a thread computes from the host copy alone (`drafts.unroll.Supervision.ahead`), and for which
            settings; a copy has none.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    turns_BS: Tensor
    documents_BS: Tensor
    sample_ids: tuple[tuple[int, ...], ...] | None = None
    context: ContextShard | None = None
    host: Batch | None = None
    rejected_BS: Tensor | None = None
    planned: tuple[tuple[Any, ...], Future[Any]] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert self.host is None or self.host.context is self.context, "rows are counted on the host: set context first"

    @property
    def single_document(self) -> bool:
        """True if every row has one document that starts at 0 (with padding only after it)."""
        return int((self.host or self).documents_BS.max()) <= 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(((self.host or self).documents_BS >= 0).sum())

    def check_positions(self, limit: int) -> None:
        """Raise UserError for documents of more than `limit` tokens; reads positions only of rows that long."""
        if self.tokens_BS.shape[1] <= limit:
            return
        known = self.host or self
        last = int((known.positions_BS * (known.documents_BS >= 0)).max())
        if last >= limit:
            raise UserError(
                f"micro-batch: found a document with position {last}, expected at most {limit - 1}, by the base's "
                f"max_position_embeddings {limit}: use shorter sequences"
            )

    def document_lengths(self) -> Tensor:
        """int64 [B, S] length of the document of each token."""
        number_BS = self.documents_BS.long() + 1
        counts = number_BS.new_zeros(number_BS.shape[0], number_BS.shape[1] + 1)
        return counts.scatter_add_(1, number_BS, torch.ones_like(number_BS)).gather(1, number_BS)

    def local(self, x_BS: Tensor) -> Tensor:
        """Columns of a [B, S] tensor that this rank computes."""
        return x_BS if self.context is None else self.context.part(x_BS, 1)

    def whole_rows(self, rows_R: Tensor) -> Tensor:
        """Rows of this rank (s * B + b, with its local s) as rows of the full sequence."""
        if self.context is None:
            return rows_R
        B, S = self.tokens_BS.shape
        return self.context.rows(S, rows_R.device)[rows_R // B] * B + rows_R % B

    def to(self, device: torch.device | str) -> Batch:
        """Copy on another device."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        moved: dict[str, Any] = {k: to_device(v, device) for k, v in values.items() if isinstance(v, Tensor)}
        kept = self if self.tokens_BS.device.type == "cpu" else self.host
        return dataclasses.replace(self, **moved, host=kept if torch.device(device).type != "cpu" else None)


@dataclass
class Features:
    """One micro-batch with the frozen base's outputs: everything that a draft trains on.

    Attributes:
        batch: the tokens (full sequence on every tensor parallel rank).
        captures_SBC: [S, B, K*H] outputs of the captured base layers, ascending, before any norm. Under sequence
            parallelism the first axis has this rank's S / TP rows, under context parallelism those of `batch.context`
            (S / CP / TP under both).
        state_SBH: [S, B, H] final state: the input of the base's LM head. Sharded like the captures.
        argmax_SB: int64 [S, B] the base's argmax (never sharded), if already computed; the teacher then needs no
            product with the whole vocabulary.
    """

    batch: Batch
    captures_SBC: Tensor
    state_SBH: Tensor
    argmax_SB: Tensor | None = None

    def argmax_of(self, rows_U: Tensor) -> Tensor | None:
        """[U] the base's argmax at rows s * B + b, if known."""
        return None if self.argmax_SB is None else self.argmax_SB.flatten()[rows_U]
