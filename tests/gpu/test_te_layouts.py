"""Base and draft of Transformer Engine's modules on two GPUs: loss and gradient against fp32 on one GPU.

The yardstick is local modules in bf16: Transformer Engine's may be at most a little farther from fp32 than they are in
the same layout, or on one GPU. The training step is that of `benchmarks/measure_layouts.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import measure_layouts
from megatron_spec.config import ParallelConfig
from megatron_spec.runtime import distributed
from tests import te_chain
from tests.te_chain import LAYOUTS, calls_of_engine
from tests.worlds import run_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
LENGTH = 96
KINDS = {"local": (False, False), "base": (True, False), "draft": (False, True)}
"""Name -> Transformer Engine's modules in base, in draft."""
CASES = [("llama", layout) for layout in ("TP", "TP SP", "PP", "DP", "CP")] + [("mixtral", "EP"), ("mixtral", "TP SP")]
Found = dict[str, Any]


def alone(root: str) -> dict[str, dict[str, Found]]:
    """{family: {"exact": fp32, "local": bf16}} of one GPU."""
    found: dict[str, dict[str, Found]] = {}
    for family in ("llama", "mixtral"):
        folder = te_chain.prepare(Path(root, family), family, wide=True) / "base"
        world = distributed.initialize()
        found[family] = {
            "exact": step(folder, world, torch.float32, "local"), "local": step(folder, world, torch.bfloat16, "local")
        }  # fmt: skip
    return found


def step(folder: Path, world: Any, dtype: torch.dtype, kind: str) -> Found:
    """Loss and gradients of one global batch."""
    base, draft = KINDS[kind]
    with calls_of_engine() as calls:
        found = measure_layouts.gradients(folder, world, dtype, base, LENGTH, draft_engine=draft, captures=(0, 1, 2))
    assert bool(calls) == (base or draft), f"{kind}: {len(calls)} linears of Transformer Engine ran"
    return {name: found[name] for name in ("loss", "gradients")} if world.rank == 0 else {}


def pair(root: str) -> dict[tuple[str, str], dict[str, Found]]:
    """{(family, layout): {kind: bf16}}; nothing on the second rank."""
    from megatron.core import parallel_state

    found: dict[tuple[str, str], dict[str, Found]] = {}
    for family, layout in CASES:
        parallel_state.destroy_model_parallel()
        world = distributed.initialize(ParallelConfig(**LAYOUTS[layout]))
        folder = Path(root, family, "base")
        found[family, layout] = {kind: step(folder, world, torch.bfloat16, kind) for kind in KINDS}
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def one(root: str) -> dict[str, dict[str, Found]]:
    return run_world(1, alone, root)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two(root: str, one: Any) -> dict[tuple[str, str], dict[str, Found]]:
    return run_world(2, pair, root)[0]  # type: ignore[no-any-return]


def far(found: Found, exact: Found) -> tuple[float, float]:
    """(relative difference of the loss, of all gradients together)."""
    assert found["gradients"].keys() == exact["gradients"].keys()
    return abs(found["loss"] / exact["loss"] - 1), measure_layouts.differences(found["gradients"], exact["gradients"])[
        0
    ]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_layouts(one: Any, two: Any, family: str, layout: str) -> None:
    exact, results = one[family]["exact"], two[family, layout]
    yardsticks = [far(each, exact) for each in (one[family]["local"], results["local"])]
    loss, gradient = (max(column) for column in zip(*yardsticks, strict=True))
    assert gradient < 0.3, f"the example is too wild for bf16 ({gradient})"
    # Experts: rounding decides ties between two of them, which changes single rows.
    factor = 1.5 if family == "llama" else 1.8
    for kind in ("base", "draft"):
        found = far(results[kind], exact)
        assert found[0] < 2 * loss + 5e-3, (kind, found, yardsticks)
        assert found[1] < factor * gradient + 1e-3, (kind, found, yardsticks)
