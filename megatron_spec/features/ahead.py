"""Features computed ahead of the optimizer, so that the base's pipeline does not drain between steps.

The base is frozen, so features of later steps can be computed at any time. Micro-batches of several steps run together,
and the first stages of a pipeline go on with those of the next steps (`base/stream.py`). Features on disk are read by a
thread, and copied to the device, while the draft trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_spec.batch import Batch, Features
from megatron_spec.features.base import BackgroundSource, FeatureSource, check_count


def default_ahead(pp_size: int, in_background: bool) -> int:
    """Default number of micro-batches of a rank to compute at once: few enough to fit in memory beside the draft."""
    return 4 if pp_size > 1 or in_background else 1


class FeaturesAhead:
    """Features of consecutive steps, in the order of training.

    At most `ahead` micro-batches of this rank are held in addition to the one in training.

    Args:
        source: source of features; all ranks of a pipeline group make the same calls. A thread reads a
            `BackgroundSource`.
        steps: the micro-batches of every step (`FeatureSource.features`), consumed lazily.
        pp_size: number of pipeline stages, over which the micro-batches of a step are distributed.
        ahead: number of micro-batches of this rank to compute at once; 0: `default_ahead`.

    Attributes:
        online: the base computes the features; False: a thread reads them.
    """

    def __init__(self, source: FeatureSource, steps: Iterable[list[Batch]], pp_size: int, ahead: int = 0) -> None:
        self.source, self.pp_size = source, pp_size
        self._start = source.start if isinstance(source, BackgroundSource) else None
        self.online = self._start is None
        self.ahead = ahead or default_ahead(pp_size, self._start is not None)
        self.lookahead: int = getattr(source, "lookahead", 0)
        self._steps = iter(steps)
        self._drawn: deque[list[Batch]] = deque()
        self._rounds: deque[list[Batch]] = deque()
        """Micro-batches that are not computed yet; each entry has one per pipeline rank."""
        self._ready: deque[Features] = deque()
        self._read: deque[Future[Callable[[], list[Features]]]] = deque()
        self._reader = ThreadPoolExecutor(1, "features") if self._start is not None else None
        self._ended = False

    def step(self) -> tuple[list[Batch], Iterator[Features], int]:
        """The next step: its micro-batches, the features of those that this rank owns, and the number of the latter.

        The iterator must be exhausted before the next call. Raises UserError if the number of micro-batches is not a
        multiple of the pipeline size, StopIteration after the last step.
        """
        if not self._drawn:
            self._draw()
        batches = self._drawn.popleft()
        count = len(batches) // self.pp_size
        return batches, (self._next() for _ in range(count)), count

    def prepare(self) -> None:
        """Compute features of the next step, if there is one and none are ready: between steps, so that the device has
        work while the host waits for the end of the last one. A thread reads ahead anyway."""
        if self.online and not self._ready:
            self._fill()

    @property
    def drained(self) -> bool:
        """True once the base has computed the features of the last step: later steps only use them."""
        return self.online and self._ended and not self._rounds

    def close(self) -> None:
        """Discard what was read ahead."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _draw(self) -> None:
        try:
            batches = next(self._steps)
        except StopIteration:
            self._ended = True
            raise
        check_count(len(batches), self.pp_size)
        self._drawn.append(batches)
        self._rounds.extend(batches[i : i + self.pp_size] for i in range(0, len(batches), self.pp_size))

    def _round(self) -> list[Batch] | None:
        if not self._rounds:
            try:
                self._draw()
            except StopIteration:
                return None
        return self._rounds.popleft()

    def _next(self) -> Features:
        if self._reader is not None and self._start is not None:
            while len(self._read) < self.ahead and (batches := self._round()) is not None:
                self._read.append(self._reader.submit(self._start, batches))
            return self._read.popleft().result()()[0]
        if not self._ready:
            self._fill()
        return self._ready.popleft()

    def _fill(self) -> None:
        chosen: list[Batch] = []
        for _ in range(self.ahead):
            if (batches := self._round()) is None:  # after the last step: --features-ahead may be any number
                break
            chosen += batches
        if chosen:
            self._ready.extend(self.source.features(chosen, self._following()))

    def _following(self) -> list[Batch]:
        """The micro-batches after those that were taken, as many as the source looks ahead."""
        while len(self._rounds) * self.pp_size < self.lookahead:
            try:
                self._draw()
            except StopIteration:
                break
        return [batch for each in self._rounds for batch in each][: self.lookahead]
