"""Opens conversations for the scripts: tokenizer and stop tokens of a folder, length checked against the base."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_spec.checkpoint.spec import CheckpointSpec
from megatron_spec.commands.runs import ScriptRun
from megatron_spec.config import BaseConfig, UserError, megatron_flags
from megatron_spec.data.loader import ConversationDataset
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids


def check_seq_length(seq_length: int, spec: CheckpointSpec) -> None:
    """Raise UserError if the length exceeds the base's max_position_embeddings."""
    longest = spec.base.config.max_position_embeddings
    if not 0 < seq_length <= longest:
        raise UserError(f"--seq-length {seq_length} must be between 1 and the base's max_position_embeddings {longest}")


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


def check_base_shapes(run: ScriptRun, base: BaseConfig) -> None:
    """Raise UserError if Megatron-LM's flags describe another architecture than the base's."""
    wrong = []
    for name, text in run.base_shapes:
        found = operator.attrgetter(megatron_flags.FLAGS[name].attribute)(base)
        try:
            same = float(text) == float(found)
        except ValueError:
            same = False
        if not same:
            wrong.append(f"{name} {text}, but the base has {found}")
    if wrong:
        raise UserError(f"the architecture is that of the base in --load: {'; '.join(wrong)}")
