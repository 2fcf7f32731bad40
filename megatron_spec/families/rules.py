"""The parameters of a base, from its BaseConfig and its family's naming."""

from __future__ import annotations

from megatron_spec.config import BaseConfig, MlaConfig, MoeConfig
from megatron_spec.families.families import BY_NAME, Naming
from megatron_spec.families.names import ALL_EXPERTS, Kind, NameRule


def _one(core: str, hf: str, kind: Kind, *shape: int, float32: bool = False) -> NameRule:
    return NameRule(core, (hf,), kind, (shape,), float32)


def _qkv(config: BaseConfig, core: str, hf: str, naming: Naming) -> list[NameRule]:
    H, D = config.hidden_size, config.head_dim
    rows = (config.num_attention_heads * D, *[config.num_key_value_heads * D] * 2)
    core += "linear_qkv."
    if naming.fused:
        return [_one(core + "weight", hf + "qkv_proj.weight", "fused_qkv", sum(rows), H)]
    parts = [hf + f"{part}_proj." for part in "qkv"]
    rules = [NameRule(core + "weight", tuple(p + "weight" for p in parts), "qkv", tuple((r, H) for r in rows))]
    if config.qkv_bias or config.attention_bias:
        rules.append(NameRule(core + "bias", tuple(p + "bias" for p in parts), "qkv", tuple((r,) for r in rows)))
    return rules


def _latent(config: BaseConfig, mla: MlaConfig, core: str, hf: str) -> list[NameRule]:
    H, N, rank = config.hidden_size, config.num_attention_heads, mla.kv_lora_rank
    rules = []
    if mla.q_lora_rank is None:
        rules.append(_one(core + "linear_q_proj.weight", hf + "q_proj.weight", "rows", N * config.head_dim, H))
    else:
        Q = mla.q_lora_rank
        rules += [
            _one(core + "linear_q_down_proj.weight", hf + "q_a_proj.weight", "replicated", Q, H),
            _one(core + "q_layernorm.weight", hf + "q_a_layernorm.weight", "replicated", Q),
            _one(core + "linear_q_up_proj.weight", hf + "q_b_proj.weight", "rows", N * config.head_dim, Q),
        ]
    down, up = rank + mla.rope_head_dim, N * (mla.nope_head_dim + mla.v_head_dim)
    return [
        *rules,
        _one(core + "linear_kv_down_proj.weight", hf + "kv_a_proj_with_mqa.weight", "replicated", down, H),
        _one(core + "kv_layernorm.weight", hf + "kv_a_layernorm.weight", "replicated", rank),
        _one(core + "linear_kv_up_proj.weight", hf + "kv_b_proj.weight", "rows", up, rank),
    ]


def _attention(config: BaseConfig, core: str, hf: str, naming: Naming) -> list[NameRule]:
    H, N, D = config.hidden_size, config.num_attention_heads, config.head_dim
    core, hf = core + "self_attention.", hf + "self_attn."
    rules = _latent(config, config.mla, core, hf) if config.mla else _qkv(config, core, hf, naming)
    if config.qk_norm:
        rules += [_one(core + f"{x}_layernorm.weight", hf + f"{x}_norm.weight", "replicated", D) for x in "qk"]
    if config.attention_sinks:
        rules.append(_one(core + "core_attention.softmax_offset", hf + "sinks", "rows", N))
    rules.append(_one(core + "linear_proj.weight", hf + "o_proj.weight", "columns", H, N * config.value_dim))
    if config.attention_bias:
        rules.append(_one(core + "linear_proj.bias", hf + "o_proj.bias", "replicated", H))
    return rules


def _mlp(core: str, hf: str, names: tuple[str, str, str], H: int, F: int, fused: bool = False) -> list[NameRule]:
    gate, up, down = (hf + name + ".weight" for name in names)
    if fused:
        first = _one(core + "linear_fc1.weight", hf + "gate_up_proj.weight", "fused_gate_up", 2 * F, H)
    else:
        first = NameRule(core + "linear_fc1.weight", (gate, up), "gate_up", ((F, H), (F, H)))
    return [first, _one(core + "linear_fc2.weight", down, "columns", H, F)]


def _stacked_experts(moe: MoeConfig, core: str, hf: str, H: int) -> list[NameRule]:
    E, F = moe.num_experts, moe.intermediate_size
    core, hf = f"{core}experts.local_experts.{ALL_EXPERTS}.linear_", hf + "experts."
    return [
        _one(core + "fc1.weight", hf + "gate_up_proj", "stacked_gate_up", E, H, 2 * F),
        _one(core + "fc1.bias", hf + "gate_up_proj_bias", "stacked_gate_up_bias", E, 2 * F),
        _one(core + "fc2.weight", hf + "down_proj", "stacked_down", E, F, H),
        _one(core + "fc2.bias", hf + "down_proj_bias", "stacked_down_bias", E, H),
    ]


def _experts(config: BaseConfig, moe: MoeConfig, core: str, hf: str, naming: Naming) -> list[NameRule]:
    H, E = config.hidden_size, moe.num_experts
    core, hf = core + "mlp.", f"{hf}{naming.moe}."
    names, router = (naming.gate, naming.up, naming.down), f"{hf}{naming.router}."
    rules = [_one(core + "router.weight", router + "weight", "replicated", E, H)]
    if moe.bias:
        rules.append(_one(core + "router.bias", router + "bias", "replicated", E))
    if moe.choice_bias:
        bias = router + "e_score_correction_bias"
        rules.append(_one(core + "router.expert_bias", bias, "replicated", E, float32=True))
    if naming.stacked:
        return rules + _stacked_experts(moe, core, hf, H)
    for e in range(E):
        inner = f"{core}experts.local_experts.{e}."
        rules += _mlp(inner, f"{hf}experts.{e}.", names, H, moe.intermediate_size)
    if moe.shared_intermediate_size:
        rules += _mlp(core + "shared_experts.", hf + "shared_experts.", names, H, moe.shared_intermediate_size)
    return rules


def name_rules(config: BaseConfig) -> list[NameRule]:
    """All parameters: embedding, layers, final norm, LM head (absent if tied to the embedding)."""
    naming = BY_NAME[config.family].naming
    H, V = config.hidden_size, config.vocab_size
    rules = [_one("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab", V, H)]
    for i in range(config.num_layers):
        core, hf = f"decoder.layers.{i}.", f"model.layers.{i}."
        rules.append(_one(core + "input_layernorm.weight", hf + "input_layernorm.weight", "replicated", H))
        rules += _attention(config, core, hf, naming)
        rules.append(_one(core + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", "replicated", H))
        if config.moe is not None and config.has_experts(i):
            rules += _experts(config, config.moe, core, hf, naming)
        else:
            names = ("gate_proj", "up_proj", "down_proj")
            rules += _mlp(core + "mlp.", hf + "mlp.", names, H, config.intermediate_size, naming.fused)
    rules.append(_one("decoder.final_layernorm.weight", "model.norm.weight", "replicated", H))
    if not config.tie_word_embeddings:
        rules.append(_one("output_layer.weight", "lm_head.weight", "vocab", V, H))
    return rules


def prediction_layer(name: str, config: BaseConfig) -> int | None:
    """Index of the prediction module of a tensor, a layer after the base's last one (DeepSeek-V3); else None."""
    if config.family != "deepseek_v3" or not name.startswith("model.layers."):
        return None
    number = name.split(".")[2]
    return int(number) if number.isdigit() and int(number) >= config.num_layers else None


def is_ignorable(name: str, config: BaseConfig) -> bool:
    """True for tensors of a checkpoint that the base does not need.

    Rotary buffers in old files, a copy of a tied LM head, and prediction modules after the last layer (DeepSeek).
    """
    if prediction_layer(name, config) is not None:
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
