"""spec.json: what a draft checkpoint is, apart from its tensors. No torch here.

A checkpoint folder holds `latest_checkpointed_iteration.txt` (Megatron's pointer) and `iter_NNNNNNN/` folders, each
with spec.json, run.json, vocab.safetensors and the sharded tensors of `dist_checkpointing` in dist/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_spec.config import BaseConfig, Config, DraftConfig, QuantConfig, UserError
from megatron_spec.runtime.files import read_json, sha256_of

POINTER = "latest_checkpointed_iteration.txt"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class BaseLink(Config):
    """The base a draft belongs to: where it was, what it contains, what it is."""

    path: str
    """Folder in which it was."""
    kind: str
    """'hf' or 'megatron'."""
    fingerprint: str
    """Hash of its content."""
    config: BaseConfig
    """Its architecture."""


@dataclass(frozen=True)
class CheckpointSpec(Config):
    """Contents of spec.json."""

    base: BaseLink
    """The base of the draft."""
    draft: DraftConfig
    """Told apart by `algorithm`."""
    quant: QuantConfig | None = None
    """Fake quantisation; None: not quantised."""
    iteration: int = 0
    """Optimizer steps of the run that saved it."""
    format_version: int = FORMAT_VERSION
    """Version of this file."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        if self.format_version != FORMAT_VERSION:
            raise UserError(
                f"checkpoint format {self.format_version} is not known here (this version reads {FORMAT_VERSION})"
            )


def iteration_folder(checkpoint: Path | str, iteration: int) -> Path:
    """CHECKPOINT/iter_NNNNNNN."""
    return Path(checkpoint) / f"iter_{iteration:07d}"


def latest_iteration(checkpoint: Path | str) -> int | None:
    """Iteration the pointer names, or None when the folder holds no checkpoint. Raises UserError on a broken one."""
    pointer = Path(checkpoint) / POINTER
    if not pointer.is_file():
        return None
    text = pointer.read_text(encoding="utf-8").strip()
    if not text.isdigit():
        raise UserError(f"{pointer} should hold an iteration number, found {text[:40]!r}")
    return int(text)


def resolve(checkpoint: Path | str) -> Path:
    """The complete iteration folder that --load means: a checkpoint folder's latest, or an iter_* folder itself.

    Raises UserError when it is missing or half-written.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        raise UserError(f"--load {path}: no such folder")
    if not (path / "spec.json").is_file():
        latest = latest_iteration(path)
        if latest is None:
            raise UserError(
                f"--load {path} holds no draft checkpoint ({POINTER} and spec.json are missing): "
                "give the --save folder of convert_model.py, finetune.py or quantize.py"
            )
        path = iteration_folder(path, latest)
    for name in ("spec.json", "vocab.safetensors", "dist/metadata.json"):
        if not (path / name).is_file():
            raise UserError(f"checkpoint {path} is incomplete: {name} is missing; use another iteration or save again")
    return path


def read_spec(folder: Path | str) -> CheckpointSpec:
    """spec.json of an iteration folder. Raises UserError on unknown keys or wrong types."""
    return CheckpointSpec.from_dict(read_json(Path(folder) / "spec.json"))


def identity(folder: Path) -> dict[str, str]:
    """Path of an iteration folder, and what tells its content from that of another."""
    return {"path": str(folder.resolve()), "run.json": sha256_of(folder / "run.json")}
