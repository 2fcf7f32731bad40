"""A pipeline of the frozen base that stays filled from one call to the next.

A pipeline that starts and ends with every call is idle in PP - 1 of n + PP - 1 slots. The base has no backward, so
earlier stages may go on with the micro-batches of the next call: at the end of a call, stage s has run `LAG` x (PP - 1
- s) of them, and later stages keep what they received. A tensor is sent beside the next computation, so `LAG` is 2.

`schedule.run_base` (megatron-core's forward-only schedule) is the twin.

S sequence (this rank's part under sequence parallelism), B micro-batch, H hidden, k captures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base import relay
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import check_lengths
from megatron_spec.batch import Batch
from megatron_spec.ops.visibility import Visibility

LAG = 2
"""Slots between the runs of a micro-batch on consecutive stages: it is sent in the slot between them."""


@dataclass
class _Exchange:
    """Transfers of one slot, with the tensors that they read or write."""

    slot: int
    requests: list[Any]
    tensors: list[Tensor]


class FilledPipeline:
    """Runs micro-batches, and the first ones of the next call where it would be idle.

    All ranks of the pipeline make the same calls.
    """

    def __init__(self, base: FrozenBase) -> None:
        self.base, self.world = base, base.world
        self.ranks = dist.get_process_group_ranks(self.world.pp)
        self.entered: list[Batch] = []
        """Micro-batches of the next call that the first stage has run."""
        self._received: deque[Tensor] = deque()
        """Inputs of this stage that are complete, or will be after the transfers in `_open`."""
        self._open: deque[_Exchange] = deque()
        dist.all_reduce(torch.zeros(1, device=self.world.device), group=self.world.pp)  # NCCL starts with all ranks

    @property
    def wanted(self) -> int:
        """Number of following micro-batches that keep the pipeline filled."""
        return LAG * (self.world.pp_size - 1)

    @torch.no_grad()
    def run(self, batches: list[Batch], following: Sequence[Batch] = ()) -> list[Tensor]:
        """[S, B, H * (1 + k)] final state and captures of the micro-batches i with i % PP == this stage, in order.

        Args:
            following: the first micro-batches of the next call, up to `wanted` of them. If the next call begins with
                others, what was computed of them is dropped.
        """
        check_lengths(self.base, [*batches, *following])
        count, ahead = len(batches), list(following)[: self.wanted]
        work = [*batches, *ahead]
        done = self._done(work)
        spans = [self._span(stage, done, count, len(ahead)) for stage in range(self.world.pp_size)]
        owned: list[Tensor] = []
        for slot in range(min(first for first, _ in spans), count):
            mine = self._index(slot, self.world.pp_rank, spans)
            output = None if mine is None else self._compute(work[mine], slot)
            self._exchange(slot, output, work, spans, count, owned)
        self._finish(count)
        self.entered = ahead
        return owned

    def _done(self, work: list[Batch]) -> int:
        """Number of micro-batches of `work` that the first stage has run."""
        known = self.entered
        if len(known) > len(work) or any(a is not b for a, b in zip(known, work, strict=False)):
            self._received.clear()
            return 0
        return len(known)

    def _skew(self, stage: int) -> int:
        return LAG * (self.world.pp_size - 1 - stage)

    def _span(self, stage: int, done: int, count: int, ahead: int) -> tuple[int, int]:
        """First slot of a stage, and the slot after its last one; micro-batch i has slot i - skew."""
        skew = self._skew(stage)
        return min(skew, done) - skew, count + min(skew, ahead) - skew

    def _index(self, slot: int, stage: int, spans: list[tuple[int, int]]) -> int | None:
        """The micro-batch that a stage runs in a slot."""
        first, end = spans[stage]
        return slot + self._skew(stage) if first <= slot < end else None

    def _compute(self, batch: Batch, slot: int) -> Tensor:
        """This stage's output: hidden state and captures."""
        self._finish(slot - LAG + 1)
        relayed = None if self.world.is_first_stage else self._received.popleft()
        hidden, captures = self.base(batch, Visibility.of(batch), relayed)
        return relay.join(hidden, captures).contiguous()

    def _exchange(
        self, slot: int, output: Tensor | None, work: list[Batch], spans: list[tuple[int, int]], count: int,
        owned: list[Tensor],
    ) -> None:  # fmt: skip
        """Start the transfers of a slot: outputs to the next stage, and results to their owners."""
        pp, stage = self.world.pp_size, self.world.pp_rank
        operations: list[dist.P2POp] = []
        tensors: list[Tensor] = []

        def transfer(action: Any, tensor: Tensor, peer: int) -> Tensor:
            """One transfer of this slot."""
            operations.append(dist.P2POp(action, tensor, self.ranks[peer], self.world.pp))
            tensors.append(tensor)
            return tensor

        if output is not None and not self.world.is_last_stage:
            transfer(dist.isend, output, stage + 1)
        sent = None if stage == 0 else self._index(slot, stage - 1, spans)
        if sent is not None:
            self._received.append(transfer(dist.irecv, self._empty(work[sent], self.base.stage.captures_in), stage - 1))
        result = self._index(slot, pp - 1, spans)
        if result is not None and result < count:
            owner = result % pp
            if self.world.is_last_stage:
                assert output is not None
                owned += [output] if owner == stage else []
                if owner != stage:
                    transfer(dist.isend, output, owner)
            elif owner == stage:
                owned.append(transfer(dist.irecv, self._empty(work[result], self.base.capture_layer_ids), pp - 1))
        if operations:
            self._open.append(_Exchange(slot, dist.batch_isend_irecv(operations), tensors))

    def _finish(self, before: int) -> None:
        """Wait for the transfers of the slots before this one."""
        while self._open and self._open[0].slot < before:
            for request in self._open.popleft().requests:
                request.wait()

    def _empty(self, batch: Batch, captures: Sequence[int]) -> Tensor:
        B, S = batch.tokens_BS.shape
        width = self.base.config.hidden_size * (1 + len(captures))
        return torch.empty(self.world.local_rows(S), B, width, dtype=self.base.dtype, device=self.world.device)
