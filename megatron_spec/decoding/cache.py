"""Moves rows and slots: running sequences stay in the first rows of every state, accepted paths in consecutive slots.

B rows, M moved rows, P slots of a path.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_spec.ops.visibility import KVCache
from megatron_spec.runtime.platform import to_device

COPIED = 1 << 28
"""Bytes of a cache that a copy of rows holds at a time."""


def rows_view(cache: KVCache, first: int, count: int) -> KVCache:
    """View of rows first .. first + count - 1, sharing storage."""
    view = copy.copy(cache)
    view.keys = cache.keys[:, first : first + count]
    view.values = cache.values[:, first : first + count]
    return view


class Moves:
    """Copies rows `source` over rows `target`, in one transfer of indices and one copy of each state.

    No row is both source and target: the engine moves rows after the kept ones to free rows before them.
    """

    def __init__(self, source: Sequence[int], target: Sequence[int], device: torch.device) -> None:
        assert not set(source) & set(target), (source, target)
        self.source_M, self.target_M = to_device(torch.tensor([list(source), list(target)]), device)

    def copy(self, *states: Tensor) -> None:
        """Rows are the first dimension."""
        for state in states:
            state[self.target_M] = state[self.source_M]

    def copy_cache(self, cache: KVCache, slots: int | None = None) -> None:
        """Args: slots: number of slots that the sources use; default: all."""
        for state in (cache.keys[:, :, :slots], cache.values[:, :, :slots]):
            row = state[:, :1].numel() * state.element_size()
            count = max(1, COPIED // max(row, 1))
            for source_M, target_M in zip(self.source_M.split(count), self.target_M.split(count), strict=True):
                state[:, target_M] = state[:, source_M]


def move_rows(
    source: Sequence[int], target: Sequence[int], caches: Iterable[KVCache] = (), states: Iterable[Tensor] = ()
) -> None:
    """Copy rows `source` of caches and states on one device to rows `target`."""
    caches, states = list(caches), list(states)
    moves = Moves(source, target, (states or [cache.keys for cache in caches])[0].device)
    moves.copy(*states)
    for cache in caches:
        moves.copy_cache(cache)


def move_slots(cache: KVCache, source_BP: Tensor, target_BP: Tensor) -> None:
    """In the first B rows, copy slots `source_BP` to `target_BP`, to compact an accepted path.

    Keys stay valid: their rotary position is the one in the text, whatever their slot.
    """
    rows_B1 = torch.arange(source_BP.shape[0], device=source_BP.device)[:, None]
    cache.keys[:, rows_B1, target_BP] = cache.keys[:, rows_B1, source_BP]
    cache.values[:, rows_B1, target_BP] = cache.values[:, rows_B1, source_BP]
