"""Base families: what each adds to the common fields of a config.json, and the names of its tensors.

All families rotate the first half of a head's dimensions against the second, as megatron-core does, so rows of q and k
keep their order on import; DeepSeek rotates adjacent pairs (`MlaConfig.interleaved`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_spec.config import BaseConfig, MlaConfig, MoeConfig, UserError
from megatron_spec.config.rope import mscale, read_rope, rope_values
from megatron_spec.families import fields

Raw = dict[str, Any]


@dataclass(frozen=True)
class Naming:
    """Names and layout of the Hugging Face tensors of a family's layers.

    Attributes:
        fused: q, k, v in one matrix, gate and up in another (Phi-3).
        moe: prefix of the mixture of experts inside a layer.
        router: name of its router.
        gate, up, down: names of an expert's matrices.
        stacked: one transposed tensor has all experts, with gate and up interleaved (gpt-oss).
    """

    fused: bool = False
    moe: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: `BaseConfig.family`.
        architecture: `architectures` in config.json.
        models: models of this architecture, for docs/families.md.
        extra: (config.json, its source for errors) -> arguments of BaseConfig in addition to the common ones.
        naming: names of its tensors.
        absent: values of keys that a config.json lacks, as in transformers, where they are not those of `fields`.
        partial: rotates part of a head with `partial_rotary_factor`.
        ropes: supported types of its rotary embedding; empty: all.
        quantized: quant_method of weights that are dequantised on import, besides block-wise fp8, which every family
            supports.
    """

    name: str
    architecture: str
    models: str
    extra: Callable[[Raw, str], Raw]
    naming: Naming = Naming()
    absent: Raw = field(default_factory=dict)
    partial: bool = False
    ropes: tuple[str, ...] = ()
    quantized: str = ""


def _window_everywhere(raw: Raw) -> Raw:
    return fields.window(
        raw.get("sliding_window"), fields.all_layers(raw), raw.get("max_position_embeddings", 2048)
    )  # fmt: skip


def _window_by_type(raw: Raw, default: tuple[int, ...], where: str) -> Raw:
    """Window of the layers with sliding attention in layer_types (transformers 5); without it, of `default`."""
    found = fields.sliding_layers(raw, where)
    layers = default if found is None else found
    return fields.window(raw.get("sliding_window"), layers, raw.get("max_position_embeddings", 2048))


def _llama(raw: Raw, where: str) -> Raw:
    fields.refuse_true(raw, ("attention_bias", "mlp_bias"), where)
    return {}


def _mistral(raw: Raw, where: str) -> Raw:
    return _window_everywhere(raw)


def _phi3(raw: Raw, where: str) -> Raw:
    fields.refuse_true(raw, ("attention_bias",), where)
    return _window_everywhere(raw)


def _qwen2(raw: Raw, where: str) -> Raw:
    begin = raw.get("max_window_layers", 28)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    late = tuple(range(begin, raw["num_hidden_layers"]))
    return {"qkv_bias": True, **_window_by_type({**raw, "sliding_window": window}, late, where)}


def _qwen3(raw: Raw, where: str) -> Raw:
    fields.refuse_true(raw, ("attention_bias",), where)
    return {**_qwen2(raw, where), "qkv_bias": False, "qk_norm": True, "head_dim": raw.get("head_dim") or 128}


def _mixtral(raw: Raw, where: str) -> Raw:
    fields.require(raw, ("num_local_experts", "num_experts_per_tok"), where)
    moe = MoeConfig(
        num_experts=raw["num_local_experts"], experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
    )  # fmt: skip
    return {**_window_everywhere(raw), "moe": moe}


def _qwen3_moe(raw: Raw, where: str) -> Raw:
    fields.refuse_true(raw, ("attention_bias",), where)
    experts: Any = raw.get("num_experts") or raw.get("num_local_experts")
    fields.require(
        {**raw, "num_experts": experts}, ("num_experts", "num_experts_per_tok", "moe_intermediate_size"), where
    )
    step, only_dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    dense = tuple(i for i in fields.all_layers(raw) if i in only_dense or (i + 1) % step)
    moe = MoeConfig(
        num_experts=experts, experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"], normalize=bool(raw.get("norm_topk_prob", False)),
        dense_layers=dense,
    )  # fmt: skip
    found: Raw = {"moe": moe, "qk_norm": True}
    if raw.get("use_sliding_window"):
        found |= _window_everywhere(raw)
    return found


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Rotary embedding of a gpt-oss config.json without one, as in transformers."""


def _gpt_oss(raw: Raw, where: str) -> Raw:
    fields.require(raw, ("num_local_experts", "num_experts_per_tok", "head_dim"), where)
    moe = MoeConfig(
        num_experts=raw["num_local_experts"], experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"], router="softmax_of_chosen", bias=True,
        clamp=float(raw.get("swiglu_limit", 7.0)), alpha=float(raw.get("swiglu_alpha", 1.702)),
    )  # fmt: skip
    every_second = tuple(range(0, raw["num_hidden_layers"], 2))
    rope = {} if fields.has_rope(raw) else {"rope": read_rope({**raw, "rope_parameters": _GPT_OSS_ROPE}, where)}
    return {
        **_window_by_type(raw, every_second, where), **rope, "moe": moe, "attention_sinks": True,
        "attention_bias": bool(raw.get("attention_bias", True)),
    }  # fmt: skip


def _deepseek_v3(raw: Raw, where: str) -> Raw:
    needed = (
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "num_experts_per_tok",
        "moe_intermediate_size",
    )  # fmt: skip
    fields.require(raw, needed, where)
    fields.refuse_true(raw, ("attention_bias",), where)
    for name, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if raw.get(name, expected) != expected:
            raise UserError(f"{where}: {name} {raw[name]!r} is not supported; expected {expected!r}")
    rope = rope_values(raw)
    factor = 1.0
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        factor = mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    mla = MlaConfig(
        kv_lora_rank=raw["kv_lora_rank"], nope_head_dim=raw["qk_nope_head_dim"], rope_head_dim=raw["qk_rope_head_dim"],
        v_head_dim=raw["v_head_dim"], q_lora_rank=raw.get("q_lora_rank"), score_factor=factor,
        interleaved=bool(raw.get("rope_interleave", True)),
    )  # fmt: skip
    moe = MoeConfig(
        num_experts=raw["n_routed_experts"], experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"], router="sigmoid",
        normalize=bool(raw.get("norm_topk_prob", True)), scale=float(raw.get("routed_scaling_factor", 1.0)),
        groups=raw.get("n_group") or 1, groups_per_token=raw.get("topk_group") or 1, choice_bias=True,
        shared_intermediate_size=raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
        dense_layers=tuple(range(raw.get("first_k_dense_replace") or 0)),
    )  # fmt: skip
    heads = raw["num_attention_heads"]
    return {
        "mla": mla, "moe": moe, "head_dim": mla.nope_head_dim + mla.rope_head_dim, "num_key_value_heads": heads,
        "mtp_layers": int(raw.get("num_nextn_predict_layers") or 0),
    }  # fmt: skip


_QWEN: Raw = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2", _llama),
    Family(
        "mistral", "MistralForCausalLM", "Mistral 7B, Nemo, Small", _mistral,
        absent={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        "phi3", "Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4", _phi3, Naming(fused=True), partial=True,
        ropes=("default", "longrope"),
        absent={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen 1.5, 2, 2.5", _qwen2, absent=_QWEN),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3", _qwen3, absent=_QWEN),
    Family(
        "mixtral", "MixtralForCausalLM", "Mixtral 8x7B, 8x22B", _mixtral,
        Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2"),
        absent={"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3 30B-A3B, 235B-A22B", _qwen3_moe,
        absent={**_QWEN, "num_key_value_heads": 4},
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM", "gpt-oss 20b, 120b", _gpt_oss, Naming(router="router", stacked=True),
        quantized="mxfp4",
        absent={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 128,
        },
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek-V3, R1 (fp8 or bf16)", _deepseek_v3,
        absent={
            "max_position_embeddings": 4096, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        },
    ),
)  # fmt: skip

REFUSED = {
    "GemmaForCausalLM": "scales its embeddings, adds 1 to its norm weights, and uses GELU",
    "Gemma2ForCausalLM": "soft-caps its logits and has norms after attention and MLP",
    "Gemma3ForCausalLM": "has norms after attention and MLP and two rotary bases",
    "Phi3SmallForCausalLM": "has block-sparse attention",
    "PhiForCausalLM": "runs attention and MLP in parallel",
    "PhiMoEForCausalLM": "has a router (SparseMixer) that megatron-core lacks",
    "Qwen2MoeForCausalLM": "gates its shared expert, which megatron-core 0.16 lacks",
    "Qwen3NextForCausalLM": "has linear attention (Gated DeltaNet layers), which is not built here yet",
    "DeepseekV2ForCausalLM": "has a different router from DeepSeek-V3, which is not implemented yet",
    "DeepseekV32ForCausalLM": "has sparse attention (an indexer), which is not implemented yet",
    "Llama4ForConditionalGeneration": "has chunked attention and image inputs",
    "CohereForCausalLM": "runs attention and MLP in parallel and scales its logits",
    "FalconForCausalLM": "runs attention and MLP in parallel",
    "GPT2LMHeadModel": "has learned position embeddings and LayerNorm",
    "GPTNeoXForCausalLM": "runs attention and MLP in parallel, with LayerNorm",
    "MambaForCausalLM": "has Mamba layers, which are not built here yet",
}
"""Architectures that are refused by name, with the reason; shown in docs/families.md."""

BY_NAME = {family.name: family for family in FAMILIES}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}


def parse(family: Family, raw: Raw, where: str) -> BaseConfig:
    """BaseConfig from a config.json. Raises UserError naming the field that is missing or not supported."""
    quantization = raw.get("quantization_config") or raw.get("compression_config") or {}  # earlier compressed-tensors
    method = quantization.get("quant_method", "")
    if method == "fp8":
        fields.fp8_block(quantization, where)
    elif quantization and (not method or method != family.quantized):
        raise UserError(
            f"{where}: the base is already quantised (quantization_config, {method or 'unknown method'}); use the "
            "original in bf16"
        )
    fields.check_consistent(raw, family.name, [other.name for other in FAMILIES], where)
    config = BaseConfig(**{"family": family.name, **fields.common(raw, where), **family.extra(raw, where)})
    _check_rope(family, config, where)
    return config


def _check_rope(family: Family, config: BaseConfig, where: str) -> None:
    """Raise UserError for rotary embeddings that this family does not have in transformers."""
    rope, size = config.rope, config.mla.rope_head_dim if config.mla else config.head_dim
    if rope.partial_rotary_factor != 1.0 and not family.partial:
        raise UserError(
            f"{where}: found partial_rotary_factor {rope.partial_rotary_factor}, but {family.architecture} rotates "
            "whole heads: remove it"
        )
    if rope.rotary_dim(size) % 2 or not rope.rotary_dim(size):
        raise UserError(
            f"{where}: {rope.rotary_dim(size)} of {size} dimensions of a head are rotated, expected an even number of "
            "at least 2: dimensions are rotated in pairs"
        )
    if family.ropes and rope.type not in family.ropes:
        raise UserError(
            f"{where}: rope type {rope.type!r} is not supported for {family.architecture}; supported: "
            f"{', '.join(family.ropes)}"
        )
