"""The mask token of a base: named by its tokenizer, reserved, or a row of the embedding that no token has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.data import mask_token


def write(folder: Path, added: dict[str, int], vocab: Any = ("a", "b")) -> Path:
    tokens = {word: i for i, word in enumerate(vocab)} if isinstance(vocab, tuple) else vocab
    added_tokens = [{"content": word, "id": i} for word, i in added.items()]
    content = {"added_tokens": added_tokens, "model": {"vocab": tokens}}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("added", "vocab_size", "found"),
    [
        ({"<|end|>": 2, "<|reserved_0|>": 3, "<|mask|>": 4}, 6, 4),
        ({"<|end|>": 2, "<|reserved_1|>": 4, "<|reserved_0|>": 3}, 6, 3),
        ({"<|end|>": 2, "[MASK]": 6}, 6, None),  # a token without a row
        ({"<|end|>": 2}, 4, 3),
        ({"<|end|>": 2}, 3, None),
    ],
)
def test_first_choice_that_the_embedding_has(
    tmp_path: Path, added: dict[str, int], vocab_size: int, found: int | None
) -> None:
    assert mask_token.find(write(tmp_path, added), vocab_size) == found


def test_without_a_tokenizer_none_is_known(tmp_path: Path) -> None:
    assert mask_token.find(tmp_path, 9) is None


@pytest.mark.parametrize("content", ["{broken", "[]"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        mask_token.find(tmp_path, 9)
