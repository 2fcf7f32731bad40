"""Offsets from byte lengths equal the tokenizer's own."""

import numpy as np
import pytest
from tokenizers import normalizers
from tokenizers.pre_tokenizers import ByteLevel

from megatron_spec.data import chat
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.conversations import Conversation
from megatron_spec.data.offsets import TokenOffsets, TokenPlaces, byte_lengths
from tests.unit_tests.data.chat_fixtures import BRACKETS, CHATML, make_tokenizer, talk

TEXTS = ["plain <|end|> text", "né 😀 ö", "<bos>😀<eos>", " a  b ", "日本語の<|end|>文"]
TALKS = [
    talk(("user", "hi é"), ("assistant", "yo 😀😀"), ("user", "ö"), ("assistant", "né 12\n\nok ")),
    talk(("user", "<|end|> 日本"), ("assistant", "語 <|end|> x")),
    talk(("user", "e\u0301"), ("assistant", "e\u0301 x")),
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_span_has_the_same_tokens(text):
    tokenizer = make_tokenizer(CHATML)
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    places = TokenPlaces(text, np.array(encoding.ids), byte_lengths(tokenizer))
    offsets = TokenOffsets(encoding)
    assert places.fits
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            assert places.tokens_of(begin, end) == offsets.tokens_of(begin, end)
    last = [i for i, (b, e) in enumerate(encoding.offsets) if i + 1 == len(encoding) or encoding.offsets[i + 1][0] >= e]
    assert [places.character_end(i) for i in last] == [offsets.character_end(i) for i in last]


@pytest.mark.parametrize("template", [CHATML, BRACKETS])
@pytest.mark.parametrize("kind", ["bytes", "normalised", "prefix space"])
def test_masks_do_not_depend_on_the_offset_method(template, kind, monkeypatch):
    tokenizer = make_tokenizer(template)
    if kind == "normalised":  # then lengths say nothing about some texts
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    if kind == "prefix space":
        tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    conversations = [Conversation(messages, "here") for messages in TALKS]
    fast = [ChatEncoder(tokenizer).encode(c) for c in conversations]
    monkeypatch.setattr(chat, "byte_lengths", lambda tokenizer: None)
    slow = [ChatEncoder(tokenizer).encode(c) for c in conversations]
    for a, b in zip(fast, slow, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.turns.tolist() == b.turns.tolist()


def test_tokenizers_without_byte_tokens_have_no_lengths():
    tokenizer = make_tokenizer(CHATML)
    assert byte_lengths(tokenizer)[tokenizer.convert_tokens_to_ids("<|end|>")] == 7
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer.model)({"\u2581a": 5, "b": 6}, [])
    assert byte_lengths(tokenizer) is None
