"""How products of few rows are divided: into enough programs, which have the shared memory that they need."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measure_products import products
from megatron_spec.ops.tiles import FEW_ROWS, MOST, SHARE, Tiles, tiles_of

LARGE: dict[str, tuple[int, int, int, int]] = {
    "SmolLM2-135M": (576, 960, 1536, 49152), "Qwen2.5-0.5B": (896, 1152, 4864, 151936),
    "Llama-3.2-1B": (2048, 3072, 8192, 128256), "Qwen2.5-1.5B": (1536, 2048, 8960, 151936),
    "Phi-3-mini": (3072, 9216, 8192, 32064), "Gemma-2-9B": (3584, 8192, 14336, 256000),
    "Qwen2.5-7B": (3584, 4608, 18944, 152064), "Llama-3.1-8B": (4096, 6144, 14336, 128256),
    "Qwen3-32B": (5120, 10240, 25600, 151936), "Llama-3.1-70B": (8192, 10240, 28672, 128256),
}  # fmt: skip
"""Hidden size, outputs of the projection to queries, keys and values, size of the MLP, vocabulary."""


def shapes_of(H: int, qkv: int, mlp: int, vocabulary: int) -> list[tuple[int, int, bool]]:
    """(outputs, inputs, gated) of a base's layer and head, and of a draft's projection of two inputs."""
    two = (qkv, 2 * H, False)
    return [(qkv, H, False), two, (H, H, False), (mlp, H, True), (H, mlp, False), (vocabulary, H, False)]


SHAPES = sorted({shape for base in LARGE.values() for shape in shapes_of(*base)})
SHAPES_OF_TESTS = [(48, 896, False), (40, 2100, False), (40, 2100, True), (112, 992, False), (16, 128, False)]


@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory_holds_them(size: int) -> None:
    """A program fits with a margin of a stage, also where the columns of a program have to divide 16 or 48."""
    shapes = [*SHAPES, *SHAPES_OF_TESTS, *((p.outputs, p.inputs, p.gated) for p in products())]
    shapes += [(outputs, inputs, gated) for outputs, inputs, _ in shapes for gated in (False, True)]
    for outputs, inputs, gated in shapes:
        for unit in (0, 16, 48):
            tiles = tiles_of(outputs, inputs, gated, size, unit)
            assert (FEW_ROWS + tiles.columns * (1 + gated)) * tiles.block * size * tiles.stages <= 232448
            assert tiles.block >= 64 and tiles.columns >= 16 and not unit % tiles.columns, tiles


def test_shared_memory_of_a_program() -> None:
    """Of compiled programs Triton 3.6 says 147456 and 122880 bytes: a stage less."""
    assert Tiles(32, 512, 1, 4, 4).shared_memory(False, 2) == 147456 + 147456 // 3
    assert Tiles(32, 128, 2, 4, 4).shared_memory(True, 4) == 122880 + 122880 // 3


def test_blocks_shrink_with_wide_values() -> None:
    assert (tiles_of(4096, 4096).block, tiles_of(4096, 4096, size=4).block) == (512, 256)


def test_there_are_enough_programs() -> None:
    """One for most processors at least; or each has no more to read than it may share with others."""
    for outputs, inputs, gated in SHAPES:
        tiles = tiles_of(outputs, inputs, gated)
        programs = -(-outputs // tiles.columns) * tiles.parts
        assert programs >= MOST or inputs // (tiles.parts + 1) < SHARE, (outputs, inputs, tiles)
        blocks = -(-inputs // tiles.block)
        assert (tiles.parts - 1) * -(-blocks // tiles.parts) < blocks, (outputs, inputs, tiles)  # none without inputs


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((14336, 4096, True), (64, 128, 1, 4, 4)), ((4864, 896, True), (64, 128, 1, 4, 4)),
        ((1536, 576, True), (32, 128, 1, 4, 4)), ((6144, 4096), (64, 256, 1, 4, 4)),
        ((1152, 896), (16, 128, 1, 4, 6)), ((960, 576), (16, 128, 1, 4, 6)),
        ((896, 896), (16, 128, 1, 4, 6)), ((576, 576), (16, 128, 1, 4, 6)), ((576, 1536), (16, 128, 3, 4, 6)),
        ((896, 4864), (32, 256, 10, 4, 3)), ((4096, 4096), (32, 512, 1, 4, 4)), ((4096, 14336), (32, 512, 1, 4, 4)),
        ((151936, 896), (64, 128, 1, 4, 4)), ((128256, 4096), (64, 128, 1, 4, 4)),
    ],
)  # fmt: skip
def test_measured_ones(shape: tuple[Any, ...], tiles: tuple[int, ...]) -> None:
    """The fastest of an H200, or within a few percent of it."""
    assert tiles_of(*shape) == tiles
