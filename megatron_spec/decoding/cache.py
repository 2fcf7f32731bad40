"""Row bookkeeping on a KVCache: running sequences stay in the first rows, without copying the whole cache."""

from __future__ import annotations

import copy

from megatron_spec.ops.attention import KVCache


def rows_view(cache: KVCache, first: int, count: int) -> KVCache:
    """Rows first .. first + count - 1 as a cache of their own, sharing storage."""
    view = copy.copy(cache)
    view.keys = cache.keys[:, first : first + count]
    view.values = cache.values[:, first : first + count]
    return view


def move_rows(cache: KVCache, source: list[int], target: list[int]) -> None:
    """Copy rows `source` over rows `target`."""
    for s, t in zip(source, target, strict=True):
        cache.keys[:, t] = cache.keys[:, s]
        cache.values[:, t] = cache.values[:, s]
