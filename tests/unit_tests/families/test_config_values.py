"""Values of a config.json that transformers reads: absent ones, and those that this package must not ignore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.checkpoint.huggingface import HuggingFaceWeights
from megatron_spec.config import UserError
from megatron_spec.families import parse_base_config, read_base_config
from megatron_spec.families.rules import name_rules
from megatron_spec.runtime import distributed
from tests.unit_tests.families.families import MODELS, save

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=48, num_hidden_layers=4, num_attention_heads=32, vocab_size=50
)
NEEDED: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "deepseek_v3": dict(
        kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, n_routed_experts=16,
        num_experts_per_tok=2, moe_intermediate_size=8,
    ),
}  # fmt: skip
IGNORED = {"bos_token_id": None, "eos_token_ids": (), "pad_token_id": None, "mtp_layers": 0, "torch_dtype": "float32"}


@pytest.mark.parametrize("name", [name for name in MODELS if " " not in name])
@pytest.mark.parametrize("more", [{}, {"use_sliding_window": True, "max_position_embeddings": 8192}])
def test_absent_values_are_those_of_transformers(name: str, more: dict[str, Any]) -> None:
    stem = MODELS[name][0]
    given = {**SIZES, **NEEDED.get(name, {}), **more}
    whole = json.loads(getattr(transformers, f"{stem}Config")(**given).to_json_string(use_diff=False))
    kind = {"architectures": [f"{stem}ForCausalLM"], "model_type": name}
    found, expected = (parse_base_config({**raw, **kind}, "config.json").replace(**IGNORED) for raw in (given, whole))
    assert found == expected


LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"]}
QWEN = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({**LLAMA, "model_type": "mistral"}, "model_type 'mistral' beside architectures"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "LlamaForCausalLM rotates whole heads"),
    ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates whole heads"),
    ({**LLAMA, "head_dim": 5}, "5 of 5 dimensions of a head are rotated, expected an even number"),
    ({**LLAMA, "architectures": ["Phi3ForCausalLM"], "head_dim": 10, "partial_rotary_factor": 0.5}, "5 of 10 dimens"),
    ({**LLAMA, "per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config is not supported"),
    ({**LLAMA, "transformers_weights": "other.safetensors"}, "transformers_weights is not supported"),
    ({**LLAMA, "architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}},
     "'linear' is not supported for Phi3ForCausalLM; supported: default, longrope"),
    ({**QWEN, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 4}, "has chunked_attention, which"),
    ({**QWEN, "layer_types": ["full_attention"] * 3}, "has 3 entries, expected one for each of 4 layers"),
    ({**QWEN, "layer_types": ["sliding_attention"] * 4}, "there is no window .*use_sliding_window false"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "message"), REFUSALS)
def test_values_that_may_not_be_ignored(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_base_config(raw, "config.json")


def test_a_tied_head_must_be_a_copy(tmp_path: Path) -> None:
    save("llama", tmp_path, tie_word_embeddings=True)
    file, config = tmp_path / "model.safetensors", read_base_config(tmp_path)
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with HuggingFaceWeights(tmp_path) as weights:
        weights.check(name_rules(config), config)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with HuggingFaceWeights(tmp_path) as weights, pytest.raises(UserError, match="is not a copy of"):
        weights.check(name_rules(config), config)


def test_the_weights_of_two_sets_that_transformers_reads(tmp_path: Path) -> None:
    """Saving a smaller model leaves the index and may leave the shards of a larger one."""
    save("llama", tmp_path, seed=1, max_shard_size="20KB")
    shards = {path: path.read_bytes() for path in tmp_path.glob("model-*.safetensors")}
    model = save("llama", tmp_path, seed=2)
    for place, content in shards.items():
        place.write_bytes(content)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    base = load_base(inspect_base(tmp_path), distributed.initialize())
    assert torch.equal(base.head_weight, model.lm_head.weight)
    distributed.shutdown()
