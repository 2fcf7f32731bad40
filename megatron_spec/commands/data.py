"""Opens conversations for the scripts: tokenizer and stop tokens of a folder, length checked against the base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_spec.checkpoint.spec import CheckpointSpec
from megatron_spec.config import UserError
from megatron_spec.data.loader import ConversationDataset
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids


def check_file(path: str, flag: str = "--data") -> None:
    """Raise UserError if an input file does not exist."""
    if not Path(path).is_file():
        raise UserError(f"{flag} {path}: {'is a folder, expected a file' if Path(path).is_dir() else 'no such file'}")


def tokenizer_folder(spec: CheckpointSpec, base: str | None, tokenizer: str | None) -> str:
    """Folder of the tokenizer: the given one, or the base's. Raises UserError if it is missing."""
    folder = tokenizer or base or str(spec.base.path)
    if tokenizer is None and base is None and not Path(folder).exists():
        raise UserError(f"the base of this checkpoint is not at {folder}: give its new location with --base")
    return folder


def open_dataset(
    data: str,
    tokenizer_folder: str,
    seq_length: int,
    cache: str | None = None,
    *,
    vocab_size: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    workers: int | None = None,
) -> ConversationDataset:
    """Conversations of a JSON lines file, tokenised with the tokenizer of a folder; see `ConversationDataset`."""
    tokenizer = load_tokenizer(tokenizer_folder)
    stops = stop_token_ids(tokenizer_folder, tokenizer)
    return ConversationDataset(data, tokenizer, seq_length, stops, cache, workers, template_kwargs, vocab_size)
