"""Exported EAGLE-3 folders: contents, equality with a plain reader, and faults that verification catches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spec.config import QuantConfig, UserError
from megatron_spec.drafts.contract import shift
from megatron_spec.export.check import check_folder
from megatron_spec.export.common import VerificationError
from megatron_spec.export.eagle import export_draft
from megatron_spec.export.load import load_exported_draft
from megatron_spec.export.verify import two_steps, verify_draft
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.quantization.rounding import dequantize
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.export.plain_eagle import PlainEagle
from tests.unit_tests.quantization.tiny import OBJECTIVE, D, Tiny, V, make, world_of

FP8 = QuantConfig(base="none")
NARROW = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_tiny(path, num_hidden_layers=8, eos_token_id=[2, 5])
    return path


def build(folder: Path, quant: QuantConfig | None = None, **overrides: Any) -> Tiny:
    tiny = make(folder, world_of(), **overrides)
    if quant:
        calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, quant, tiny.world)
    return tiny


def export(tiny: Tiny, out: Path, quant: QuantConfig | None = None, **options: Any) -> Path:
    features = tiny.source.features(tiny.batches[0])[0]
    return export_draft(
        tiny.draft, tiny.reference, out, quant, tiny.world, features=features, ends=tiny.base, **options
    )


@pytest.fixture(scope="module")
def fp8(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Path]:
    tiny = build(base_folder, FP8)
    return tiny, export(tiny, tmp_path_factory.mktemp("fp8") / "draft", FP8)


# ---- content


def test_bf16_folder_has_exactly_the_format(base_folder: Path, tmp_path: Path) -> None:
    out = export(build(base_folder), tmp_path / "draft")
    tensors = load_file(str(out / "model.safetensors"))
    H, F, q, k = 32, 48, 48, 24
    layer = "midlayer."
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (D, H), "d2t": (D,), "t2d": (V,),
        layer + "input_layernorm.weight": (H,), layer + "hidden_norm.weight": (H,),
        layer + "post_attention_layernorm.weight": (H,), layer + "self_attn.q_proj.weight": (q, 2 * H),
        layer + "self_attn.k_proj.weight": (k, 2 * H), layer + "self_attn.v_proj.weight": (k, 2 * H),
        layer + "self_attn.o_proj.weight": (H, q), layer + "mlp.gate_proj.weight": (F, H),
        layer + "mlp.up_proj.weight": (F, H), layer + "mlp.down_proj.weight": (H, F),
    }  # fmt: skip
    assert {n: tuple(t.shape) for n, t in tensors.items()} == expected
    dtypes = {n: t.dtype for n, t in tensors.items()}
    assert dtypes.pop("d2t") == torch.int64 and dtypes.pop("t2d") == torch.bool
    assert set(dtypes.values()) == {torch.bfloat16}
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "run.json"
    ]  # fmt: skip
    assert json.loads((out / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "num_hidden_layers": 1, "vocab_size": V, "draft_vocab_size": D, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 64, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 5],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_biases_of_quantised_linears_stay_in_high_precision(base_folder: Path, tmp_path: Path, kind: Any) -> None:
    """Biases start at 0, which any rounding keeps: these are trained ones."""
    quant = QuantConfig(base="none", draft=kind)
    tiny = build(base_folder, quant, attention_bias=True, mlp_bias=True)
    biases = {n: p.data for n, p in tiny.draft.named_parameters() if n.endswith(".bias")}
    for bias in biases.values():
        bias.copy_(torch.linspace(-0.3, 0.7, len(bias)))
    tensors = load_file(str(export(tiny, tmp_path / "draft", quant) / "model.safetensors"))
    assert len(biases) == 7
    for name, bias in biases.items():
        assert torch.equal(tensors[name], bias.to(torch.bfloat16)), name


def test_full_vocabulary_writes_no_map(base_folder: Path, tmp_path: Path) -> None:
    out = export(build(base_folder, size=V), tmp_path / "draft")
    assert not {"d2t", "t2d"} & load_file(str(out / "model.safetensors")).keys()
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == V


def test_other_captures_rope_and_longer_context_are_written(base_folder: Path, tmp_path: Path) -> None:
    tiny = build(
        base_folder, capture_layer_ids=[0, 6], rope_theta=500.0, max_position_embeddings=16,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    config = json.loads((export(tiny, tmp_path / "draft") / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 7]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 6]}
    assert config["rope_theta"] == 500.0
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    assert config["max_position_embeddings"] == 64


def test_fp8_folder(fp8: tuple[Tiny, Path]) -> None:
    tiny, out = fp8
    tensors = load_file(str(out / "model.safetensors"))
    assert tensors["fc.weight"].dtype == tensors["lm_head.weight"].dtype == torch.bfloat16
    quantised = {n for n, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    assert len(quantised) == 7 and all(n.startswith("midlayer.") for n in quantised)
    for name in quantised:
        stem = name.removesuffix(".weight")
        for kind in ("weight_scale", "input_scale"):
            scale = tensors[f"{stem}.{kind}"]
            assert scale.dtype == torch.float32 and scale.shape == () and scale > 0
        module = tiny.draft.get_submodule(stem)
        in_memory = module.quantized_weight()  # type: ignore[operator]
        assert torch.equal(dequantize(tensors[name], tensors[f"{stem}.weight_scale"]), in_memory)
    metadata = json.loads((out / "hf_quant_config.json").read_text())
    exclude = ["lm_head", "fc", "model.fc", "*fc*", "*embed_tokens*"]
    assert metadata["producer"]["name"] == "megatron_spec"
    assert metadata["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": exclude}
    inside = json.loads((out / "config.json").read_text())["quantization_config"]
    float8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert inside.pop("producer") == metadata["producer"]
    assert inside == {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": exclude,
        "config_groups": {"group_0": {"input_activations": float8, "weights": float8, "targets": ["Linear"]}},
    }  # fmt: skip


def test_partly_excluded_layers_are_named(base_folder: Path, tmp_path: Path) -> None:
    quant = FP8.replace(exclude=(*FP8.exclude, "*down_proj"))
    out = export(build(base_folder, quant), tmp_path / "draft", quant)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "*down_proj" in ignored
    assert load_file(str(out / "model.safetensors"))["midlayer.mlp.down_proj.weight"].dtype == torch.bfloat16


def test_embeddings_on_request(base_folder: Path, tmp_path: Path) -> None:
    out = export(build(base_folder), tmp_path / "draft", export_embeddings=True, dtype="float32")
    target = load_file(str(base_folder / "model.safetensors"))["model.embed_tokens.weight"]
    assert torch.equal(load_file(str(out / "model.safetensors"))["embed_tokens.weight"], target)


@pytest.mark.parametrize(
    ("quant", "overrides"),
    [
        (None, {}),
        (FP8, {}),
        (None, {"num_hidden_layers": 2}),
        (None, {"capture_layer_ids": [0, 6]}),
        (None, {"size": V}),
        (FP8, NARROW),
    ],
)
def test_rule_checker_agrees(
    base_folder: Path, tmp_path: Path, quant: QuantConfig | None, overrides: dict[str, Any]
) -> None:
    out = export(build(base_folder, quant, **overrides), tmp_path / "draft", quant)
    assert [f for f in check_folder(out, base=base_folder) if not f.warning] == []


# ---- a plain reader computes the same


@pytest.mark.parametrize("quant", [None, FP8], ids=["fp32", "fp8"])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"num_hidden_layers": 2, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 50.0}, NARROW],
    ids=["one_layer", "two_layers", "narrow"],
)
@torch.no_grad()
def test_plain_reader_gives_the_same_logits(
    base_folder: Path, tmp_path: Path, quant: QuantConfig | None, overrides: dict[str, Any]
) -> None:
    tiny = build(base_folder, quant, **overrides)
    out = export(tiny, tmp_path / "draft", quant, dtype="float32")
    (features,) = tiny.source.features(tiny.batches[1])
    tokens_BS = shift(features.batch.tokens_BS, 1, dim=1)
    embedding = tiny.draft.embed(tokens_BS, tiny.base)
    if "hidden_size" in overrides:
        assert torch.equal(embedding, load_file(str(out / "model.safetensors"))["embed_tokens.weight"][tokens_BS.t()])
    expected = two_steps(tiny.draft, features.captures_SBC, embedding, features.batch.positions_BS)
    for row in range(2):
        plain = PlainEagle(out).steps(features.captures_SBC[:, row], embedding[:, row], torch.arange(12), 2)
        for found, ours in zip(plain, expected, strict=True):
            # An fp8 input next to a rounding boundary may fall to the other side: a rare step of 1/16 of one element.
            error = float((found - ours[:, row]).norm() / ours[:, row].norm())
            assert error < (1e-5 if quant is None else 0.02)


def test_narrower_draft_has_its_own_embedding(base_folder: Path, tmp_path: Path) -> None:
    tiny = build(base_folder, **NARROW)
    out = export(tiny, tmp_path / "draft", dtype="float32")
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["target_hidden_size"]) == (16, 32)
    assert load_file(str(out / "model.safetensors"))["embed_tokens.weight"].shape == (V, 16)
    (features,) = tiny.source.features(tiny.batches[1])
    again = load_exported_draft(out, tiny.reference.config, tiny.world)
    with torch.no_grad():
        losses = [d(features, tiny.base, OBJECTIVE).loss_T for d in (tiny.draft, again)]
    assert torch.equal(*losses)
    with pytest.raises(UserError, match="has its own"):
        export(tiny, tmp_path / "other", export_embeddings=True)


def test_reloaded_draft_is_the_same(fp8: tuple[Tiny, Path], tmp_path: Path) -> None:
    tiny, _ = fp8
    out = export(tiny, tmp_path / "draft", FP8, dtype="float32")
    again = load_exported_draft(out, tiny.reference.config, tiny.world)
    (features,) = tiny.source.features(tiny.batches[1])
    with torch.no_grad():
        a = tiny.draft(features, tiny.base, OBJECTIVE).loss_T
        b = again(features, tiny.base, OBJECTIVE).loss_T
    assert torch.equal(a, b)


# ---- refusals


def test_refuses_before_writing(base_folder: Path, fp8: tuple[Tiny, Path], tmp_path: Path) -> None:
    tiny = build(base_folder)
    with pytest.raises(UserError, match="never quantised"):
        export(tiny, tmp_path / "a", FP8)
    with pytest.raises(UserError, match="fake-quantised"):
        export(fp8[0], tmp_path / "a", None)
    with pytest.raises(UserError, match="dtype"):
        export(tiny, tmp_path / "a", dtype="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        export(tiny, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "x"]
    export(tiny, tmp_path / "full", overwrite=True)
    assert not (tmp_path / "full" / "x").exists()


def test_layer_numbers_in_patterns_are_refused(base_folder: Path, tmp_path: Path) -> None:
    quant = FP8.replace(exclude=(*FP8.exclude, "layers.1.mlp.*"))
    with pytest.raises(UserError, match="layer number"):
        export(build(base_folder, quant, num_hidden_layers=2), tmp_path / "a", quant)


def test_failure_leaves_nothing(base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = build(base_folder)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("megatron_spec.export.eagle.write_run_json", full_disk)
    with pytest.raises(UserError, match="no space left on the disk"):
        export(tiny, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


# ---- verification


def change(tensors: dict[str, Tensor], name: str, value: Tensor) -> dict[str, Tensor]:
    return {**tensors, name: value}


def repeat(d2t: Tensor) -> Tensor:
    """Draft token 4 means the same target token as draft token 3."""
    ids = d2t + torch.arange(D)
    ids[4] = ids[3]
    return ids - torch.arange(D)


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "flipped": (lambda t: change(t, "fc.weight", t["fc.weight"].flip(0)), "fc.weight differs"),
    "one_value": (
        lambda t: change(t, "norm.weight", t["norm.weight"] + (torch.arange(32) == 7).bfloat16()), "norm.weight differs"
    ),
    "missing": (lambda t: {n: x for n, x in t.items() if "hidden_norm" not in n}, "missing midlayer.hidden_norm"),
    "unknown": (lambda t: change(t, "fc.bias", torch.zeros(32, dtype=torch.bfloat16)), "unexpected fc.bias"),
    "dtype": (lambda t: change(t, "lm_head.weight", t["lm_head.weight"].float()), "lm_head.weight is float32"),
    "shape": (lambda t: change(t, "lm_head.weight", t["lm_head.weight"][:-1]), r"lm_head.weight is \[39"),
    "not_injective": (lambda t: change(t, "d2t", repeat(t["d2t"])), "distinct"),
    "out_of_range": (lambda t: change(t, "d2t", t["d2t"] + 60), "within 0..82"),
    "zero_map": (lambda t: change(t, "d2t", t["d2t"] * 0), "all zeros"),
    "no_map": (lambda t: {n: x for n, x in t.items() if n not in ("d2t", "t2d")}, "d2t is missing"),
    "nan": (lambda t: change(t, "norm.weight", t["norm.weight"] * float("nan")), "not finite"),
    "scale": (
        lambda t: change(t, "midlayer.mlp.up_proj.weight_scale", t["midlayer.mlp.up_proj.weight_scale"] * 2), "differs"
    ),
    "input_scale": (
        lambda t: {n: x * 8 if n.endswith("input_scale") else x for n, x in t.items()}, "input_scale differs"
    ),
    "no_input_scale": (
        lambda t: {n: x for n, x in t.items() if n != "midlayer.mlp.down_proj.input_scale"}, "input_scale is missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_verification_catches(fp8: tuple[Tiny, Path], tmp_path: Path, name: str) -> None:
    tiny, out = fp8
    damage, message = DAMAGE[name]
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(damage(load_file(str(out / "model.safetensors"))), str(tmp_path / "model.safetensors"))
    with pytest.raises(VerificationError, match=message):
        verify_draft(tmp_path, tiny.draft, tiny.reference.config, tiny.world)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope_theta", 5e5, "rope"),
        ("rms_norm_eps", 1e-6, "rms_norm_eps"),
        ("max_position_embeddings", 2, "less than"),
        ("target_hidden_size", None, "target_hidden_size"),
        ("num_key_value_heads", 4, "k_proj.weight is"),
        ("eagle_aux_hidden_state_layer_ids", [2, 4, 6], "capture_layer_ids"),
        ("draft_vocab_size", 41, r"lm_head.weight is \[40"),
        ("rope_theta", ..., "missing rope_theta"),
        ("quantization_config", ..., "without hf_quant_config"),
    ],
)  # fmt: skip
def test_verification_catches_config(
    fp8: tuple[Tiny, Path], tmp_path: Path, key: str, value: Any, message: str
) -> None:
    tiny, out = fp8
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = {**json.loads((out / "config.json").read_text()), key: value}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    with pytest.raises(VerificationError, match=message):
        verify_draft(tmp_path, tiny.draft, tiny.reference.config, tiny.world)


def test_verification_passes_what_was_written(fp8: tuple[Tiny, Path]) -> None:
    tiny, out = fp8
    verify_draft(out, tiny.draft, tiny.reference.config, tiny.world)
