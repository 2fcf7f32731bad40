"""Layers of a draft in decoding, for few rows over a cache, in seven kernels (path `draft_decode`).

Two norms (one kernel for those of both inputs of a layer); products, with gate and residual sums inside them; and one
kernel for attention, from the projection of the rows to its output, cache included (`ops/kernels/decode.py`).
`DraftLayer.forward` runs a layer this way when its attention is `FewRows`, so every draft with such layers does.

S new rows of each of B sequences, R = S * B rows, H draft hidden size, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_spec.drafts.linear import attached_quantizers
from megatron_spec.ops.visibility import Visibility

MOST_ROWS = 16
"""Most rows of a layer."""


def suits(layers: Any, visibility: Visibility) -> bool:
    """True if these layers have no quantisers, and the rows are few and see a cache up to their own slot or a tree."""
    slots_BS = visibility.slots_BS
    if slots_BS is None or not visibility.key_slots or visibility.given_BSL is not None:
        return False
    modules = [module for layer in layers for module in layer.modules()]
    return slots_BS.numel() <= MOST_ROWS and not attached_quantizers(modules)


class FewRows:
    """Attention over a cache that computes whole layers.

    Args:
        kernels: operators (`ops.backend.load`).
        table: (cos, sin) [L, 1, 1, D] of the positions 0 .. L - 1.
    """

    def __init__(self, kernels: Any, visibility: Visibility, table: tuple[Tensor, Tensor]) -> None:
        self.kernels, self.visibility, self.table = kernels, visibility, table

    def rotary(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [S, B, 1, D] of the positions."""
        cos, sin = (table[:, 0, 0].index_select(0, positions_BS.t().flatten()) for table in self.table)
        shape = (*positions_BS.t().shape, 1, -1)
        return cos.view(shape), sin.view(shape)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Never called: layers run as a whole."""
        raise AssertionError(layer)

    def layer(
        self, module: Any, hidden_SBH: Tensor, embedding_SBH: Tensor, tables: tuple[Tensor, Tensor], index: int
    ) -> Tensor:
        """`DraftLayer.forward` of layer `index`; tables: (cos, sin) [S, B, 1, D]."""
        product = self.kernels.few_rows_product
        hidden = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
        inputs, rest = self._inputs(module, hidden, embedding_SBH)
        attention, mlp, norm = module.self_attn, module.mlp, module.post_attention_layernorm
        qkv = product(weights=_weights(attention, "qkv"), biases=_biases(attention, "qkv"), **inputs)
        attended = self._attend(attention, qkv, tables, index)
        x = product(attended, (attention.o_proj.weight,), _bias(attention.o_proj), rest_RO=rest)
        gate = (mlp.gate_proj.weight, mlp.up_proj.weight)
        biases = None if mlp.gate_proj.bias is None else (mlp.gate_proj.bias, mlp.up_proj.bias)
        gated = product(x, gate, biases, norm.weight, norm.eps, gated=True)
        out: Tensor = product(gated, (mlp.down_proj.weight,), _bias(mlp.down_proj), rest_RO=x)
        return out.view(hidden_SBH.shape)

    def _inputs(self, module: Any, hidden_RH: Tensor, embedding_SBH: Tensor) -> tuple[dict[str, Any], Tensor]:
        """(inputs and norms of the projection, residual stream)."""
        norm = module.input_layernorm
        if not module.reads_embedding:
            weight = {} if norm is None else {"norm_H": norm.weight, "eps": norm.eps}
            return {"x_RH": hidden_RH, **weight}, hidden_RH
        embedding_RH = embedding_SBH.reshape(len(hidden_RH), -1)
        rest, second = hidden_RH, (hidden_RH, module.hidden_norm.weight)
        if module.norm_before_residual:
            rest = torch.empty_like(hidden_RH)
            self.kernels.norm_forward(hidden_RH, module.hidden_norm.eps, first=(module.hidden_norm.weight, rest))
            second = (rest, None)
        return {"x_RH": embedding_RH, "norm_H": norm.weight, "eps": norm.eps, "second": second}, rest

    def _attend(self, attention: Any, qkv_RX: Tensor, tables: tuple[Tensor, Tensor], index: int) -> Tensor:
        visibility = self.visibility
        cache, slots_BS = visibility.cache, visibility.slots_BS
        assert cache is not None and slots_BS is not None
        norms, eps = None, 0.0
        if attention.q_norm is not None:
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps
        heads = attention.q_proj.weight.shape[0] // attention.head_dim
        cos, sin = (table.flatten(0, 2) for table in tables)
        out: Tensor = self.kernels.decode_attention(
            qkv_RX, (cos, sin), (cache.keys[index], cache.values[index]), slots_BS[:, 0], heads,
            attention.num_kv_heads, visibility.key_slots, None, norms, eps, visibility.above_BSM, grouped=False,
        )  # fmt: skip
        return out


def _weights(attention: Any, letters: str) -> tuple[Tensor, ...]:
    return tuple(getattr(attention, f"{letter}_proj").weight for letter in letters)


def _biases(attention: Any, letters: str) -> tuple[Tensor, ...] | None:
    found = tuple(getattr(attention, f"{letter}_proj").bias for letter in letters)
    return None if found[0] is None else found


def _bias(linear: Any) -> tuple[Tensor] | None:
    return None if linear.bias is None else (linear.bias,)
