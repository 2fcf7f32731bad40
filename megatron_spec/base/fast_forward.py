"""The layers of the frozen base with fused kernels on a GPU: the short forward in half precision.

Fewer passes over memory (residual sum with norm, rotary embedding with the split of q, k and v, gate), and cuDNN's
attention where it is there. `FrozenBase` uses it when it applies and falls back to the layers otherwise.

S sequence, B micro-batch, R = S * B rows, N query and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from megatron_spec.base.lean_forward import LeanForward, missing_features
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.ops.attention import AttentionPlan, causal_attention
from megatron_spec.ops.products import kernels_available

log = logging.getLogger(__name__)


class FastForward(LeanForward):
    """Forward of one stage's layers in bf16 or fp16 on a GPU: training batches and decoding."""

    only = False
    """True when the layers themselves cannot run any more."""

    @staticmethod
    def applies(config: BaseConfig, dtype: torch.dtype, world: Any) -> bool:
        """True when a base of this shape can be run this way on this rank."""
        if world.device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return False
        lacking = missing_features(config, world.tp_size)
        if lacking:
            log.info("the base's layers run one by one (no fused forward for %s)", ", ".join(lacking))
        return not lacking and kernels_available() and not world.parallel.sequence_parallel

    def can_run(self, plan: AttentionPlan) -> bool:
        """True for decoding and for causal or packed batches, also of shared sequences, when nothing hooks in."""
        return (plan.mask_B1SL is None or plan.cache is not None) and self.untouched()

    def _attend(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], S: int, B: int, plan: AttentionPlan, layer: int
    ) -> Tensor:
        if plan.context is not None or plan.cache is not None:
            return super()._attend(qkv, tables, S, B, plan, layer)
        q, k, v = self.split_rotated(qkv, tables, S, B, self._head_norms(layer))
        return causal_attention(q, k, v, plan.documents).reshape(S * B, -1)

    def tables(self, angles_SB1D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `LeanForward.tables`; fp32 [R, D / 2]."""
        angles = angles_SB1D.flatten(0, 2)[:, : self.config.head_dim // 2]
        return angles.cos().contiguous(), angles.sin().contiguous()

    def split_rotated(
        self,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor],
        S: int,
        B: int,
        norms: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LeanForward.split_rotated`."""
        from megatron_spec.ops.kernels import rows

        N, G, D = self.heads, self.kv_heads, self.config.head_dim
        q = torch.empty(S * B, N * D, dtype=qkv.dtype, device=qkv.device)
        k = torch.empty(S * B, G * D, dtype=qkv.dtype, device=qkv.device)
        eps = self.config.rms_norm_eps
        rows.rotary_forward(qkv, tables, q, k, None, N, G, grouped=True, norms=norms, eps=eps)
        return q.view(S, B, N, D), k.view(S, B, G, D), qkv.view(S, B, G, N // G + 2, D)[:, :, :, -1]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """See `LeanForward.add_norm`."""
        from megatron_spec.ops.kernels import rows

        total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
        rows.norm_forward(x, self.config.rms_norm_eps, delta, None if delta is None else total, (weight, normed))
        return total, normed

    def final(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `LeanForward.final`; never in another number format."""
        return FastForward.add_norm(self, x, delta, weight)

    def gated(self, gate_up: Tensor) -> Any:
        """See `LeanForward.gated`."""
        from megatron_spec.ops.kernels import rows

        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        rows.gated_forward(gate_up, out)
        return out


class Fp8Forward(FastForward):
    """The same with the four linears of every layer in real fp8; norms, attention and residual stream stay as they are.

    The bf16 weights of the linears are released: such a base serves training batches only.
    """

    only = True

    def __init__(self, plain: FastForward) -> None:
        from megatron_spec.ops.kernels import fp8

        super().__init__(plain.config, plain.layers, plain.final_norm, plain.tp)
        self.weights: dict[int, Any] = {}
        for layer in self.layers:
            attention, mlp = layer.self_attention, layer.mlp
            for module in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
                self.weights[id(module)] = fp8.Fp8Matrix.of_weight(module.weight.data)
                module.weight.data = module.weight.data.new_empty(0)

    def can_run(self, plan: AttentionPlan) -> bool:
        """Training batches only: `FrozenBase` refuses the rest."""
        return plan.cache is None and super().can_run(plan)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """See `FastForward.add_norm`."""
        from megatron_spec.ops.kernels import fp8

        total = x if delta is None else torch.empty_like(x)
        normed = fp8.norm(x, delta, None if delta is None else total, weight, self.config.rms_norm_eps)
        return total, normed

    def linear(self, activation: Any, module: Any, bias: Tensor | None) -> Tensor:
        """See `LeanForward.linear`."""
        from megatron_spec.ops.kernels import fp8

        out = fp8.product(activation, self.weights[id(module)], self.layers[0].input_layernorm.weight.dtype)
        return out if bias is None else out.add_(bias)

    def gated(self, gate_up: Tensor) -> Any:
        """See `FastForward.gated`."""
        from megatron_spec.ops.kernels import fp8

        return fp8.gated(gate_up)

    def rows(self, x: Tensor) -> Any:
        """See `FastForward.rows`."""
        from megatron_spec.ops.kernels import fp8

        return fp8.quantize(x)


def run_in_fp8(base: Any) -> None:
    """Turn a loaded `FrozenBase` to real fp8 (E4M3) linears, in place: twice the arithmetic rate, half the memory.

    Scales are per output channel for weights and per row for activations, found as the rows are computed. The head
    and the embedding stay as they are.

    Raises:
        UserError: no GPU of compute capability 9.0, a base that is not in bf16, or one that carries quantisers.
    """
    if base.world.device.type != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        raise UserError("--base-fp8 needs a GPU with fp8 tensor cores (compute capability 9.0, Hopper, or newer)")
    lacking = missing_features(base.config, base.world.tp_size)
    if lacking:
        raise UserError(f"--base-fp8 cannot run this base: it has {', '.join(lacking)}; leave --base-fp8 out")
    if base.fast is None or base.dtype != torch.bfloat16:
        raise UserError(
            f"--base-fp8 cannot run this base (dtype {base.dtype}, sequence parallel "
            f"{base.world.parallel.sequence_parallel}): use --bf16, without sequence parallelism"
        )
    config = base.config
    sizes = (config.hidden_size, config.intermediate_size // base.world.tp_size, config.head_dim)
    if any(size % 16 for size in sizes):
        raise UserError(
            f"--base-fp8 needs sizes that are multiples of 16; hidden size, intermediate size per rank and head size "
            f"are {sizes}"
        )
    if not base.fast.can_run(AttentionPlan.causal()):
        raise UserError("--base-fp8: this base carries fake quantisers; leave --base-fp8 out")
    base.fast = Fp8Forward(base.fast)
