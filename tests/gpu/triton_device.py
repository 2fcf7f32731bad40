"""What tests of Triton kernels share: they run on a GPU, or with TRITON_INTERPRET=1 in its interpreter on the CPU."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU (or TRITON_INTERPRET=1)"),
]
COMPILED = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")


def variants(module: ModuleType) -> int:
    """Compiled variants of a module's own kernels."""
    kernels = [k for k in vars(module).values() if getattr(k, "__module__", "") == module.__name__]
    caches = [cache for k in kernels for cache in getattr(k, "device_caches", {}).values()]
    return sum(len(cache[0]) for cache in caches)
