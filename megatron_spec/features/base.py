"""The contract of a source of features: what a training step asks, whether the base runs now or ran long ago."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from megatron_spec.batch import Batch, Features
from megatron_spec.config import UserError


class FeatureSource(Protocol):
    """Gives each pipeline rank the features of the micro-batches it owns: micro-batch i belongs to rank i % PP."""

    def features(self, batches: list[Batch]) -> list[Features]:
        """Features of this rank's micro-batches.

        Args:
            batches: all micro-batches of this pipeline group for one step, the same list on each of its ranks.

        Returns:
            One Features per owned micro-batch, in order.

        Raises:
            UserError: the number of micro-batches is not a multiple of the pipeline parallel size.
        """
        ...


def check_count(count: int, pp_size: int) -> None:
    """Every pipeline rank must own equally many micro-batches: raise UserError otherwise."""
    if count == 0 or count % pp_size:
        raise UserError(
            f"found {count} micro-batches per data parallel rank and step, expected a multiple of "
            f"pipeline_model_parallel_size {pp_size}: change global_batch_size or micro_batch_size"
        )


ROUNDS_PER_FLUSH = 4
"""Micro-batches a pipeline rank holds at once when the base is pipelined."""


def in_groups(source: FeatureSource, batches: list[Batch], pp_size: int) -> Iterator[Features]:
    """The same features in the same order as `source.features(batches)`, but drawn one at a time.

    With gradient accumulation the features of a whole step can take tens of GB; here the base runs over a few
    micro-batches for each pipeline rank when the features before them have been used: one without a pipeline,
    ROUNDS_PER_FLUSH with one, so that filling and draining the pipeline does not cost half of its time.

    Args:
        batches: as for `FeatureSource.features`; every rank of the pipeline group must draw all of them.

    Raises:
        UserError: the number of micro-batches is not a multiple of `pp_size` (at once, not when drawing).
    """
    check_count(len(batches), pp_size)
    return _drawn(source, batches, pp_size if pp_size == 1 else pp_size * ROUNDS_PER_FLUSH)


def _drawn(source: FeatureSource, batches: list[Batch], group: int) -> Iterator[Features]:
    for start in range(0, len(batches), group):
        yield from source.features(batches[start : start + group])  # holds no group while the next is computed
