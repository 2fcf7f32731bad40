"""Random numbers of a training step: functions of torch's seed and a row's content, independent of the layout."""

from __future__ import annotations

from typing import Any


def mix(x: Any) -> Any:
    """32-bit hash (multiply-xorshift) of an integer or of each element of an int64 tensor."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
