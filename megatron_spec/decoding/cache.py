"""Moves rows and slots of a KVCache: running sequences stay in the first rows, accepted paths in consecutive slots.

B rows, P slots of a path.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from megatron_spec.ops.visibility import KVCache


def rows_view(cache: KVCache, first: int, count: int) -> KVCache:
    """View of rows first .. first + count - 1, sharing storage."""
    view = copy.copy(cache)
    view.keys = cache.keys[:, first : first + count]
    view.values = cache.values[:, first : first + count]
    return view


def move_rows(cache: KVCache, source: list[int], target: list[int]) -> None:
    """Copy rows `source` to rows `target`."""
    for s, t in zip(source, target, strict=True):
        cache.keys[:, t] = cache.keys[:, s]
        cache.values[:, t] = cache.values[:, s]


def move_slots(cache: KVCache, source_BP: Tensor, target_BP: Tensor) -> None:
    """In the first B rows, copy slots `source_BP` to `target_BP`, to compact an accepted path.

    Keys stay valid: their rotary position is the one in the text, whatever their slot.
    """
    rows_B1 = torch.arange(source_BP.shape[0], device=source_BP.device)[:, None]
    cache.keys[:, rows_B1, target_BP] = cache.keys[:, rows_B1, source_BP]
    cache.values[:, rows_B1, target_BP] = cache.values[:, rows_B1, source_BP]
