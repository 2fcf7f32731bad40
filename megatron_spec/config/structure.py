"""The tensors of every draft: name, shape, how it is split, what it starts from. One table for all who need it.

Modules are checked against it when they are built (`drafts.build_draft`); initial values, the exported layout, the
reader of published drafts, the verification and the memory estimate are derived from it. No torch here.

H draft hidden, Ht target hidden, K captured layers, V target vocabulary, D draft vocabulary, F MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from megatron_spec.config.base import MlaConfig, MoeConfig
from megatron_spec.config.block import BlockConfig
from megatron_spec.config.draft import DraftConfig, EagleConfig, MedusaConfig

First = Literal["normal", "ones", "zeros", "head", "embedding", "captures", "feature"]
"""What a parameter starts from: noise, a constant, the base's head rows, the base's embedding, the captures passed
through, or the feature half of [embedding ; feature] passed through."""

FINAL_NORM = "norm.weight"
"""Name of the base's final norm among the tensors that initial values may be copied from."""
CHOICE_BIAS = "e_score_correction_bias"
"""Bias of a router's choice: fp32 in every file, and without a gradient."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a draft.

    Attributes:
        shape: of the whole tensor, not of a shard.
        split: dimension that is split over tensor parallel ranks; None for a replicated one.
        first: what it starts from.
        base: tensor of the base's last layer (its name there) that it may start from instead; where that is half as
            wide, the second half alone does ([embedding ; feature]: the feature).
        linear: the weight of a linear that may be quantised.
    """

    shape: tuple[int, ...]
    split: int | None = None
    first: First = "normal"
    base: str | None = None
    linear: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Table = dict[str, TensorSpec]


def share(total: int, ranks: int, rank: int) -> range:
    """The rows of a vocabulary on one rank: as many on each, fewer on the last one where `ranks` does not divide it.

    The rows need no padding, so a checkpoint has the true vocabulary and loads at any size.
    """
    width = -(-total // ranks)
    return range(min(rank * width, total), min((rank + 1) * width, total))


def _norm(size: int, base: str | None = None) -> TensorSpec:
    return TensorSpec((size,), first="ones", base=base)


def _column(rows: int, width: int, base: str | None = None) -> TensorSpec:
    return TensorSpec((rows, width), 0, base=base, linear=True)


def _row(rows: int, width: int, base: str | None = None) -> TensorSpec:
    return TensorSpec((rows, width), 1, base=base, linear=True)


def _bias(size: int, split: bool, base: str | None = None) -> TensorSpec:
    return TensorSpec((size,), 0 if split else None, first="zeros", base=base)


def layer_names(config: EagleConfig | BlockConfig) -> list[str]:
    """Prefix of every decoder layer: 'midlayer' loads in every engine; more layers need the numbered form."""
    if config.reads_captures and config.num_hidden_layers == 1:
        return ["midlayer"]
    return [f"layers.{i}" for i in range(config.num_hidden_layers)]


def draft_tensors(config: DraftConfig) -> Table:
    """Every parameter of the draft, under the names of its module."""
    if isinstance(config, MedusaConfig):
        return _medusa(config)
    if isinstance(config, BlockConfig):
        return _block(config)
    table = _ends(config)
    for i, layer in enumerate(layer_names(config)):
        table |= {f"{layer}.{name}": spec for name, spec in _layer(config, i == 0).items()}
    return table


def _medusa(config: MedusaConfig) -> Table:
    H, table = config.hidden_size, {}
    for h in range(config.num_heads):
        for i in range(config.num_layers):
            block = f"heads.{h}.blocks.{i}.linear"
            table[f"{block}.weight"] = TensorSpec((H, H), first="zeros", linear=True)
            table[f"{block}.bias"] = _bias(H, split=False)
        if not config.share_base_head:
            table[f"heads.{h}.lm_head.weight"] = TensorSpec((config.vocab_size, H), 0, first="head", linear=True)
    return table


def _block(config: BlockConfig) -> Table:
    H, r = config.hidden_size, config.markov_rank
    table: Table = {
        "fc.weight": TensorSpec((H, len(config.capture_layer_ids) * H), first="captures", linear=True),
        "hidden_norm.weight": _norm(H),
        FINAL_NORM: _norm(H, FINAL_NORM),
    }
    if config.own_head:
        table["lm_head.weight"] = TensorSpec((config.draft_vocab_size, H), 0, first="head")
    for i, prefix in enumerate(layer_names(config)):
        layer = {"input_layernorm.weight": _norm(H), **_block_attention(config)}
        layer |= {"post_attention_layernorm.weight": _norm(H, "post_attention_layernorm.weight"), **_mlp(config)}
        table |= {f"{prefix}.{n}": spec if i == 0 else replace(spec, base=None) for n, spec in layer.items()}
    return table | (_markov(config, r) if r else {})


def _block_attention(config: BlockConfig) -> Table:
    """q, k and v stay in high precision: SGLang has no scales for them, TensorRT-LLM slices the fused weight."""
    fused = {f"self_attn.{x}_proj.weight" for x in "qkv"}
    table = _attention(config, config.hidden_size)
    return {name: replace(spec, linear=False) if name in fused else spec for name, spec in table.items()}


def _markov(config: BlockConfig, r: int) -> Table:
    """DSpark's heads. W2 starts at 0: without effect, but with a gradient."""
    H = config.hidden_size
    table: Table = {
        "markov_head.markov_w1.weight": TensorSpec((config.vocab_size, r), 0),
        "markov_head.markov_w2.weight": TensorSpec((config.draft_vocab_size, r), 0, first="zeros"),
    }
    inner = {"vanilla": None, "gated": ("gate_proj", r, H + r), "rnn": ("joint_proj", 3 * r, H + 2 * r)}
    if (shape := inner[config.markov_head_type]) is not None:
        name, rows, width = shape
        table[f"markov_head.{name}.weight"] = TensorSpec((rows, width))
        table[f"markov_head.{name}.bias"] = _bias(rows, split=False)
    if config.has_confidence_head:
        width = H + (r if config.confidence_reads_markov else 0)
        table["confidence_head.proj.weight"] = TensorSpec((1, width), first="zeros")
        table["confidence_head.proj.bias"] = _bias(1, split=False)
    return table


def quantisable(config: DraftConfig) -> list[str]:
    """Every linear of the decoder layers that may be quantised."""
    table = draft_tensors(config).items()
    return [n.removesuffix(".weight") for n, spec in table if spec.linear and (".self_attn." in n or ".mlp." in n)]


def _ends(config: EagleConfig) -> Table:
    """Everything outside of the decoder layers."""
    H, captured = config.hidden_size, len(config.capture_layer_ids) * config.target_hidden_size
    same_width = config.target_hidden_size == H
    if config.is_module:
        norms = {f"layers.0.{name}.weight": _norm(H) for name in ("enorm", "hnorm")}
        projection = TensorSpec((H, 2 * H), first="feature", linear=True)
        return {
            **norms,
            "layers.0.eh_proj.weight": projection,
            "layers.0.shared_head.norm.weight": _norm(H, FINAL_NORM),
        }
    table: Table = {"fc.bias": _bias(H, split=False)} if config.fc_bias else {}
    if not config.reads_captures:
        return {**table, "fc.weight": TensorSpec((H, 2 * H), first="feature", linear=True)}
    if config.norm_before_fc:
        table["input_norm.weight"] = _norm(captured)
    if config.fc_norm:
        table |= {f"fc_norm.{i}.weight": _norm(config.target_hidden_size) for i in range(len(config.capture_layer_ids))}
    table["fc.weight"] = TensorSpec((H, captured), first="captures" if same_width else "normal", linear=True)
    if config.parallel_drafting:
        table["mask_hidden"] = TensorSpec((1, 1, captured))
    table[FINAL_NORM] = _norm(H, FINAL_NORM)
    if config.own_embedding:
        table["embed_tokens.weight"] = TensorSpec((config.vocab_size, H), 0, first="embedding")
    head: First = "head" if same_width else "normal"
    table["lm_head.weight"] = TensorSpec((config.draft_vocab_size, H), 0, first=head, linear=True)
    return table


def _layer(config: EagleConfig, first: bool) -> Table:
    """One decoder layer. In EAGLE-3's first one `input_layernorm` is the norm of the token embedding."""
    H, reads_embedding = config.hidden_size, config.reads_captures and first
    table: Table = {}
    if reads_embedding:
        table |= {"input_layernorm.weight": _norm(H), "hidden_norm.weight": _norm(H, "input_layernorm.weight")}
    elif config.is_module:
        table["input_layernorm.weight"] = _norm(H, "input_layernorm.weight")
    elif config.reads_captures or not first:
        table["input_layernorm.weight"] = _norm(H)
    if config.mla is None:
        table |= _attention(config, 2 * H if reads_embedding else H)
    else:
        table |= _latent(config, config.mla)
    table["post_attention_layernorm.weight"] = _norm(H, "post_attention_layernorm.weight")
    table |= _mlp(config) if config.moe is None else _experts(config.moe, H)
    return table if first else {name: replace(spec, base=None) for name, spec in table.items()}


def _attention(config: EagleConfig | BlockConfig, width: int) -> Table:
    H, d = config.hidden_size, config.head_dim
    rows = {
        "q": config.num_attention_heads * d,
        "k": config.num_key_value_heads * d,
        "v": config.num_key_value_heads * d,
    }

    def copied(name: str) -> str | None:
        """The base's tensor of the same name, where attention starts from it."""
        return f"self_attn.{name}" if config.init_attention else None

    table = {f"self_attn.{x}_proj.weight": _column(n, width, copied(f"{x}_proj.weight")) for x, n in rows.items()}
    table["self_attn.o_proj.weight"] = _row(H, rows["q"], copied("o_proj.weight"))
    if config.attention_bias:
        table |= {
            f"self_attn.{x}_proj.bias": _bias(n, split=True, base=copied(f"{x}_proj.bias")) for x, n in rows.items()
        }
        table["self_attn.o_proj.bias"] = _bias(H, split=False, base=copied("o_proj.bias"))
    if config.qk_norm:
        table |= {f"self_attn.{x}_norm.weight": _norm(d, copied(f"{x}_norm.weight")) for x in "qk"}
    return table


def _mlp(config: EagleConfig | BlockConfig) -> Table:
    H, F = config.hidden_size, config.intermediate_size
    table = {f"mlp.{x}_proj.weight": _column(F, H, f"mlp.{x}_proj.weight") for x in ("gate", "up")}
    table["mlp.down_proj.weight"] = _row(H, F, "mlp.down_proj.weight")
    if config.mlp_bias:
        table |= {f"mlp.{x}_proj.bias": _bias(F, split=True) for x in ("gate", "up")}
        table["mlp.down_proj.bias"] = _bias(H, split=False)
    return table


def _latent(config: EagleConfig, mla: MlaConfig) -> Table:
    H, N = config.hidden_size, config.num_attention_heads
    queries, keys = N * (mla.nope_head_dim + mla.rope_head_dim), N * (mla.nope_head_dim + mla.v_head_dim)
    table = {
        "kv_a_proj_with_mqa.weight": TensorSpec((mla.kv_lora_rank + mla.rope_head_dim, H), linear=True),
        "kv_a_layernorm.weight": _norm(mla.kv_lora_rank),
        "kv_b_proj.weight": _column(keys, mla.kv_lora_rank),
        "o_proj.weight": _row(H, N * mla.v_head_dim),
    }
    if mla.q_lora_rank is None:
        table["q_proj.weight"] = _column(queries, H)
    else:
        low = mla.q_lora_rank
        table |= {"q_a_proj.weight": TensorSpec((low, H), linear=True), "q_a_layernorm.weight": _norm(low)}
        table["q_b_proj.weight"] = _column(queries, low)
    return {f"self_attn.{name}": spec for name, spec in table.items()}


def _experts(moe: MoeConfig, H: int) -> Table:
    widths = {f"experts.{e}": moe.intermediate_size for e in range(moe.num_experts)}
    if moe.shared_intermediate_size:
        widths["shared_experts"] = moe.shared_intermediate_size
    table: Table = {"mlp.gate.weight": TensorSpec((moe.num_experts, H))}
    if moe.choice_bias:
        table[f"mlp.gate.{CHOICE_BIAS}"] = TensorSpec((moe.num_experts,), first="zeros")
    for expert, width in widths.items():
        for x in ("gate", "up"):
            table[f"mlp.{expert}.{x}_proj.weight"] = _column(width, H)
        table[f"mlp.{expert}.down_proj.weight"] = _row(H, width)
    return table
