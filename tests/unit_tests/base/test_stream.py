"""The pipeline that stays filled against megatron-core's schedule, call by call, on two and three stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base.schedule import run_base
from megatron_spec.base.stream import FilledPipeline
from megatron_spec.batch import Batch
from megatron_spec.config import ParallelConfig
from tests.unit_tests.base.test_direct import CONFIG, make_base
from tests.worlds import run_world


def batch(number: int) -> Batch:
    """A micro-batch; some are longer."""
    S = 8 if number % 3 else 12
    tokens = torch.randint(40, (2, S), generator=torch.Generator().manual_seed(number))
    zeros = torch.zeros_like(tokens, dtype=torch.int32)
    return Batch(tokens, torch.arange(S).repeat(2, 1), zeros + 1, zeros)


# (numbers of a call, numbers said to follow): filled calls, fewer than wanted, others than said, and the end
CALLS = [
    ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9]),
    ([6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]),
    ([12, 13, 14, 15, 16, 17], [18]),
    ([18, 19, 20, 21, 22, 23], [0, 1, 2, 3]),
    ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9]),
    ([30, 31, 32, 33, 34, 35], []),
    ([6, 7, 8, 9, 10, 11], []),
]


def compare(size: int) -> list[int]:
    """The number of micro-batches that this stage ran in every call."""
    config = CONFIG.replace(num_layers=6)
    base = make_base(config, ParallelConfig(pipeline_model_parallel_size=size))
    world, batches = base.world, {n: batch(n) for n in range(36)}
    pipeline, counts = FilledPipeline(base), []
    inner, ran = base.forward, []
    base.forward = lambda *a: ran.append(1) or inner(*a)  # type: ignore[method-assign]
    for numbers, following in CALLS:
        ran.clear()
        found = pipeline.run([batches[n] for n in numbers], [batches[n] for n in following])
        counts.append(len(ran))
        expected = run_base(base, [batches[n] for n in numbers])
        whole: list[list[Tensor]] = [[torch.cat([state, captures], -1) for captures, state in expected]]
        dist.broadcast_object_list(whole, dist.get_process_group_ranks(world.pp)[-1], group=world.pp)
        owned = whole[0][world.pp_rank :: size]
        assert len(found) == len(owned) == 6 // size
        for a, b in zip(found, owned, strict=True):
            assert torch.equal(a, b)
    return counts


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_equals_the_schedule(size: int) -> None:
    for stage, counts in enumerate(run_world(size, compare, size)):
        ahead = 2 * (size - 1 - stage)
        # once filled, every stage runs as many micro-batches as the call has
        one = min(ahead, 1)
        assert counts == [6 + ahead, 6, 6 + one - ahead, 6 + ahead - one, 6, 6, 6]
