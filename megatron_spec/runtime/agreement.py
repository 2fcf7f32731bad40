"""Ranks must be started with the same settings and see the same files: compared before the first collective that
depends on them, because ranks that disagree would hang or train something else without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megatron_spec.config import UserError


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Raise UserError, on every rank, when `settings` (flag -> value) are not those of rank 0. Collective."""
    if dist.get_world_size() == 1:
        return
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {flag: str(value) for flag, value in settings.items()})
    differences = []
    for flag in sorted({flag for found in everywhere for flag in found}):
        values = [found.get(flag, "(not given)") for found in everywhere]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append(f"{flag} is {values[0]} on rank 0 and {values[other]} on rank {other}")
    if differences:
        raise UserError(
            f"the ranks were not started alike: {'; '.join(differences)}. Start every rank with the same flags, and "
            "make sure that they read the same files"
        )
