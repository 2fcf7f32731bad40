"""The rule checker and its script, on folders that break one rule each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_spec.config import EagleConfig, UserError
from megatron_spec.config.structure import quantisable
from megatron_spec.export import layout
from megatron_spec.export.check import check_folder
from megatron_spec.export.check.finding import Finding
from megatron_spec.export.formats import open_source
from megatron_spec.export.quant_metadata import DRAFT_EXCLUDES, hf_quant_config, quantization_config

ROOT = Path(__file__).parents[3]
V, D, H = 50, 20, 8
CONFIG = EagleConfig(
    algorithm="eagle3", hidden_size=H, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    vocab_size=V, draft_vocab_size=D, target_hidden_size=H, max_position_embeddings=64, capture_layer_ids=(1, 3, 4),
)  # fmt: skip

Tensors = dict[str, Tensor]
Json = dict[str, Any]
Break = Callable[[Tensors, Json], tuple[Tensors, Json]]


def good(fp8: bool = False) -> tuple[Tensors, Json]:
    """A valid folder's contents, made without the exporter."""
    linears = set(quantisable(CONFIG)) if fp8 else set()
    tensors = {
        name: torch.ones(shape, dtype=getattr(torch, dtype)) if dtype.startswith("float8") is False
        else torch.ones(shape).to(torch.float8_e4m3fn)
        for name, (dtype, shape) in layout.expected_tensors(CONFIG, "bfloat16", linears).items()
    }  # fmt: skip
    ids = torch.arange(D) * 2 + 1
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(D), torch.isin(torch.arange(V), ids)
    config: Json = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": H, "intermediate_size": 12, "vocab_size": V,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "draft_vocab_size": D, "rope_theta": 1e4, "max_position_embeddings": 64,
    }  # fmt: skip
    if fp8:
        config["quantization_config"] = quantization_config(DRAFT_EXCLUDES)
    return tensors, config


def write(folder: Path, tensors: Tensors, config: Json) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    if "quantization_config" in config:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(DRAFT_EXCLUDES)))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    values = {"hidden_size": H, "vocab_size": V, "max_position_embeddings": 64, "num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("fp8", [False, True])
def test_a_good_folder_breaks_no_rule(tmp_path: Path, base: Path, fp8: bool) -> None:
    assert check_folder(write(tmp_path / "d", *good(fp8)), base=base) == []


def other(kind: str) -> tuple[Tensors, Json]:
    """A valid folder's contents of another kind, made without the exporter."""
    shape = dict(
        hidden_size=H, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=V,
    )  # fmt: skip
    common: Json = {**shape, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    common["max_position_embeddings"] = 64
    if kind == "medusa":
        tensors = {f"{h}.0.linear.weight": torch.ones(H, H) for h in range(2)}
        tensors |= {f"{h}.0.linear.bias": torch.ones(H) for h in range(2)}
        tensors |= {f"{h}.1.weight": torch.ones(V, H) for h in range(2)}
        values = {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": 2}
        return tensors, {**values, "medusa_num_layers": 1, "medusa_fc_bias": True, "hidden_size": H, "vocab_size": V}
    if kind == "model":
        tensors = {"model.embed_tokens.weight": torch.ones(V, H), "lm_head.weight": torch.ones(V, H)}
        return tensors, {**common, "architectures": ["LlamaForCausalLM"]}
    if kind in ("dflash", "dspark"):
        return block(kind)
    algorithm = {"eagle1": "eagle1", "mtp": "eagle-mtp"}[kind]
    config = EagleConfig(
        algorithm=algorithm, draft_vocab_size=V, target_hidden_size=H, max_position_embeddings=64, **shape
    )  # type: ignore[arg-type]  # fmt: skip
    tensors = {n: torch.ones(size) for n, size in layout.weight_shapes(config).items()}
    tensors |= {n: torch.zeros(size) for n, size in layout.zero_shapes(config).items()}
    return tensors, {**common, "architectures": layout.ARCHITECTURES[algorithm]}


def block(kind: str) -> tuple[Tensors, Json]:
    """A DFlash or DSpark folder as DeepSpec writes one: rank 2, two captures, blocks of 4."""
    shapes = {"fc": (H, 2 * H), "hidden_norm": (H,), "norm": (H,)}
    layer = {"q": (8, H), "k": (4, H), "v": (4, H), "o": (H, 8)}
    shapes |= {f"layers.0.self_attn.{x}_proj": size for x, size in layer.items()}
    shapes |= {f"layers.0.self_attn.{x}_norm": (4,) for x in "qk"}
    shapes |= {f"layers.0.mlp.{x}_proj": (12, H) for x in ("gate", "up")} | {"layers.0.mlp.down_proj": (H, 12)}
    shapes |= {f"layers.0.{x}_layernorm": (H,) for x in ("input", "post_attention")}
    config: Json = dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", hidden_size=H, intermediate_size=12, vocab_size=V,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_hidden_layers=1, rms_norm_eps=1e-6,
        rope_theta=1e4, max_position_embeddings=64, hidden_act="silu", block_size=4, num_target_layers=8,
        layer_types=["full_attention"], dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 5]},
    )  # fmt: skip
    if kind == "dspark":
        shapes |= {f"markov_head.markov_w{i}": (V, 2) for i in (1, 2)} | {"confidence_head.proj": (1, H + 2)}
        config |= {
            "architectures": ["Qwen3DSparkModel"], "markov_rank": 2, "markov_head_type": "vanilla",
            "enable_confidence_head": True, "confidence_head_with_markov": True,
        }  # fmt: skip
    tensors = {f"{n}.weight": torch.ones(size) for n, size in shapes.items()}
    return tensors | ({"confidence_head.proj.bias": torch.ones(1)} if kind == "dspark" else {}), config


def gated(t: Tensors, c: Json) -> tuple[Tensors, Json]:
    gate = {"markov_head.gate_proj.weight": torch.ones(2, H + 2), "markov_head.gate_proj.bias": torch.ones(2)}
    return t | gate, {**c, "markov_head_type": "gated"}


def attends(causal: bool, window: int | None, **more: Any) -> Break:
    keys: Json = {"layer_types": ["sliding_attention"], "sliding_window": window} if window else {}
    return lambda t, c: (t, {**c, **keys, **more, "dflash_config": {**c["dflash_config"], "causal": causal}})


def modelopt_window(t: Tensors, c: Json) -> tuple[Tensors, Json]:
    """A window only in `dflash_config`, beside full attention in `layer_types`: only vLLM applies it."""
    inside = {**c["dflash_config"], "causal": True, "use_swa": True, "swa_window_size": 3}
    return t, {**c, "sliding_window": 3, "dflash_config": inside}


EVERY = ("trtllm", "vllm", "sglang")
KINDS = {
    "eagle1": ("vllm", "sglang"), "medusa": ("vllm",), "mtp": (), "model": EVERY, "dflash": EVERY, "dspark": EVERY,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds(tmp_path: Path, base: Path, kind: str) -> None:
    """A valid folder breaks no rule, and engines that do not load its kind are named."""
    folder = write(tmp_path / "d", *other(kind))
    assert [f for f in check_folder(folder, base=base) if not f.warning] == []
    for engine in ("trtllm", "vllm", "sglang"):
        rules = [f.rule for f in check_folder(folder, engine, base) if not f.warning]  # type: ignore[arg-type]
        assert rules == ([] if engine in KINDS[kind] else ["kind"]), engine


def rename(t: Tensors, old: str, new: str) -> Tensors:
    return {n.replace(old, new): x for n, x in t.items()}


def without(values: dict[str, Any], *names: str) -> Any:
    return {n: x for n, x in values.items() if not any(name in n for name in names)}


NESTED = "eagle_config"
TOP = "eagle_aux_hidden_state_layer_ids"
BROKEN: dict[str, tuple[Break, str, str, bool]] = {
    # name: (change, rule, part of the message, fp8)
    "no d2t": (lambda t, c: (without(t, "d2t", "t2d"), c), "d2t", "d2t is missing", False),
    "zero d2t": (lambda t, c: ({**t, "d2t": t["d2t"] * 0}, c), "d2t", "all zeros", False),
    "absolute d2t": (
        lambda t, c: ({**t, "d2t": t["d2t"] + torch.arange(D)}, c), "d2t", "target ids instead of offsets", False
    ),
    "repeated d2t": (lambda t, c: ({**t, "d2t": -torch.arange(D)}, c), "d2t", "not distinct", False),
    "short t2d": (lambda t, c: ({**t, "t2d": t["t2d"][1:]}, c), "t2d", "config.json says vocab_size", False),
    "other t2d": (lambda t, c: ({**t, "t2d": ~t["t2d"]}, c), "t2d", "different tokens", False),
    "d2t with D = V": (
        lambda t, c: ({**t, "lm_head.weight": torch.ones(V, H)}, {**c, "draft_vocab_size": V}), "d2t", "raises", False
    ),
    "prefix": (lambda t, c: ({f"model.{n}": x for n, x in t.items()}, c), "prefix", "model.", False),
    "no draft_vocab_size": (lambda t, c: (t, without(c, "draft_vocab_size")), "draft_vocab_size", "missing", False),
    "rope_parameters": (
        lambda t, c: (t, {**without(c, "rope_theta"), "rope_parameters": {"rope_theta": 5e5}}), "rope", "10000", False
    ),
    "no rope": (lambda t, c: (t, without(c, "rope_theta")), "rope", "missing", False),
    "short context": (lambda t, c: (t, {**c, "max_position_embeddings": 32}), "max_position_embeddings", "64", False),
    "null": (lambda t, c: (t, {**c, "target_hidden_size": None}), "null", "target_hidden_size", False),
    "null eagle_config": (lambda t, c: (t, {**c, "eagle_config": None}), "null", "eagle_config", False),
    "architecture": (lambda t, c: (t, {**c, "architectures": ["LlamaForCausalLM"]}), "architectures", "Llama", False),
    "missing norm": (lambda t, c: (without(t, "hidden_norm"), c), "missing", "midlayer.hidden_norm", False),
    "missing head": (lambda t, c: (without(t, "lm_head"), c), "missing", "lm_head", False),
    "bias": (lambda t, c: ({**t, "fc.bias": torch.ones(H)}, c), "fc_bias", "fc_bias", False),
    "unknown": (lambda t, c: ({**t, "hello": torch.ones(H)}, c), "unknown", "hello", False),
    "padded head": (lambda t, c: ({**t, "lm_head.weight": torch.ones(24, H)}, c), "shape", "lm_head", False),
    "heads": (lambda t, c: (t, {**c, "num_key_value_heads": 2}), "shape", "k_proj", False),
    "vocabulary": (lambda t, c: (t, {**c, "vocab_size": 64}), "vocab_size", "50", False),
    "ids disagree": (lambda t, c: (t, {**c, TOP: [1, 3, 4], NESTED: {TOP: [1, 3, 4]}}), "capture_ids", "plus", False),
    "ids top only": (lambda t, c: (t, {**c, TOP: [1, 3, 4]}), "capture_ids", "only at the top", False),
    "ids nested only": (lambda t, c: (t, {**c, NESTED: {TOP: [1, 3, 4]}}), "capture_ids", "only in eagle", False),
    "ids out of range": (
        lambda t, c: (t, {**c, TOP: [1, 3, 9], NESTED: {TOP: [0, 2, 8]}}), "capture_ids", "do not all exist", False
    ),
    "ids and fc": (lambda t, c: (t, {**c, TOP: [1, 3], NESTED: {TOP: [0, 2]}}), "capture_ids", "2 layer ids", False),
    "fp8 fc": (
        lambda t, c: ({**t, "fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}, c), "fp8", "fc.weight is fp8", True
    ),
    "no input scale": (lambda t, c: (without(t, "o_proj.input_scale"), c), "fp8", "o_proj.input_scale", True),
    "scales differ": (
        lambda t, c: ({**t, "midlayer.self_attn.k_proj.weight_scale": torch.tensor(2.0)}, c), "fp8", "differs", True
    ),
    "no metadata": (lambda t, c: (t, without(c, "quantization_config")), "fp8", "without", True),
}  # fmt: skip


def has_problem(findings: list[Finding], rule: str, message: str) -> bool:
    return any(f.rule == rule and message in f.found and not f.warning for f in findings)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_found(tmp_path: Path, base: Path, name: str) -> None:
    change, rule, message, fp8 = BROKEN[name]
    findings = check_folder(write(tmp_path / "d", *change(*good(fp8))), base=base)
    assert has_problem(findings, rule, message), findings
    assert all(f.fix for f in findings)


def eight_bits(t: Tensors, linear: str) -> Tensors:
    codes = {f"{linear}.weight": t[f"{linear}.weight"].to(torch.float8_e4m3fn)}
    return t | codes | {f"{linear}.{x}_scale": torch.tensor(1.0) for x in ("weight", "input")}


OTHERS: dict[str, tuple[str, Break, str, str]] = {
    # name: (kind, change, rule, part of the message)
    "no bias": ("eagle1", lambda t, c: (without(t, "fc.bias"), c), "fc.bias", "uninitialised"),
    "trained bias": ("eagle1", lambda t, c: ({**t, "fc.bias": torch.ones(H)}, c), "fc.bias", "drops"),
    "input norm": (
        "eagle1", lambda t, c: ({**t, "layers.0.input_layernorm.weight": torch.ones(H)}, c), "unknown", "cannot be read"
    ),
    "plain name": ("eagle1", lambda t, c: (t, {**c, "architectures": ["LlamaForCausalLM"]}), "architectures", "Llama"),
    "lost layer": ("eagle1", lambda t, c: (without(t, "o_proj"), c), "missing", "o_proj"),
    "theta": ("eagle1", lambda t, c: (t, without(c, "rope_theta")), "rope", "10000"),
    "fc bias key": ("medusa", lambda t, c: (t, without(c, "medusa_fc_bias")), "medusa_fc_bias", "drops the biases"),
    "one head": ("medusa", lambda t, c: ({n: x for n, x in t.items() if n[0] == "0"}, c), "missing", "tensors hold 1"),
    "model type": ("medusa", lambda t, c: (t, without(c, "model_type")), "model_type", "something else"),
    "padded heads": ("medusa", lambda t, c: ({**t, "0.1.weight": torch.ones(64, H)}, c), "shape", "0.1.weight"),
    "lost norm": ("mtp", lambda t, c: (without(t, "enorm"), c), "missing", "enorm"),
    "padded vocabulary": (
        "model", lambda t, c: ({**t, "model.embed_tokens.weight": torch.ones(64, H)}, c), "vocab_size", "64 rows"
    ),
    "fp8 values": (
        "dflash", lambda t, c: (eight_bits(t, "layers.0.self_attn.v_proj"), c), "qkv", "SGLang silently loads the codes"
    ),
    "fp8 gate": (
        "dflash", lambda t, c: (eight_bits(t, "layers.0.mlp.gate_proj"), c), "served", "leaves the common scale"
    ),
    "no mask token": (
        "dflash", lambda t, c: (t, {**c, "dflash_config": {"target_layer_ids": [1, 5]}}), "config", "mask_token_id"
    ),
    "two masks": ("dspark", lambda t, c: (t, {**c, "mask_token_id": 8}), "config", "8 at the top level and 7"),
    "other base": ("dflash", lambda t, c: (t, {**c, "num_target_layers": 6}), "num_target_layers", "has 8 layers"),
    "last layer": (
        "dflash", lambda t, c: (t, {**c, "dflash_config": {**c["dflash_config"], "target_layer_ids": [1, 7]}}),
        "capture_ids", "SGLang never delivers",
    ),
    "causal": ("dflash", attends(True, None), "served", "sglang does not compute"),
    "one-sided window": ("dflash", attends(False, 4), "served", "trtllm does not compute"),
    "gated": ("dspark", gated, "served", "vllm does not compute"),
    "no window": (
        "dflash", lambda t, c: (t, {**c, "layer_types": ["sliding_attention"]}), "option", "window without its size"
    ),
    "no model type": ("dspark", lambda t, c: (t, without(c, "model_type")), "model_type", "layers of Qwen 3"),
    "lost W2": ("dspark", lambda t, c: (without(t, "markov_w2"), c), "missing", "markov_w2"),
    "no head": ("model", lambda t, c: (without(t, "lm_head"), c), "missing", "tie_word_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_broken_rule_of_another_kind_is_found(tmp_path: Path, base: Path, name: str) -> None:
    kind, change, rule, message = OTHERS[name]
    findings = check_folder(write(tmp_path / "d", *change(*other(kind))), base=base)
    assert has_problem(findings, rule, message), findings


def test_the_last_layer_of_gpt_oss_reaches_a_draft(tmp_path: Path, base: Path) -> None:
    """SGLang captures it before the final norm; of other targets only what a next layer begins with."""
    tensors, config = block("dflash")
    config["dflash_config"]["target_layer_ids"] = [1, 7]
    three = {TOP: [1, 3, 8], NESTED: {TOP: [0, 2, 7]}}
    target = json.loads((base / "config.json").read_text())
    for folder in (write(tmp_path / "b", tensors, config), write(tmp_path / "e", good()[0], {**good()[1], **three})):
        for name, lost in (("GptOssForCausalLM", False), ("LlamaForCausalLM", True), (None, True)):
            (base / "config.json").write_text(json.dumps({**target, **({"architectures": [name]} if name else {})}))
            assert has_problem(check_folder(folder, base=base), "capture_ids", "SGLang never delivers") == lost


def test_which_engines_compute_a_block_draft(tmp_path: Path, base: Path) -> None:
    """The masks and heads that each loader has."""
    expected = {
        "whole block": ("dflash", attends(False, None), set()),
        "causal": ("dflash", attends(True, None), {"sglang", "trtllm"}),
        "causal, named for SGLang": ("dflash", attends(True, None, is_causal=True), {"trtllm"}),
        "causal window": ("dflash", attends(True, 3), set()),
        "causal window of ModelOpt": ("dflash", modelopt_window, {"sglang", "trtllm"}),
        "window": ("dflash", attends(False, 4), {"sglang", "trtllm"}),
        "causal window, dspark": ("dspark", attends(True, 3), {"trtllm"}),
        "gated": ("dspark", gated, {"vllm", "trtllm"}),
        "partial rotation": ("dflash", lambda t, c: (t, {**c, "partial_rotary_factor": 0.5}), {"sglang"}),
    }
    for name, (kind, change, lost) in expected.items():
        findings = check_folder(write(tmp_path / name, *change(*other(kind))), base=base)
        assert {e for f in findings for e in f.engines if f.rule == "served"} == lost, name
        assert all(f.rule == "served" for f in findings), name


def test_off_by_one_layers_are_pointed_out(tmp_path: Path, base: Path) -> None:
    tensors, config = good()  # a target of 8 layers: outputs 1, 3, 4
    for keys in ({TOP: [1, 3, 4]}, {NESTED: {TOP: [2, 4, 5]}}):
        findings = check_folder(write(tmp_path / "d", tensors, {**config, **keys}), base=base)
        assert [f for f in findings if "one off" in f.found], findings
    right = {TOP: [2, 4, 5], NESTED: {TOP: [1, 3, 4]}}
    findings = check_folder(write(tmp_path / "d", tensors, {**config, **right}), base=base)
    assert not [f for f in findings if "one off" in f.found]


def test_rules_are_those_of_the_engine(tmp_path: Path) -> None:
    tensors, config = good()
    folder = write(tmp_path / "d", {f"model.{n}": x for n, x in tensors.items()}, config)
    assert [f.rule for f in check_folder(folder, "vllm")] == ["prefix"]
    assert check_folder(folder, "sglang") == []


def test_numbered_single_layer_is_a_warning(tmp_path: Path) -> None:
    tensors, config = good()
    (finding,) = check_folder(write(tmp_path / "d", rename(tensors, "midlayer", "layers.0"), config))
    assert finding.warning and finding.rule == "midlayer"


def test_unreadable_folders(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", *good())
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(UserError, match="cut off"):
        check_folder(folder)
    (folder / "model.safetensors").write_bytes(b"not a file")
    with pytest.raises(UserError, match="not a safetensors file"):
        check_folder(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin does not load"):
        check_folder(folder)
    (folder / "pytorch_model.bin").rename(folder / "weights.pt")
    with pytest.raises(UserError, match=r"found weights\.pt"):
        check_folder(folder)
    with pytest.raises(UserError, match="not a folder"):
        check_folder(tmp_path / "nowhere")
    (tmp_path / "out").mkdir()
    write(tmp_path / "out" / "draft", *good())
    with pytest.raises(UserError, match=r"give .*out/draft"):
        check_folder(tmp_path / "out")


def test_old_pickled_folders_are_read(tmp_path: Path) -> None:
    tensors, config = good()
    folder = write(tmp_path / "d", tensors, config)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert check_folder(folder) == []
    torch.save({**tensors, "t2d": ~tensors["t2d"]}, folder / "pytorch_model.bin")
    assert [f.rule for f in check_folder(folder)] == ["t2d"]


def script(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/check_export.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_rules_and_serving_import_no_torch() -> None:
    code = (
        "import sys, megatron_spec.export.check, megatron_spec.serving.trtllm, megatron_spec.serving.vllm;"
        "assert not {'torch', 'megatron.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_script_exit_codes(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", *good())
    done = script(str(folder))
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr
    write(folder, without(good()[0], "d2t"), good()[1])
    done = script(str(folder))
    assert done.returncode == 1 and "fix: write d2t" in done.stdout
    assert script(str(tmp_path / "nowhere")).returncode == 2
    assert script(str(folder), "--engine", "other").returncode == 2


def test_what_is_no_folder_of_a_draft_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "save" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000001" / "spec.json").touch()
    for name, words in (
        ("model.gguf", r"is a file; expected a folder in Hugging Face format \(GGUF is not read\)"),
        ("nowhere", "no such folder; expected"),
        ("empty", "found no config.json; expected"),
        ("save", "is a draft checkpoint, expected an exported draft: run export.py --load"),
    ):
        with pytest.raises(UserError, match=words):
            open_source(tmp_path / name)
