"""CUDA graphs for decoding: a step is many small kernels, which take longer to launch than to run.

Functions of fixed shapes that use the same memory in every call and never read values on the host are recorded. The
first runs of a shape are eager, which is the warm-up that capture needs; then it is recorded once and replayed. Few
shapes occur: batch sizes (`padded_rows`) and the number of cache slots to read (`key_step`) are rounded up.

Only the recorder knows CUDA, so tests can record and replay on a CPU.
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
"""Eager runs of a shape before it is recorded."""


class Recorder(Protocol):
    """Records the device work of a function."""

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """(replay, the results, whose tensors every replay overwrites). Nothing runs before the first replay.

        Raises RuntimeError if the function cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool."""

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
    """Measures the time spent recording, which occurs once per shape rather than once per answer."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.seconds = recorder, 0.0

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See `Recorder`."""
        start = now()
        recorded = self.recorder(function)
        self.seconds += now() - start
        return recorded


def recorder_for(base: Any) -> Recorder | None:
    """A recorder if the fast path `cuda_graphs` is on."""
    return CudaRecorder() if base.paths.on("cuda_graphs") else None


def timed_recorder_for(base: Any, wanted: bool) -> TimedRecorder | None:
    """`recorder_for` for benchmarks: recording time is kept apart, as it would dominate a few short answers.

    Args:
        wanted: `DecodeConfig.cuda_graphs`.
    """
    recorder = recorder_for(base) if wanted else None
    return None if recorder is None else TimedRecorder(recorder)


def key_step(most: int) -> int:
    """Cache slots are read in multiples of this number: at most eight shapes for any cache size `most`."""
    return max(64, 1 << max((most - 1).bit_length() - 3, 0))


def padded_rows(running: int, most: int) -> int:
    """`running` rounded up to a power of two, or from 64 on to 3/4 of one; at most `most`."""
    whole = 1 << (running - 1).bit_length()
    return min(whole * 3 // 4 if whole > 64 and running <= whole * 3 // 4 else whole, most)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to every tensor in it (in dataclasses, tuples and lists)."""
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: mapped(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, function) for item in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a structure, in the order of `mapped`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        """Collect a tensor of the structure."""
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
    """Runs functions by replaying their recordings, or eagerly if there is no recorder."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self._runs: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, _Recording | None] = {}

    @property
    def active(self) -> bool:
        """True if functions are recorded, so that few shapes should occur."""
        return self.recorder is not None

    def run(self, name: Hashable, function: Callable[..., T], *inputs: Any) -> T:
        """function(*inputs). The next run with the same name and shapes overwrites the results.

        Args:
            name: identifies everything that `function` depends on besides its inputs and persistent memory.
            inputs: tensors, and dataclasses or tuples of tensors.
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
            log.warning("decoding: %s runs without a CUDA graph: %s", name, str(error).splitlines()[0])
            return None
        return _Recording(replay, tensors_in(still), results)
