"""Draft checkpoints with megatron-core's `dist_checkpointing`: any parallel layout loads those of any other."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_spec.checkpoint.background import BackgroundWriter
from megatron_spec.checkpoint.metadata import check_metadata
from megatron_spec.checkpoint.optimizer_state import adopt_learning_rates, allocate_state, translate
from megatron_spec.checkpoint.results import results_in_this_process
from megatron_spec.checkpoint.spec import (
    POINTER,
    CheckpointSpec,
    aside_of,
    in_use,
    iteration_folder,
    iterations,
    latest_iteration,
    replaced_at,
)
from megatron_spec.config import UserError
from megatron_spec.config.structure import share
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.files import rename, require_space, write_json, write_text, writing
from megatron_spec.runtime.folders import recover, replace_folder
from megatron_spec.runtime.provenance import write_run_json


def sharded_state(draft: nn.Module, world: World) -> dict[str, ShardedTensor]:
    """Every parameter and buffer of a draft as a `ShardedTensor`, under its own name prefixed with 'draft.'.

    Parameters split over the tensor parallel group carry `partition_dim`; everything else is replicated.
    """
    state: dict[str, ShardedTensor] = {}
    for name, tensor in draft.state_dict(keep_vars=True).items():
        key = f"draft.{name}"
        if getattr(tensor, "tensor_model_parallel", False):
            state[name] = _shard(key, tensor, world, (0, 0, world.draft_dp.rank()))
        else:
            replica = (0, world.tp_rank, world.draft_dp.rank())
            state[name] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica)
    return state


def _shard(key: str, tensor: Any, world: World, replica: tuple[int, ...]) -> ShardedTensor:
    whole: int | None = getattr(tensor, "partition_whole", None)
    if whole is None or whole % world.tp_size == 0:
        offset = (tensor.partition_dim, world.tp_rank, world.tp_size)
        return ShardedTensor.from_rank_offsets(key, tensor, offset, replica_id=replica)
    shape, begin = list(tensor.shape), [0] * tensor.dim()
    shape[tensor.partition_dim] = whole
    begin[tensor.partition_dim] = share(whole, world.tp_size, world.tp_rank).start
    local = tuple(tensor.shape)
    return ShardedTensor(key, tensor, tensor.dtype, local, tuple(shape), tuple(begin), None, replica_id=replica)


def _optimizer_metadata() -> dict[str, str]:
    # The only sharding of the distributed optimizer's state that loads under another layout.
    return {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}  # type: ignore[dict-item]


def save(
    checkpoint: Path | str,
    spec: CheckpointSpec,
    draft: nn.Module,
    vocab: DraftVocab,
    world: World,
    *,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    base_amax: dict[str, float] | None = None,
    run_config: dict[str, Any] | None = None,
    keep: int = 0,
    keep_until: int = -1,
    writer: BackgroundWriter | None = None,
) -> Path:
    """Save one iteration; it becomes visible, and `latest`, only when it is complete.

    Args:
        optimizer: megatron-core optimizer whose state is saved with the draft.
        extra: small picklable state (samples consumed, scheduler), equal on all ranks.
        base_amax: activation ranges of a fake-quantised base, by layer name.
        keep: number of iterations to keep; older ones are removed. 0 keeps all.
        keep_until: iterations up to this one belong to earlier runs and are never removed.
        writer: writes while training continues, after it has published its previous save. Default: write now.
    """
    if writer is not None:
        writer.wait()
    final = iteration_folder(checkpoint, spec.iteration)
    temporary = final.with_name(f".{final.name}.tmp")
    state: dict[str, Any] = {"model": sharded_state(draft, world), "extra": extra or {}}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=_optimizer_metadata())
    size = _size(state["model"], optimizer is not None)

    def begin() -> None:
        """Create the folder and its small files."""
        with _written(final, temporary, size):
            remove_leftovers(final.parent)
            require_space(final, size)
            (temporary / "dist").mkdir(parents=True)
            vocab.save(temporary / "vocab.safetensors")
            if base_amax is not None:
                write_json(temporary / "base_amax.json", base_amax)
            write_run_json(temporary, run_config or {})
            write_json(temporary / "spec.json", spec.to_dict())

    together(lambda: begin() if world.rank == 0 else None)

    def publish_everywhere() -> None:
        """Rename the finished folder, once all ranks have written."""
        together(lambda: publish(temporary, final, keep, keep_until) if world.rank == 0 else None)

    if writer is not None:
        writer.save(state, temporary / "dist", publish_everywhere, lambda: _written(final, temporary, size))
        return final
    with _written(final, temporary, size), results_in_this_process():
        dist_checkpointing.save(state, str(temporary / "dist"))
    publish_everywhere()
    return final


def _size(model: dict[str, ShardedTensor], with_optimizer: bool) -> int:
    """Bytes of the checkpoint: every value, plus three fp32 values for the optimizer (master copy, two moments)."""
    return sum(
        math.prod(t.global_shape) * (t.data.itemsize + 12 * (with_optimizer and t.data.requires_grad))
        for t in model.values()
    )  # fmt: skip


@contextmanager
def _written(final: Path, temporary: Path, size: int) -> Iterator[None]:
    """Remove the temporary folder if writing the iteration fails. Raises UserError for a full disk."""
    try:
        with writing(final, size):
            yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish(temporary: Path, final: Path, keep: int = 0, keep_until: int = -1) -> None:
    """Rename a complete temporary folder to iteration `final` and make it the latest. If killed at any point, `latest`
    still names a complete iteration: the new one or the previous one. If there is no other than `final` itself, saved
    again, it may be left under the name `aside_of`, until `remove_leftovers`."""
    checkpoint = final.parent
    others = [p for p in iterations(checkpoint) if p != final]
    if final.exists() and others:  # the same iteration saved again: meanwhile, another one is the latest
        write_text(checkpoint / POINTER, f"{_number(others[-1])}\n")
    replace_folder(temporary, final, aside_of(final))
    write_text(checkpoint / POINTER, f"{_number(final)}\n")
    if keep:
        _remove_old(checkpoint, keep, keep_until)


def remove_leftovers(checkpoint: Path) -> None:
    """Remove what killed runs left in a checkpoint folder, and give back an iteration that one was replacing."""
    for leftover in checkpoint.glob(".iter_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for aside in checkpoint.glob(aside_of(checkpoint / "iter_*").name):
        recover(replaced_at(aside), aside)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def _remove_old(checkpoint: Path, keep: int, keep_until: int) -> None:
    latest = latest_iteration(checkpoint)
    # A run that saves into the folder it started from keeps the iterations of earlier runs.
    saved = [p for p in iterations(checkpoint) if _number(p) > keep_until]
    for old in saved[:-keep]:
        if latest is not None and old != iteration_folder(checkpoint, latest) and not in_use(old):
            doomed = old.with_name(f".{old.name}.old.tmp")  # a partly removed folder must not look complete
            rename(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def load(folder: Path | str, draft: nn.Module, world: World, *, optimizer: Any = None) -> dict[str, Any]:
    """Load an iteration folder (see `spec.resolve`) into a draft and, when given, its optimizer.

    Strict: every missing and unexpected tensor is named. Returns the `extra` state that was saved.
    Raises UserError when the checkpoint does not fit or still holds values that were never set.
    """
    wanted: dict[str, Any] = {"model": sharded_state(draft, world)}
    if optimizer is not None:
        allocate_state(optimizer)
        wanted["optimizer"] = optimizer.sharded_state_dict(
            wanted["model"], is_loading=True, metadata=_optimizer_metadata()
        )
    try:
        _check_names(Path(folder), wanted["model"])
        loaded = dist_checkpointing.load(wanted, str(Path(folder) / "dist"), strict=StrictHandling.RAISE_UNEXPECTED)
    except UserError:
        raise
    except (Exception, CheckpointException) as e:
        raise _unreadable(folder, e) from e
    draft.load_state_dict(loaded["model"])
    if optimizer is not None:
        adopt_learning_rates(optimizer, loaded["optimizer"])
        translate(optimizer, loaded["optimizer"])
        optimizer.load_state_dict(loaded["optimizer"])
    unset = [n for n, p in draft.named_parameters() if not torch.isfinite(p).all()]
    if unset:
        raise UserError(f"checkpoint {folder} holds values that are not finite in: {', '.join(unset)}")
    return dict(loaded.get("extra") or {})


def read_extra(folder: Path | str) -> dict[str, Any]:
    """Only the `extra` state of an iteration folder; reads no tensors and needs no process group.

    Raises UserError when it cannot be read.
    """
    try:
        return dict(dist_checkpointing.load_common_state_dict(str(Path(folder) / "dist")).get("extra") or {})
    except Exception as e:
        raise _unreadable(folder, e) from e


def _unreadable(folder: Path | str, error: BaseException) -> UserError:
    if not Path(folder).is_dir():
        return UserError(f"checkpoint {folder} was removed while it was read: start again, or give another iteration")
    return UserError(f"checkpoint {folder} cannot be loaded: {type(error).__name__}: {error}")


def has_optimizer(folder: Path | str) -> bool:
    """True if an iteration folder holds optimizer state, which resuming needs.

    Raises UserError when it cannot be read.
    """
    try:
        return "optimizer" in dist_checkpointing.load_common_state_dict(str(Path(folder) / "dist"))
    except Exception as e:
        raise UserError(f"checkpoint {folder} cannot be loaded: {type(e).__name__}: {e}") from e


def _check_names(folder: Path, wanted: dict[str, ShardedTensor]) -> None:
    check_metadata(folder / "dist")
    metadata = dist_checkpointing.load_tensors_metadata(str(folder / "dist"))
    found = {k: tuple(v.global_shape) for k, v in metadata.items() if k.startswith("draft.")}
    expected = {v.key: tuple(v.global_shape) for v in wanted.values()}
    problems = [f"missing {k}" for k in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {k}" for k in sorted(found.keys() - expected.keys())]
    problems += [
        f"{k} has shape {found[k]}, expected {expected[k]}"
        for k in sorted(expected.keys() & found.keys())
        if found[k] != expected[k]
    ]
    if problems:
        raise UserError(f"checkpoint {folder} does not fit its spec.json: " + "; ".join(problems[:12]))
