"""Interface between training and a source of features: the running base, or features on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from megatron_spec.batch import Batch, Features
from megatron_spec.config import UserError


class FeatureSource(Protocol):
    """Gives each pipeline rank the features of the micro-batches that it owns: rank i % PP owns micro-batch i."""

    def features(self, batches: list[Batch], following: Sequence[Batch] = ()) -> list[Features]:
        """Features of this rank's micro-batches.

        Args:
            batches: all micro-batches of this pipeline group for one step, the same list on all its ranks.
            following: the first micro-batches of the next call, if known, for sources that can begin with them.

        Returns:
            One Features per owned micro-batch, in order.

        Raises:
            UserError: the number of micro-batches is not a multiple of the pipeline parallel size.
        """
        ...


@runtime_checkable
class BackgroundSource(FeatureSource, Protocol):
    """A source whose work a thread may start while the draft trains."""

    def start(self, batches: list[Batch]) -> Callable[[], list[Features]]:
        """Like `features`; the result gives them to the stream on which it is called."""
        ...


def check_count(count: int, pp_size: int) -> None:
    """Raise UserError unless all pipeline ranks own equally many micro-batches."""
    if count == 0 or count % pp_size:
        raise UserError(
            f"found {count} micro-batches per data parallel rank and step, expected a multiple of "
            f"pipeline_model_parallel_size {pp_size}: change global_batch_size or micro_batch_size"
        )
