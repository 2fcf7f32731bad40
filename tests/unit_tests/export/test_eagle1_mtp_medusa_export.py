"""Exports of EAGLE-1, EAGLE-3.1, MTP and Medusa: damage is caught; two ranks write what one process writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.config import DraftConfig, QuantConfig, UserError, presets
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export import medusa
from megatron_spec.export.check import check_folder
from megatron_spec.export.common import VerificationError
from megatron_spec.export.draft import export_draft
from megatron_spec.export.formats import Source, open_source, read_draft
from megatron_spec.export.layout import ARCHITECTURES
from megatron_spec.export.served import check_exportable
from megatron_spec.export.verify import verify_draft
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.runtime.distributed import World
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.quantization.tiny import OBJECTIVE, batch, world_of
from tests.worlds import run_world

V = 83
KINDS = ("eagle1", "eagle3.1", "eagle-mtp", "medusa", "medusa-shared")
QK_NORM = {"qk_norm": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


@dataclass
class Exported:
    world: World
    reference: Any
    base: Any
    draft: Any


def config_of(kind: str, base: Any) -> DraftConfig:
    if kind.startswith("medusa"):
        return presets.medusa_config(base, 2, 2, share_base_head=kind == "medusa-shared")
    options = {"norm_before_fc": True} if kind == "eagle3.1" else {}
    return presets.eagle_config(base, kind, {"num_hidden_layers": 2, **options} if kind == "eagle1" else options)


def make(folder: str | Path, world: World, kind: str) -> Exported:
    """A draft of every kind with random norms and biases, so that a lost one is detected."""
    reference = inspect_base(folder)
    config = config_of(kind, reference.config)
    base = load_base(reference, world, config.capture_layer_ids)
    draft = build_draft(config, DraftVocab.full(config.vocab_size), world, torch.float32)
    draft.initialize(base, seed=5)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if "norm" in name:
                p.mul_(torch.linspace(0.5, 1.5, p.numel()))
            elif "linear" in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    return Exported(world, reference, base, draft)


def export(s: Exported, out: Path, quant: QuantConfig | None = None) -> Path:
    return export_draft(s.draft, s.reference, out, quant, s.world, ends=s.base)


def export_all(folder: str, out: str, layouts: list[dict[str, Any]]) -> None:
    for parallel in layouts:
        for kind in KINDS:
            name = next((n for n, p in LAYOUTS.items() if p == parallel), "one")
            export(make(folder, world_of(**parallel), kind), Path(out, name, kind))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, out = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("out")
    save_tiny(folder, num_hidden_layers=8, vocab_size=V)
    export_all(str(folder), str(out), [{}])
    run_world(2, export_all, str(folder), str(out), list(LAYOUTS.values()))
    return folder, out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_folder_is_bit_equal_to_one_process(folders: tuple[Path, Path], kind: str, layout: str) -> None:
    one, two = folders[1] / "one" / kind, folders[1] / layout / kind
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in two.iterdir()) and len(names) == 4
    for name in set(names) - {"run.json"}:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def change(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name] + 1})


DAMAGE = [
    ("eagle1", drop("fc.bias"), "missing fc.bias"),
    ("eagle1", change("fc.bias"), "gives fc_bias True"),
    ("eagle1", lambda t: t.update({"layers.0.input_layernorm.weight": t["fc.bias"] + 1}), "found layers.0.input_layer"),
    ("eagle1", drop("layers.1.input_layernorm.weight"), "missing layers.1.input_layernorm"),
    ("eagle3.1", drop("fc_norm.1.weight"), "missing fc_norm.1"),
    ("eagle3.1", change("input_norm.weight"), "input_norm.weight differs"),
    ("eagle-mtp", drop("layers.0.shared_head.norm.weight"), "missing layers.0.shared_head"),
    ("eagle-mtp", change("layers.0.eh_proj.weight"), "eh_proj.weight differs"),
    ("medusa", drop("1.1.linear.bias"), "missing 1.1.linear.bias"),
    ("medusa", change("1.2.weight"), "1.2.weight differs"),
    ("medusa", lambda t: t.update({"0.2.weight": t["0.2.weight"][:-2].clone()}), "0.2.weight is"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGE)
def test_damage_is_caught(folders: tuple[Path, Path], tmp_path: Path, kind: str, damage: Any, message: str) -> None:
    s = make(folders[0], world_of(), kind)
    out = tmp_path / "draft"
    shutil.copytree(folders[1] / "one" / kind, out)
    file = out / (medusa.WEIGHTS if kind == "medusa" else "model.safetensors")
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=message):
        if kind == "medusa":
            medusa.verify(out, s.draft, s.reference.config, s.world, ends=s.base)
        else:
            verify_draft(out, s.draft, s.reference.config, s.world, ends=s.base)


def test_wrong_logits_of_a_medusa_folder_are_caught(folders: tuple[Path, Path]) -> None:
    s = make(folders[0], world_of(), "medusa")
    medusa.check_logits(folders[1] / "one" / "medusa", s.draft, s.world, s.base)
    with torch.no_grad():
        s.draft.heads[1].blocks[1].linear.bias.add_(1.0)
    with pytest.raises(VerificationError, match="head 1"):
        medusa.check_logits(folders[1] / "one" / "medusa", s.draft, s.world, s.base)


def test_conflicting_options_are_caught(folders: tuple[Path, Path]) -> None:
    source = open_source(folders[1] / "one" / "eagle3.1")
    found: Any = read_draft(source).config
    assert found.algorithm == "eagle3.1" and found.fc_norm and found.norm_output and found.norm_before_fc
    raw = {**source.raw, "eagle_config": {**source.raw["eagle_config"], "fc_norm": False}}
    with pytest.raises(UserError, match="disagree about fc_norm"):
        read_draft(Source(source.folder, raw, source.entries))


@pytest.mark.parametrize("kind", KINDS)
def test_rule_checker_agrees(folders: tuple[Path, Path], kind: str) -> None:
    wrong = [f for f in check_folder(folders[1] / "one" / kind, base=folders[0]) if not f.warning]
    both = [("norm_before_fc_and_fc_norm", ("trtllm",))] if kind == "eagle3.1" else []
    assert [(f.rule, f.engines) for f in wrong] == both


@pytest.mark.parametrize("kind", ["eagle1", "eagle-mtp"])
def test_norms_of_heads_do_not_make_it_an_eagle3_draft(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written under its own architecture, read again as the same, and no engine is said to serve it."""
    plain = config_of(kind, inspect_base(folders[0]).config)
    monkeypatch.setattr(f"{__name__}.config_of", lambda *_: plain.replace(**QK_NORM))
    s = make(folders[0], world_of(), kind)
    out = export(s, tmp_path / "draft")
    found = read_draft(out, s.reference.config)
    assert found.source.raw["architectures"] == ARCHITECTURES[kind] and found.config == s.draft.config
    if kind == "eagle-mtp":
        [limit] = check_exportable(s.draft.config, s.reference.config)
        assert "no engine loads an eagle-mtp draft" in limit
        return
    with pytest.raises(UserError, match="qk_norm: no engine computes such an EAGLE-1 draft"):
        check_exportable(s.draft.config, s.reference.config)
    [wrong] = [f for f in check_folder(out, base=folders[0]) if not f.warning]
    assert wrong.rule == "qk_norm" and len(wrong.engines) == 3


def test_rules_cover_the_options(folders: tuple[Path, Path], tmp_path: Path) -> None:
    one = folders[1] / "one" / "eagle3.1"
    assert [f for f in check_folder(one, "vllm", base=folders[0]) if not f.warning] == []
    shutil.copytree(one, tmp_path / "draft")
    tensors = load_file(one / "model.safetensors")
    del tensors["fc_norm.2.weight"]
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    assert any("fc_norm.2" in f.found for f in check_folder(tmp_path / "draft"))


@pytest.mark.parametrize("kind", ["eagle1", "eagle-mtp", "medusa"])
def test_fp8(folders: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    """fp8 tensors for EAGLE-1 and MTP; Medusa in high precision, its weights on the fp8 grid."""
    s, quant = make(folders[0], world_of(), kind), QuantConfig(base="none")
    goal = presets.objective_for(s.draft.config, OBJECTIVE.replace(ttt_steps=2))
    calibrate(s.base, s.draft, OnlineFeatures(s.base), [[batch(1)]], goal, quant, s.world)
    out = export(s, tmp_path / "draft", quant)
    if kind == "medusa":
        found = load_file(out / medusa.WEIGHTS)["0.1.linear.weight"]
        linear = s.draft.heads[0].blocks[1].linear
        assert not torch.equal(found, linear.weight.bfloat16())
        assert torch.equal(found, linear.quantized_weight().bfloat16())
        return
    tensors = load_file(out / "model.safetensors")
    fp8 = {n for n, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    assert len(fp8) == 7 * s.draft.config.num_hidden_layers and not {n for n in fp8 if "eh_proj" in n or "fc" in n}
    assert (out / "hf_quant_config.json").is_file()


def test_base_is_needed_for_shared_heads(folders: tuple[Path, Path], tmp_path: Path) -> None:
    s = make(folders[0], world_of(), "medusa-shared")
    with pytest.raises(UserError, match="load the base"):
        export_draft(s.draft, s.reference, tmp_path / "draft", None, s.world)
