"""Operators of the direct forward (`direct.py`): plain torch (decoding on any device, which is bound by the host: a
fraction of the calls per step), fused kernels (half precision on a GPU, for decoding and training: fewer passes over
memory), and fp8 linears (training only).

S sequence, B micro-batch, R = S * B rows, H hidden, N query and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.config import BaseConfig
from megatron_spec.ops.attention import attend
from megatron_spec.ops.fp8 import Fp8Matrix
from megatron_spec.ops.rope import apply_rotary
from megatron_spec.ops.visibility import Visibility

Norms = tuple[Tensor, Tensor] | None
"""Weights [D] of the RMS norms of each query and each key head, taken before they are rotated."""


class PlainOperators:
    """Plain torch operators, in any dtype. An activation is what `linear` accepts: here, a tensor [R, inputs]."""

    weights_released = False
    """True when the modules have lost their weights and only these operators can run the layers."""

    def __init__(self, config: BaseConfig, heads: int, kv_heads: int) -> None:
        self.config, self.heads, self.kv_heads, self.eps = config, heads, kv_heads, config.rms_norm_eps

    def serves(self, visibility: Visibility) -> bool:
        """True for the forwards that these operators speed up: decoding."""
        return visibility.cache is not None

    def attend(
        self,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor],
        S: int,
        B: int,
        visibility: Visibility,
        layer: int,
        norms: Norms,
    ) -> Tensor:
        """Attention output [R, N * D] of a layer from its projection [R, (N + 2G) * D]."""
        q, k, v = self.split_rotated(qkv, tables, S, B, norms)
        return attend(q, k, v, visibility, layer).reshape(S * B, -1)

    def tables(self, angles_SB1D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) as `split_rotated` expects them."""
        return angles_SB1D.cos().to(dtype)[:, :, None], angles_SB1D.sin().to(dtype)[:, :, None]

    def split_rotated(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], S: int, B: int, norms: Norms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [S, B, N, D] and k [S, B, G, D], rotated, and v [S, B, G, D] of a projection [R, (N + 2G) * D].

        Its columns are those of megatron-core's linear_qkv: per group the queries, the key, the value.
        """
        split = qkv.view(S, B, self.kv_heads, self.heads // self.kv_heads + 2, self.config.head_dim)
        rotated = split[..., :-1, :]
        if norms is not None:
            weights = torch.cat([norms[0].expand(rotated.shape[-2] - 1, -1), norms[1][None]])
            rotated = F.rms_norm(rotated, norms[0].shape, eps=self.eps) * weights
        rotated = apply_rotary(rotated, *tables)
        return rotated[..., :-1, :].flatten(2, 3), rotated[..., -1, :], split[..., -1, :]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """(x + delta, its norm as an activation)."""
        total = x if delta is None else x + delta
        return total, F.rms_norm(total, weight.shape, weight, self.eps)

    def final(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return self.add_norm(x, delta, weight)

    def linear(self, activation: Any, module: Any, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Product with the module's weight, plus a bias, [R, outputs of this rank], written to `out` when given."""
        if out is None:
            return F.linear(activation, module.weight, bias)
        if bias is None:
            return torch.mm(activation, module.weight.t(), out=out)
        return torch.addmm(bias, activation, module.weight.t(), out=out)

    def gated(self, gate_up: Tensor) -> Any:
        """silu(gate) * up as an activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gated_product(self, activation: Any, module: Any, training: bool) -> Any:
        """silu(gate) * up of the outputs of an MLP's first module, as an activation."""
        return self.gated(self.linear(activation, module, module.bias))

    def includes(self, module: Any, training: bool) -> bool:
        """True if a product with the module's weight computes what follows it: the gate, or by `add_product` the
        residual sum."""
        return False

    def add_product(self, x: Tensor, activation: Any, module: Any, keep: bool) -> Tensor:
        """x + product with the module's weight, in place of x unless `keep`."""
        weight = module.weight.t()
        return torch.addmm(x, activation, weight) if keep else x.addmm_(activation, weight)

    def activation(self, x: Tensor) -> Any:
        """x as an activation."""
        return x


class KernelOperators(PlainOperators):
    """Operators with fused kernels (residual sum and norm, rotary embedding and split of q, k, v, gate), for training
    batches and decoding.

    Args:
        kernels: operators (`ops.backend.load`).
        epilogues: gates and residual sums are computed inside products in training (path `product_epilogues`).
    """

    def __init__(self, config: BaseConfig, heads: int, kv_heads: int, kernels: Any, epilogues: bool = False) -> None:
        super().__init__(config, heads, kv_heads)
        self.kernels, self.epilogues = kernels, epilogues

    def serves(self, visibility: Visibility) -> bool:
        """True: training batches and decoding."""
        return True

    def tables(self, angles_SB1D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `PlainOperators.tables`; fp32 [R, D / 2]."""
        angles = angles_SB1D.flatten(0, 2)[:, : self.config.head_dim // 2]
        return angles.cos().contiguous(), angles.sin().contiguous()

    def split_rotated(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], S: int, B: int, norms: Norms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PlainOperators.split_rotated`."""
        N, G, D = self.heads, self.kv_heads, self.config.head_dim
        q, k = qkv.new_empty(S * B, N * D), qkv.new_empty(S * B, G * D)
        self.kernels.rotary_forward(qkv, tables, q, k, None, N, G, grouped=True, norms=norms, eps=self.eps)
        return q.view(S, B, N, D), k.view(S, B, G, D), qkv.view(S, B, G, N // G + 2, D)[:, :, :, -1]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """See `PlainOperators.add_norm`."""
        total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
        self.kernels.norm_forward(x, self.eps, delta, None if delta is None else total, (weight, normed))
        return total, normed

    def final(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `PlainOperators.final`; never in fp8."""
        return KernelOperators.add_norm(self, x, delta, weight)

    def gated(self, gate_up: Tensor) -> Any:
        """See `PlainOperators.gated`."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.kernels.gated_forward(gate_up, out)
        return out

    def gated_product(self, activation: Any, module: Any, training: bool) -> Any:
        """See `PlainOperators.gated_product`."""
        if not self.includes(module, training):
            return super().gated_product(activation, module, training)
        out = activation.new_empty(len(activation), len(module.weight) // 2)
        self.kernels.gated_product(activation, module.weight, out)
        return out

    def includes(self, module: Any, training: bool) -> bool:
        """See `PlainOperators.includes`."""
        return self.epilogues and training and module.bias is None


class Fp8Operators(KernelOperators):
    """`KernelOperators` with the four linears of every layer in fp8; norms, attention and residual stream keep dtype.

    The bf16 weights of the linears are released, so the base serves training batches only.
    """

    weights_released = True

    def __init__(self, plain: KernelOperators, layers: list[Any]) -> None:
        super().__init__(plain.config, plain.heads, plain.kv_heads, plain.kernels)
        self.dtype = layers[0].input_layernorm.weight.dtype
        self.weights: dict[int, Any] = {}
        for layer in layers:
            attention, mlp = layer.self_attention, layer.mlp
            for module in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
                self.weights[id(module)] = Fp8Matrix.of_weight(module.weight.data)
                module.weight.data = module.weight.data.new_empty(0)

    def serves(self, visibility: Visibility) -> bool:
        """True for training batches; `FrozenBase` refuses the rest."""
        return visibility.cache is None

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """See `PlainOperators.add_norm`."""
        total = x if delta is None else torch.empty_like(x)
        return total, self.kernels.quantized_norm(x, delta, None if delta is None else total, weight, self.eps)

    def linear(self, activation: Any, module: Any, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See `PlainOperators.linear`."""
        found: Tensor = self.kernels.product(activation, self.weights[id(module)], self.dtype, out=out)
        return found if bias is None else found.add_(bias)

    def gated(self, gate_up: Tensor) -> Any:
        """See `PlainOperators.gated`."""
        return self.kernels.quantized_gate(gate_up)

    def activation(self, x: Tensor) -> Any:
        """See `PlainOperators.activation`."""
        return self.kernels.quantize(x)
