"""spec.json: what describes a draft checkpoint besides its tensors. Does not import torch.

A checkpoint folder holds `latest_checkpointed_iteration.txt` (Megatron's pointer) and `iter_NNNNNNN/` folders, each
with spec.json, run.json, vocab.safetensors and the sharded tensors of `dist_checkpointing` in dist/.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_spec.config import (
    BaseConfig,
    BlockConfig,
    Config,
    DraftConfig,
    ObjectiveConfig,
    QuantConfig,
    UserError,
    option,
    presets,
)
from megatron_spec.runtime.files import read_object, sha256_of

POINTER = "latest_checkpointed_iteration.txt"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class BaseLink(Config):
    """The base a draft belongs to: its path, content and architecture."""

    path: str
    """Folder of the base at conversion."""
    kind: str
    """Format of the base: 'hf' or 'megatron'."""
    fingerprint: str
    """Hash of the base's content."""
    config: BaseConfig
    """Architecture of the base."""


@dataclass(frozen=True)
class CheckpointSpec(Config):
    """Contents of spec.json."""

    base: BaseLink
    """The base of the draft."""
    draft: DraftConfig
    """Configuration of the draft; `algorithm` selects its class."""
    quant: QuantConfig | None = None
    """Fake quantisation; None: not quantised."""
    iteration: int = option(0, least=0)
    """Optimizer steps of the run that saved it."""
    draft_class: str | None = None
    """module:Class of a draft of the user's; None: this package's class for the algorithm."""
    format_version: int = FORMAT_VERSION
    """Version of this file."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        if self.format_version != FORMAT_VERSION:
            raise UserError(
                f"checkpoint format {self.format_version} is not supported (this version reads {FORMAT_VERSION})"
            )


def iteration_folder(checkpoint: Path | str, iteration: int) -> Path:
    """CHECKPOINT/iter_NNNNNNN."""
    return Path(checkpoint) / f"iter_{iteration:07d}"


def aside_of(folder: Path) -> Path:
    """Where an iteration is while a new save of the same iteration takes its name."""
    return folder.with_name(f".{folder.name}.aside")


def replaced_at(aside: Path) -> Path:
    """The iteration folder of `aside_of`."""
    return aside.with_name(aside.name.removeprefix(".").removesuffix(".aside"))


def iterations(checkpoint: Path | str) -> list[Path]:
    """The iteration folders of a checkpoint, oldest first."""
    path = Path(checkpoint)
    return sorted(p for p in path.iterdir() if re.fullmatch(r"iter_\d{7,}", p.name)) if path.is_dir() else []


def is_draft_checkpoint(folder: Path | str) -> bool:
    """True for a folder of `resolve`, also an incomplete one."""
    return any((path / "spec.json").is_file() for path in (Path(folder), *iterations(folder)))


def missing_files(folder: Path) -> list[str]:
    """Names of the files that an iteration folder lacks."""
    return [name for name in ("spec.json", "vocab.safetensors", "dist/metadata.json") if not (folder / name).is_file()]


def latest_iteration(checkpoint: Path | str) -> int | None:
    """Iteration the pointer names; None when the folder holds no checkpoint. Raises UserError on a broken one.

    Without a pointer, or with one to an iteration that is gone, the newest complete iteration is taken: a run may have
    been killed before it wrote the pointer.
    """
    pointer = Path(checkpoint) / POINTER
    named = _named(pointer) if os.path.lexists(pointer) else None
    if named is not None and iteration_folder(checkpoint, named).is_dir():
        return named
    complete = [p for p in iterations(checkpoint) if not missing_files(p)]
    return int(complete[-1].name.removeprefix("iter_")) if complete else named


def _named(pointer: Path) -> int:
    try:
        with pointer.open(encoding="utf-8") as file:
            text = file.read(64).strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{pointer} cannot be read: {e}") from None
    if not (text.isdecimal() and text.isascii()):
        raise UserError(f"{pointer} should hold an iteration number, found {text[:40]!r}")
    return int(text)


def resolve(checkpoint: Path | str) -> Path:
    """The complete iteration folder of --load: a checkpoint folder's latest, or an iter_* folder itself.

    Raises UserError when it is missing or half-written.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        removed = re.fullmatch(r"iter_\d+", path.name) and iterations(path.parent)
        why = "; it may have been removed by the run that saves there (--ckpt-keep): start again" if removed else ""
        raise UserError(f"--load {path}: no such folder{why}")
    if not (path / "spec.json").is_file():
        latest = latest_iteration(path)
        if latest is None:
            raise UserError(
                f"--load {path} holds no draft checkpoint ({POINTER} and spec.json are missing): "
                "give the --save folder of convert_model.py, finetune.py or quantize.py"
            )
        path = iteration_folder(path, latest)
    missing = missing_files(path)
    if missing and not path.exists() and aside_of(path).is_dir():
        raise UserError(
            f"checkpoint {path} was being saved again when the run was killed: save again, or rename "
            f"{aside_of(path)} to it"
        )
    if missing:
        raise UserError(
            f"checkpoint {path} is incomplete: {', '.join(missing)} is missing; use another iteration or save again"
        )
    return path


@contextmanager
def locked(checkpoint: Path | str) -> Iterator[Path]:
    """`resolve`, with a lock that keeps a run saving there (--ckpt-keep) from removing the iteration meanwhile."""
    while True:
        folder = resolve(checkpoint)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # removed since
            continue
        try:
            with suppress(OSError):  # the file system may not support locks
                fcntl.flock(handle, fcntl.LOCK_SH)
            if missing_files(folder):  # removed since: `resolve` finds the checkpoint's new latest one
                continue
            yield folder
            return
        finally:
            os.close(handle)


def in_use(folder: Path) -> bool:
    """True while another process has locked an iteration (`locked`)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def read_spec(folder: Path | str) -> CheckpointSpec:
    """spec.json of an iteration folder. Raises UserError on unknown keys or wrong types."""
    return CheckpointSpec.from_dict(read_object(Path(folder) / "spec.json"))


def identity(folder: Path) -> dict[str, str]:
    """Path of an iteration folder and a hash that identifies its content."""
    return {"path": str(folder.resolve()), "run.json": sha256_of(folder / "run.json")}


def recorded_objective(config: DraftConfig, values: dict[str, Any]) -> ObjectiveConfig:
    """The objective of a run from its checkpoint.

    Those of older versions record step_decay also where it does nothing, and no step_weights where it counts.
    """
    paced = values.get("step_weights") == "d-pace"
    changes = {"step_decay": None} if paced else {"step_weights": "decay"}
    if isinstance(config, BlockConfig):
        changes = {"step_decay": None, "step_weights": None}
    return presets.objective_for(config, ObjectiveConfig.from_dict(values | changes))


def recorded_calls(values: dict[str, Any]) -> int:
    """Calls of a draft in training up to a checkpoint; its draws depend on them. One in each iteration of a run."""
    return int(values.get("calls", values.get("iteration", 0)))
