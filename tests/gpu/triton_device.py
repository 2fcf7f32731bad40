"""What tests of Triton kernels share: they run on a GPU, or with TRITON_INTERPRET=1 in its interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU (or TRITON_INTERPRET=1)"),
]
