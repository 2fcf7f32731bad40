"""Initialisation of a single process."""

from __future__ import annotations

import os

import torch.distributed as dist

from megatron_spec.runtime import distributed


def test_single_process_leaves_the_environment_unchanged() -> None:
    """Child processes must not take themselves for its ranks."""
    before = dict(os.environ)
    world = distributed.initialize()
    assert dist.is_initialized() and (world.pp_rank, world.pp_size) == (0, 1)
    assert dict(os.environ) == before
