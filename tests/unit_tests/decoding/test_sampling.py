"""Choosing tokens on one rank; several ranks are in test_parallel.py."""

from __future__ import annotations

from typing import Any

import torch

from megatron_spec.decoding import sampling
from megatron_spec.decoding.drafters.ngram import lookup


def test_sample_follows_the_softmax(tiny: Any) -> None:
    group = tiny.base.world.tp
    logits = torch.tensor([0.3, -1.0, 2.0, float("-inf"), 1.1, float("-inf")])
    draws = 20000
    uniform = (torch.arange(draws) + 0.5) / draws  # stratified: frequencies are exact to 1 / draws
    ids = sampling.sample(logits.repeat(draws, 1), uniform, 0.7, group)
    expected = (logits / 0.7).softmax(0)
    assert torch.allclose(torch.bincount(ids, minlength=6) / draws, expected, atol=2 / draws)


def test_sample_never_returns_an_impossible_token(tiny: Any) -> None:
    group = tiny.base.world.tp
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    assert sampling.sample(logits, torch.tensor([0.0, 1.0]), 1.0, group).tolist() == [1, 2]


def test_lookup_prefers_long_then_late_matches() -> None:
    tokens = torch.tensor([1, 2, 3, 9, 2, 3, 7, 3, 8, 1, 2, 3])
    assert lookup(tokens, 3, 2).tolist() == [9, 2]  # 1 2 3 at the start
    assert lookup(tokens, 2, 2).tolist() == [7, 3]  # 2 3, the later of two
    assert lookup(tokens, 2, 2, use_oldest=True).tolist() == [9, 2]
    assert lookup(tokens, 1, 5).tolist() == [8, 1, 2, 3]  # the end of the text cuts it
    assert lookup(torch.tensor([1, 2, 3]), 2, 3).tolist() == []
    assert lookup(torch.tensor([4]), 2, 3).tolist() == []
    assert lookup(torch.tensor([4, 4]), 2, 3).tolist() == [4]
