"""longrope's short or long factors: only a text's length selects them, in training, packing and decoding.

Phi-3's original number of positions is 16 here. Compared with transformers, each text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.base.schedule import run_base
from megatron_spec.batch import Batch
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.config import DecodeConfig
from megatron_spec.decoding.engine import decode
from megatron_spec.runtime import distributed
from tests.unit_tests.families.families import CAPTURES, LENGTH, save, tokens

PROMPTS = (5, 14, 16, 30, 9)
"""Lengths: one stays short, two cross the boundary while they are answered, one is long."""
NEW = 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """(transformers' model, the same as a base)."""
    folder: Path = tmp_path_factory.mktemp("phi3")
    reference = save("phi3", folder)
    world = distributed.initialize()
    yield reference, load_base(inspect_base(folder), world, CAPTURES)
    distributed.shutdown()


def test_documents_of_a_batch_are_independent(models: tuple[Any, Any]) -> None:
    """Row 0: one short document and padding; row 1: one long document; row 2: a short and a short one, packed."""
    reference, base = models
    ids = tokens()[0]
    documents = torch.zeros(3, LENGTH, dtype=torch.int32)
    documents[0, 11:], documents[2, 9:] = -1, 1
    positions = torch.arange(LENGTH).expand(3, -1).clone()
    positions[2, 9:] -= 9
    [(_, state)] = run_base(base, [Batch(ids, positions, torch.zeros_like(documents), documents)])
    logits = base.logits(state).transpose(0, 1)
    for row, first, end in ((0, 0, 11), (1, 0, LENGTH), (2, 0, 9), (2, 9, LENGTH)):
        with torch.no_grad():
            alone = reference(ids[row : row + 1, first:end]).logits[0]
        torch.testing.assert_close(logits[row, first:end], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", [{}, {"decoding_type": "NGram", "max_draft_len": 3}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_equal_transformers(models: tuple[Any, Any], batch_size: int, method: dict[str, Any]) -> None:
    reference, base = models
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(84, (n,), generator=generator).tolist() for n in PROMPTS]
    prompts[0] = prompts[0][:2] * 3  # n-grams that repeat
    found = decode(base, prompts, DecodeConfig(max_new_tokens=NEW, batch_size=batch_size, **method), ())
    for prompt, generation in zip(prompts, found, strict=True):
        out = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert generation.tokens == out[0, len(prompt) :].tolist(), len(prompt)
        lengths = generation.accepted_lengths
        assert not method or len(generation.tokens) == 1 + sum(lengths) + len(lengths)


@pytest.mark.parametrize("length", [PROMPTS[1], PROMPTS[2]])
def test_equal_prompts_cross_the_boundary(models: tuple[Any, Any], length: int) -> None:
    """Read once as prompts, and one by one where they are read again."""
    base, generator = models[1], torch.Generator().manual_seed(6)
    prompt = torch.randint(84, (length,), generator=generator).tolist()
    config = DecodeConfig(max_new_tokens=NEW, batch_size=3, temperature=1.0)
    found = decode(base, [prompt] * 7, config, {5, 6}, seeds=range(7))
    for seed, generation in enumerate(found):
        [alone] = decode(base, [prompt], config, {5, 6}, seeds=[seed])
        assert (generation.tokens, generation.stopped) == (alone.tokens, alone.stopped)
