"""The layers of the frozen base as a short list of products and element-wise operations, without modules or autograd.

Runs what the stage's megatron-core layers run, on their own weights, with the same result; a step of decoding, which is
bound by the host, takes a fraction of the calls. `fast_forward.py` has the same with fused kernels on a GPU.

S sequence, B micro-batch, R = S * B rows, H hidden, N query and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.config import BaseConfig
from megatron_spec.ops.attention import AttentionPlan, attend
from megatron_spec.ops.rope import apply_rotary, rotary_angles


def missing_features(config: BaseConfig, tp_size: int) -> list[str]:
    """What this base has that the short forward does not compute; it then runs megatron-core's layers."""
    found = {
        "experts": config.moe is not None,
        "latent attention": config.mla is not None,
        "a sliding window": config.window is not None,
        "attention sinks": config.attention_sinks,
        "a rotary embedding that is partial or scaled by length": config.rope.partial_rotary_factor != 1.0
        or config.rope.type in ("yarn", "longrope"),
        "fewer key/value heads than tensor parallel ranks": config.num_key_value_heads % tp_size != 0,
        f"activation {config.hidden_act}": config.hidden_act != "silu",
    }
    return [name for name, present in found.items() if present]


class LeanForward:
    """Forward of one stage's layers in plain torch, for decoding on any device and in any dtype.

    Args:
        layers: megatron-core TransformerLayers with this package's local spec.
        final_norm: weight of the final norm on the last stage.
    """

    def __init__(self, config: BaseConfig, layers: list[Any], final_norm: Tensor | None, tp: dist.ProcessGroup) -> None:
        self.config, self.layers, self.final_norm, self.tp = config, layers, final_norm, tp
        self.heads = config.num_attention_heads // tp.size()
        self.kv_heads = config.num_key_value_heads // tp.size()
        self._parts = [m for layer in layers for m in layer.modules()]

    @staticmethod
    def suits(config: BaseConfig, world: Any) -> bool:
        """True when a base of this shape can be run this way on this rank."""
        return not missing_features(config, world.tp_size) and not world.parallel.sequence_parallel

    def untouched(self) -> bool:
        """No hooks (quantisers, observers): these must run, so such layers are not bypassed."""
        return not any(m._forward_pre_hooks or m._forward_hooks for m in self._parts)

    def can_run(self, plan: AttentionPlan) -> bool:
        """True for decoding, when nothing hooks into the layers."""
        return plan.cache is not None and self.untouched()

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
            (state after the last layer, after the final norm when there is one; captured outputs), all [S, B, H].
        """
        S, B, H = hidden_SBH.shape
        plan = plan or AttentionPlan.causal()
        tables = self.tables(rotary_angles(positions_BS, inv_freq), hidden_SBH.dtype)
        x, delta, recorded = hidden_SBH.reshape(S * B, H), None, []
        for i, layer in enumerate(self.layers):
            x, normed = self.add_norm(x, delta, layer.input_layernorm.weight)
            if i - 1 in captured:
                recorded.append(x.view(S, B, H))
            qkv = self.linear(normed, layer.self_attention.linear_qkv, layer.self_attention.linear_qkv.bias)
            attended = self._attend(qkv, tables, S, B, plan, i)
            delta = self._summed(self.rows(attended), layer.self_attention.linear_proj)
            x, normed = self.add_norm(x, delta, layer.pre_mlp_layernorm.weight)
            gate_up = self.linear(normed, layer.mlp.linear_fc1, layer.mlp.linear_fc1.bias)
            delta = self._summed(self.gated(gate_up), layer.mlp.linear_fc2)
        if self.final_norm is not None:
            x, out = self.final(x, delta, self.final_norm)
        else:
            x = out = x if delta is None else x + delta
        if len(self.layers) - 1 in captured:
            recorded.append(x.view(S, B, H))
        return out.view(S, B, H), recorded

    def _attend(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], S: int, B: int, plan: AttentionPlan, layer: int
    ) -> Tensor:
        q, k, v = self.split_rotated(qkv, tables, S, B, self._head_norms(layer))
        return attend(q, k, v, plan, layer).reshape(S * B, -1)

    def _head_norms(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Weights [D] of the norms over each query and each key head."""
        if not self.config.qk_norm:
            return None
        attention = self.layers[layer].self_attention
        return attention.q_layernorm.weight, attention.k_layernorm.weight

    def _summed(self, activation: Any, module: Any) -> Tensor:
        """Output of a row-parallel module: the ranks' products summed, then its bias, which every rank holds whole."""
        if self.tp.size() == 1:
            return self.linear(activation, module, module.bias)
        out = self.linear(activation, module, None)
        dist.all_reduce(out, group=self.tp)
        return out if module.bias is None else out.add_(module.bias)

    # What a subclass computes with other kernels or in another number format: an activation is what `linear` accepts.

    def tables(self, angles_SB1D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) as `split_rotated` wants them."""
        return angles_SB1D.cos().to(dtype)[:, :, None], angles_SB1D.sin().to(dtype)[:, :, None]

    def split_rotated(
        self,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor],
        S: int,
        B: int,
        norms: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [S, B, N, D] and k [S, B, G, D], rotated, and v [S, B, G, D] of a projection [R, (N + 2G) * D].

        Its columns are those of megatron-core's linear_qkv: per group the queries, the key, the value.

        Args:
            norms: weights [D] of the RMS norms of each query and key head, taken before rotation.
        """
        split = qkv.view(S, B, self.kv_heads, self.heads // self.kv_heads + 2, self.config.head_dim)
        straight = split[..., :-1, :]
        if norms is not None:
            weights = torch.cat([norms[0].expand(straight.shape[-2] - 1, -1), norms[1][None]])
            straight = F.rms_norm(straight, norms[0].shape, eps=self.config.rms_norm_eps) * weights
        rotated = apply_rotary(straight, *tables)
        return rotated[..., :-1, :].flatten(2, 3), rotated[..., -1, :], split[..., -1, :]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """(x + delta, its norm as an activation)."""
        total = x if delta is None else x + delta
        return total, F.rms_norm(total, weight.shape, weight, self.config.rms_norm_eps)

    def final(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return self.add_norm(x, delta, weight)

    def linear(self, activation: Any, module: Any, bias: Tensor | None) -> Tensor:
        """Product with the module's weight, plus a bias, [R, outputs of this rank]."""
        return F.linear(activation, module.weight, bias)

    def gated(self, gate_up: Tensor) -> Any:
        """silu(gate) * up as an activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rows(self, x: Tensor) -> Any:
        """x as an activation."""
        return x
