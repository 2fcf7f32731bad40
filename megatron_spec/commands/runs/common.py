"""What several commands have: their common fields, and how a command takes its run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_spec.cli import json_object
from megatron_spec.config import BaseLayers, Config, ParallelConfig, TransformerImpl, flag_name, group, option
from megatron_spec.runtime.files import sha256_of

R = TypeVar("R")
SHARED = "Base, tokenizer and arithmetic"
"""Title of the flags that most scripts have."""


def takes(cls: type[Config]) -> Callable[[Callable[[Any], R]], Callable[..., R]]:
    """Decorate a command so that it takes a run of `cls`, or its fields as arguments."""

    def decorate(command: Callable[[Any], R]) -> Callable[..., R]:
        """The decorated command."""

        @functools.wraps(command)
        def call(*args: Any, **fields: Any) -> R:
            """Run the command with a run of `cls`, constructed from the fields unless given."""
            return command(args[0] if args and isinstance(args[0], cls) else cls(*args, **fields))

        return call

    return decorate


def settings_of(run: Config, **known: Any) -> dict[str, Any]:
    """Flag -> value of a run, and the hashes of the files it names: what must be equal on all ranks.

    Args:
        known: known hashes of files, by field; other entries are added unchanged.
    """
    found = dict(_flags(run))
    for flag, value in list(found.items()):
        name = flag.removeprefix("--").replace("-", "_")
        if isinstance(value, str) and Path(value).is_file() and name not in known:
            found[f"{flag} (content)"] = sha256_of(value)
    return {**found, **{f"--{name.replace('_', '-')} (content)": value for name, value in known.items()}}


def _flags(run: Config) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if isinstance(value, Config):
            yield from _flags(value)
        else:
            yield f"--{flag_name(field)}", value


@dataclass(frozen=True, kw_only=True)
class ScriptRun(Config):
    """Fields of every command."""

    base_shapes: tuple[tuple[str, ...], ...] = option((), hidden=True)
    """(flag, value) pairs of Megatron-LM's architecture flags, which must match the base."""


@dataclass(frozen=True, kw_only=True)
class ModelRun(ScriptRun):
    """Fields of a command that runs base or draft."""

    plain: bool = option(False, title=SHARED)
    """Turn off all fast paths (docs/performance.md): run plain code everywhere, for comparison."""


@dataclass(frozen=True, kw_only=True)
class Layers(Config):
    """Fields of a command that builds the base's layers."""

    layers: BaseLayers = group(BaseLayers, only=("transformer_impl",))
    """Layers of the base."""


@dataclass(frozen=True, kw_only=True)
class Parallel(Config):
    """Fields of a command that runs under torchrun."""

    parallel: ParallelConfig = group(ParallelConfig)
    """Parallel layout."""


@dataclass(frozen=True, kw_only=True)
class Precision(Config):
    """Fields of a command that loads weights."""

    bf16: bool = option(False, title=SHARED)
    """Hold weights in bfloat16 instead of float32."""


@dataclass(frozen=True, kw_only=True)
class DraftModules(Config):
    """Fields of a command that computes with a draft."""

    draft_transformer_impl: TransformerImpl = option("local", title=SHARED)
    """Modules of the draft's linears and norms: this package's, or Transformer Engine's, which are slower but run on
    every GPU it supports; checkpoints are the same (docs/transformer_engine.md#drafts)."""


@dataclass(frozen=True, kw_only=True)
class MovedBase(Config):
    """Fields of a command that reads a draft checkpoint."""

    base: str | None = option(None, "DIR", title=SHARED)
    """Path of the base, if it has moved since convert_model.py."""


@dataclass(frozen=True, kw_only=True)
class ChatText(Config):
    """Fields of a command that tokenises conversations or prompts."""

    tokenizer: str | None = option(None, "DIR", title=SHARED)
    """Tokenizer folder (default: the base's)."""
    chat_template_kwargs: dict[str, Any] | None = option(None, "JSON", parse=json_object, title=SHARED)
    """Arguments of the chat template, such as {"enable_thinking": false}; a line's own chat_template_kwargs take
    precedence."""
