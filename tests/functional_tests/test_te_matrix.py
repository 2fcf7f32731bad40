"""Scripts, families and layouts with stand-ins for Transformer Engine's modules, against local modules on one rank.

tests/gpu/test_te_scripts.py does the same with the modules themselves. docs/transformer_engine.md shows what ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_spec.runtime import distributed
from tests import te_chain, te_results, te_stand_in
from tests.support_results import same_as_committed
from tests.unit_tests.families.families import MODELS
from tests.worlds import run_world
from tools.te_table import OF_DRAFT, SCRIPTS, refusal

FAMILIES = [name for name in MODELS if " " not in name]
IN_LAYOUTS = {"llama": ("TP", "TP SP", "PP", "DP", "CP"), "mixtral": ("EP",)}
"""One dense family, and one with experts where they matter."""
RAN: te_results.Ran = {}
Titles = dict[tuple[str, str, str, bool], tuple[str, set[str]]]
"""(family, layout, script, with stand-ins) -> (title of the results, kinds of stand-ins that ran)."""


def modules(script: str, engine: bool) -> set[str]:
    """The stand-ins that a script should run."""
    of_base = {"base"} if engine and script != "convert" else set()
    return of_base | ({"linear", "norm"} if engine and script in OF_DRAFT else set())


def scripts(here: Path, layout: str, engine: bool) -> Titles:
    """Every script that takes the layout."""
    found: Titles = {}
    for script in SCRIPTS:
        if refusal(script, layout) is None:
            with te_stand_in.installed():
                title = te_chain.script(script, here, layout, base=engine, draft=engine and script in OF_DRAFT)
                found[here.name, layout, script, engine] = title, {kind for kind, _, _ in te_stand_in.calls}
    return found


def alone(root: str) -> Titles:
    """All families on one rank."""
    found: Titles = {}
    for family in FAMILIES:
        here = te_chain.prepare(Path(root, family), family)
        te_chain.local(here)
        found |= scripts(here, "one", True)
    return found


def pairs(root: str) -> Titles:
    """All layouts of two ranks."""
    from megatron.core import parallel_state

    found: Titles = {}
    for family, layouts in IN_LAYOUTS.items():
        for layout in layouts:
            for engine in (False, True):
                found |= scripts(Path(root, family), layout, engine)
            parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    distributed.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def titles(root: Path) -> Titles:
    found: Titles = run_world(1, alone, str(root))[0]
    first, second = run_world(2, pairs, str(root))
    return found | {key: (title, ran | second[key][1]) for key, (title, ran) in first.items()}


CASES = [(family, "one") for family in FAMILIES] + [(f, layout) for f, names in IN_LAYOUTS.items() for layout in names]


def bound(name: str) -> float:
    """Of the relative difference. The draft's inputs come from a fake-quantised base: a last bit may change a code."""
    return 5e-3 if name.startswith("draft ") and name.endswith("input_quantizer.amax") else 1e-4


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_scripts_find_what_local_ones_find_on_one_rank(root: Path, titles: Titles, family: str, layout: str) -> None:
    for script in SCRIPTS:
        refused = refusal(script, layout) is not None
        expected = te_chain.results(script, root / family, "local")
        assert expected, script
        if layout == "one":
            te_results.add(RAN, (te_results.LOCAL,), script, family, layout)
        for engine in (True,) if layout == "one" else (False, True):
            assert ((family, layout, script, engine) not in titles) == refused
            if refused:
                continue
            title, ran = titles[family, layout, script, engine]
            assert ran == modules(script, engine), (script, engine)
            found = te_chain.results(script, root / family, title)
            gaps = te_chain.distances(found, expected)
            wrong = {name: gap for name, gap in gaps.items() if not gap < bound(name)}
            assert not wrong, (script, engine, wrong)
            names = (te_results.BASE, *([te_results.DRAFT] if script in OF_DRAFT else []))
            te_results.add(RAN, names if engine else (te_results.LOCAL,), script, family, layout)


def test_the_page_states_what_ran() -> None:
    """Runs last: the table's source is what the tests above found."""
    if sum(len(layouts) for found in RAN.get("local", {}).values() for layouts in found.values()) < len(SCRIPTS):
        pytest.skip("not everything ran")
    assert same_as_committed("scripts", RAN), "run with MEGATRON_SPEC_WRITE_SUPPORT=1"
