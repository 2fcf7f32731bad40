"""How cuBLAS may sum the products of the base in decoding.

Where outputs are few, cuBLAS divides the inputs of a product among programs and sums up their shares (split-K). It
chooses by the number of rows, so a row may get other bits in a verification than in a step of the base alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

UNDIVIDED = False
"""Products in half precision are summed without split-K, through cuBLASLt. Off: neither its time nor its bits are
measured yet (tests/gpu/test_decode_rows.py)."""
HALF = ("fp16", "bf16")


def can_be_undivided() -> bool:
    """True if this torch has the setting (2.10 or later)."""
    return hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k")


@contextmanager
def undivided() -> Iterator[None]:
    """No split-K within; torch's settings are as before afterwards. Raises RuntimeError without cuBLASLt."""
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in HALF]
    before = [(getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in names]
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        for name in names:
            setattr(matmul, name, (False, False))
        yield
    finally:
        for name, setting in zip(names, before, strict=True):
            setattr(matmul, name, setting)
        torch.backends.cuda.preferred_blas_library(library)


def of_decoding(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """What the base's forwards in decoding run in."""
    half = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return undivided() if UNDIVIDED and half and can_be_undivided() else nullcontext()
