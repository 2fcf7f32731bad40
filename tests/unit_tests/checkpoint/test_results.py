"""A checkpoint that is written at once starts no process; one in the background starts one, whose end is noticed."""

from __future__ import annotations

import functools
import os
import signal
from contextlib import nullcontext
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_spec.checkpoint.background import BackgroundWriter
from megatron_spec.checkpoint.results import results_in_this_process
from megatron_spec.config import UserError


def save(folder: Path, value: Any) -> None:
    folder.mkdir()
    state = {"value": ShardedTensor.from_rank_offsets("value", value)}
    with results_in_this_process():
        dist_checkpointing.save(state, str(folder))


@pytest.mark.parametrize("killed", [False, True])
def test_a_writer_in_the_background_that_is_killed(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """It has no processes of its own, which could be killed unnoticed; nothing is published without it."""
    published: list[bool] = []
    here = os.getpid()

    def write(*_: Any, **__: Any) -> Any:
        """In the writer: die, as when memory is short."""
        assert os.getppid() == here
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return item(*_, **__)

    item = filesystem_async._write_item
    monkeypatch.setattr(filesystem_async, "_write_item", functools.wraps(item)(write))
    folder = tmp_path / ".iter_0000001.tmp" / "dist"
    folder.mkdir(parents=True)
    state = {"value": ShardedTensor.from_rank_offsets("value", torch.arange(5.0))}
    writer = BackgroundWriter()
    writer.save(state, folder, lambda: published.append(True), nullcontext)
    if killed:
        with pytest.raises(UserError, match=r"checkpoint in .* was not written: the process that wrote it was killed"):
            writer.wait()
    else:
        writer.wait()
    assert published == ([] if killed else [True])


def test_no_manager_is_started(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()  # of an asynchronous save
    monkeypatch.setattr(filesystem_async, "_results_queue", theirs)
    monkeypatch.setattr(BaseManager, "start", lambda *_: pytest.fail("a manager was started"))
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a writer was forked"))  # one that is killed never reports
    save(tmp_path / "saved", torch.arange(5.0))
    assert filesystem_async._results_queue is theirs
    state = {"value": ShardedTensor.from_rank_offsets("value", torch.zeros(5))}
    assert dist_checkpointing.load(state, str(tmp_path / "saved"))["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(Exception, match="cannot be written"), results_in_this_process():
        raise RuntimeError("cannot be written")
    assert filesystem_async._results_queue is theirs
