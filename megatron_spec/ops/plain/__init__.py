"""Plain twins of the Triton kernels, file by file; that of training-time-test attention is in `attention.py`.

They document the arithmetic, and run the fast paths where kernels cannot (tests on a CPU, also in fp64): arithmetic is
in the input's dtype. Arguments and results are those of the kernel of the same name.
"""

from megatron_spec.ops.plain.adam import adamw
from megatron_spec.ops.plain.branch import merge_backward, merge_forward
from megatron_spec.ops.plain.decode import decode_attention
from megatron_spec.ops.plain.experts import choose_experts, gate_rows, mix_rows, sort_rows
from megatron_spec.ops.plain.few_rows import few_rows_product
from megatron_spec.ops.plain.fp8 import product, quantize, quantize_columns, quantized_gate, quantized_norm, transpose
from megatron_spec.ops.plain.loss import (
    largest,
    mixed_gradient,
    mixed_rows,
    mixed_sums,
    soft_rows,
    soft_shard,
)
from megatron_spec.ops.plain.many_rows import gated_product, largest_product
from megatron_spec.ops.plain.rotary import rotary_backward, rotary_forward
from megatron_spec.ops.plain.rows import (
    gated_backward,
    gated_forward,
    norm_backward,
    norm_forward,
    norm_partials,
    scale_,
    shifted_sum,
)
from megatron_spec.ops.plain.sample import chunk_masses, find_in_chunk
from megatron_spec.ops.plain.teacher import teacher_rows

__all__ = [
    "adamw", "choose_experts", "chunk_masses", "decode_attention", "few_rows_product", "find_in_chunk", "gate_rows",
    "gated_backward", "gated_forward", "gated_product", "largest", "largest_product", "merge_backward",
    "merge_forward", "mix_rows", "mixed_gradient", "mixed_rows", "mixed_sums", "norm_backward", "norm_forward",
    "norm_partials", "product", "quantize", "quantize_columns", "quantized_gate", "quantized_norm",
    "rotary_backward", "rotary_forward", "scale_", "shifted_sum", "soft_rows", "soft_shard", "sort_rows",
    "teacher_rows", "transpose",
]  # fmt: skip
OPERATORS = frozenset(__all__)
"""Operators that `ops.backend` loads from here or from `ops.kernels`."""
