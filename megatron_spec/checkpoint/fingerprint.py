"""Identity of a base on disk, by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_BLOCK = 64 * 1024
_SAMPLES = 64


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}\n".encode())
    with path.open("rb") as f:
        if size <= _BLOCK * (_SAMPLES + 1):
            digest.update(f.read())
            return
        # The first block holds the header (names, shapes, offsets) of a safetensors file.
        for i in range(_SAMPLES + 1):
            f.seek((size - _BLOCK) * i // _SAMPLES)
            digest.update(f.read(_BLOCK))


def fingerprint(config_text: bytes, weight_files: Iterable[Path]) -> str:
    """sha256 over the configuration and every weight file: name, size, and content.

    Files above about 4 MiB are sampled: 65 blocks of 64 KiB, spread evenly, the first (header) and last among them.
    So 140 GB take seconds. Training or converting changes every block; a manual change of a few bytes inside a large
    file can go unnoticed.
    """
    digest = hashlib.sha256()
    digest.update(len(config_text).to_bytes(8, "little") + config_text)
    for path in sorted(weight_files, key=lambda p: p.name):
        _add_file(digest, path)
    return "sha256:" + digest.hexdigest()
