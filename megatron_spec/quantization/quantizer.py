"""Per-tensor E4M3 quantiser: an amax buffer and a mode."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from megatron_spec.config import UserError
from megatron_spec.quantization import histogram
from megatron_spec.quantization.rounding import RoundedOnce, fake_quant, round_trip_


class Mode(Enum):
    """Mode of a quantiser."""

    DISABLED = "disabled"
    """Nothing."""
    CALIBRATING = "calibrating"
    """Record the largest magnitude, pass the tensor through."""
    ENABLED = "enabled"
    """Round to E4M3 with the recorded range."""


class SharedInput:
    """State shared by the quantisers of one input: linears that engines fuse read the same tensor with one range."""

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.rounded: Tensor | None = None
        self.amax: float | None = None

    def agree(self, name: str, amax: float) -> None:
        """Raise UserError when the quantisers have different ranges."""
        if self.amax is not None and self.amax != amax:
            raise UserError(
                f"quantiser {name}: its range {amax} differs from {self.amax} of the linears that engines fuse with "
                "it; calibrate again (quantize.py)"
            )
        self.amax = amax


class TensorQuantizer(nn.Module):
    """Fake-quantises one tensor of the model (a weight or an input) with one range.

    `amax` is an fp32 scalar buffer, so it is part of checkpoints. NaN: never calibrated. -inf: calibrating, nothing
    observed yet. Using either is an error, and so is a range that is infinite or NaN because of the data.

    Args:
        name: its name in the model, for messages.
        clipped: zero gradient outside +-amax.
        constant: it rounds a weight, which does not change between `hold` and `release`.
        form: 'fp8', or 'nvfp4' for a weight.
        kernel: the model may use the path `rounding_kernel`.
    """

    amax: Tensor
    relative_error: float = float("nan")
    """|x - q(x)| / |x|, set by calibration."""
    clipped_share: float = 0.0
    """Share of the values outside the range in calibration."""
    observing: bool = True
    """False: calibration passes over what comes next."""
    histogram: Tensor | None = None
    """Magnitudes observed in calibration (see `histogram.py`); None otherwise, or if not requested."""

    def __init__(
        self, name: str, clipped: bool = False, device: torch.device | str = "cpu", constant: bool = False,
        form: str = "fp8", kernel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.clipped, self.constant, self.form, self.kernel = clipped, constant, form, kernel
        self.shared: SharedInput | None = None
        self.mode = Mode.ENABLED
        self._checked = False
        self._held = False
        self._rounded: RoundedOnce | None = None
        self.register_buffer("amax", torch.full((), torch.nan, dtype=torch.float32, device=device))

    def start_calibration(self, with_histogram: bool = False) -> None:
        """Discard the range and collect a new one."""
        self.amax.fill_(-torch.inf)
        self.histogram = histogram.empty(self.amax.device) if with_histogram else None
        self.mode = Mode.CALIBRATING

    def observe(self, x: Tensor) -> None:
        """Widen the range to include x. A NaN in x makes the range NaN, which is reported when it is used."""
        if not x.numel():  # a micro-batch may have no supervised rows from some draft step on
            return
        self.amax.copy_(torch.maximum(self.amax, x.detach().abs().amax().float()))
        if self.histogram is not None:
            self.histogram += histogram.magnitudes(x)

    def choose_range(self, percent: float | None = None) -> None:
        """Set the range from the observations: the largest magnitude, or a percentile of the histogram.

        Also sets `relative_error` and `clipped_share`, and discards the histogram.
        """
        seen, self.histogram = self.histogram, None
        if seen is None or not bool(self.amax.isfinite()):  # `check` reports what is wrong
            return
        if percent is not None:
            self.set_amax(torch.minimum(histogram.percentile(seen, percent), self.amax))
        self.clipped_share = histogram.clipped_share(seen, self.amax)
        self.relative_error = histogram.rounding_error(seen, self.amax)

    def enable(self) -> None:
        """Start rounding. Raises UserError when there is no range."""
        self.mode = Mode.ENABLED
        self.check()

    def check(self) -> None:
        """Raise UserError unless the range is finite. Synchronises with the device once, then caches the result."""
        value = float(self.amax)
        if not (0 <= value < float("inf")):
            state = {
                "nan": "was never calibrated, or saw NaN",
                "-inf": "saw no data while calibrating",
                "inf": "saw an infinite value",
            }
            raise UserError(
                f"quantiser {self.name}: its range {state.get(str(value), f'is {value}')}; calibrate it "
                "(quantize.py), or load a checkpoint that was quantised"
            )
        if self.shared is not None:
            self.shared.agree(self.name, value)
        self._checked = True

    def set_amax(self, value: float | Tensor) -> None:
        """Set the range directly."""
        self.amax.copy_(torch.as_tensor(value, dtype=torch.float32))
        self._forget()

    def hold(self) -> bool:
        """Until `release`, round a weight only once, and an input shared by several linears only once.

        False if it is already in effect.
        """
        was, self._held = self._held, True
        return not was

    def release(self) -> None:
        """End `hold`: weights may change again."""
        self._held, self._rounded = False, None
        self.forget_input()

    def forget_input(self) -> None:
        """Release the last input."""
        if self.shared is not None:
            self.shared.x = self.shared.rounded = None

    def _forget(self) -> None:
        """Invalidate everything derived from the range."""
        self._checked, self._rounded = False, None
        self.forget_input()
        if self.shared is not None:
            self.shared.amax = None

    def forward(self, x: Tensor) -> Tensor:
        """x fake-quantised (enabled) or unchanged, in its shape and dtype."""
        if self.mode is Mode.DISABLED:
            return x
        if self.mode is Mode.CALIBRATING:
            if self.observing:
                self.observe(x)
            return x
        if not self._checked:
            self.check()
        if self._held and self.constant:
            if self._rounded is None:
                self._rounded = RoundedOnce(x, self.amax, self.clipped, self.form, self.kernel)
            return self._rounded.of(x)
        if self._held and self.shared is not None:
            if self.shared.x is not x or self.shared.rounded is None:
                self.shared.x, self.shared.rounded = x, fake_quant(x, self.amax, self.clipped, "fp8", self.kernel)
            return self.shared.rounded
        return fake_quant(x, self.amax, self.clipped, self.form, self.kernel)

    @property
    def straight(self) -> bool:
        """True if gradients pass unchanged, so that `round_` can replace `forward`."""
        return self.mode is not Mode.CALIBRATING and not self.clipped

    @torch.no_grad()
    def round_(self, x: Tensor) -> Tensor:
        """`forward` in place; returns x. For code that writes its own backward."""
        assert self.straight and self.form == "fp8", self
        if self.mode is Mode.ENABLED:
            if not self._checked:
                self.check()
            round_trip_(x, self.amax, self.kernel)
        return x

    @torch.no_grad()
    def rounded(self, x: Tensor) -> Tensor:
        """x rounded, without gradient and regardless of the mode."""
        return fake_quant(x.detach(), self.amax, form=self.form, kernel=self.kernel)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> TensorQuantizer:
        """Move with the model, but keep amax in fp32 when the model is cast: scales are exported as fp32."""
        kept = self.amax
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.amax.dtype != torch.float32:
            self.amax = kept.to(self.amax.device)
        return self

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"mode={self.mode.value}, clipped={self.clipped}"
