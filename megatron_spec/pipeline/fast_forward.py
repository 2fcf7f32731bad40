"""The layers of the frozen base as a short list of matrix products and kernels, without modules or autograd.

Runs what the stage's megatron-core layers run, on their own weights: same result within rounding, fewer passes over
memory (residual sum with norm, rotary embedding with the split of q, k and v, gate), and cuDNN's attention where it
is there. `FrozenBase` uses it when it applies and falls back to the layers otherwise.

S sequence, B micro-batch, R = S * B rows, H hidden, N query and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_spec.config import BaseConfig, UserError
from megatron_spec.ops.attention import AttentionPlan, attend, causal_attention
from megatron_spec.ops.products import kernels_available
from megatron_spec.ops.rope import rotary_angles

log = logging.getLogger(__name__)


def _power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


def missing_features(config: BaseConfig, tp_size: int) -> list[str]:
    """What this base has that the fused forward does not compute; it then runs megatron-core's layers."""
    found = {
        "experts": config.moe is not None,
        "latent attention": config.mla is not None,
        "a sliding window": config.window is not None,
        "attention sinks": config.attention_sinks,
        "norms of queries and keys": config.qk_norm,
        "biases": config.qkv_bias or config.attention_bias or config.mlp_bias,
        "a rotary embedding that is partial or scaled by length": config.rope.partial_rotary_factor != 1.0
        or config.rope.type in ("yarn", "longrope"),
        f"head size {config.head_dim}": not _power_of_two(config.head_dim),
        "fewer key/value heads than tensor parallel ranks": config.num_key_value_heads % tp_size != 0,
        f"activation {config.hidden_act}": config.hidden_act != "silu",
    }
    return [name for name, present in found.items() if present]


def _untouched(layer: nn.Module) -> bool:
    """No hooks (quantisers, observers): these must run, so such a layer is not bypassed."""
    return not any(m._forward_pre_hooks or m._forward_hooks for m in layer.modules())


class FastForward:
    """Causal training forward of one stage's layers.

    Args:
        layers: megatron-core TransformerLayers with this package's local spec.
        final_norm: weight of the final norm on the last stage.
    """

    only = False
    """True when the layers themselves cannot run any more."""

    def __init__(self, config: BaseConfig, layers: list[Any], final_norm: Tensor | None, tp: dist.ProcessGroup) -> None:
        self.config, self.layers, self.final_norm, self.tp = config, layers, final_norm, tp
        self.heads = config.num_attention_heads // tp.size()
        self.kv_heads = config.num_key_value_heads // tp.size()

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
        """True for causal or packed batches, also of shared sequences, when nothing hooks into the layers."""
        return plan.mask_B1SL is None and plan.cache is None and all(map(_untouched, self.layers))

    @torch.no_grad()
    def __call__(
        self,
        hidden_SBH: Tensor,
        positions_BS: Tensor,
        inv_freq: Tensor,
        captured: Collection[int],
        plan: AttentionPlan | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers.

        Args:
            captured: places in `layers` whose outputs are wanted.
            plan: who may look at whom; default: causal.

        Returns:
            (state behind the last layer, after the final norm when there is one; captured outputs), all [S, B, H].
        """
        S, B, H = hidden_SBH.shape
        angles = rotary_angles(positions_BS, inv_freq).view(S * B, -1)[:, : self.config.head_dim // 2]
        tables = (angles.cos().contiguous(), angles.sin().contiguous())
        x, delta, recorded = hidden_SBH.reshape(S * B, H), None, []
        for i, layer in enumerate(self.layers):
            x, normed = self.add_norm(x, delta, layer.input_layernorm.weight)
            if i - 1 in captured:
                recorded.append(x.view(S, B, H))
            qkv = self.linear(normed, layer.self_attention.linear_qkv)
            attended = self._attend(qkv, tables, S, B, plan or AttentionPlan.causal())
            delta = self._sum(self.linear(self.rows(attended), layer.self_attention.linear_proj))
            x, normed = self.add_norm(x, delta, layer.pre_mlp_layernorm.weight)
            gate_up = self.linear(normed, layer.mlp.linear_fc1)
            delta = self._sum(self.linear(self.gated(gate_up), layer.mlp.linear_fc2))
        if self.final_norm is not None:
            x, out = FastForward.add_norm(self, x, delta, self.final_norm)
        else:
            x = out = x if delta is None else x + delta
        if len(self.layers) - 1 in captured:
            recorded.append(x.view(S, B, H))
        return out.view(S, B, H), recorded

    def _attend(self, qkv: Tensor, tables: tuple[Tensor, Tensor], S: int, B: int, plan: AttentionPlan) -> Tensor:
        from megatron_spec.ops import kernels

        N, G, D = self.heads, self.kv_heads, self.config.head_dim
        q = torch.empty(S * B, N * D, dtype=qkv.dtype, device=qkv.device)
        k = torch.empty(S * B, G * D, dtype=qkv.dtype, device=qkv.device)
        kernels.rotary_forward(qkv, tables, q, k, None, N, G, grouped=True)
        v = qkv.view(S, B, G, N // G + 2, D)[:, :, :, -1]
        q, k = q.view(S, B, N, D), k.view(S, B, G, D)
        if plan.context is not None:
            return attend(q, k, v, plan, 0).reshape(S * B, N * D)
        return causal_attention(q, k, v, plan.documents).reshape(S * B, N * D)

    def _sum(self, partial: Tensor) -> Tensor:
        if self.tp.size() > 1:
            dist.all_reduce(partial, group=self.tp)
        return partial

    # What a subclass computes in another number format: an activation is whatever `linear` accepts.

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """(x + delta, its norm as an activation)."""
        from megatron_spec.ops import kernels

        total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
        kernels.norm_forward(x, self.config.rms_norm_eps, delta, None if delta is None else total, (weight, normed))
        return total, normed

    def linear(self, activation: Any, module: Any) -> Tensor:
        """Product with the module's weight, [R, outputs of this rank]."""
        out: Tensor = activation @ module.weight.t()
        return out

    def gated(self, gate_up: Tensor) -> Any:
        """silu(gate) * up as an activation."""
        from megatron_spec.ops import kernels

        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        kernels.gated_forward(gate_up, out)
        return out

    def rows(self, x: Tensor) -> Any:
        """x as an activation."""
        return x


class Fp8Forward(FastForward):
    """The same with the four linears of every layer in real fp8; norms, attention and residual stream stay as they are.

    The bf16 weights of the linears are released: such a base serves training batches only.
    """

    only = True

    def __init__(self, plain: FastForward) -> None:
        from megatron_spec.ops import fp8

        super().__init__(plain.config, plain.layers, plain.final_norm, plain.tp)
        self.weights: dict[int, Any] = {}
        for layer in self.layers:
            attention, mlp = layer.self_attention, layer.mlp
            for module in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
                self.weights[id(module)] = fp8.Fp8Matrix.of_weight(module.weight.data)
                module.weight.data = module.weight.data.new_empty(0)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """See `FastForward.add_norm`."""
        from megatron_spec.ops import fp8

        total = x if delta is None else torch.empty_like(x)
        normed = fp8.norm(x, delta, None if delta is None else total, weight, self.config.rms_norm_eps)
        return total, normed

    def linear(self, activation: Any, module: Any) -> Tensor:
        """See `FastForward.linear`."""
        from megatron_spec.ops import fp8

        return fp8.product(activation, self.weights[id(module)], self.layers[0].input_layernorm.weight.dtype)

    def gated(self, gate_up: Tensor) -> Any:
        """See `FastForward.gated`."""
        from megatron_spec.ops import fp8

        return fp8.gated(gate_up)

    def rows(self, x: Tensor) -> Any:
        """See `FastForward.rows`."""
        from megatron_spec.ops import fp8

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
