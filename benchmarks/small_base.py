"""The small base of scale.py's equality test: a Llama, or a Qwen3 with experts, in Hugging Face format.

No torch here, except to write it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_spec.config import BaseConfig, UserError
from megatron_spec.families import parse_base_config

Raw = dict[str, Any]
_LLAMA: Raw = dict(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
    head_dim=64, vocab_size=8192, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", torch_dtype="float32",
)  # fmt: skip
_EXPERTS: Raw = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=704, norm_topk_prob=True,
)  # fmt: skip
_TINY: Raw = dict(hidden_size=128, intermediate_size=256, head_dim=8, vocab_size=512)


def config_json(experts: bool, tiny: bool) -> Raw:
    """Its config.json."""
    shape = {**_LLAMA, **(_TINY if tiny else {}), **(_EXPERTS if experts else {})}
    return {**shape, "moe_intermediate_size": 64} if experts and tiny else shape


def small_shape(experts: bool, tiny: bool) -> BaseConfig:
    """The configuration of the small base."""
    return parse_base_config(config_json(experts, tiny), "the small base")


def check_reference(folder: Path, experts: bool, tiny: bool, writes: bool) -> None:
    """Raise UserError unless `folder` has this base, or has none and the layout `one`, which writes it, comes first."""
    path = folder / "base" / "config.json"
    if not path.is_file():
        if writes:
            return
        raise UserError(f"--reference {folder}: found no base: run the layout one with this folder first")
    if json.loads(path.read_text(encoding="utf-8")) != config_json(experts, tiny):
        raise UserError(f"--reference {folder}: found the base of another --model or --tiny: use another folder")


def _sizes(shape: Raw) -> dict[str, tuple[int, ...]]:
    """Its tensors."""
    H, M, V, D = (int(shape[k]) for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    queries, keys = int(shape["num_attention_heads"]) * D, int(shape["num_key_value_heads"]) * D
    experts = int(shape.get("num_experts", 0))
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (V, H), "lm_head": (V, H)}
    for i in range(int(shape["num_hidden_layers"])):
        at = f"model.layers.{i}"
        sizes |= {f"{at}.self_attn.q_proj": (queries, H), f"{at}.self_attn.o_proj": (H, queries)}
        sizes |= {f"{at}.self_attn.{n}_proj": (keys, H) for n in "kv"}
        width, mlps = M, [f"{at}.mlp"]
        if experts:
            width, mlps = int(shape["moe_intermediate_size"]), [f"{at}.mlp.experts.{e}" for e in range(experts)]
            sizes |= {f"{at}.mlp.gate": (experts, H), f"{at}.self_attn.q_norm": (D,), f"{at}.self_attn.k_norm": (D,)}
        for mlp in mlps:
            sizes |= {f"{mlp}.{n}_proj": (width, H) for n in ("gate", "up")} | {f"{mlp}.down_proj": (H, width)}
        sizes |= {f"{at}.input_layernorm": (H,), f"{at}.post_attention_layernorm": (H,)}
    sizes["model.norm"] = (H,)
    return sizes


def write(folder: Path, experts: bool, tiny: bool) -> None:
    """Random weights; logits have a spread of a few units."""
    import torch
    from safetensors.torch import save_file

    generator, shape = torch.Generator().manual_seed(11), config_json(experts, tiny)
    tensors = {
        f"{n}.weight": torch.ones(s) if len(s) == 1 else torch.randn(s, generator=generator) * 1.5 * s[1] ** -0.5
        for n, s in _sizes(shape).items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
