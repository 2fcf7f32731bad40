"""Operators of the fast paths: Triton kernels or their plain twins, under the same names."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

from megatron_spec.config.machine import Kernels

KERNELS = (
    "adam", "branch", "decode", "experts", "few_rows", "fp8", "loss", "many_rows", "rotary", "rows", "sample",
    "teacher",
)  # fmt: skip
"""Files of `ops.kernels` that have operators."""


@functools.cache
def load(kernels: Kernels) -> Any:
    """Operators by name (`norm_forward`, `merge_backward`, `soft_rows`, ...; see `ops.plain`).

    Args:
        kernels: implementation to load (`planning.paths.Paths.kernels`), not 'none'.
    """
    assert kernels != "none", "no fast path may run here"
    from megatron_spec.ops import plain

    if kernels == "plain":
        return plain
    found: dict[str, Any] = {}
    for name in KERNELS:
        module = importlib.import_module(f"megatron_spec.ops.kernels.{name}")
        found |= {key: value for key, value in vars(module).items() if key in plain.OPERATORS}
    return SimpleNamespace(**found)
