"""What the `.metadata` of a distributed checkpoint may hold: torch unpickles that file without restrictions.

So it is read with a list of what such files hold before torch or megatron-core read it. All else in a checkpoint is
read with safe loaders, where only tensors are asked for.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from pathlib import Path
from typing import Any

import torch

from megatron_spec.config import UserError

_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
"""Their dataclasses and enumerations only hold values."""
_NAMES = {
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),  # up to megatron-core 0.15
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "slice"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _Other(Exception):
    """The name of something that is no part of such a file."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Class or function that the file names. Raises `_Other` for one that is not expected there."""
        if "." not in name:  # 'os.system' of a module that imports os
            if (module, name) in _NAMES:
                return super().find_class(module, name)
            if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
            if module.startswith(_MODULES):
                found = super().find_class(module, name)
                if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                    return found
        raise _Other(f"{module}.{name}")


def check_metadata(folder: Path) -> None:
    """Raise UserError unless the `.metadata` of a checkpoint's folder can be unpickled without running code."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            _Reader(file).load()
    except _Other as e:
        raise UserError(
            f"{path} names {e}, which no distributed checkpoint needs: reading it could run code; get the checkpoint "
            "again from a source that you trust"
        ) from None
    except Exception as e:  # unpickling raises any exception
        raise UserError(f"{path} cannot be read ({type(e).__name__}: {e}): copy the checkpoint again") from e
