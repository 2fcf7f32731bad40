"""The exported base in one process: equal to the original, loadable by transformers, fp8 equal to memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from megatron_spec.config import QuantConfig, UserError
from megatron_spec.export.base import export_base
from megatron_spec.families.names import split_qkv
from megatron_spec.quantization.calibrate import calibrate
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.quantization.tiny import OBJECTIVE, Tiny, make, world_of

FP8 = QuantConfig(draft="none", kv_cache="fp8")
LEFT_BEHIND = ("modeling_evil.py", "source.json", "metadata.json", "progress.txt")
"""Code, and records of other runs."""


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_tiny(path, num_hidden_layers=8)
    (path / "tokenizer.json").write_text("{}")
    for name in LEFT_BEHIND:
        (path / name).write_text("{}")
    return path


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(str(path)).items()}


def quantised(base_folder: Path) -> Tiny:
    tiny = make(base_folder, world_of())
    calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, FP8, tiny.world)
    return tiny


def test_fp32_export_is_the_original(base_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make(base_folder, world_of())
    out = export_base(
        tiny.base, tiny.reference, tmp_path / "base", None, tiny.world, dtype="float32", max_shard_bytes=20_000
    )
    found, expected = tensors_of(out), tensors_of(base_folder)
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys() and len(set(index["weight_map"].values())) > 2
    assert (out / "tokenizer.json").is_file() and not [name for name in LEFT_BEHIND if (out / name).exists()]
    assert (out / "generation_config.json").is_file() and "generation_config" not in caplog.text
    LlamaForCausalLM.from_pretrained(out)


def test_tied_base_exports_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path / "tied", num_hidden_layers=8, tie_word_embeddings=True)
    tiny = make(tmp_path / "tied", world_of())
    out = export_base(tiny.base, tiny.reference, tmp_path / "out", None, tiny.world)
    found = tensors_of(out)
    assert "lm_head.weight" not in found and found["model.embed_tokens.weight"].shape == (83, 32)
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert (json.loads((out / "config.json").read_text()).get("dtype")) == "bfloat16"
    assert "the exported base has no tokenizer" in caplog.text  # as from a Megatron checkpoint; engines need one
    assert "the original base is in float32, this one is rounded to bfloat16" in caplog.text
    caplog.clear()
    export_base(tiny.base, tiny.reference, tmp_path / "same", None, tiny.world, dtype="float32")
    assert "rounded" not in caplog.text


def test_fp8_export(base_folder: Path, tmp_path: Path) -> None:
    tiny = quantised(base_folder)
    out = export_base(tiny.base, tiny.reference, tmp_path / "base", FP8, tiny.world, dtype="float32")
    found = tensors_of(out)
    assert found["lm_head.weight"].dtype == found["model.embed_tokens.weight"].dtype == torch.float32
    fp8 = {n for n, t in found.items() if t.dtype == torch.float8_e4m3fn}
    assert len(fp8) == 8 * 7
    layer = tiny.base.model.decoder.layers[3]
    q, k, v = split_qkv(layer.self_attention.linear_qkv.weight.detach(), tiny.base.config)
    gate, up = layer.mlp.linear_fc1.weight.detach().chunk(2)
    memory = {
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate, "mlp.up_proj": up,
        "mlp.down_proj": layer.mlp.linear_fc2.weight.detach(),
    }  # fmt: skip
    for name, expected in memory.items():
        stem = f"model.layers.3.{name}"
        assert torch.equal(found[f"{stem}.weight"].float() * found[f"{stem}.weight_scale"], expected)
        assert found[f"{stem}.input_scale"] > 0
    attention = "model.layers.3.self_attn."
    assert len({float(found[f"{attention}{n}_proj.weight_scale"]) for n in "qkv"}) == 1
    key = layer.self_attention.core_attention.k_quantizer.amax
    assert float(found[f"{attention}k_proj.k_scale"]) == pytest.approx(float(key) / 448)
    assert f"{attention}v_proj.v_scale" in found
    sidecar = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert sidecar["kv_cache_quant_algo"] == "FP8" and "lm_head" in sidecar["exclude_modules"]
    inside = json.loads((out / "config.json").read_text())["quantization_config"]
    assert inside["kv_cache_scheme"]["num_bits"] == 8 and inside["ignore"] == sidecar["exclude_modules"]


def test_bf16_base_keeps_its_codes(base_folder: Path, tmp_path: Path) -> None:
    """A bf16 base has q * scale rounded to bf16 in memory, but the codes in the file are exactly q."""
    tiny = make(base_folder, world_of(), dtype=torch.bfloat16)
    calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, FP8, tiny.world)
    found = tensors_of(export_base(tiny.base, tiny.reference, tmp_path / "base", FP8, tiny.world))
    stem = "model.layers.2.mlp.down_proj"
    again = (found[f"{stem}.weight"].float() * found[f"{stem}.weight_scale"]).bfloat16()
    assert torch.equal(again, tiny.base.model.decoder.layers[2].mlp.linear_fc2.weight.detach())


def test_refusals(base_folder: Path, tmp_path: Path) -> None:
    tiny = make(base_folder, world_of())
    with pytest.raises(UserError, match="never quantised"):
        export_base(tiny.base, tiny.reference, tmp_path / "a", FP8, tiny.world)
    with pytest.raises(UserError, match="fake-quantised in memory"):
        export_base(quantised(base_folder).base, tiny.reference, tmp_path / "a", None, tiny.world)
    assert list(tmp_path.iterdir()) == []
