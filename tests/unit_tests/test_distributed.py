"""Initialisation of a process, and of two."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_spec.config import ParallelConfig
from megatron_spec.runtime import distributed
from tests.worlds import run_world


def test_single_process_leaves_the_environment_unchanged() -> None:
    """Child processes must not take themselves for its ranks."""
    before = dict(os.environ)
    world = distributed.initialize()
    assert dist.is_initialized() and (world.pp_rank, world.pp_size) == (0, 1)
    assert dict(os.environ) == before


def timeouts() -> set[timedelta]:
    """Of the world and of every group that the base and the draft use."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, distributed_timeout_minutes=77)
    world = distributed.initialize(parallel)
    groups = [dist.group.WORLD, world.tp, world.pp, world.dp, world.draft_dp, world.draft_groups.pp]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}  # type: ignore[union-attr]


def test_every_group_waits_as_long_as_asked() -> None:
    assert run_world(2, timeouts) == [{timedelta(minutes=77)}] * 2
