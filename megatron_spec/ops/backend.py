"""Operators of the fast paths: Triton kernels or their plain twins, under the same names."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from megatron_spec.config.machine import Kernels


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
    from megatron_spec.ops.kernels import adam, branch, decode, experts, few_rows, fp8, loss, rotary, rows, sample

    found: dict[str, Any] = {}
    for module in (adam, branch, decode, experts, few_rows, fp8, loss, rotary, rows, sample):
        found |= {name: value for name, value in vars(module).items() if name in plain.OPERATORS}
    return SimpleNamespace(**found)
