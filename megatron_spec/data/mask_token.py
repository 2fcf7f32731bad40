"""The mask token of a base for block drafts: an id that has an embedding row and occurs in no text."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_spec.runtime.files import read_object

_RESERVED = re.compile(r"<\|?(reserved|unused|extra|placeholder)[-_a-z]*\d*\|?>|\[unused\d+\]", re.I)
_MASKS = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")


def find(folder: Path, vocab_size: int) -> int | None:
    """Id of the mask token of the tokenizer in `folder`, else of its first reserved token, else of an unused row.

    None if there is none of these, or no tokenizer.json. Raises UserError for one that cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    raw = read_object(file)
    added = {t["content"]: int(t["id"]) for t in raw.get("added_tokens") or ()}
    known = (raw.get("model") or {}).get("vocab") or {}
    taken = set(added.values()) | (set(known.values()) if isinstance(known, dict) else set(range(len(known))))
    for word in _MASKS:
        if added.get(word, vocab_size) < vocab_size:
            return added[word]
    reserved = sorted(i for word, i in added.items() if _RESERVED.fullmatch(word) and i < vocab_size)
    if reserved:
        return reserved[0]
    unused = max(taken, default=-1) + 1
    return unused if unused < vocab_size else None
