"""CUDA graphs for the steps of decoding: a step is many small kernels, and starting them takes longer than they run.

What is recorded are functions of fixed shapes that read and write the same memory every time and never read values
on the host. The first runs of a shape are ordinary ones, which is the warm-up that recording needs; then it is recorded
once and replayed. Shapes are few: sequences come in powers of two, cache slots that are read in steps (`key_step`).

A recorder is all that knows CUDA, so that a test can record and replay on a CPU.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_spec.decoding.costs import now

log = logging.getLogger(__name__)

T = TypeVar("T")

WARM = 2
"""Ordinary runs of a shape before it is recorded."""


class Recorder(Protocol):
    """Records what a function asks of the device."""

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """(does it all, the tensors that hold the results every time); nothing has been done before the first replay.

        Raises RuntimeError for what cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs; all of them share one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.first: torch.cuda.CUDAGraph | None = None
        """Kept, because torch refuses to record into a pool whose graphs are all gone."""

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        self.first = self.first or graph
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = function()
        return graph.replay, results


class TimedRecorder:
    """Counts the seconds that recording takes: once for a shape, not with every answer."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.seconds = recorder, 0.0

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See `Recorder`."""
        start = now()
        recorded = self.recorder(function)
        self.seconds += now() - start
        return recorded


def recorder_for(base: Any) -> Recorder | None:
    """A recorder where the base may take the path `cuda_graphs`: other ranks would have to replay in step."""
    return CudaRecorder() if base.paths.on("cuda_graphs") else None


def timed_recorder_for(base: Any, wanted: bool) -> TimedRecorder | None:
    """The same, for timing answers: few short ones would pay for the graphs of their shapes as much as many long ones.

    Args:
        wanted: `DecodeConfig.cuda_graphs`.
    """
    recorder = recorder_for(base) if wanted else None
    return None if recorder is None else TimedRecorder(recorder)


def key_step(most: int) -> int:
    """Cache slots are read in multiples of this: at most eight shapes, however much the cache holds."""
    return max(64, 1 << max((most - 1).bit_length() - 3, 0))


def padded_rows(running: int, most: int) -> int:
    """The next power of two, at most `most`."""
    return min(1 << (running - 1).bit_length(), most)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in it (dataclasses, tuples, lists) replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: mapped(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, function) for item in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor that `mapped` would reach, in its order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        """Remember a tensor of the structure."""
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


@dataclasses.dataclass
class _Recording:
    replay: Callable[[], None]
    inputs: list[Tensor]
    results: Any


class Replays:
    """Runs functions from recordings where there is a recorder, else as they are."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self._runs: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, _Recording | None] = {}

    @property
    def active(self) -> bool:
        """True when shapes should be kept few."""
        return self.recorder is not None

    def run(self, name: Hashable, function: Callable[..., T], *inputs: Any) -> T:
        """function(*inputs); results are overwritten by the next run of the same name and shapes.

        Args:
            name: all that `function` depends on besides its inputs and the contents of memory that stays.
            inputs: tensors, and dataclasses or tuples of them.
        """
        if self.recorder is None:
            return function(*inputs)
        given = tensors_in(inputs)
        key = (name, tuple((tensor.shape, tensor.dtype) for tensor in given))
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        if runs > WARM and key not in self._recordings:
            self._recordings[key] = self._record(name, function, inputs)
        recording = self._recordings.get(key)
        if recording is None:
            return function(*inputs)
        for kept, new in zip(recording.inputs, given, strict=True):
            kept.copy_(new)
        recording.replay()
        results: T = recording.results
        return results

    def _record(self, name: Hashable, function: Callable[..., T], inputs: Any) -> _Recording | None:
        assert self.recorder is not None
        still = mapped(inputs, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        try:
            replay, results = self.recorder(lambda: function(*still))
        except RuntimeError as error:
            log.warning("decoding: %s is not replayed as a CUDA graph: %s", name, str(error).splitlines()[0])
            return None
        return _Recording(replay, tensors_in(still), results)
