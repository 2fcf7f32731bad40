"""The library speculators converts our EAGLE-3 folders, and loads those that we write in its format: the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_spec.export import speculators
from megatron_spec.export.draft import export_draft
from tests.engine.conftest import engine_python, run_worker
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.quantization.tiny import make, world_of

pytestmark = pytest.mark.engine

DRAFTS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_hidden_layers": 2, "capture_layer_ids": [0, 3, 6]},
    "rope": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    engine_python("speculators")
    folder = tmp_path_factory.mktemp("speculators")
    save_tiny(folder / "base", num_hidden_layers=8)
    cases = []
    for name, overrides in DRAFTS.items():
        tiny = make(folder / "base", world_of(), **overrides)
        hf = export_draft(
            tiny.draft, tiny.reference, folder / name / "hf", None, tiny.world, ends=tiny.base, export_embeddings=True
        )
        speculators.convert(hf, folder / "base", folder / name / "ours")
        common = {"base": str(folder / "base")}
        theirs = str(folder / name / "theirs")
        cases.append({"name": f"{name}, converted", "convert": str(hf), "load": theirs, **common})
        cases.append({"name": f"{name}, ours", "convert": None, "load": str(folder / name / "ours"), **common})
    (folder / "cases.json").write_text(json.dumps(cases))
    run_worker("speculators", "speculators_worker.py", str(folder / "cases.json"), str(folder / "results.json"))
    return folder, json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", DRAFTS)
def test_the_same_model(run: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, results = run
    ours = results[f"{name}, ours"]
    assert "error" not in ours, ours
    written = load_file(str(folder / name / "ours" / "model.safetensors"))
    for tensor, value in written.items():
        assert ours["sums"][tensor] == pytest.approx(float(value.double().abs().sum())), tensor
    verifier = {n for n in ours["sums"] if n.startswith("verifier_")}
    assert ours["sums"].keys() - verifier == written.keys()
    layer = ours["config"]["transformer_layer_config"]
    assert layer["rope_parameters"]["rope_theta"] == DRAFTS[name].get("rope_theta", 10000.0)
    ids = DRAFTS[name].get("capture_layer_ids")
    assert ours["config"].get("eagle_aux_hidden_state_layer_ids") == (ids and [j + 1 for j in ids])


@pytest.mark.parametrize("name", ["one layer", "rope"])  # its converter builds every layer as a first one
def test_its_converter_makes_the_same(run: tuple[Path, dict[str, Any]], name: str) -> None:
    _, results = run
    theirs, ours = results[f"{name}, converted"], results[f"{name}, ours"]
    assert "error" not in theirs, theirs
    assert theirs["sums"] == ours["sums"]
    for key in ("draft_vocab_size", "norm_before_residual", "fc_norm", "speculators_config"):
        assert theirs["config"][key] == ours["config"][key]
    different = {
        k for k, v in theirs["config"]["transformer_layer_config"].items()
        if ours["config"]["transformer_layer_config"].get(k) != v
    }  # fmt: skip
    assert not different - {"eos_token_id", "bos_token_id", "use_cache"}, different
