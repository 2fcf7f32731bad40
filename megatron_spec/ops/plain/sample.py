"""Plain twins of `ops.kernels.sample`.

N rows, V vocabulary, C chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 8
"""Logits of a chunk of `chunk_masses`; small, because tests have small vocabularies."""


def _weights(logits_NV: Tensor, top_N: Tensor, temperature: float) -> Tensor:
    """fp64 [N, C, chunk]."""
    p = (logits_NV.float() / temperature - top_N[:, None]).exp().double()
    return torch.nn.functional.pad(p, (0, -p.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))


def chunk_masses(logits_NV: Tensor, top_N: Tensor, temperature: float) -> Tensor:
    """`kernels.sample.chunk_masses`."""
    return _weights(logits_NV, top_N, temperature).sum(2)


def find_in_chunk(
    logits_NV: Tensor, top_N: Tensor, temperature: float, chunk_N: Tensor, rest_N: Tensor
) -> Tensor:  # fmt: skip
    """`kernels.sample.find_in_chunk`."""
    p = _weights(logits_NV, top_N, temperature)[torch.arange(len(chunk_N), device=chunk_N.device), chunk_N]
    first_N = (p.cumsum(1) <= rest_N[:, None]).sum(1)
    last_N = (torch.arange(CHUNK, device=p.device) * (p > 0)).amax(1)
    return chunk_N * CHUNK + torch.minimum(first_N, last_N)
