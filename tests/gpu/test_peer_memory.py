"""Sums of two GPUs through each other's memory (`ops/peer_memory.py`) against NCCL's, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_spec.config import ParallelConfig
from megatron_spec.ops import overlap, peer_memory
from megatron_spec.ops.overlap import RankSums
from megatron_spec.runtime import distributed
from tests.worlds import run_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ROWS, H = 8192, 4096


def values(rows: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
    return torch.randn(rows, H, generator=generator, device="cuda").to(dtype)


def sums_in_flight(sums: RankSums, dtype: torch.dtype) -> int:
    """Differing elements over many rounds: halves in flight together, a whole one started first, products between."""
    weight, wrong = torch.eye(H, device="cuda", dtype=dtype), torch.zeros((), device="cuda", dtype=torch.int64)
    for seed in range(20):
        given = [values(n, seed, dtype) for n in (ROWS, ROWS // 2, ROWS // 2, 1024)]
        expected = [x.clone() for x in given]
        for x in expected:
            dist.all_reduce(x, group=sums.group)
        first = sums.start(given[0])
        later = []
        for x in given[1:]:  # each is the output of a product, as in a layer
            later.append(sums.start(x @ weight))
        found = [wait() for wait in later]
        found.insert(0, first())
        for a, b in zip(found, expected, strict=True):
            wrong += (a != b).sum()
    return int(wrong)


def models(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Loss and gradients of a draft on a base, both sharded over two GPUs."""
    from benchmarks.random_models import random_base, random_draft
    from benchmarks.shapes import base_shape
    from megatron_spec.batch import Batch
    from megatron_spec.config import ObjectiveConfig
    from megatron_spec.features.online import OnlineFeatures

    world = distributed.initialize(ParallelConfig(tensor_model_parallel_size=2))
    config = base_shape("tiny").replace(hidden_size=512, intermediate_size=1024, head_dim=64)
    torch.manual_seed(5 + world.tp_rank)
    base, draft = random_base(config, world, torch.bfloat16), random_draft(config, world, 256, torch.bfloat16)
    for model in (base, draft):
        model.paths = model.paths.without(*overrides)
    assert base.direct is not None
    base.direct.sums = overlap.rank_sums(world.tp, base.paths)
    S, B = 1024, 4
    tokens = torch.randint(0, config.vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
    ones = torch.ones(B, S, dtype=torch.int32)
    batch = Batch(tokens, torch.arange(S).expand(B, S).clone(), ones, ones - 1).to(world.device)
    features = OnlineFeatures(base).features([batch])[0]
    losses = draft(features, base, ObjectiveConfig(ttt_steps=3))
    losses.total.backward()
    found = {"captures": features.captures_SBC, "state": features.state_SBH, "loss": losses.loss_T}
    found |= {f"grad {n}": p.grad for n, p in draft.named_parameters() if p.grad is not None}
    used = [sums._link is not None for sums in (base.direct.sums, draft.rank_sums())]
    return {"values": {n: x.detach().cpu() for n, x in found.items()}, "used": used}


def ranks() -> dict[str, Any]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world = distributed.initialize(ParallelConfig(tensor_model_parallel_size=2))
    link = peer_memory.connect(world.tp, world.device)
    if link is None:
        return {"link": False}
    sums = RankSums(world.tp, lambda x: link)
    found: dict[str, Any] = {"link": True, "free": None}
    found["wrong"] = {str(dtype): sums_in_flight(sums, dtype) for dtype in (torch.bfloat16, torch.float32)}
    found["free"] = sorted(sums._free) == list(range(link.slots))
    found["models"] = [models(()), models(("tp_symmetric",))]
    return found


def test_equals_nccl() -> None:
    for found in run_world(2, ranks, fresh=True):
        assert found["link"], "these GPUs cannot share memory: see the log"
        assert found["wrong"] == {"torch.bfloat16": 0, "torch.float32": 0} and found["free"]
        copied, reduced = found["models"]
        assert copied["used"] == [True, True] and reduced["used"] == [False, False]
        for name, x in reduced["values"].items():
            y = copied["values"][name]
            if name.startswith("grad"):  # the backward of attention adds in any order
                assert float((x.float() - y.float()).norm() / x.float().norm()) < 1e-2, name
            else:
                assert torch.isfinite(x.float()).all() and torch.equal(x, y), name
