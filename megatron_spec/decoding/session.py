"""What several calls of `decode` share: caches, rows, and the CUDA graphs recorded on them.

A recording is bound to the memory and the modules it was made with. A session reuses it only for the same base, draft
and settings, and only if nothing that a recording holds has changed (`fingerprint`); otherwise it records anew. The
caller decides how long the memory is kept, by holding the session.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_spec.base.model import FrozenBase
from megatron_spec.config import DecodeConfig
from megatron_spec.decoding.drafters import Drafter, build_drafter
from megatron_spec.decoding.replay import Recorder, Replays, recorder_for
from megatron_spec.decoding.rows import Rows
from megatron_spec.decoding.step import DeviceSteps
from megatron_spec.ops.visibility import KVCache
from megatron_spec.runtime import platform

KEPT = 1 / 16
"""Largest part of the device's memory that the base's cache may take between two calls."""


@dataclass
class Buffers:
    """Device memory of up to `count` sequences of up to `slots` tokens, and the steps on it."""

    count: int
    slots: int
    cache: KVCache
    rows: Rows
    steps: DeviceSteps
    replays: Replays


class DecodeSession:
    """Keeps the buffers and recordings of the last call of `decode` for the next ones.

    Weights may change between two calls, and hooks, quantisers and captures may come and go. A call with another base,
    draft or configuration (seed and batch size apart), with more or longer sequences, or of which too large a cache
    would be left, starts anew. A call within a call (a consumer of answers that decodes) gets a session of its own.

    Args:
        recorder: records CUDA graphs; default: used if they are available, unless config.cuda_graphs is off.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.drafter: Drafter | None = None
        self._key: tuple[Any, ...] = ()
        self._buffers: Buffers | None = None
        self._print: Hashable = None
        self._busy = False

    @contextmanager
    def call(self, base: FrozenBase, draft: Any, config: DecodeConfig, stop_ids: set[int]) -> Iterator[DecodeSession]:
        """The session of one call of `decode`: this one, or a new one while another call uses this one."""
        if self._busy:
            with DecodeSession(self.recorder).call(base, draft, config, stop_ids) as own:
                yield own
            return
        self._busy = True
        try:
            self._begin(base, draft, config, stop_ids)
            yield self
        finally:
            self._end()
            self._busy = False

    def _begin(self, base: FrozenBase, draft: Any, config: DecodeConfig, stop_ids: set[int]) -> None:
        key = (base, draft, config.replace(seed=0, batch_size=1), stop_ids)
        same = len(self._key) == len(key) and base is self._key[0] and draft is self._key[1]
        if same and key[2:] == self._key[2:]:
            if self._print != self._fingerprint():
                self._buffers = None
        else:
            self.clear()
            self._key, self.drafter = key, build_drafter(draft, base, config)

    def _end(self) -> None:
        """Keep what is worth it."""
        kept = self._buffers
        if kept is None or not kept.replays.active or _bytes(kept.cache) > KEPT * platform.device_memory():
            self.clear()
        else:
            self._print = self._fingerprint()

    def clear(self) -> None:
        """Free the memory."""
        self._key, self._buffers, self._print, self.drafter = (), None, None, None

    def _fingerprint(self) -> Hashable:
        return fingerprint(self._key[0], self.drafter)

    def buffers(self, count: int, slots: int) -> Buffers:
        """Buffers for at least `count` sequences of `slots` tokens; those of before if they are large enough."""
        base, _, config, stop_ids = self._key
        kept = self._buffers
        if kept is not None and count <= kept.count and slots <= kept.slots:
            if self.drafter and not self.drafter.fixed_shapes:
                self.drafter.open(kept.count, kept.slots)  # forget the texts of before
            return kept
        self._buffers = kept = None  # before the next ones are allocated
        recorder = self.recorder
        if recorder is None and config.cuda_graphs:
            recorder = self.recorder = recorder_for(base)
        cache = base.new_cache(count, slots)
        if self.drafter:
            self.drafter.open(count, slots)
        rows = Rows(count, slots + 1, config, stop_ids, base.world.device, drafted=self.drafter is not None)
        steps = DeviceSteps(base, config, rows, cache, self.drafter)
        self._buffers = Buffers(count, slots, cache, rows, steps, Replays(recorder))
        return self._buffers


def weight_bytes(module: nn.Module | None) -> int:
    """Bytes of a module's parameters and buffers on this rank; 0 without one."""
    if module is None:
        return 0
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _bytes(cache: KVCache) -> int:
    return sum(x.numel() * x.element_size() for x in (cache.keys, cache.values))


def fingerprint(base: FrozenBase, drafter: Drafter | None) -> Hashable:
    """Changes with everything that a recording of base and drafter holds besides values in memory.

    That is: the modules, their tensors (by address), hooks and settings, and the tensors and settings of the drafter.
    """
    owned = vars(drafter).values() if drafter else ()
    roots = dict.fromkeys([base, *(value for value in owned if isinstance(value, nn.Module))])
    modules = [_module(module) for root in roots for module in root.modules()]
    caches = [value for value in owned if isinstance(value, KVCache)]
    tensors = [
        *(value for value in owned if isinstance(value, Tensor)),
        *(t for c in caches for t in (c.keys, c.values)),
    ]
    return tuple(modules), id(base.direct), id(drafter), _settings(drafter), tuple(map(_memory, tensors))


def _module(module: nn.Module) -> Hashable:
    hooks = (*module._forward_pre_hooks, *module._forward_hooks)  # torch numbers them, no number comes twice
    tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    return id(module), type(module), hooks, _settings(module), tuple(map(_memory, tensors))


def _settings(owner: Any) -> Hashable:
    """Plain attributes of an object."""
    return tuple((name, repr(value)) for name, value in vars(owner).items() if _is_plain(value)) if owner else ()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum))


def _memory(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
