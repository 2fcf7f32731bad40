"""Fingerprint of the target's embedding and LM head, which detects a target changed after training. No torch.

Rotating a model (QuaRot, SpinQuant) keeps its text but changes every hidden state: a draft trained before the rotation
loads without an error, and none of its tokens are accepted.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_spec.config import UserError
from megatron_spec.export.tensor_files import Entry, read_entries

KEY = "base_rows"
"""Key in run.json of an exported draft."""
_NAMES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
_ROWS = 64


def _digest(entry: Entry) -> str:
    """dtype, shape and hash of evenly spaced rows."""
    rows, row_bytes = entry.shape[0], (entry.stop - entry.start) // entry.shape[0]
    digest = hashlib.sha256()
    with entry.path.open("rb") as f:
        for i in range(min(_ROWS, rows)):
            f.seek(entry.start + (rows - 1) * i // max(min(_ROWS, rows) - 1, 1) * row_bytes)
            digest.update(f.read(row_bytes))
    return f"{entry.dtype} {'x'.join(map(str, entry.shape))} {digest.hexdigest()}"


def base_rows(folder: Path | str) -> dict[str, str]:
    """Name -> fingerprint; {} for a target that is not a Hugging Face folder of safetensors."""
    try:
        entries = read_entries(Path(folder))
    except UserError:
        return {}
    return {k: _digest(entries[n]) for k, n in _NAMES.items() if n in entries and entries[n].tensor is None}


def is_target(entry: Entry, target: str | None) -> bool | None:
    """Whether a tensor is the target's of this fingerprint; None if it cannot be told."""
    if target is None or entry.tensor is not None:
        return None
    found = _digest(entry)
    return found == target if found.split()[:2] == target.split()[:2] else None


def changed(recorded: dict[str, str], found: dict[str, str]) -> list[str]:
    """Names whose rows differ at equal dtype and shape (a target in another dtype is still the same target)."""
    return [
        name
        for name, text in recorded.items()
        if name in found and text.split()[:2] == found[name].split()[:2] and text != found[name]
    ]
