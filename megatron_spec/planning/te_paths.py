"""Reasons that block the fast paths of a base of Transformer Engine's modules (`planning.paths`)."""

from __future__ import annotations

from megatron_spec.config import BaseConfig
from megatron_spec.planning.setting import Reasons, Setting, fp8_products


def _engine(s: Setting) -> Reasons:
    return {"--transformer-impl local builds the base": not s.layers.engine, "there is no GPU": not s.machine.gpu}


def _half(s: Setting) -> Reasons:
    return {f"weights are in {s.dtype}, not in half precision (--bf16)": s.dtype not in ("bfloat16", "float16")}


def _head_sizes(*sizes: int) -> Reasons:
    reason = f"heads of keys and values have {sizes} dimensions, not multiples of 8 up to 256"
    return {reason: any(size % 8 or size > 256 for size in sizes)}


def te_attention(s: Setting) -> Reasons:
    """Of Transformer Engine's attention in the base."""
    base, parallel = s.base, s.parallel
    if base is None:
        return {"the base's layers do not run": True}
    return {
        **_engine(s),
        **_half(s),
        "ranks share the sequence (context parallelism)": parallel.context_parallel_size > 1,
        "the base has fewer key/value heads than tensor parallel ranks": bool(
            base.num_key_value_heads % parallel.tensor_model_parallel_size
        ),
        **_head_sizes(base.head_dim, base.value_dim),
    }


def te_experts(s: Setting) -> Reasons:
    """Of Transformer Engine's grouped linears in the base."""
    return {
        **_engine(s), **_half(s), "the base has no experts": s.base is None or s.base.moe is None,
    }  # fmt: skip


def te_fp8(s: Setting) -> Reasons:
    """Of Transformer Engine's fp8 for the base's linears."""
    base, multiple = s.base, 128 if s.layers.recipe == "blockwise" else 16
    sizes = () if base is None else linear_sizes(base, s.parallel.tensor_model_parallel_size)
    return {
        "the base's layers do not run": base is None,
        **_engine(s),
        **fp8_products(s),
        "the base is fake-quantised": s.quant is not None and (s.quant.base != "none" or s.quant.kv_cache != "none"),
        # Transformer Engine updates all ranges after a forward of either; ranks without supervised rows run no draft.
        "context parallel ranks would wait for one another (--fp8-recipe delayed and --draft-fp8-recipe)": (
            s.layers.recipe == "delayed" and s.draft_fp8_recipe is not None and s.parallel.context_parallel_size > 1
        ),
        f"inputs and outputs of the base's linears per rank are {sizes}, not all multiples of {multiple}": any(
            size % multiple for size in sizes
        ),
    }


def linear_sizes(base: BaseConfig, tp_size: int) -> tuple[int, ...]:
    """Different sizes of the inputs and outputs of the linears in the base's layers, on each tensor parallel rank."""
    heads, H = base.num_attention_heads // tp_size, base.hidden_size
    sizes = {H, heads * base.value_dim}
    if base.mla is not None:
        mla = base.mla
        sizes |= {mla.kv_lora_rank, mla.kv_lora_rank + mla.rope_head_dim, heads * base.head_dim}
        sizes |= {heads * (mla.nope_head_dim + mla.v_head_dim), mla.q_lora_rank or H}
    else:
        sizes.add((base.num_attention_heads + 2 * base.num_key_value_heads) * base.head_dim // tp_size)
    layers = range(base.num_layers)
    if not all(base.has_experts(layer) for layer in layers):
        sizes.add(base.intermediate_size // tp_size)
    if base.moe is not None:
        sizes |= {
            width // tp_size for width in (base.moe.intermediate_size, base.moe.shared_intermediate_size) if width
        }
    return tuple(sorted(sizes))
