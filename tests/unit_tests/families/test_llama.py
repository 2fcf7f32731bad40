from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.config import BaseConfig, RopeConfig, UserError
from megatron_spec.families import config_json, parse_base_config, read_base_config
from megatron_spec.families.megatron_args import config_from_args
from megatron_spec.families.names import hf_shapes, join_shards, merge_qkv, read_shard, to_hf
from megatron_spec.families.rules import name_rules

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 83, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "eos_token_id": [2, 5], "bos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def parse(**changes: Any) -> BaseConfig:
    return parse_base_config({**RAW, **changes}, "config.json")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(type="linear", factor=2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
         RopeConfig(theta=5e5, type="llama3", **LLAMA3)),
        ({"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}}, RopeConfig(theta=7e4)),
        ({"rope_parameters": {"rope_theta": 7e4, "rope_type": "llama3", **LLAMA3}},
         RopeConfig(theta=7e4, type="llama3", **LLAMA3)),
    ],
)  # fmt: skip
def test_every_form_of_rope(changes: dict[str, Any], expected: RopeConfig) -> None:
    assert parse(**changes).rope == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 7e4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": DEFAULT, "rope_scaling": YARN}, "'rope_type': 'yarn', 'rope_theta': 10000.0"),
        ({"rope_parameters": DEFAULT, "rope_scaling": {**YARN, "rope_theta": 7e4}}, "'rope_type': 'yarn'"),
        ({"rope_parameters": {**YARN, "rope_theta": 7e4}, "rope_scaling": {**YARN, "factor": 2.0}, "rope_theta": 7e4},
         "'factor': 2.0"),
        ({"rope_parameters": {**YARN, "rope_theta": 7e4}, "rope_theta": 5e5}, "'rope_theta': 70000.0"),
        ({"rope_parameters": {**YARN, "rope_theta": 7e4}, "rope_scaling": None, "rope_theta": 7e4}, ""),
        ({"rope_parameters": DEFAULT, "rope_scaling": {"type": "default"}, "rope_theta": 7e4}, ""),
    ],
)  # fmt: skip
def test_duplicate_rope_is_read_as_in_transformers(
    changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from copy import deepcopy

    from transformers import LlamaConfig

    expected = LlamaConfig(**deepcopy({**RAW, **changes})).rope_parameters
    rope = parse_base_config({**RAW, **changes}, f"{said} config.json").rope
    assert (rope.type, rope.theta) == (expected["rope_type"], expected["rope_theta"])
    assert rope.factor == expected.get("factor", 1.0)
    assert said in caplog.text and bool(said) == ("contradict" in caplog.text)


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": 2, "pad_token_id": 3, "tie_word_embeddings": True},
        {"bos_token_id": None, "eos_token_id": None, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": 99},
    ],
)
def test_written_config_round_trip(changes: dict[str, Any]) -> None:
    config = parse(**changes)
    assert parse_base_config(config_json(config), "written") == config


def test_ids_and_defaults() -> None:
    config = parse()
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((2, 5), 1, None)
    assert config.torch_dtype == "bfloat16" and not config.tie_word_embeddings
    small = parse(num_key_value_heads=None, head_dim=None)
    assert (small.num_key_value_heads, small.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLm"]}, "did you mean 'LlamaForCausalLM'.*supported: LlamaForCausalLM"),
        ({"architectures": None}, "supported: LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "needs low_freq_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "already quantised"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "already quantised .*unknown method"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "already quantised .*compressed-tensors"),
    ],
)
def test_unsupported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(**changes)


def test_missing_fields_are_named() -> None:
    raw = {k: v for k, v in RAW.items() if k not in ("hidden_size", "vocab_size")}
    with pytest.raises(UserError, match="missing hidden_size, vocab_size"):
        parse_base_config(raw, "config.json")


def test_reading_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        read_base_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_base_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert read_base_config(tmp_path) == parse()


def test_qkv_interleave_golden() -> None:
    """Two key/value heads, four query heads of size 1: q0 q1 k0 v0 | q2 q3 k1 v1."""
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert merge_qkv(q[:, None], k[:, None], v[:, None], 2).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize("tp", [1, 2, 4])  # 4: more ranks than key/value heads
def test_shards_join_to_what_was_imported(tp: int) -> None:
    """Import on every rank, join, export: every parameter is bit-equal, and no rank reads more than its shard."""
    config = parse()
    torch.manual_seed(0)
    for rule in name_rules(config):
        tensors = {name: torch.randn(shape) for name, shape in hf_shapes(rule).items()}
        read_count = [0]

        def read(
            name: str, dim: int, start: int, stop: int, tensors: dict[str, Tensor] = tensors, n: list[int] = read_count
        ) -> Tensor:
            part = tensors[name].narrow(dim, start, stop - start)
            n[0] += part.numel()
            return part

        shards = [read_shard(rule, config, rank, tp, read) for rank in range(tp)]
        total = sum(t.numel() for t in tensors.values())
        # With more ranks than key/value heads, ranks that share a group read it each.
        allowed = tp if rule.kind == "replicated" else tp // 2 if rule.kind == "qkv" and tp > 2 else 1
        assert read_count[0] == total * allowed, rule.core
        exported = to_hf(rule, join_shards(rule, shards), config)
        assert exported.keys() == tensors.keys()
        assert all(torch.equal(exported[name], tensors[name]) for name in tensors), rule.core


def test_tied_head_has_no_rule() -> None:
    assert "output_layer.weight" in {r.core for r in name_rules(parse())}
    assert "output_layer.weight" not in {r.core for r in name_rules(parse(tie_word_embeddings=True))}


ARGS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "group_query_attention": True, "kv_channels": 12, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
    "rotary_base": 10000, "vocab_size": 83, "untie_embeddings_and_output_weights": True, "bf16": True,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
}  # fmt: skip


def test_megatron_arguments() -> None:
    expected = parse(eos_token_id=None, bos_token_id=None)
    assert config_from_args(ARGS, "x") == expected
    scaled = config_from_args({**ARGS, "use_rope_scaling": True, "rotary_base": 500000}, "x").rope
    assert scaled == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None, "padded_vocab_size": 128}, "only the padded vocabulary"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"normalization": "LayerNorm", "swiglu": False}, "normalization='LayerNorm', swiglu=False"),
        ({"hidden_size": None}, "lack hidden_size"),
        ({"window_size": (127, 0)}, r"window_size=\(127, 0\)"),
        ({"no_rope_freq": 4, "qk_l2_norm": True}, "no_rope_freq=4, qk_l2_norm=True"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
        ({"squared_relu": True}, "squared_relu=True"),
    ],
)
def test_megatron_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_from_args({**ARGS, **changes}, "x")
