"""Policies, teachers and export formats through the chain, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_spec.commands.export import ExportRun, export
from megatron_spec.commands.finetune import FinetuneRun, resolve
from megatron_spec.commands.quantize import quant_policy
from megatron_spec.config import ObjectiveConfig, QuantConfig, TrainConfig, UserError
from megatron_spec.export.check import check_folder
from tests.functional_tests.script_helpers import make_base, write_conversations
from tests.worlds import run_world

GOAL = ObjectiveConfig(ttt_steps=2)
POLICY = """
exclude_base: ["model.layers.1.mlp.*"]
exclude_draft: ["*down_proj"]
calibration: percentile
percentile: 99.5
clipped_ste: true
"""


def finetune_run(root: Path, load: str, save: str, **changes: Any) -> FinetuneRun:
    settings = TrainConfig(2, micro_batch_size=2, global_batch_size=4, lr=1e-3)
    run = FinetuneRun(str(root / load), str(root / save), str(root / "train.jsonl"), settings, GOAL, seq_length=96)
    return run.replace(**changes)


def losses(root: Path, save: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (root / save / "metrics.jsonl").read_text().splitlines()]


def chain(place: str) -> dict[str, Any]:
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.finetune import finetune
    from megatron_spec.commands.quantize import quantize

    root = Path(place)
    common = {"samples": 4, "seq_length": 96, "micro_batch_size": 2, "objective": GOAL}
    data = str(root / "train.jsonl")
    convert(str(root / "base"), str(root / "draft"))
    quantize(str(root / "draft"), str(root / "q"), data, policy=str(root / "policy.yaml"), kv_cache="fp8", **common)  # type: ignore[arg-type]
    quantize(str(root / "draft"), str(root / "none"), data, policy="none", **common)  # type: ignore[arg-type]
    found = {}
    for teacher in ("quantised", "original"):
        assert finetune(finetune_run(root, "q", f"qat-{teacher}", teacher=teacher))
        found[teacher] = losses(root, f"qat-{teacher}")
    assert finetune(finetune_run(root, "none", "plain"))
    found["plain"] = losses(root, "plain")
    export(ExportRun(str(root / "qat-original"), str(root / "fp8"), extra_modules=True))
    export(
        ExportRun(
            str(root / "plain"), str(root / "speculators"), extra_modules=True, format="speculators", max_draft_len=2
        )
    )
    export(ExportRun(str(root / "q"), str(root / "base-only"), extra_modules=False))
    convert(str(root / "base"), str(root / "heads"), algorithm="medusa", num_medusa_heads=2)
    export(
        ExportRun(str(root / "heads"), str(root / "legacy"), extra_modules=True, format="trtllm-legacy", trtllm_tp=2)
    )
    export(ExportRun(str(root / "heads"), str(root / "pt"), extra_modules=True, medusa_pt=True))
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("quantised")
    make_base(root / "base")
    write_conversations(root / "train.jsonl", 8)
    (root / "policy.yaml").write_text(POLICY)
    return root, run_world(1, chain, str(root))[0]


def test_policy_from_a_file(done: tuple[Path, dict[str, Any]]) -> None:
    root, _ = done
    lines = {line["name"]: line for line in json.loads((root / "q" / "calibration.json").read_text())}
    assert "base.layers.0.mlp.linear_fc1" in lines and "base.layers.1.mlp.linear_fc1" not in lines
    assert "draft.midlayer.mlp.up_proj" in lines and "draft.midlayer.mlp.down_proj" not in lines
    assert "base.layers.0.self_attention.core_attention.k" in lines
    assert 0 < max(line["clipped"] for line in lines.values()) < 0.02
    draft, base = (load_file(str(root / "fp8" / part / "model.safetensors")) for part in ("draft", "base"))
    assert str(draft["midlayer.mlp.up_proj.weight"].dtype) == "torch.float8_e4m3fn"
    assert str(draft["midlayer.mlp.down_proj.weight"].dtype) == "torch.bfloat16"
    assert "model.layers.0.self_attn.k_proj.k_scale" in base
    assert str(base["model.layers.1.mlp.up_proj.weight"].dtype) == "torch.bfloat16"
    assert [f for f in check_folder(root / "fp8" / "draft", base=root / "base") if not f.warning] == []
    assert [f for f in check_folder(root / "fp8" / "base") if not f.warning] == []


def test_teacher_original_and_ranges_are_kept(done: tuple[Path, dict[str, Any]]) -> None:
    root, found = done
    assert found["quantised"][0] != found["original"][0] and found["plain"][0] != found["original"][0]
    ranges = [json.loads(p.read_text()) for p in sorted(root.glob("*/iter_*/base_amax.json"))]
    assert len(ranges) == 3 and ranges[0] == ranges[1] == ranges[2]


def test_formats(done: tuple[Path, dict[str, Any]]) -> None:
    root, _ = done
    assert sorted(p.name for p in (root / "base-only").iterdir()) == ["base"]
    config = json.loads((root / "speculators" / "draft" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(root / "base")
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    assert sorted(p.name for p in (root / "speculators").iterdir()) == ["draft"]
    assert sorted(p.name for p in (root / "legacy").iterdir()) == ["trtllm"]
    for folder in (root / "speculators" / "draft", root / "legacy" / "trtllm", root / "pt" / "draft"):
        assert [f for f in check_folder(folder) if not f.warning] == [], folder
        assert (folder / "tokenizer.json").is_file() and (folder / "run.json").is_file()
    assert (root / "pt" / "draft" / "medusa_lm_head.pt").is_file()


@pytest.mark.parametrize(
    ("load", "changes", "message"),
    [
        ("plain", {"format": "trtllm-legacy"}, "written for Medusa"),
        ("heads", {"format": "speculators"}, "the draft is medusa"),
        ("q", {"format": "speculators"}, "no fp8"),
        ("heads", {"trtllm_tp": 2}, "--trtllm-tp needs"),
        ("heads", {"format": "trtllm-legacy", "trtllm_tp": 3}, "does not divide"),
        ("plain", {"medusa_pt": True}, "only Medusa"),
        ("heads", {"export_embeddings": True}, "has no embedding"),
        ("q", {"format": "speculators", "extra_modules": False}, "is a format for drafts"),
        ("plain", {"extra_modules": False}, "nothing to export"),
    ],
)
def test_export_refuses_before_loading(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, load: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        export(ExportRun(str(done[0] / load), str(tmp_path / "out"), **{"extra_modules": True, **changes}))
    assert list(tmp_path.iterdir()) == []


def test_teacher_of_a_base_that_is_not_quantised_is_refused(done: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="not quantised; leave the flag out"):
        resolve(finetune_run(done[0], "none", "x", teacher="original"))
    with pytest.raises(UserError, match="--teacher is original, but the run"):
        resolve(finetune_run(done[0], "q", "qat-quantised", teacher="original"))


def test_policies(tmp_path: Path) -> None:
    assert quant_policy("fp8") == QuantConfig() and quant_policy("none").base == "none"
    assert quant_policy("fp8_base_only", "fp8").kv_cache == "fp8"
    (tmp_path / "p.json").write_text('{"draft": "none", "kv_cache": "fp8"}')
    assert quant_policy(str(tmp_path / "p.json"), "none") == QuantConfig(draft="none")
    wrong = {
        "p.json": ('{"kv_cach": "fp8"}', "did you mean 'kv_cache'"), "q.yaml": ("- a", "must hold an object"),
        "r.yml": ("a: [", "not valid YAML"), "t.yml": ("a: 2026-13-45", "not valid YAML"),
        "s.json": ('{"calibration": "percentile", "percentile": 0}', "percentile must be"),
    }  # fmt: skip
    for name, (text, message) in wrong.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message):
            quant_policy(str(tmp_path / name))
    for name, kv_cache, message in (
        ("fp88", None, "did you mean 'fp8'"), ("fp8_draft_only", "fp8", "set base to 'fp8'"),
        (str(tmp_path / "nowhere.yaml"), None, "does not exist"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            quant_policy(name, kv_cache)
