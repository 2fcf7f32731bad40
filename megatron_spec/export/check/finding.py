"""Findings about a folder, and the folder that the rules check. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_spec.export.formats import Reading
from megatron_spec.export.tensor_files import Entry

Engine = Literal["trtllm", "vllm", "sglang"]
ALL: tuple[Engine, ...] = ("trtllm", "vllm", "sglang")


@dataclass(frozen=True)
class Finding:
    """A violation of one rule."""

    rule: str
    found: str
    fix: str
    engines: tuple[Engine, ...] = ALL
    warning: bool = False
    """True for something that works but is fragile."""

    def __str__(self) -> str:
        kind = "warning" if self.warning else "error"
        return f"{kind} [{self.rule}] ({', '.join(self.engines)}): {self.found}\n    fix: {self.fix}"


@dataclass
class Folder:
    """A folder to check: its config.json and tensors, and the target's config when known."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Entry]
    base: dict[str, Any] | None = None
    reading: Reading | None = None
    """The draft, if it is readable."""
    embedding_compared: bool = False
    """It is known whether the draft's embedding is the target's: then `reading` says it."""
    prefix: str = field(init=False, default="")
    """'model.' when the tensor names have this prefix."""

    def __post_init__(self) -> None:
        if any(n.startswith("model.") for n in self.tensors):
            self.prefix = "model."
            self.tensors = {n.removeprefix("model."): e for n, e in self.tensors.items()}

    @property
    def layers(self) -> list[str]:
        """Prefix of every layer in this folder's spelling."""
        count = self.config.get("num_hidden_layers", 1)
        if any(n.startswith("midlayer.") for n in self.tensors):
            return ["midlayer"]
        return [f"layers.{i}" for i in range(count)]

    @property
    def target_architecture(self) -> str | None:
        """First of the target's `architectures`."""
        names = (self.base or {}).get("architectures")
        return names[0] if isinstance(names, list) and names else None

    @property
    def target_hidden(self) -> int:
        """Hidden size of the target."""
        base = (self.base or {}).get("hidden_size")
        return int(self.config.get("target_hidden_size") or base or self.config["hidden_size"])

    @property
    def draft_vocab(self) -> int:
        """D; V when the key is missing."""
        return int(self.config.get("draft_vocab_size") or self.config["vocab_size"])
