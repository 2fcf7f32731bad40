"""Random numbers of a training step as a function of torch's seed and of what a row holds, never of the layout."""

from __future__ import annotations

from typing import Any


def mix(x: Any) -> Any:
    """32 well-mixed bits of an integer or of an int64 tensor (a multiply-xorshift hash)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
