"""What a profile says that ran on the device: calls of the runtime that launch it are events of the host."""

from __future__ import annotations

from typing import Any

import torch


def kernels_of(profile: torch.profiler.profile) -> list[Any]:
    """Averages of the kernels and copies of a profile."""
    return [
        event
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and not any(n in event.key for n in ("Memset", "Sync"))
    ]


def count_kernels(profile: torch.profiler.profile) -> int:
    """How many kernels and copies ran."""
    return sum(event.count for event in kernels_of(profile))
