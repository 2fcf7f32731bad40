"""The `.metadata` of a checkpoint, which torch unpickles, runs no code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save
from torch.distributed.checkpoint.filesystem import FileSystem

from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.metadata import check_metadata
from megatron_spec.config import UserError


class Runs:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def dotted(folder: Path) -> bytes:
    """os.system, by way of a module of torch that imports os."""
    module, name = b"torch.distributed.checkpoint.filesystem", b"os.mkdir"
    strings = b"".join(b"\x8c" + bytes([len(x)]) + x for x in (module, name))
    where = str(folder / "ran").encode()
    return b"\x80\x04" + strings + b"\x93" + b"\x8c" + bytes([len(where)]) + where + b"\x85R."


@pytest.mark.parametrize("kind", ["mkdir", "a dotted name", "a class that does more than hold values"])
def test_code_is_not_run(tmp_path: Path, kind: str) -> None:
    made = tmp_path / "ran"
    content = {
        "mkdir": pickle.dumps(Runs(os.mkdir, str(made))),
        "a dotted name": dotted(tmp_path),
        "a class that does more than hold values": pickle.dumps(Runs(FileSystem)),
    }[kind]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata names .*: reading it could run code"):
        sharded.load(tmp_path, torch.nn.Module(), None)  # type: ignore[arg-type]
    assert not made.exists()
    if kind != "a class that does more than hold values":
        with pytest.raises(Exception, match="NoneType"):
            FileSystemReader(tmp_path / "dist").read_metadata()
        assert made.exists(), "the test must have something to catch"


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64)}
    save({**tensors, "object": {"a": 1}}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    check_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"\.metadata cannot be read .*: copy the checkpoint again"):
        check_metadata(tmp_path)
