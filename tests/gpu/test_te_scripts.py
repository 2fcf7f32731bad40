"""Every script with base and draft of Transformer Engine's modules, in bf16: all families on one GPU, layouts on two.

The numbers are near those of local modules on one GPU. MEGATRON_SPEC_TE_RESULTS=FILE notes what ran
(`tests/te_results.py`). The same on CPUs, to rounding and with stand-ins: tests/functional_tests/test_te_matrix.py.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import te_chain, te_results
from tests.unit_tests.families.families import MODELS
from tests.worlds import run_world
from tools.te_table import OF_DRAFT, SCRIPTS, refusal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
FAMILIES = [name for name in MODELS if " " not in name]
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
IN_LAYOUTS = {"llama": ("TP", "TP SP", "PP", "DP", "CP"), "mixtral": ("TP SP", "EP")}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


Ran = dict[str, tuple[str, list[str]]]
"""{script: (title of its results, classes of Transformer Engine's linears that ran)}."""


def scripts(here: Path, layout: str) -> Ran:
    """Every script that takes the layout."""
    found: Ran = {}
    for script in SCRIPTS:
        if refusal(script, layout) is None:
            with te_chain.calls_of_engine() as calls:
                title = te_chain.script(script, here, layout, base=True, draft=script in OF_DRAFT, bf16=True)
            found[script] = title, sorted(set(calls))
    return found


def check(here: Path, family: str, layout: str, ran: Ran) -> None:
    """The modules ran, and every result is near that of local modules; notes the scripts."""
    for script, (title, classes) in ran.items():
        if script != "convert":
            assert any(name.startswith("TE") for name in classes), (script, classes)
            assert script not in OF_DRAFT or "Linear" in classes, (script, classes)
        found, expected = (te_chain.results(script, here, name) for name in (title, "local"))
        assert found.keys() == expected.keys() and found, script
        gaps = {n: gap for n, gap in te_chain.distances(found, expected).items() if not n.endswith("argmax")}
        far = {name: gap for name, gap in gaps.items() if not gap <= limit(script, family)}  # NaN is far, too
        if script == "validate":
            assert 1.0 <= float(found["acceptance_length"]) <= 3.0
        elif script == "generate":
            lines = [json.loads(line) for line in (here / f"{script} {title}").read_text().splitlines()]
            assert len(lines) == 2 and all(line["conversations"] for line in lines)
        else:
            assert not far, (script, far)
        names = (te_results.BASE, *([te_results.DRAFT] if script in OF_DRAFT else []))
        te_results.add_on_gpu(names, script, family, layout)


def limit(script: str, family: str) -> float:
    """Relative difference in bf16. Rounding decides ties between experts, which changes single rows altogether."""
    if script == "convert":
        return 1e-3
    near = {"finetune": 0.05, "quantize": 0.15, "extract": 0.15, "export": 0.15}.get(script, 1.0)
    return near * (1 if family not in MIXTURES else 3 if script == "finetune" else 6)


def alone(root: str, family: str) -> Ran:
    here = te_chain.prepare(Path(root, family), family, wide=True)
    te_chain.local(here, bf16=True)
    return scripts(here, "one")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module", autouse=True)
def processes() -> Any:
    from megatron_spec.runtime import distributed

    yield
    distributed.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(root: str, family: str) -> None:
    check(Path(root, family), family, "one", alone(root, family))


def pair(root: str) -> dict[tuple[str, str], Ran]:
    from megatron.core import parallel_state

    found = {}
    for family, layouts in IN_LAYOUTS.items():
        for layout in layouts:
            found[family, layout] = scripts(Path(root, family), layout)
            parallel_state.destroy_model_parallel()
    return found


@two_gpus
def test_layouts(root: str) -> None:
    for family in IN_LAYOUTS:
        if not Path(root, family).is_dir():
            alone(root, family)
    first, second = run_world(2, pair, root)
    for (family, layout), ran in first.items():
        other = second[family, layout]  # a rank may have nothing to do
        both = {script: (title, classes + other[script][1]) for script, (title, classes) in ran.items()}
        check(Path(root, family), family, layout, both)
