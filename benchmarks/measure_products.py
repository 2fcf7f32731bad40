"""What decode_products.py measures: products of a decoding layer, divided in many ways, in CUDA graphs."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import measure_steps
from benchmarks.decode_products import BASES, ROWS
from benchmarks.measure_steps import L2
from megatron_spec.config import UserError

if TYPE_CHECKING:
    from megatron_spec.ops.tiles import Tiles

MEMORY = 220 << 10
"""Bytes of shared memory of a processor."""


class Product(NamedTuple):
    """A product of a base: O outputs of H inputs, with a gate or a residual sum after it."""

    base: str
    name: str
    outputs: int
    inputs: int
    gated: bool = False
    rest: bool = False

    @property
    def bytes(self) -> int:
        """Of its weights, in bf16."""
        return self.outputs * self.inputs * 2 * (1 + self.gated)


def products() -> list[Product]:
    """All products, and one that reads next to nothing: the least that a kernel takes."""
    found = [Product("", "nothing", 16, 128)]
    for base, (_, H, qkv, mlp, vocabulary) in BASES.items():
        found += [
            Product(base, "qkv", qkv, H), Product(base, "proj", H, H, rest=True),
            Product(base, "gate and up", mlp, H, gated=True), Product(base, "down", H, mlp, rest=True),
            Product(base, "head", vocabulary, H),
        ]  # fmt: skip
    return found


def usual(product: Product) -> Tiles:
    """How the product is divided now."""
    from megatron_spec.ops.tiles import tiles_of

    return tiles_of(product.outputs, product.inputs, product.gated)


DEVICE = "cuda"


def grid(product: Product) -> list[Tiles]:
    """Divisions to try, the present one first, the others in a random order."""
    from megatron_spec.ops.tiles import PROGRAMS, SHARE, Tiles

    found: list[Tiles] = []
    wide, (O, H) = product.name == "head", (product.outputs, product.inputs)
    columns, blocks = (32, 64, 128) if wide else (16, 32, 64), (128, 256, 512) if H >= 2048 else (128, 256)
    for cols, block, ahead, warps in itertools.product(
        columns, blocks, (3, 6), (4, 8) if wide or H >= 2048 else (2, 4)
    ):
        places = math.ceil(O / cols)
        enough = math.ceil(PROGRAMS / places)
        for parts in sorted({1, enough, 2 * enough}) if not wide else [1]:
            stages = min(ahead, math.ceil(math.ceil(H / block) / parts)) + 1
            memory = (16 + cols * (1 + product.gated)) * block * 2 * (stages - 1)
            useful = parts == 1 or H // parts >= SHARE // 2
            if useful and memory * min(2, max(1, places * parts // 132)) <= MEMORY:
                found.append(Tiles(cols, block, parts, warps, stages))
    random.Random(O).shuffle(found)
    return list(dict.fromkeys([usual(product), *found]))


class Inputs:
    """Random inputs of a product, and as many copies of its weights as the cache does not hold."""

    def __init__(self, product: Product, copies: int | None = None) -> None:
        self.product = product
        count = copies or max(1, min(64, -(-L2 // product.bytes)))
        make, (O, H) = torch.Generator(DEVICE).manual_seed(1), (product.outputs, product.inputs)

        def draw(*shape: int) -> Tensor:
            """Random values."""
            return torch.randn(*shape, generator=make, device=DEVICE, dtype=torch.bfloat16)

        self.x, self.rest = draw(16, H), draw(16, O)
        self.weights = [draw(1 + product.gated, O, H).mul_(H**-0.5) for _ in range(count)]

    def run(self, rows: int, tiles: Tiles | None, copy: int = 0) -> Tensor:
        """The product, by the kernel, or without gate and residual sum by cuBLAS (tiles: None)."""
        from megatron_spec.ops.kernels.few_rows import few_rows_product

        product, weights = self.product, self.weights[copy]
        if tiles is None:
            return torch.nn.functional.linear(self.x[:rows], weights.flatten(0, 1))
        return few_rows_product(
            self.x[:rows], tuple(weights), gated=product.gated,
            rest_RO=self.rest[:rows] if product.rest else None, tiles=tiles,
        )  # fmt: skip

    def micros(self, rows: int, tiles: Tiles | None) -> float:
        """Microseconds of a product in a graph of many: the fastest of some replays."""
        copies = len(self.weights)
        return measure_steps.micros(lambda i: self.run(rows, tiles, i % copies), max(copies, 4))

    def check(self, tiles: Tiles) -> dict[str, Any]:
        """Bits of a row alone and among five; error against fp64."""
        from megatron_spec.ops import plain

        product, five = self.product, self.run(5, tiles)
        same = all(torch.equal(self.run(n, tiles), five[:n]) for n in (1, 3))
        exact = plain.few_rows_product(
            self.x[:5].double(), [w.double() for w in self.weights[0]], gated=product.gated,
            rest_RO=self.rest[:5].double() if product.rest else None,
        )  # fmt: skip
        return {"same_bits": same, "error": float((five - exact).abs().max() / exact.abs().max())}


def _compile(share: list[tuple[Product, Tiles]], until: float) -> None:
    """Run divisions once each, so that their kernels are in Triton's cache on disk.

    Args: until: when to stop (time.time()).
    """
    kept: dict[Product, Inputs] = {}
    for product, tiles in share:
        if time.time() > until:
            return
        kept[product] = kept.get(product) or Inputs(product, 1)
        with contextlib.suppress(Exception):  # the measurement says which ones do not run
            kept[product].run(1, tiles)


def _compile_step(base: str, way: str) -> None:
    with contextlib.suppress(Exception):  # the measurement says so
        measure_steps.Step(base, layers=1).way(way, 1)


def compile_all(work: list[tuple[Product, Tiles]], bases: list[str], processes: int, seconds: float) -> None:
    """`_compile` in processes of their own: every kernel once, whichever products it serves, the first ones first; and
    the kernels of steps."""
    seen: dict[Any, tuple[Product, Tiles]] = {}
    for product, tiles in work:
        even = product.inputs % tiles.block == 0
        seen.setdefault((product.gated, product.rest, even, tiles), (product, tiles))
    todo, until = list(seen.values()), time.time() + seconds
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        steps = pool.starmap_async(_compile_step, itertools.product(bases, measure_steps.WAYS), chunksize=1)
        pool.starmap(_compile, [(todo[i::processes], until) for i in range(processes)], chunksize=1)
        steps.get()


class Timed(NamedTuple):
    """Microseconds of a division, by number of rows."""

    tiles: Tiles
    micros: dict[int, float]

    @property
    def total(self) -> float:
        """Of all numbers of rows: what counts, as one division serves all."""
        return sum(self.micros.values())


def line_of(inputs: Inputs, timed: list[Timed], skipped: int) -> dict[str, Any]:
    """Figures of a product."""
    product = inputs.product
    ways: dict[str, Any] = {}
    best = min(timed, key=lambda t: t.total)
    by_tiles = {t.tiles: t for t in timed}
    for name, found in (("now", by_tiles[usual(product)]), ("best", best)):
        micros = {n: round(t, 2) for n, t in found.micros.items()}
        ways[name] = {"tiles": found.tiles._asdict(), "us": micros, "TB/s": round(product.bytes / micros[1] / 1e6, 2)}
    near = sorted(timed, key=lambda t: t.total)[1:5]
    return {
        **{k: v for k, v in product._asdict().items() if v is not False}, **ways,
        "next": [(*t.tiles, round(t.micros[1], 2), round(t.micros[5], 2)) for t in near],
        "cublas_us": {n: round(inputs.micros(n, None), 2) for n in ROWS},
        "now_is": inputs.check(usual(product)), "best_is": inputs.check(best.tiles),
        "tried": len(timed), "do_not_run": skipped,
    }  # fmt: skip


def sums(lines: list[dict[str, Any]], bases: list[str]) -> dict[str, Any]:
    """Milliseconds of a step's products, layers and head, of every base, by way and number of rows; products that are
    slower than 1.1 times cuBLAS's."""
    found: dict[str, Any] = {}
    for base in bases:
        mine = [({**{way: line[way]["us"] for way in ("now", "best")}, "cublas": line["cublas_us"]}, line["name"])
                for line in lines if line["base"] == base]  # fmt: skip
        found[base] = {
            way: [round(sum(us[way][n] * (1 if name == "head" else BASES[base][0]) for us, name in mine) / 1e3, 3)
                  for n in ROWS]
            for way in ("now", "best", "cublas")
        }  # fmt: skip
        found[base]["slower"] = {
            name: [round(us["now"][n] / us["cublas"][n], 2) for n in ROWS]
            for us, name in mine if any(us["now"][n] > 1.1 * us["cublas"][n] for n in ROWS)
        }  # fmt: skip
    return found


def measure(args: argparse.Namespace) -> None:
    """Prints the lines."""
    if not torch.cuda.is_available():
        raise UserError("no GPU was found, expected one: the kernels are timed there")
    start, write = time.monotonic(), _writer(args.output)
    bases = args.base or list(BASES)
    wanted = [p for p in products() if p.base in (*bases, "")]
    work = {p: grid(p)[: args.most] for p in wanted}
    ordered = [(p, work[p][i]) for i in range(args.most) for p in wanted if i < len(work[p])]
    compile_all(ordered, bases, args.processes, 0.6 * args.seconds)
    compiled = time.monotonic() - start
    for base in bases:
        write(measure_steps.line_of(base), True)
    inputs = {p: Inputs(p) for p in wanted}
    timed: dict[Product, list[Timed]] = {p: [] for p in wanted}
    skipped = dict.fromkeys(wanted, 0)
    for i in range(args.most):  # all products before the next division: time may run out
        for product in wanted:
            if i >= len(work[product]) or (i >= 1 and time.monotonic() - start > args.seconds):
                continue
            tiles = work[product][i]
            try:
                timed[product].append(Timed(tiles, {n: inputs[product].micros(n, tiles) for n in ROWS}))
            except Exception as error:  # out of shared memory, registers
                skipped[product] += 1
                write({"base": product.base, "name": product.name, "tiles": tiles, "error": str(error)[:80]}, False)
    for product in wanted:
        for one in timed[product]:
            write({"base": product.base, "name": product.name, "tiles": one.tiles, "us": one.micros}, False)
    lines = [line_of(inputs[p], timed[p], skipped[p]) for p in wanted]
    for line in lines:
        write(line, True)
    write({"ms_of_a_step": sums(lines, bases), "rows": ROWS, "compiled_s": round(compiled, 1),
           "seconds": round(time.monotonic() - start, 1)}, True)  # fmt: skip


def _writer(output: str | None) -> Callable[[dict[str, Any], bool], None]:
    """Writes a line to the file, and to the screen where asked to."""
    file = open(output, "w", encoding="utf-8") if output else None  # noqa: SIM115  # open until the end

    def write(line: dict[str, Any], shown: bool) -> None:
        """Write a line."""
        text = json.dumps(line)
        if file is not None:
            file.write(text + "\n")
            file.flush()
        if shown:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    return write
