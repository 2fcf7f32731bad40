"""A recorder for the CPU: records every operation with its tensors, and replays it on the same memory.

What a CUDA graph cannot hold fails here too: a value read on the host is refused, and anything that the host decided or
copied from its own memory is the same in every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "aten::equal", "masked_select", "unique", "lift_fresh")
"""Operations that wait for the device, and the last one, which copies from the host's memory (`torch.tensor`)."""


class _Writer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(word in func.name() for word in WAITS):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        out = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        fresh = [x.untyped_storage().data_ptr() not in given for x in made]
        if func._schema.is_mutable:
            self.lines.append(lambda: func(*args, **kwargs))
        elif any(fresh):  # else a view: it shows what its base holds
            self.lines.append(lambda: self._again(func, args, kwargs, made))
        return out

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        for kept, value in zip(made, new, strict=True):
            if kept.numel():
                kept.copy_(value)


class CpuRecorder:
    """See `decoding.replay.Recorder`.

    Attributes:
        recorded, replayed: how often.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with _Writer() as writer:
            results = function()  # a CUDA graph records without running, so the first replay is this run
        self.recorded += 1
        done = [True]

        def replay() -> None:
            self.replayed += 1
            if done:
                done.clear()
                return
            for line in writer.lines:
                line()

        return replay, results
