"""Random numbers of a training step: functions of torch's seed and a row's content, independent of the layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def step_of(number: int) -> Iterator[None]:
    """Inside, draws are those of step `number` of a program that seeds torch only once; its random state is kept."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed((torch.initial_seed() + number * 1_000_003) % (1 << 63))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def mix(x: Any) -> Any:
    """32-bit hash (multiply-xorshift) of an integer or of each element of an int64 tensor."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
