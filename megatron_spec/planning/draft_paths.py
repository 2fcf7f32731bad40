"""Reasons that block the fast paths of a draft and its loss (`planning.paths`)."""

from __future__ import annotations

from megatron_spec.config import BlockConfig, EagleConfig
from megatron_spec.planning.setting import Reasons, Setting, draft_engine, fp8_products, half_kernels, wide_kernels
from megatron_spec.planning.unroll_memory import MOST_WHOLE_ROWS, whole_rows_bytes


def draft_decode(s: Setting) -> Reasons:
    """Of a draft's layers by the kernels of `decode_products`."""
    config = s.draft
    if not isinstance(config, EagleConfig):
        return {"the draft does not run on its own output (EAGLE, MTP)": True}
    odd = s.machine.kernels == "triton" and (config.num_attention_heads * config.head_dim) % 16 != 0
    odd = odd or (s.machine.kernels == "triton" and (config.num_key_value_heads * config.head_dim) % 16 != 0)
    return {
        **draft_engine(s),
        **wide_kernels(s),
        "products are summed over tensor parallel ranks": s.parallel.tensor_model_parallel_size > 1,
        "the draft has latent attention or experts": config.mla is not None or config.moe is not None,
        "the draft has a sliding window": config.sliding_window is not None,
        "the draft has a partial rotary embedding": config.rope.partial_rotary_factor != 1.0,
        "the widths of the draft's queries or keys are no multiples of 16": odd,
        "the draft is fake-quantised": s.quant is not None and s.quant.draft != "none",
    }


def draft_fused(s: Setting) -> Reasons:
    """Of the unroll with its backward written by hand."""
    config = s.draft
    if not isinstance(config, EagleConfig) or not config.reads_captures:
        return {"the draft is not EAGLE-3": True}
    steps = s.objective.ttt_steps if s.objective is not None else 0
    rows = s.rows / s.parallel.context_parallel_size
    whole = whole_rows_bytes(config.hidden_size, rows, steps, 2) if s.parallel.sequence_parallel else 0
    odd = s.machine.kernels == "triton" and (config.head_dim < 16 or config.head_dim % 8 != 0)
    clipped = s.quant is not None and s.quant.draft != "none" and s.quant.clipped_ste
    return {
        **draft_engine(s),
        "the draft proposes all tokens in one forward (P-EAGLE)": config.parallel_drafting,
        **half_kernels(s),
        "draft steps are detached": s.objective is not None and s.objective.detach,
        "there are fewer key/value heads than tensor parallel ranks": bool(
            config.num_key_value_heads % s.parallel.tensor_model_parallel_size
        ),
        "the draft has several layers": config.num_hidden_layers > 1,
        "the draft has an embedding of its own": config.own_embedding,
        "the draft feeds back a normed state (norm_output)": config.norm_output,
        f"the draft's layer has {', '.join(config.layer_options)}": bool(config.layer_options),
        f"the draft's head size is {config.head_dim}": odd,
        "fake quantisers clip gradients": clipped,
        "the full sequence would take too much memory under sequence parallelism": whole > MOST_WHOLE_ROWS,
    }


def draft_fp8(s: Setting) -> Reasons:
    """Of the products of the draft's layer in real fp8."""
    return {
        "the draft is fake-quantised": s.quant is not None and s.quant.draft != "none",
        **draft_fused(s),
        "tensor parallel ranks would round parts of a row separately": s.parallel.tensor_model_parallel_size > 1,
        **fp8_products(s),
    }


def block_kernel(s: Setting) -> Reasons:
    """Of the attention kernel of block drafts."""
    return {
        "the draft is not a block draft": not isinstance(s.draft, BlockConfig),
        **half_kernels(s),
        "its plain twin runs instead": s.machine.kernels == "plain",
    }


def draft_layer(s: Setting) -> Reasons:
    """Of fused layers of block drafts."""
    config = s.draft
    if not isinstance(config, BlockConfig):
        return {"the draft is not a block draft": True}
    return {
        **draft_engine(s),
        **half_kernels(s),
        "the draft is fake-quantised": s.quant is not None and s.quant.draft != "none",
        "the draft has a partial rotary embedding": config.rope.partial_rotary_factor != 1.0,
        "there are fewer key/value heads than tensor parallel ranks": bool(
            config.num_key_value_heads % s.parallel.tensor_model_parallel_size
        ),
    }


KERNEL_LOSSES = ("soft_ce", "kl", "hard_ce", "tv", "ce_l1")
"""Losses that have a kernel."""


def loss_kernel(s: Setting) -> Reasons:
    """Of loss, metrics and gradient of a row in one pass."""
    kind = s.objective.loss_kind if s.objective is not None else "soft_ce"
    return {**half_kernels(s), f"the loss {kind} has no kernel": kind not in KERNEL_LOSSES}
