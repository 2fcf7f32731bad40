"""A checkpoint that is written at once starts no process which imports torch, whatever becomes of it."""

from __future__ import annotations

from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_spec.checkpoint.results import results_in_this_process


def save(folder: Path, value: Any) -> None:
    folder.mkdir()
    state = {"value": ShardedTensor.from_rank_offsets("value", value)}
    with results_in_this_process():
        dist_checkpointing.save(state, str(folder))


def test_no_manager_is_started(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()  # of an asynchronous save
    monkeypatch.setattr(filesystem_async, "_results_queue", theirs)
    monkeypatch.setattr(BaseManager, "start", lambda *_: pytest.fail("a manager was started"))
    save(tmp_path / "saved", torch.arange(5.0))
    assert filesystem_async._results_queue is theirs
    state = {"value": ShardedTensor.from_rank_offsets("value", torch.zeros(5))}
    assert dist_checkpointing.load(state, str(tmp_path / "saved"))["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(Exception, match="cannot be written"), results_in_this_process():
        raise RuntimeError("cannot be written")
    assert filesystem_async._results_queue is theirs
