"""Limits of the memory of the fused unroll, for the unroll and for its estimate."""

from __future__ import annotations

MOST_WHOLE_ROWS = 8 << 30
"""Maximum bytes of the full sequence on every rank in the fused unroll under sequence parallelism."""
ROWS_AT_ONCE = 65536
"""Most rows of a weight-gradient product of the fused unroll: bounds the memory of its backward at long sequences."""
MOST_GATES = 8 << 30
"""Bytes of gate and up activations over all steps above which the fused unroll computes them again in its backward."""


def keeps_gates(rows: float, intermediate_size: float, width: int) -> bool:
    """True if the fused unroll keeps gate and up of `rows` rows, those of all steps, of `width`-byte values."""
    return rows * 2 * intermediate_size * width <= MOST_GATES


def whole_rows_bytes(hidden_size: int, rows: float, steps: int, width: int) -> float:
    """Bytes of the residual stream and its norms in the fused unroll, for `rows` rows of `width`-byte values."""
    return 9.0 * hidden_size * rows * steps * width
