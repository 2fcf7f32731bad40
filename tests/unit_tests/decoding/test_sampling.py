"""Sampling on one rank; several ranks are in test_parallel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_spec.decoding import sampling
from megatron_spec.ops import plain

BY_CHUNKS = pytest.mark.parametrize("kernels", [None, plain], ids=["whole", "chunks"])


@BY_CHUNKS
def test_sample_follows_the_softmax(tiny: Any, kernels: Any) -> None:
    group = tiny.base.world.tp
    logits = torch.tensor([0.3, -1.0, 2.0, float("-inf"), 1.1, float("-inf")])
    draws = 20000
    uniform = (torch.arange(draws) + 0.5) / draws  # stratified: frequencies are exact to 1 / draws
    ids = sampling.sample(logits.repeat(draws, 1), uniform, 0.7, group, kernels)
    expected = (logits / 0.7).softmax(0)
    given = logits.repeat(2, 1)
    sampling.sample(given, uniform[:2], 1.0, group, kernels)
    assert torch.equal(given, logits.repeat(2, 1))  # it works in place, on a copy
    assert torch.allclose(torch.bincount(ids, minlength=6) / draws, expected, atol=2 / draws)


@BY_CHUNKS
def test_sample_never_returns_an_impossible_token(tiny: Any, kernels: Any) -> None:
    group = tiny.base.world.tp
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    assert sampling.sample(logits, torch.tensor([0.0, 1.0]), 1.0, group, kernels).tolist() == [1, 2]
    far = torch.nn.functional.pad(logits, (16, 20), value=float("-inf"))  # chunks without mass around it
    assert sampling.sample(far, torch.tensor([0.0, 1.0]), 1.0, group, kernels).tolist() == [17, 18]


@BY_CHUNKS
def test_rows_of_nan_give_tokens_of_the_vocabulary(tiny: Any, kernels: Any) -> None:
    """And change nothing in other rows."""
    group, uniform = tiny.base.world.tp, torch.tensor([0.4, 0.0, 0.5, 0.5])
    logits = torch.randn(4, 61, generator=torch.Generator().manual_seed(8))
    expected = sampling.sample(logits, uniform, 1.0, group, kernels)
    logits[1], logits[2, 5], logits[3] = float("nan"), float("nan"), float("-inf")
    found = sampling.sample(logits, uniform, 1.0, group, kernels)
    assert found[0] == expected[0] and bool(((found >= 0) & (found < 61)).all())


def test_sampling_by_chunks_gives_the_same_tokens(tiny: Any) -> None:
    generator, group = torch.Generator().manual_seed(7), tiny.base.world.tp
    logits, uniform = torch.randn(500, 61, generator=generator) * 4, torch.rand(500, generator=generator)
    logits[:, 50:] = float("-inf")
    whole = sampling.sample(logits, uniform, 0.8, group)
    assert torch.equal(sampling.sample(logits, uniform, 0.8, group, plain), whole) and len(set(whole.tolist())) > 20


def test_top_k_and_top_p_keep_what_transformers_keeps(tiny: Any) -> None:
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    group = tiny.base.world.tp
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(5)) * 3
    for top_k, top_p in ((0, 1.0), (1, 1.0), (5, 1.0), (0, 0.3), (0, 0.9), (8, 0.7), (100, 0.999), (3, 1e-6)):
        expected = logits
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        assert torch.equal(sampling.likely(logits, top_k, top_p, group), expected), (top_k, top_p)


def test_draws_follow_whole_distributions() -> None:
    p = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 0.0])  # not normalised
    draws = 8000
    ids = sampling.draw(p.repeat(draws, 1), (torch.arange(draws) + 0.5) / draws)
    assert torch.bincount(ids, minlength=6).tolist() == [0, 3000, 1000, 0, 4000, 0]
    assert sampling.draw(p[None], torch.tensor([1.0])).tolist() == [4]


def test_log_probabilities_and_entropy(tiny: Any) -> None:
    group = tiny.base.world.tp
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(6)) * 3
    logits[:, 25:] = float("-inf")  # padding of the vocabulary
    logp = logits.double().log_softmax(dim=-1)
    top, ids = sampling.top_log_probs(logits, 3, group)
    assert torch.equal(ids, logp.topk(3).indices) and torch.allclose(top.double(), logp.topk(3).values)
    expected = torch.distributions.Categorical(logits=logits[:, :25].double()).entropy()
    assert torch.allclose(sampling.entropy(logits, group).double(), expected)
    assert torch.equal(sampling.at(logits, torch.tensor([0, 3, 24, 29]), group), logits[range(4), [0, 3, 24, 29]])
