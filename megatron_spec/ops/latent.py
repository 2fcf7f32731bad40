"""Arithmetic of multi-head latent attention (DeepSeek-V3, arXiv 2412.19437, section 2.1.1), for base and draft.

Queries and keys have a rotary and a non-rotary part; all heads share the rotary part of a key.

S sequence, B batch, N heads of this rank, D = nope + rope sizes of a query or key head, V of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.config import MlaConfig
from megatron_spec.ops.rope import apply_rotary

LATENT_EPS = 1e-6
"""Epsilon of the norms of the latents, independent of the model's other norms."""


def expand(
    q_SBND: Tensor, k_rotary_SBR: Tensor, kv_SBNX: Tensor, mla: MlaConfig, cos_SB1R: Tensor, sin_SB1R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [S, B, N, D], rotated, and value [S, B, N, V] from the projections.

    Args:
        k_rotary_SBR: rotary part of the keys, before rotation.
        kv_SBNX: the expanded latent: non-rotary part of the keys, and values.
    """
    q_plain, q_rotary = q_SBND.split([mla.nope_head_dim, mla.rope_head_dim], -1)
    k_plain, value = kv_SBNX.split([mla.nope_head_dim, mla.v_head_dim], -1)
    q_rotary, k_rotary = (
        apply_rotary(_halves(x, mla.interleaved), cos_SB1R, sin_SB1R) for x in (q_rotary, k_rotary_SBR[:, :, None])
    )
    key = torch.cat([k_plain, k_rotary.expand(-1, -1, k_plain.shape[2], -1)], -1)
    return torch.cat([q_plain, q_rotary], -1), key, value


def _halves(x: Tensor, interleaved: bool) -> Tensor:
    """Reorder pairs (0, 1), (2, 3), ... to halves (0, 2, ...; 1, 3, ...); in both queries and keys scores are equal."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1) if interleaved else x
