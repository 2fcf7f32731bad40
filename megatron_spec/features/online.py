"""Features from the running base: forward-only pipeline, then each micro-batch is sent to the rank that trains on it.

S sequence (this rank's part under sequence and context parallelism), B micro-batch, H hidden, C = captures * H.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import Result, run_base
from megatron_spec.batch import Batch, Features
from megatron_spec.features.base import check_count


class OnlineFeatures:
    """A FeatureSource that runs the frozen base, without gradients."""

    def __init__(self, base: FrozenBase) -> None:
        self.base = base

    def features(self, batches: list[Batch]) -> list[Features]:
        """See `FeatureSource.features`. Collective over the pipeline group."""
        world = self.base.world
        check_count(len(batches), world.pp_size)
        results = run_base(self.base, batches)
        if world.pp_size > 1:
            results = self._scatter(results, batches)
        owned = batches[world.pp_rank :: world.pp_size]
        return [Features(b, captures, state) for b, (captures, state) in zip(owned, results, strict=True)]

    def _scatter(self, results: list[Result], batches: list[Batch]) -> list[Result]:
        """Send micro-batch i from the last stage to pipeline rank i % PP, within one tensor parallel coordinate."""
        world, H = self.base.world, self.base.config.hidden_size
        ranks = dist.get_process_group_ranks(world.pp)
        joined: list[Tensor] = []
        operations = []
        for i, batch in enumerate(batches):
            owner = i % world.pp_size
            if world.is_last_stage:
                tensor = torch.cat([results[i][1], results[i][0]], dim=-1)
                if owner != world.pp_rank:
                    operations.append(dist.P2POp(dist.isend, tensor, ranks[owner], world.pp))
            elif owner == world.pp_rank:
                tensor = self._empty(batch)
                operations.append(dist.P2POp(dist.irecv, tensor, ranks[-1], world.pp))
            if owner == world.pp_rank:
                joined.append(tensor)
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        return [(tensor[..., H:], tensor[..., :H]) for tensor in joined]

    def _empty(self, batch: Batch) -> Tensor:
        world = self.base.world
        B, S = batch.tokens_BS.shape
        width = self.base.config.hidden_size * (1 + len(self.base.capture_layer_ids))
        return torch.empty(world.local_rows(S), B, width, dtype=self.base.dtype, device=world.device)
