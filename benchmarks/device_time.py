"""Where a device's time goes in decoding: kernels by kind, from torch's profiler. On a CPU, operators of torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_spec.decoding.costs import now

KINDS = {
    "attention": r"attention|flash|fmha",
    "products": r"gemm|gemv|cutlass|nvjet|cublas|splitk|_product_kernel|aten::(mm|addmm|bmm|linear)",
    "norms, rotation, gate": r"_norm|_rotary|_gated|rms_norm|silu",
    "choice of tokens": r"reduce|argmax|softmax|scan|cumsum|sort|topk|search|max",
    "copies": r"copy|memcpy|memset|cat|index|gather|scatter",
}
"""Kind -> what its kernels' names contain; the first that matches counts."""
OTHERS = "other element-wise"
LONGEST = 12


def kind_of(name: str) -> str:
    """Kind of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHERS)


def profiled(function: Callable[[], int]) -> dict[str, Any]:
    """Kernels and milliseconds per step, and shares of the device's time by kind.

    Args:
        function: runs some steps, and returns how many.
    """
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        start = now()
        steps = max(1, function())
        seconds = now() - start
    found = [
        (e.key, e.count, (e.self_device_time_total if cuda else e.self_cpu_time_total)) for e in recorded.key_averages()
    ]
    found = [event for event in found if event[2] > 0]
    busy = sum(micros for *_, micros in found)
    shares: dict[str, float] = {}
    for name, _, micros in found:
        shares[kind_of(name)] = shares.get(kind_of(name), 0.0) + micros / max(busy, 1e-9)
    longest = sorted(found, key=lambda event: -event[2])[:LONGEST]
    return {
        "steps": steps, "ms_per_step": round(seconds / steps * 1e3, 3),
        "device_ms_per_step": round(busy / steps / 1e3, 3), "device_busy": round(busy / 1e6 / seconds, 3),
        "kernels_per_step": round(sum(count for _, count, _ in found) / steps, 1),
        "shares": {kind: round(share, 3) for kind, share in sorted(shares.items(), key=lambda x: -x[1])},
        "longest": [
            {"kernel": name[:80], "per_step": round(count / steps, 2), "ms_per_step": round(micros / steps / 1e3, 4)}
            for name, count, micros in longest
        ],
    }  # fmt: skip
