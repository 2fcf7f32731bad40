"""The tokenizer of a model folder, and the ids a turn can end with. A name on the hub is downloaded (`runtime.hub`)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime import files
from megatron_spec.runtime.hub import model_folder


def load_tokenizer(folder: Path | str) -> Any:
    """The fast Hugging Face tokenizer in `folder`. Raises UserError when there is none or it does not load."""
    folder = model_folder(folder, weights=False)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: found no tokenizer.json; expected a folder with a fast Hugging Face tokenizer")
    files.require_small(folder / "tokenizer.json", "JSON")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


class BatchTokenizer:
    """Token ids of texts, without special tokens around them.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        threads: tokenise several texts on so many threads; Python runs on while they do.
    """

    def __init__(self, tokenizer: Any, threads: int = 1) -> None:
        self.tokenizer, self.threads = tokenizer, threads

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        encode = functools.partial(self.tokenizer.backend_tokenizer.encode_batch_fast, add_special_tokens=False)
        if self.threads < 2 or len(texts) < 2:
            return [encoding.ids for encoding in encode(texts)]
        size = -(-len(texts) // self.threads)
        parts = self._pool.map(encode, [texts[i : i + size] for i in range(0, len(texts), size)])
        return [encoding.ids for part in parts for encoding in part]


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of all special tokens, which no text produces."""
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)


def stop_token_ids(folder: Path | str, tokenizer: Any | None = None, base: Path | str | None = None) -> tuple[int, ...]:
    """Ascending ids that end a turn: eos of generation_config.json, config.json and the tokenizer, if present.

    Args:
        base: folder of the base, whose files count as well where the tokenizer is in another one.

    Raises UserError when an id in the files is not a number.
    """
    found: set[int] = set()
    folders = [model_folder(place, weights=False) for place in (folder, base) if place is not None]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for path in (place / name for place in folders for name in ("generation_config.json", "config.json")):
        if not os.path.lexists(path):
            continue
        value = files.read_object(path, {"eos_token_id": (int, list)}).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int for i in ids):
            raise UserError(f"{path}: found eos_token_id {value!r}, expected a number or a list of numbers")
        found.update(ids)
    return tuple(sorted(found))


def vocabulary_hash(tokenizer: Any) -> str:
    """16 hexadecimal digits that identify tokens and their ids; stored with token ids on disk."""
    tokens = sorted((int(i), token) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def beyond_vocabulary(where: str, token: int, vocab_size: int, tokenizer: Any = None) -> UserError:
    """The error for a token id outside the base's vocabulary, with its location, id and token."""
    name = tokenizer.convert_ids_to_tokens(token) if tokenizer is not None and token < len(tokenizer) else None
    return UserError(
        f"{where}: found token id {token}{f' ({name!r})' if name is not None else ''}, the base has ids below "
        f"{vocab_size}: tokenizer and base do not belong together"
    )
