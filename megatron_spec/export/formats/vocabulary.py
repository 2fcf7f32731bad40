"""The vocabulary map of a draft: d2t (offsets) and t2d (marks), as stored. No torch."""

from __future__ import annotations

from megatron_spec.export.formats.reading import Problem
from megatron_spec.export.tensor_files import Entry


def check_map(d2t: Entry, t2d: Entry | None, D: int, V: int) -> list[Problem]:
    """What is wrong with a map from D draft ids to V target ids; any order of the target ids is right."""
    if d2t.shape != (D,) or d2t.dtype not in ("I64", "I32"):
        return [Problem("d2t", f"d2t is {d2t.dtype} {list(d2t.shape)}", f"write it as int64 [{D}]")]
    offsets = d2t.integers()
    targets = [i + offset for i, offset in enumerate(offsets)]
    if D < V and not any(offsets):
        return [Problem("d2t", "d2t is all zeros: it was never calibrated", "write the map of the training")]
    if min(targets) < 0 or max(targets) >= V or len(set(targets)) < len(targets):
        absolute = min(offsets) >= 0 and max(offsets) < V and len(set(offsets)) == len(offsets)
        hint = ": it seems to hold target ids instead of offsets" if absolute else ""
        fix = "store offsets: d2t[i] = target id - i" if absolute else "write the map of the training"
        return [Problem("d2t", f"i + d2t[i] is not distinct and within 0..{V - 1}{hint}", fix)]
    if t2d is None:
        return []
    if t2d.dtype != "BOOL" or t2d.shape != (V,):
        return [Problem("t2d", f"t2d is {t2d.dtype} {list(t2d.shape)}", f"write it as bool [{V}]")]
    marked = {i for i, inside in enumerate(t2d.integers()) if inside}
    return (
        [] if marked == set(targets) else [Problem("t2d", "t2d marks other tokens than d2t lists", "write it from d2t")]
    )
