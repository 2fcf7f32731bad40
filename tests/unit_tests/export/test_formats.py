"""Formats made from Hugging Face folders: speculators, and TensorRT-LLM's legacy checkpoint cut for its ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_spec.config import MedusaConfig, QuantConfig, UserError
from megatron_spec.export import speculators, trtllm_legacy
from megatron_spec.export.base import export_base
from megatron_spec.export.check import check_folder
from megatron_spec.export.common import VerificationError
from megatron_spec.export.draft import export_draft
from megatron_spec.export.formats import read_draft
from megatron_spec.export.stream import TensorWriter
from megatron_spec.quantization.calibrate import calibrate
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.drafts.plain_eagle3 import eagle_config
from tests.unit_tests.export.test_eagle1_mtp_medusa_export import make as make_exported
from tests.unit_tests.quantization.tiny import OBJECTIVE, D, V, make, world_of


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_tiny(path, num_hidden_layers=8, intermediate_size=48, num_key_value_heads=2)
    return path


# ---- one tensor at a time


def test_writer_memory_and_layout(tmp_path: Path) -> None:
    """100 tensors of 2 MB through a process that may hold only a few of them."""
    code = """
import resource, sys, torch
from pathlib import Path
from megatron_spec.export.stream import TensorWriter
plan = {f"t{i}": ("float32", (512, 1024)) for i in range(100)}
writer = TensorWriter(Path(sys.argv[1]), plan, max_shard_bytes=50 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i, name in enumerate(plan):
    writer.add(name, torch.full((512, 1024), float(i)))
writer.close()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 20 << 10, f"{grown} KiB"
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4 and index["metadata"]["total_size"] == 200 << 20
    found = load_file(str(tmp_path / index["weight_map"]["t42"]))
    assert torch.equal(found["t42"], torch.full((512, 1024), 42.0))


def test_writer_is_strict(tmp_path: Path) -> None:
    plan = {"a": ("bool", (3,)), "b": ("float8_e4m3fn", (2, 2)), "c": ("int64", (1,)), "d": ("float32", ())}
    values: dict[str, Tensor] = {
        "d": torch.tensor(1.5), "b": torch.ones(2, 2).to(torch.float8_e4m3fn), "a": torch.tensor([True, False, True]),
        "c": torch.tensor([2**40]),
    }  # fmt: skip
    writer = TensorWriter(tmp_path, plan)
    with pytest.raises(VerificationError, match="planned"):
        writer.add("a", torch.zeros(4, dtype=torch.bool))
    for name, value in values.items():
        if name == "c":
            with pytest.raises(VerificationError, match="never written: c"):
                writer.close()
        writer.add(name, value)
    writer.close()
    with pytest.raises(VerificationError, match="twice"):
        writer.add("c", values["c"])
    found = load_file(str(tmp_path / "model.safetensors"))
    assert all(torch.equal(found[n].float(), values[n].float()) for n in plan)


# ---- speculators


def test_speculators_of_a_narrower_draft(base_folder: Path, tmp_path: Path) -> None:
    narrow = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny = make(base_folder, world_of(), **narrow)
    hf = export_draft(tiny.draft, tiny.reference, tmp_path / "hf", None, tiny.world, ends=tiny.base)
    speculators.convert(hf, base_folder, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["target_hidden_size"] == 32 and config["transformer_layer_config"]["hidden_size"] == 16
    assert load_file(str(tmp_path / "out" / "model.safetensors"))["embed_tokens.weight"].shape == (V, 16)


@pytest.mark.parametrize("overrides", [{}, {"num_hidden_layers": 2, "capture_layer_ids": [0, 6], "size": V}])
def test_speculators(base_folder: Path, tmp_path: Path, overrides: dict[str, Any]) -> None:
    tiny = make(base_folder, world_of(), **overrides)
    hf = export_draft(
        tiny.draft, tiny.reference, tmp_path / "hf", None, tiny.world, ends=tiny.base, export_embeddings=True
    )
    speculators.convert(hf, base_folder, tmp_path / "out", 4)
    assert [f for f in check_folder(tmp_path / "out") if not f.warning] == []
    found, source = (load_file(str(f / "model.safetensors")) for f in (tmp_path / "out", hf))
    assert torch.equal(found["layers.0.hidden_norm.weight"].float(), _first(source, "hidden_norm.weight").float())
    assert "layers.1.hidden_norm.weight" not in found and not [n for n in found if n.startswith("midlayer")]
    assert ("d2t" in found) == ("size" not in overrides)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["draft_vocab_size"] == (V if overrides else D)
    assert config.get("eagle_aux_hidden_state_layer_ids") == ([1, 7] if overrides else None)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(base_folder), "architectures": ["LlamaForCausalLM"]
    }  # fmt: skip
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    layer = config["transformer_layer_config"]
    assert layer["vocab_size"] == V and layer["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_speculators_holds_windows_captures_and_rotated_parts(base_folder: Path, tmp_path: Path) -> None:
    """What vLLM reads of the layers' configuration: a window, the number of captures if it is not three."""
    options = {"sliding_window": 24, "capture_layer_ids": [0, 2, 4, 5, 6]}
    tiny = make(base_folder, world_of(), **options, rope={"theta": 10000.0, "partial_rotary_factor": 0.5})
    hf = export_draft(
        tiny.draft, tiny.reference, tmp_path / "hf", None, tiny.world, ends=tiny.base, export_embeddings=True
    )
    speculators.convert(hf, base_folder, tmp_path / "out")
    layer = json.loads((tmp_path / "out" / "config.json").read_text())["transformer_layer_config"]
    assert layer["num_aux_hidden_states"] == 5
    assert (layer["sliding_window"], layer["layer_types"]) == (24, ["sliding_attention"])
    assert layer["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    read = read_draft(tmp_path / "out", tiny.reference.config).config
    assert read == read_draft(hf, tiny.reference.config).config and read.sliding_window == 24
    assert not [f for f in check_folder(tmp_path / "out", "vllm") if not f.warning]
    path = tmp_path / "out" / "config.json"
    raw = json.loads(path.read_text())
    for count, said in (
        (None, "5 layers are captured, but vLLM builds fc for 3"),
        (3, "num_aux_hidden_states is 3, but"),
    ):
        raw["transformer_layer_config"]["num_aux_hidden_states"] = count
        path.write_text(json.dumps(raw))
        assert said in " ".join(f.found for f in check_folder(tmp_path / "out", "vllm") if not f.warning)


def _first(tensors: dict[str, Tensor], suffix: str) -> Tensor:
    return next(t for n, t in tensors.items() if n.endswith(suffix) and ("midlayer" in n or "layers.0" in n))


def test_speculators_refuses_unsupported_options() -> None:
    with pytest.raises(UserError, match="the draft is medusa"):
        speculators.check(MedusaConfig(num_heads=2, hidden_size=8, vocab_size=8), False)
    with pytest.raises(UserError, match="no fp8"):
        speculators.check(eagle_config(), True)
    with pytest.raises(UserError, match="no bias after fc"):
        speculators.check(eagle_config(fc_bias=True), False)
    with pytest.raises(UserError, match="not both"):
        speculators.check(eagle_config(algorithm="eagle3.1", norm_before_fc=True, fc_norm=True), False)


# ---- TensorRT-LLM, legacy


def linear(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    weight = tensors[f"{name}.weight"].float()
    if f"{name}.weights_scaling_factor" in tensors:
        weight = weight * tensors[f"{name}.weights_scaling_factor"]
    return x @ weight.T


class PlainRanks:
    """Computes from the files like a runtime with several ranks: partial sums added, rows joined."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tp = self.config["mapping"]["tp_size"]
        self.ranks = [load_file(str(folder / f"rank{r}.safetensors")) for r in range(self.tp)]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["norm_epsilon"]).rsqrt()
        return x * scale * self.ranks[0][f"{name}.weight"].float()

    def attention(self, x: Tensor, layer: str, t: dict[str, Tensor]) -> Tensor:
        D, N = self.config["head_size"], self.config["num_attention_heads"] // self.tp
        G = max(1, self.config["num_key_value_heads"] // self.tp)
        q, k, v = linear(x, t, f"{layer}attention.qkv").unflatten(-1, (-1, D)).split([N, G, G], dim=1)
        inverse = self.config["rotary_base"] ** -(torch.arange(0, D, 2) / D)
        angle = (torch.arange(len(x))[:, None] * inverse)[:, None]
        q, k = (
            torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
            for a, b in (y.chunk(2, -1) for y in (q, k))
        )
        k, v = (y.repeat_interleave(N // G, dim=1) for y in (k, v))
        scores = torch.einsum("snd,tnd->nst", q, k) / D**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return torch.einsum("nst,tnd->snd", scores.softmax(-1), v).flatten(1)

    def run(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(logits of the base, logits of every head), vocabulary padding cut off."""
        x = self.ranks[0]["transformer.vocab_embedding.weight"].float()[tokens]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"transformer.layers.{i}."
            y = self.norm(x, f"{layer}input_layernorm")
            x = x + sum(linear(self.attention(y, layer, t), t, f"{layer}attention.dense") for t in self.ranks)
            y = self.norm(x, f"{layer}post_layernorm")
            x = x + sum(
                linear(
                    torch.nn.functional.silu(linear(y, t, f"{layer}mlp.fc")) * linear(y, t, f"{layer}mlp.gate"),
                    t, f"{layer}mlp.proj",
                )
                for t in self.ranks
            )  # fmt: skip
        x, size = self.norm(x, "transformer.ln_f"), self.config["vocab_size"]
        heads = []
        for h in range(self.config["num_medusa_heads"]):
            y = x
            for i in range(self.config["num_medusa_layers"]):
                name = f"medusa_heads.{h}.medusa_layers.{i}.linear"
                y = y + torch.nn.functional.silu(
                    torch.cat([linear(y, t, name) + t[f"{name}.bias"].float() for t in self.ranks], -1)
                )
            heads.append(torch.cat([linear(y, t, f"medusa_heads.{h}.lm_head") for t in self.ranks], -1)[:, :size])
        return torch.cat([linear(x, t, "lm_head") for t in self.ranks], -1)[:, :size], heads


@pytest.mark.parametrize("tp", [1, 2, 4])
@torch.no_grad()
def test_legacy_ranks_compute_the_model(base_folder: Path, tmp_path: Path, tp: int) -> None:
    """The vocabulary (50 -> 83 tokens) is no multiple of the ranks, and tp 4 has more ranks than key/value heads."""
    from transformers import LlamaForCausalLM

    s = make_exported(base_folder, world_of(), "medusa")
    options: dict[str, Any] = {"dtype": "float32"}
    heads = export_draft(s.draft, s.reference, tmp_path / "draft", None, s.world, ends=s.base, also_pt=True, **options)
    base = export_base(s.base, s.reference, tmp_path / "base", None, s.world, **options)
    trtllm_legacy.convert(base, heads, tmp_path / "out", tp)
    assert sorted(p.name for p in (tmp_path / "out").glob("rank*")) == [f"rank{r}.safetensors" for r in range(tp)]
    plain = PlainRanks(tmp_path / "out")
    assert all(t["lm_head.weight"].shape == (-(-V // tp), 32) for t in plain.ranks)
    tokens = torch.randint(V, (9,), generator=torch.Generator().manual_seed(0))
    model = LlamaForCausalLM.from_pretrained(base)
    expected = model(tokens[None])
    logits, found = plain.run(tokens)
    assert torch.allclose(logits, expected.logits[0], atol=1e-4)
    state = model.model(tokens[None]).last_hidden_state.transpose(0, 1)
    for h, ours in enumerate(found):
        assert torch.allclose(ours, s.draft.logits(state, h, s.base)[:, 0], atol=1e-4)
    pickled = torch.load(heads / "medusa_lm_head.pt", weights_only=True)
    assert torch.equal(pickled["1.2.weight"], load_file(str(heads / "medusa_lm_head.safetensors"))["1.2.weight"])


def test_legacy_fp8(base_folder: Path, tmp_path: Path) -> None:
    quant = QuantConfig(draft="none", kv_cache="fp8")
    tiny = make(base_folder, world_of())
    calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, quant, tiny.world)
    base = export_base(tiny.base, tiny.reference, tmp_path / "base", quant, tiny.world, dtype="float32")
    s = make_exported(base_folder, world_of(), "medusa")
    heads = export_draft(s.draft, s.reference, tmp_path / "draft", None, s.world, ends=s.base)
    trtllm_legacy.convert(base, heads, tmp_path / "out", 2)
    assert check_folder(tmp_path / "out", "trtllm") == [] == check_folder(base)
    assert [f.rule for f in check_folder(tmp_path / "out", "vllm")] == ["kind"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == config["quantization"]["kv_cache_quant_algo"] == "FP8"
    ranks = [load_file(str(tmp_path / "out" / f"rank{r}.safetensors")) for r in range(2)]
    source = load_file(str(base / "model.safetensors"))
    layer, theirs = "transformer.layers.3.", "model.layers.3."
    gate = torch.cat([r[f"{layer}mlp.fc.weight"].float() for r in ranks])
    assert torch.equal(gate, source[f"{theirs}mlp.gate_proj.weight"].float())
    for rank in ranks:
        assert rank[f"{layer}attention.qkv.weight"].dtype == torch.float8_e4m3fn
        assert rank[f"{layer}mlp.proj.activation_scaling_factor"].shape == (1,)
        assert rank[f"{layer}mlp.proj.activation_scaling_factor"] == source[f"{theirs}mlp.down_proj.input_scale"]
        factor = rank[f"{layer}attention.kv_cache_scaling_factor"]
        assert factor == max(source[f"{theirs}self_attn.{n}_proj.{n}_scale"] for n in "kv")
        assert rank["lm_head.weight"].dtype == torch.float32
    (tmp_path / "out" / "rank1.safetensors").unlink()
    assert [f.rule for f in check_folder(tmp_path / "out", "trtllm")] == ["ranks"]


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, 1, "Qwen3"),
        ({}, 3, "does not divide the base's num_attention_heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 48}, 4, "key/value heads"),
    ],
)
def test_legacy_refusals(base_folder: Path, change: dict[str, Any], tp: int, message: str) -> None:
    values = json.loads((base_folder / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        trtllm_legacy.check({**values, **change}, tp)
