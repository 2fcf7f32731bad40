"""The teacher: the base's LM head on its final state, restricted to the draft vocabulary, once per micro-batch.

U teacher rows (rows that some draft step is compared with), H base hidden size, D / TP this rank's shard of the draft
vocabulary, V / TP this rank's shard of the (padded) base vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.config.structure import share
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.losses.vocab_parallel import (
    Largest,
    Teacher,
    argmax_and_lse,
    argmax_over_ranks,
    kernel_largest,
    largest_over_ranks,
)
from megatron_spec.ops import backend

CHUNK_BYTES = 256 << 20
"""Bytes of one chunk of whole-vocabulary logits."""
KERNEL_CHUNK_BYTES = 1100 << 20
"""The same on a GPU: large enough for the matrix product to run at full speed."""


@torch.no_grad()
def gather_rows(shard_VH: Tensor, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[len(ids), H] rows `ids` of a row-sharded matrix, on every rank; `ids` is equal on all ranks."""
    local = ids.to(shard_VH.device) - group.rank() * shard_VH.shape[0]
    mine = (local >= 0) & (local < shard_VH.shape[0])
    rows = shard_VH[local.clamp(0, shard_VH.shape[0] - 1)] * mine[:, None]
    if group.size() > 1:
        dist.all_reduce(rows, group=group)
    return rows


@torch.no_grad()
def restricted_head(ends: BaseEnds, vocab: DraftVocab, group: dist.ProcessGroup) -> Tensor:
    """[D / TP, H] rows of the base's LM head for this rank's shard of the draft vocabulary. Collective."""
    if group.size() == 1:
        return ends.head_weight[vocab.target_ids.to(ends.head_weight.device)]
    mine = torch.empty(0)
    for rank in range(group.size()):  # one shard at a time, never all D rows
        part = share(len(vocab), group.size(), rank)
        ids = vocab.target_ids[part.start : part.stop]
        rows = gather_rows(ends.head_weight, ids, group)
        if rank == group.rank():
            mine = rows
    return mine


def _chunk_rows(weight_VH: Tensor, columns: int) -> int:
    """Rows of a chunk of logits; the number of columns is equal on all ranks, which exchange sums of a chunk's rows."""
    return max(1, CHUNK_BYTES // (columns * weight_VH.element_size()))


@torch.no_grad()
def whole_logits(ends: BaseEnds, state_UH: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Chunks of (state [u, H], logits without padding [u, <= V / TP], argmax over all ranks [u]).

    Args:
        state_UH: final states, complete on every tensor parallel rank.
    """
    shard, first = ends.head_weight.shape[0], group.rank() * ends.head_weight.shape[0]
    weight = ends.head_weight[: min(max(ends.vocab_size - first, 0), shard)]
    for state in state_UH.to(weight.dtype).split(_chunk_rows(ends.head_weight, shard)):
        whole = F.linear(state, weight)
        if len(weight):
            top, argmax = whole.max(-1)
        else:  # the shard is all padding
            top = whole.new_full((len(state),), -torch.inf)
            argmax = torch.zeros_like(top, dtype=torch.int64)
        yield state, whole, argmax_over_ranks(top, argmax + first, group)


def base_argmax(ends: BaseEnds, state_UH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """int64 [U] the base's greedy next token for each final state (complete on every tensor parallel rank)."""
    found = [argmax for _, _, argmax in whole_logits(ends, state_UH, group)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=state_UH.device)


class TeacherHead:
    """Computes a `Teacher` from final states. Built once; keeps the rows of the base's LM head for the draft shard.

    Draft and base vocabulary are sharded at different tokens, so with several tensor parallel ranks the restricted
    logits are computed from a copy of these rows; whole-vocabulary logits are reduced to an argmax, chunk by chunk
    (with kernels, those of the other rows alone, from another copy). On one rank the restricted logits are selected
    from the whole-vocabulary ones.

    Args:
        kernels: operators (`ops.backend.load`) if the path `teacher_kernel` is on.
        epilogues: largest logits are found inside the products (path `product_epilogues`).
    """

    def __init__(
        self, ends: BaseEnds, vocab: DraftVocab, group: dist.ProcessGroup, kernels: Any = None, epilogues: bool = False
    ) -> None:
        self.ends, self.vocab, self.group, self.kernels, self.epilogues = ends, vocab, group, kernels, epilogues
        device = ends.head_weight.device
        self.source = (ends.head_weight.data_ptr(), ends.head_weight.dtype, device)
        shard, first = ends.head_weight.shape[0], group.rank() * ends.head_weight.shape[0]
        self.valid = min(max(ends.vocab_size - first, 0), shard)
        self.draft_ids = vocab.draft_ids.to(device)
        self.target_ids = vocab.target_ids.to(device)
        self.share = share(len(vocab), group.size(), group.rank())
        self.columns = len(share(len(vocab), group.size(), 0))
        self.aligned = vocab.is_full and (group.size() == 1 or shard == -(-len(vocab) // group.size()))
        self.rows: Tensor | None = None
        self.others: tuple[Tensor, Tensor] | None = None
        if group.size() > 1:
            self.draft_rows()  # collective, so done now, on every rank

    def fits(self, ends: BaseEnds) -> bool:
        """True if it was built from this LM head."""
        weight = ends.head_weight
        return self.source == (weight.data_ptr(), weight.dtype, weight.device)

    def draft_rows(self) -> Tensor:
        """[D / TP, H] frozen rows of the base's LM head for this rank's shard of the draft vocabulary."""
        if self.rows is None:
            whole = self.ends.head_weight[: self.valid]
            self.rows = whole if self.aligned else restricted_head(self.ends, self.vocab, self.group)
        return self.rows

    def _restricted(self, state_UH: Tensor, whole_UV: Tensor) -> Tensor:
        if self.aligned:
            return whole_UV
        if self.group.size() > 1:
            return F.linear(state_UH, self.draft_rows())
        return whole_UV.index_select(-1, self.target_ids)

    @torch.no_grad()
    def __call__(self, state_UH: Tensor, temperature: float, argmax_U: Tensor | None = None) -> Teacher:
        """The teacher for final states [U, H] (complete on every tensor parallel rank).

        Args:
            argmax_U: the base's argmax at these rows, if known; else it is computed.
        """
        weight = self.ends.head_weight[: self.valid]
        if self.kernels is not None:
            state_UH = state_UH.to(weight.dtype)
            if argmax_U is not None:
                return self._with_known_argmax(state_UH, temperature, argmax_U)
            compute = self._with_kernel if self.group.size() == 1 else self._with_kernel_over_ranks
            return compute(state_UH, weight, temperature)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        parts: list[tuple[Tensor, ...]] = []
        for logits, argmax in self._logits(state_UH, argmax_U):
            best, lse = argmax_and_lse(logits.to(wide) / temperature, self.group, self.share.start)
            parts.append((logits, lse, argmax, best))
        if not parts:
            return self._nothing(wide)
        return self._labelled(*(torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True)))

    def _labelled(self, logits_UD: Tensor, lse_U: Tensor, argmax_U: Tensor, best_U: Tensor) -> Teacher:
        """From the base's argmax, and the draft id of the largest logit of the draft vocabulary."""
        draft_id = self.draft_ids[argmax_U]
        inside = draft_id >= 0
        label = torch.where(inside, draft_id, best_U)
        return Teacher(logits_UD, lse_U, argmax_U, label, inside, self.share.start, self.columns)

    def _logits(self, state_UH: Tensor, argmax_U: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of (logits of this rank's draft shard [u, D / TP], argmax over the whole vocabulary [u])."""
        if argmax_U is None:
            for state, whole, argmax in whole_logits(self.ends, state_UH, self.group):
                yield self._restricted(state, whole), argmax
            return
        rows = self.draft_rows()
        chunk = _chunk_rows(rows, self.columns)
        for state, argmax in zip(state_UH.to(rows.dtype).split(chunk), argmax_U.split(chunk), strict=True):
            yield F.linear(state, rows), argmax.to(rows.device)

    def _with_known_argmax(self, state_UH: Tensor, temperature: float, argmax_U: Tensor) -> Teacher:
        """Only the logits of the draft vocabulary are computed."""
        rows, chunk = self.draft_rows(), self._chunk(len(state_UH), self.columns)
        logits = torch.empty(len(state_UH), len(rows), dtype=rows.dtype, device=rows.device)
        found = []
        for state, out in zip(state_UH.split(chunk), logits.split(chunk), strict=True):
            known = self._product(state, rows, temperature, out)
            found.append(kernel_largest(out, self.share.start, temperature, self.group, self.kernels, known))
        lse, best = (torch.cat(x) if len(found) > 1 else x[0] for x in zip(*found, strict=True))
        return self._labelled(logits, lse, argmax_U.to(best.device), best)

    def _with_kernel_over_ranks(self, state_UH: Tensor, weight_VH: Tensor, temperature: float) -> Teacher:
        """The head in shards: each rank's largest logits and log-sum-exp, and one exchange of all rows.

        Every logit is computed once: those of the draft vocabulary by its shards, all others by the base's.
        """
        rows, (others, other_ids) = self.draft_rows(), self._others(weight_VH)
        logits = torch.empty(len(state_UH), len(self.share), dtype=weight_VH.dtype, device=weight_VH.device)
        found = []
        chunk = self._chunk(len(state_UH), len(others))
        for state, out in zip(state_UH.split(chunk), logits.split(chunk), strict=True):
            _, own_lse, best = self._product(state, rows, temperature, out)
            if len(others):
                top, _, column = self._product(
                    state, others, 1.0, state.new_empty(len(state), len(others)), masses=False
                )
            else:
                column = torch.full((len(state),), -1, dtype=torch.int64, device=state.device)
                top = torch.full_like(column, -torch.inf, dtype=torch.float32)
            found.append((top, other_ids[column], own_lse, best))
        tops, argmaxes, own_lse, best = (torch.cat(x) for x in zip(*found, strict=True))
        best_top = logits.gather(1, best[:, None])[:, 0]
        mine = (tops, argmaxes, best_top, best + self.share.start, own_lse)
        top, argmax, best_top, best, lse = largest_over_ranks(self.group, *mine)
        best_id = self.target_ids[best]
        inside = (best_top > top) | ((best_top == top) & (best_id < argmax))
        argmax = torch.where(inside, best_id, argmax)
        return Teacher(logits, lse.to(own_lse.dtype), argmax, best, inside, self.share.start, self.columns)

    def _others(self, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of this rank's head outside the draft vocabulary, their target ids and -1), copied on first use."""
        if self.others is None:
            first = self.group.rank() * self.ends.head_weight.shape[0]
            ids = torch.arange(first, first + len(weight_VH), device=weight_VH.device)
            ids = ids[self.draft_ids[ids] < 0]
            self.others = weight_VH[ids - first], torch.cat([ids, ids.new_tensor([-1])])
        return self.others

    def _product(
        self, state_UH: Tensor, weight_VH: Tensor, temperature: float, out_UV: Tensor, masses: bool = True
    ) -> Largest:
        """out = state W^T, and what the operator `largest` finds in it; the log-sum-exp only with `masses`."""
        if self.epilogues:
            found: Largest = self.kernels.largest_product(state_UH, weight_VH, temperature, out_UV, masses)
            return found
        return self.kernels.largest(torch.mm(state_UH, weight_VH.t(), out=out_UV), temperature)  # type: ignore[no-any-return]

    def _chunk(self, rows: int, columns: int) -> int:
        """Rows of a chunk of logits: chunks are equally large, in multiples of 128, a tile of the products."""
        most = max(1, KERNEL_CHUNK_BYTES // (max(1, columns) * self.ends.head_weight.element_size()))
        equal = -(-rows // max(1, -(-rows // most)))
        return max(1, min(most, -(-equal // 128) * 128))

    def _with_kernel(self, state_UH: Tensor, weight_VH: Tensor, temperature: float) -> Teacher:
        logits = torch.empty(len(state_UH), len(self.vocab), dtype=weight_VH.dtype, device=weight_VH.device)
        chunk = self._chunk(len(state_UH), weight_VH.shape[0])
        ids, parts = (self.target_ids, self.draft_ids), []
        for state, out in zip(state_UH.split(chunk), logits.split(chunk), strict=True):
            whole, argmax = self._whole(state, weight_VH)
            parts.append(self.kernels.teacher_rows(whole, *ids, temperature, out, argmax))
        lse, argmax, label, inside = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
        return Teacher(logits, lse, argmax, label, inside, self.share.start, self.columns)

    def _whole(self, state_UH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor | None]:
        """(logits of the whole vocabulary [U, V], in fp8 if the base has its head in fp8; their argmax, if known)."""
        head = self.ends.head_fp8
        if head is None and self.epilogues:
            out = state_UH.new_empty(len(state_UH), len(weight_VH))
            return out, self._product(state_UH, weight_VH, 1.0, out, masses=False)[2]
        if head is None:
            return F.linear(state_UH, weight_VH), None
        found: Tensor = self.kernels.product(self.kernels.quantize(state_UH), head, state_UH.dtype)
        return found[:, : len(weight_VH)], None

    def _nothing(self, wide: torch.dtype) -> Teacher:
        weight = self.ends.head_weight
        ids = torch.zeros(0, dtype=torch.int64, device=weight.device)
        logits = weight.new_zeros(0, len(self.share))
        return Teacher(logits, logits.new_zeros(0, dtype=wide), ids, ids, ids.bool(), self.share.start, self.columns)


def teacher_of(draft: Any, ends: BaseEnds) -> TeacherHead:
    """The draft's `TeacherHead`, built on first use, which is a collective.

    Args:
        draft: has `vocab`, `tp_group`, `paths`, and `_teacher`, which caches the result.
    """
    if draft._teacher is None or not draft._teacher.fits(ends):
        kind = draft.paths.kernels("teacher_kernel")
        kernels = None if kind == "none" else backend.load(kind)
        epilogues = draft.paths.on("product_epilogues")
        draft._teacher = TeacherHead(ends, draft.vocab, draft.tp_group, kernels, epilogues)
    kept: TeacherHead = draft._teacher
    return kept
