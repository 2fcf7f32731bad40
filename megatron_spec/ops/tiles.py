"""How a product of few rows (`ops/kernels/few_rows.py`) is divided among programs.

From `benchmarks/decode_products.py` on an H200: 30 divisions of every product of three bases, the smallest of which has
a hidden size of 576, the largest 4,096.

R rows, H inputs and O outputs of a product.
"""

from __future__ import annotations

from typing import NamedTuple

FEW_ROWS = 16
"""Most rows of `few_rows_product`: those of one tensor core instruction."""
PROCESSORS = 132
"""Of an H200. A constant, as `PROGRAMS`, so that every device sums in the same order."""
PROGRAMS = 2 * PROCESSORS
"""Programs that a product should have."""
MOST = 2 * PROCESSORS // 3
"""Programs of many outputs that are enough: each reads far ahead."""
SHARE = 512
"""Inputs of a program, at least, where several share an output."""
WIDE = 16384
"""Outputs of which programs are many, however large: those of a head."""
LARGE = 2048
"""Inputs from which on programs of 32 outputs are faster than more programs of 16."""
SHARED_MEMORY = 232448
"""Bytes that a program may have on an H100 or H200."""


class Tiles(NamedTuple):
    """How a product is divided.

    Attributes:
        columns: outputs of a program: a power of two.
        block: inputs that a program takes at a time.
        parts: programs that share an output.
        warps: of a program.
        stages: blocks that a program has in shared memory.
    """

    columns: int = 16
    block: int = 128
    parts: int = 1
    warps: int = 4
    stages: int = 6

    def shared_memory(self, gated: bool, size: int) -> int:
        """Bytes of shared memory of a program, of values of `size` bytes, with a margin of a stage.

        Triton 3.6 keeps `stages` - 1 blocks of the rows and of one or two weights there.
        """
        return self.stages * (FEW_ROWS + self.columns * (1 + gated)) * self.block * size


def tiles_of(outputs: int, inputs: int, gated: bool = False, size: int = 2, unit: int = 0) -> Tiles:
    """The division of a product of one row to `FEW_ROWS`.

    Args:
        outputs: O.
        inputs: H.
        gated: two weights of O outputs each.
        size: bytes of a value.
        unit: a multiple of 16 that the columns of a program have to divide; 0: any.
    """
    found = _by_shape(outputs, inputs, gated)
    while unit % found.columns:
        found = found._replace(columns=found.columns // 2)
    while found.shared_memory(gated, size) > SHARED_MEMORY:
        found = found._replace(block=found.block // 2)
    blocks = -(-inputs // found.block)
    return found._replace(parts=-(-blocks // -(-blocks // found.parts)))  # none without a block


def _by_shape(outputs: int, inputs: int, gated: bool) -> Tiles:
    if gated:
        columns = 64 if outputs >= 32 * PROCESSORS else 32
        missing = -(-MOST // -(-outputs // columns))
        return Tiles(columns=columns, parts=max(1, min(missing, inputs // (2 * SHARE))), stages=4)
    if outputs >= WIDE:
        return Tiles(columns=64, stages=4)
    if inputs < LARGE:
        places = -(-outputs // 16)
        if places > 2 * PROGRAMS:
            return Tiles(columns=32, stages=4)
        return Tiles(parts=max(1, min(-(-PROGRAMS // places), inputs // SHARE)))
    places = -(-outputs // 32)
    if 3 * PROCESSORS // 4 <= places <= PROCESSORS:  # one program for each, which reads far ahead
        return Tiles(columns=32, block=512, stages=4)
    if MOST <= -(-outputs // 64) <= PROCESSORS:
        return Tiles(columns=64, block=256, stages=4)
    parts = min(-(-PROGRAMS // places), -(-inputs // SHARE))
    return Tiles(columns=32, block=256, parts=parts, stages=min(4, -(-inputs // (256 * parts)) + 1))
