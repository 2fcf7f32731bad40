"""Modules with the interface of Transformer Engine's that `drafts/engine.py` uses, on any device.

They differ from torch's where the real ones do, so that a draft which ignores their rules fails: 8-bit products need
rows and widths that are multiples of 16, parameters are registered with an extra state, and a linear must be given the
dtype of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

calls: list[tuple[str, int, bool]] = []
"""(module, rows, in 8 bits) of every call."""
autocasts: list[bool] = []
"""Contexts that are open, the innermost last."""


class Linear(nn.Module):
    """As `transformer_engine.pytorch.Linear` without collectives."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: Any,
        init_method: Callable[[Tensor], Any],
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        init_method(self.weight)
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # type: ignore[attr-defined]

    def get_extra_state(self) -> Tensor:
        """The real modules put their scales into every state dict."""
        return torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T; in 8 bits, of both rounded to 1/128 of their largest magnitude."""
        assert x.dtype == self.weight.dtype and x.is_contiguous()
        eight = bool(autocasts) and autocasts[-1]
        calls.append(("linear", len(x), eight))
        if not eight:
            return F.linear(x, self.weight)
        assert len(x) % 16 == 0 and all(n % 16 == 0 for n in self.weight.shape)
        return F.linear(_coarse(x), _coarse(self.weight))


def _coarse(x: Tensor) -> Tensor:
    unit = x.detach().abs().amax().clamp(min=1e-6) / 128
    return x + ((x.detach() / unit).round() * unit - x.detach())


class RMSNorm(nn.Module):
    """As `transformer_engine.pytorch.RMSNorm`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, dtype=dtype, device=device)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight."""
        calls.append(("norm", x.shape[:-1].numel(), False))
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


@contextmanager
def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
    """As `transformer_engine.pytorch.autocast`."""
    assert recipe is not None
    autocasts.append(enabled)
    try:
        yield
    finally:
        autocasts.pop()


def is_fp8_available(return_reason: bool) -> tuple[bool, str]:
    """As that of Transformer Engine on a GPU that has it."""
    assert return_reason
    return True, ""
