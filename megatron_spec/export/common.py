"""Write one folder from many ranks: gather shards, agree on errors, publish all or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.config import BaseConfig, UserError
from megatron_spec.config.structure import share
from megatron_spec.export.native_mtp import file_name
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.folders import published_folder

_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
_NOT_COPIED = {"config.json", "hf_quant_config.json", "run.json", "source.json"}
_NOT_COPIED |= {"latest_checkpointed_iteration.txt", "metadata.json", "progress.txt"}  # of a Megatron checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class BaseLike(Protocol):
    """Interface to a draft's base (a checkpoint's `BaseReference` or `BaseLink`)."""

    @property
    def path(self) -> Any:
        """Path of the base."""
        ...

    @property
    def kind(self) -> str:
        """'hf' or 'megatron'."""
        ...

    @property
    def config(self) -> BaseConfig:
        """Architecture of the base."""
        ...


class VerificationError(RuntimeError):
    """A written folder differs from the model in memory; it is not published."""


def parse_dtype(name: str) -> torch.dtype:
    """torch dtype of a name in an export option. Raises UserError."""
    if name not in DTYPES:
        raise UserError(f"unknown export dtype {name!r}: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def shared_folder(folder: Path | str, world: World, overwrite: bool) -> Iterator[Path]:
    """`published_folder` for all ranks: rank 0 creates it, and publishes it when the block succeeds on all ranks.

    The block must fail on all ranks or on none (`together`).
    """
    publishing = published_folder(folder, overwrite) if world.rank == 0 else None
    path = together(lambda: str(publishing.__enter__()) if publishing else "")
    names = [path]
    dist.broadcast_object_list(names, src=0)
    try:
        yield Path(names[0])
    except BaseException as e:
        if publishing is not None:
            try:
                publishing.__exit__(type(e), e, e.__traceback__)
            except BaseException as again:  # the same error, re-raised after the clean-up
                if again is not e:
                    raise
        raise
    together(lambda: publishing.__exit__(None, None, None) if publishing else None)


def copy_side_files(source: Path | str, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config of a model folder, but no code, weights or index."""
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name not in _NOT_COPIED and ".index." not in path.name:
            shutil.copyfile(path, folder / path.name)


def shards_of(tensor: Tensor, tp: dist.ProcessGroup) -> list[Tensor]:
    """The equally shaped tensors of all TP ranks, in rank order, on every rank."""
    if tp.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    shards = [torch.empty_like(tensor) for _ in range(tp.size())]
    dist.all_gather(shards, tensor, group=tp)
    return shards


def whole(parameter: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """The whole parameter: shards joined along `partition_dim`; a replicated parameter unchanged."""
    tensor = parameter.detach()
    if not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    rows: int | None = getattr(parameter, "partition_whole", None)
    if rows is None or rows % tp.size() == 0:
        return torch.cat(shards_of(tensor, tp), dim=dim)
    padding = [0, 0] * (tensor.dim() - dim - 1) + [0, -(-rows // tp.size()) - tensor.shape[dim]]
    return torch.cat(shards_of(F.pad(tensor, padding), tp), dim=dim).narrow(dim, 0, rows)


def shard(tensor: Tensor, like: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """This rank's part of a whole tensor, sharded like the parameter `like`."""
    if not getattr(like, "tensor_model_parallel", False):
        return tensor
    dim: int = like.partition_dim  # type: ignore[attr-defined]
    mine = share(tensor.shape[dim], tp.size(), tp.rank())
    return tensor.narrow(dim, mine.start, len(mine))


def parameters_by_file_name(draft: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the file, parameter). Later EAGLE-3 layers write their input norm under both names in use."""
    names = dict(draft.named_parameters())
    twins = draft.config.reads_captures  # type: ignore[union-attr]
    for name, parameter in names.items():
        yield file_name(draft.config, name), parameter  # type: ignore[arg-type]
        if not twins:
            continue
        twin = name.replace(".input_layernorm.", ".hidden_norm.")
        if twin not in names:
            yield twin, parameter
