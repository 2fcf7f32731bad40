"""Plain twins of `ops.kernels.decode`, with its letters."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_spec.ops.plain.rotary import rotary_forward
from megatron_spec.ops.visibility import visible_slots


def decode_attention(
    x_RX: Tensor, tables: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], first_B: Tensor, heads: int,
    kv_heads: int, key_slots: int, bias_X: Tensor | None = None, norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0, above_BSM: Tensor | None = None, grouped: bool = True,
) -> Tensor:  # fmt: skip
    """`kernels.decode.decode_attention`."""
    (B,), R, D = first_B.shape, len(x_RX), cache[0].shape[3]
    tables = (tables[0][:, : D // 2], tables[1][:, : D // 2])
    S, x = R // B, x_RX if bias_X is None else x_RX + bias_X
    q, k, v = (x.new_empty(R, n * D) for n in (heads, kv_heads, kv_heads))
    rotary_forward(x, tables, q, k, v, heads, kv_heads, grouped=grouped, norms=norms, eps=eps)
    slots_BS = first_B[:, None] + torch.arange(S, device=x.device)
    b_B1 = torch.arange(B, device=x.device)[:, None]
    for kept, new in zip(cache, (k, v), strict=True):
        kept[b_B1, slots_BS] = new.view(S, B, kv_heads, D).transpose(0, 1)
    keys, values = (kept[:, :key_slots].repeat_interleave(heads // kv_heads, 2) for kept in cache)
    if above_BSM is None:
        seen_BSL = torch.arange(key_slots, device=x.device) <= slots_BS[:, :, None]
    else:
        seen_BSL = visible_slots(first_B + S - above_BSM.shape[2], above_BSM, key_slots)
    scores = torch.einsum("sbnd,blnd->bnsl", q.view(S, B, heads, D), keys) * D**-0.5
    shares = scores.masked_fill(~seen_BSL[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnsl,blnd->sbnd", shares, values).reshape(R, heads * D)
