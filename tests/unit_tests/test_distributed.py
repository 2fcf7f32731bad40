"""Initialisation of a process, and of two."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
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


def left_early(folder: str) -> None:
    """Rank 1 has nothing to do in a run that rank 0 has not finished."""
    world, store = distributed.initialize(), dist.distributed_c10d._get_default_store()
    with distributed.sole_run(folder, world):
        dist.barrier()
        if world.rank == 0:
            with pytest.raises(dist.DistStoreError):
                store.wait(["left"], timedelta(seconds=1))
    if world.rank == 1:
        store.set("left", "")


def test_no_rank_leaves_a_run_before_the_others(tmp_path: Path) -> None:
    run_world(2, left_early, str(tmp_path / "run"))
