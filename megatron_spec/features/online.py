"""Features from the running base: forward-only pipeline, then each micro-batch is sent to the rank that trains on it.

S sequence (this rank's part under sequence and context parallelism), B micro-batch, H hidden, C = captures * H.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base
from megatron_spec.base.stream import FilledPipeline
from megatron_spec.batch import Batch, Features
from megatron_spec.features.base import check_count


class OnlineFeatures:
    """A FeatureSource that runs the frozen base, without gradients.

    Attributes:
        lookahead: number of following micro-batches that keep the base's pipeline filled from one call to the next.
    """

    def __init__(self, base: FrozenBase) -> None:
        self.base = base
        self.pipeline = FilledPipeline(base) if base.world.pp_size > 1 else None
        self.lookahead = 0 if self.pipeline is None else self.pipeline.wanted

    def features(self, batches: list[Batch], following: Sequence[Batch] = ()) -> list[Features]:
        """See `FeatureSource.features`. Collective over the pipeline group."""
        world, H = self.base.world, self.base.config.hidden_size
        check_count(len(batches), world.pp_size)
        if self.pipeline is None:
            results = run_base(self.base, batches)
        else:
            results = [(x[..., H:], x[..., :H]) for x in self.pipeline.run(batches, following)]
        owned = batches[world.pp_rank :: world.pp_size]
        return [Features(b, captures, state) for b, (captures, state) in zip(owned, results, strict=True)]
