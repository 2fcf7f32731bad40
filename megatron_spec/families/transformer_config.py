"""BaseConfig -> megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_spec.config import LOCAL, BaseConfig, BaseLayers, ParallelConfig


def pipeline_layout(layers_per_stage: list[int]) -> list[list[str]]:
    """megatron-core's `pipeline_model_parallel_layout` for any number of layers per stage."""
    stages = [["decoder"] * count for count in layers_per_stage]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def transformer_config(
    base: BaseConfig, parallel: ParallelConfig, layers_per_stage: list[int], dtype: torch.dtype,
    layers: BaseLayers = LOCAL,
) -> TransformerConfig:  # fmt: skip
    """Configuration of a frozen base: no dropout, no weight initialisation."""
    values: dict[str, Any] = {
        "num_layers": base.num_layers,
        "hidden_size": base.hidden_size,
        "ffn_hidden_size": base.intermediate_size,
        "num_attention_heads": base.num_attention_heads,
        "num_query_groups": base.num_key_value_heads,
        "kv_channels": base.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": base.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": base.attention_bias,
        "add_qkv_bias": base.qkv_bias,
        "qk_layernorm": base.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
    }
    if parallel.pipeline_model_parallel_size > 1:
        values["pipeline_model_parallel_layout"] = pipeline_layout(layers_per_stage)
    if layers.recipe is not None:
        values |= {
            "fp8": layers.fp8_format, "fp8_recipe": layers.recipe,
            # Of delayed: the largest value of the last micro-batches, over the ranks that share one.
            "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "tp_only_amax_red": True,
        }  # fmt: skip
    return TransformerConfig(**values)
