"""Attention under context parallelism against plain masked attention; one GPU plays every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_spec.ops import attention
from megatron_spec.ops.visibility import Visibility
from megatron_spec.runtime.context import ContextShard
from tests.unit_tests.ops.test_attention import documents, plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("kernel", ["chunks", "chunks, packed", "parts", "parts, cudnn off"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("B", [1, 2])
def test_kernels_equal_masked_attention(kernel: str, rank: int, B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    S, N, G, D, single, packed = 512, 8, 4, 64, kernel.startswith("parts"), "packed" in kernel
    if "off" in kernel:
        monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    shard, documents_BS = ContextShard(group), documents(B, S, packed).cuda()
    documents_BS = documents_BS.clamp(min=0) if single else documents_BS  # padding is not told apart
    torch.manual_seed(0)
    q = torch.randn(B, S, N, D, device="cuda", dtype=torch.bfloat16)[:, shard.rows(S, "cuda")]
    k, v = (torch.randn(B, S, G, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    do = torch.randn_like(q)
    visibility = Visibility(documents_BS, shard, single)
    assert attention.kernel_of(attention.Call(q, k, v, visibility, lse=True)).name == kernel.split(",")[0]
    o, lse, state = attention.forward(q, k, v, visibility)
    grads = attention.backward(do, q, k, v, o, lse, state, visibility)
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    o_plain, lse_plain = plain(*wide, visibility.mask_B1SL)
    expected = torch.autograd.grad(o_plain, wide, do.float())
    for found, true in zip((o, lse, *grads), (o_plain, lse_plain, *expected), strict=True):
        assert float((found.float() - true).norm() / true.norm()) < 1e-2
