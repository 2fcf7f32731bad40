"""Random numbers of a training step: functions of torch's seed and a row's content, independent of the layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_spec.config import UserError
from megatron_spec.runtime.distributed import World


@contextmanager
def step_of(number: int) -> Iterator[None]:
    """Inside, draws are those of step `number` of a program that seeds torch only once; its random state is kept."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed((torch.initial_seed() + number * 1_000_003) % (1 << 63))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def check_seeds(world: World) -> None:
    """Raise UserError if ranks that share matrices or sequences would draw other random numbers. Collective."""
    for group in [world.tp] if world.context is None else [world.tp, world.context.group]:
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, torch.initial_seed(), group=group)
        if len(set(found)) > 1:
            raise UserError(
                f"torch's seeds are {found} on ranks of one tensor or context parallel group, which have to draw the "
                "same random numbers for this draft: call torch.manual_seed with one seed on all of them"
            )


def mix(x: Any) -> Any:
    """32-bit hash (multiply-xorshift) of an integer or of each element of an int64 tensor."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
