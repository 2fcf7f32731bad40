"""The layers of the frozen base in decoding, in few kernels (paths `decode_kernels` and `decode_products`).

A layer is seven kernels for up to `FEW_ROWS` rows: norm; projection; attention with everything about heads and cache;
output projection and residual sum; norm; gate, up and activation; down and residual sum. With more rows, or without
`decode_products`, `DirectForward` runs the products and takes the attention from here: eight kernels.

S new rows of each of B sequences, R = S * B rows, H hidden, N query and G key/value heads of this rank, D head size,
X = (N + 2G) * D.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_spec.base.moe import MixtureOfExperts
from megatron_spec.config import BaseConfig
from megatron_spec.ops.visibility import Visibility

FEW_ROWS = 16
"""Most rows whose products include gate and residual sum."""
FEW_SEQUENCES = 3
"""Most sequences of such rows. With more, a verification of five rows each would have too many rows and round otherwise
than the base alone: greedy texts would part wherever two logits are equal in bf16."""
MOST_NEW = 64
"""Most new rows of a sequence that the attention kernel takes."""

Tables = tuple[Tensor, Tensor]
"""fp32 (cos, sin) [R, D / 2]."""


class DecodeLayers:
    """Layers of new rows that see a cache.

    Args:
        heads: query and key/value heads of this rank.
        kernels: operators (`ops.backend.load`).
        products: `decode_products` is on.
    """

    def __init__(self, config: BaseConfig, heads: tuple[int, int], kernels: Any, products: bool) -> None:
        self.config, self.heads, self.kernels, self.products = config, heads, kernels, products
        self.eps = config.rms_norm_eps

    def serves(self, visibility: Visibility) -> bool:
        """True for new rows in consecutive slots that see what their sequence has so far, or a tree."""
        slots_BS = visibility.slots_BS
        if slots_BS is None or not visibility.key_slots or visibility.given_BSL is not None:
            return False
        return slots_BS.shape[1] <= MOST_NEW

    def whole(self, visibility: Visibility) -> bool:
        """True if `layer` takes these rows, which `serves` holds for."""
        assert visibility.slots_BS is not None
        return self.few(*visibility.slots_BS.shape)

    def few(self, sequences: int, rows: int) -> bool:
        """True if `layer` and `head` take `rows` rows of each sequence."""
        return self.products and sequences <= FEW_SEQUENCES and sequences * rows <= FEW_ROWS

    def head(self, state_RH: Tensor, weight_VH: Tensor) -> Tensor:
        """[R, V] product with the LM head, of few rows: the same bits for a row alone and among others."""
        out: Tensor = self.kernels.few_rows_product(state_RH, (weight_VH,))
        return out

    def tables(self, angles_SB1D: Tensor) -> Tables:
        """For `attend`."""
        angles = angles_SB1D.flatten(0, 2)[:, : self.config.head_dim // 2]
        return angles.cos(), angles.sin()

    def attend(self, qkv_RX: Tensor, module: Any, tables: Tables, visibility: Visibility, layer: int) -> Tensor:
        """Attention output [R, N * D] of a layer from its projection without the bias; writes the cache."""
        cache, slots_BS = visibility.cache, visibility.slots_BS
        assert cache is not None and slots_BS is not None
        norms = (module.q_layernorm.weight, module.k_layernorm.weight) if self.config.qk_norm else None
        out: Tensor = self.kernels.decode_attention(
            qkv_RX, tables, (cache.keys[layer], cache.values[layer]), slots_BS[:, 0], *self.heads,
            visibility.key_slots, module.linear_qkv.bias, norms, self.eps, visibility.above_BSM,
        )  # fmt: skip
        return out

    def layer(self, layer: Any, x_RH: Tensor, tables: Tables, visibility: Visibility, index: int) -> Tensor:
        """[R, H] output of a whole layer, of few rows."""
        attention, mlp, product = layer.self_attention, layer.mlp, self.kernels.few_rows_product
        qkv = product(x_RH, (attention.linear_qkv.weight,), None, layer.input_layernorm.weight, self.eps)
        attended = self.attend(qkv, attention, tables, visibility, index)
        x = self._summed(attended, attention.linear_proj, x_RH)
        norm = layer.pre_mlp_layernorm.weight
        if isinstance(mlp, MixtureOfExperts):
            return x + self._experts(mlp, F.rms_norm(x, norm.shape, norm, self.eps), visibility)
        bias = mlp.linear_fc1.bias
        both = mlp.linear_fc1.weight.chunk(2), None if bias is None else bias.chunk(2)
        hidden = product(x, *both, norm, self.eps, gated=True)
        return self._summed(hidden, mlp.linear_fc2, x)

    def _summed(self, x: Tensor, linear: Any, rest: Tensor) -> Tensor:
        biases = None if linear.bias is None else (linear.bias,)
        out: Tensor = self.kernels.few_rows_product(x, (linear.weight,), biases, rest_RO=rest)
        return out

    def _experts(self, mlp: Any, normed_RH: Tensor, visibility: Visibility) -> Tensor:
        assert visibility.slots_BS is not None
        B, S = visibility.slots_BS.shape
        mixed: Tensor = mlp(normed_RH.view(S, B, -1))[0]
        return mixed.flatten(0, 1)
