"""Reasons that block the fast paths of a base (`planning.paths`)."""

from __future__ import annotations

from megatron_spec.config import BaseConfig
from megatron_spec.planning.setting import Reasons, Setting, fp8_products, half_kernels, wide_kernels


def missing_features(base: BaseConfig, tp_size: int) -> Reasons:
    """Features of a base that the direct forward does not support."""
    rope, heads = base.rope, base.num_key_value_heads
    found = {
        "latent attention": base.mla is not None,
        "a sliding window": base.window is not None,
        "attention sinks": base.attention_sinks,
        "a partial rotary embedding": rope.partial_rotary_factor != 1.0,
        f"a rotary embedding of type {rope.type}": rope.type in ("yarn", "longrope"),
        "fewer key/value heads than tensor parallel ranks": heads % tp_size != 0,
    }
    return {f"the base has {name}": present for name, present in found.items()}


def base_direct(s: Setting) -> Reasons:
    """Of the base as a list of operations, without modules."""
    if s.base is None:
        return {"the base's layers do not run": True}
    quantised = s.quant is not None and (s.quant.base != "none" or s.quant.kv_cache != "none")
    return {
        "--transformer-impl transformer_engine builds the base": s.layers.engine,
        **missing_features(s.base, s.parallel.tensor_model_parallel_size),
        "its experts shard the sequence (--sequence-parallel)": s.parallel.sequence_parallel and s.base.moe is not None,
        "the base is fake-quantised": quantised,
    }


def decode_kernels(s: Setting) -> Reasons:
    """Of one kernel from projection to attention output in decoding."""
    return {**base_direct(s), **wide_kernels(s)}


def decode_products(s: Setting) -> Reasons:
    """Of products of few rows that include gate and residual sums."""
    return {
        **decode_kernels(s),
        "products are summed over tensor parallel ranks": s.parallel.tensor_model_parallel_size > 1,
    }


def grouped_experts(s: Setting) -> Reasons:
    """Of two products for all experts of a layer."""
    moe = s.base.moe if s.base is not None else None
    real, sizes = s.machine.kernels != "plain", (0, 0)
    if s.base is not None and moe is not None:
        sizes = (s.base.hidden_size, moe.intermediate_size // s.parallel.tensor_model_parallel_size)
    return {
        "the base has no experts": moe is None,
        "--transformer-impl transformer_engine builds the base": s.layers.engine,
        "there is no GPU": real and not s.machine.gpu,
        f"weights are in {s.dtype}, not in bf16 (--bf16)": real and s.dtype != "bfloat16",
        "this torch has no grouped products (2.10 has)": not s.machine.grouped_products,
        f"hidden size and width of an expert per rank are {sizes}, not multiples of 8": any(x % 8 for x in sizes),
        "the base is fake-quantised": s.quant is not None and s.quant.base != "none",
    }


def base_fp8(s: Setting) -> Reasons:
    """Of the base's linears in real fp8 while a draft trains."""
    sizes = (0, 0, 0)
    if s.base is not None:
        width = s.base.intermediate_size // s.parallel.tensor_model_parallel_size
        sizes = (s.base.hidden_size, width, s.base.head_dim)
    uneven = f"hidden size, intermediate size per rank and head size are {sizes}, not all multiples of 16"
    experts = {"the base has experts": s.base is not None and s.base.moe is not None}
    odd = s.machine.kernels != "plain" and any(size % 16 for size in sizes)
    return {**base_direct(s), **experts, **half_kernels(s), **fp8_products(s), uneven: odd}
