"""The map from draft ids to target ids in a folder. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_spec.config import BlockConfig, EagleConfig
from megatron_spec.export.formats.reading import Problem, Reading
from megatron_spec.export.tensor_files import Entry


def read_vocabulary(reading: Reading, found: Mapping[str, str]) -> list[Problem]:
    """Problems of the draft vocabulary; without any, `reading` has the name of its map.

    Args:
        found: name of a tensor in this package -> its name in the folder.
    """
    config, entries = reading.config, reading.source.entries
    assert isinstance(config, (EagleConfig, BlockConfig))
    stored, marks = found.get("d2t"), found.get("t2d")
    full = config.draft_vocab_size == config.vocab_size
    if stored is None:
        if full:
            return []
        lacking = f"draft_vocab_size {config.draft_vocab_size} < vocab_size {config.vocab_size}, but d2t is missing"
        fix = "write d2t, int64 [draft_vocab_size]: target id - draft id; without it every drafted token is wrong"
        return [Problem("d2t", lacking, fix)]
    problems = check_map(entries[stored], entries[marks] if marks else None, config.draft_vocab_size, config.vocab_size)
    if full and not problems and not any(entries[stored].integers()):
        reading.unused[stored] = "draft ids are target ids"
    else:
        reading.d2t = stored
    return problems


def check_map(d2t: Entry, t2d: Entry | None, D: int, V: int) -> list[Problem]:
    """Problems of a map from D draft ids to V target ids; any order of the target ids is valid."""
    if d2t.shape != (D,) or d2t.dtype not in ("I64", "I32"):
        return [Problem("d2t", f"d2t is {d2t.dtype} {list(d2t.shape)}", f"write it as int64 [{D}]")]
    offsets = d2t.integers()
    targets = [i + offset for i, offset in enumerate(offsets)]
    if D < V and not any(offsets):
        return [Problem("d2t", "d2t is all zeros: it was never calibrated", "write the map used in training")]
    if min(targets) < 0 or max(targets) >= V or len(set(targets)) < len(targets):
        absolute = min(offsets) >= 0 and max(offsets) < V and len(set(offsets)) == len(offsets)
        hint = ": it seems to hold target ids instead of offsets" if absolute else ""
        fix = "store offsets: d2t[i] = target id - i" if absolute else "write the map used in training"
        return [Problem("d2t", f"i + d2t[i] is not distinct and within 0..{V - 1}{hint}", fix)]
    if t2d is None:
        return []
    if t2d.dtype != "BOOL":
        return [Problem("t2d", f"t2d is {t2d.dtype} {list(t2d.shape)}", f"write it as bool [{V}]")]
    if t2d.shape != (V,):
        fix = "make config.json and the tensor agree"
        return [Problem("t2d", f"t2d is {list(t2d.shape)}, config.json says vocab_size {V}", fix)]
    marked = {i for i, inside in enumerate(t2d.integers()) if inside}
    return (
        []
        if marked == set(targets)
        else [Problem("t2d", "t2d marks different tokens than d2t lists", "derive it from d2t")]
    )
