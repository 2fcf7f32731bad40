"""Drafts of every algorithm decode as they were trained: text as without, each draft the draft from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import DraftConfig, ObjectiveConfig, presets
from megatron_spec.decoding.drafters import build_drafter
from megatron_spec.decoding.engine import decode
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.test_eagle import Recorder
from tests.unit_tests.decoding.tiny_models import CONFIG, VOCAB

KINDS = ("eagle1", "eagle3.1", "p-eagle", "eagle-mtp", "medusa")
CAPTURING = ("eagle3.1", "p-eagle")
MASK = 7
LENGTH = CONFIG.max_draft_len


def config_of(kind: str, base: Any) -> DraftConfig:
    if kind == "medusa":
        return presets.medusa_config(base.config, num_heads=LENGTH)
    overrides: dict[str, Any] = {"capture_layer_ids": tiny_models.CAPTURES} if kind in CAPTURING else {}
    if kind == "p-eagle":
        overrides["mask_token_id"] = MASK
    return presets.eagle_config(base.config, kind, overrides)


def new_draft(base: Any, kind: str) -> Any:
    draft = build_draft(config_of(kind, base), DraftVocab.full(base.config.vocab_size), base.world, torch.float32)
    draft.initialize(base, None, seed=3)
    return draft


def text_features(base: Any, text: list[int], prompt: int) -> Features:
    from megatron_spec.base.schedule import run_base

    tokens_BS = torch.tensor([text])
    turns_BS = (torch.arange(len(text)) >= prompt).int()[None]
    batch = Batch(tokens_BS, torch.arange(len(text))[None], turns_BS, torch.zeros_like(turns_BS))
    [(captures, state)] = run_base(base, [batch])
    return Features(batch, captures, state)


@pytest.fixture(scope="module")
def trained(tiny: Any) -> dict[str, Any]:
    """A draft of every kind, overfitted on the answer to the first prompt."""
    drafts = {}
    more = decode(tiny.base, tiny.prompts[:1], CONFIG.replace(max_new_tokens=30), set())[0].tokens
    f = text_features(tiny.base, tiny.prompts[0] + more, len(tiny.prompts[0]))
    for kind in KINDS:
        draft = drafts[kind] = new_draft(tiny.base, kind)
        noise = {"feature_noise": 0.0, "token_weight": 1.0} if kind == "eagle1" else {}
        goal = ObjectiveConfig(ttt_steps=LENGTH, loss="hard_ce", row_keep=1.0, **noise)  # every row is learned
        optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
        for _ in range(120):
            losses = draft(f, tiny.base, goal)
            optimizer.zero_grad()
            (losses.total / losses.rows_T[0]).backward()
            optimizer.step()
        assert float((losses.correct_T / losses.rows_T).min()) == 1.0, kind
    return drafts


@torch.no_grad()
def drafts_from_scratch(base: Any, draft: Any, text: list[int]) -> list[int]:
    """All draft tokens of the last row, by training's own forward: each draft is appended and everything run again."""
    if hasattr(draft, "heads"):
        f = text_features(base, text, 0)
        return [int(draft.logits(f.state_SBH[-2:-1], i, base).argmax()) for i in range(LENGTH)]
    from megatron_spec.drafts.contract import shift
    from megatron_spec.ops.ttt_attention import TrainingTimeTest, trunk_layout

    f = text_features(base, text[:-1], 0)
    drafted: list[int] = []
    attention = TrainingTimeTest(trunk_layout(f.batch.documents_BS, torch.float32))
    hidden: Tensor = draft.start(f.captures_SBC, f.state_SBH)
    S = len(text) - 1
    for k in range(LENGTH):
        tokens = torch.tensor([text + drafted + [0] * LENGTH])
        embedding = base.embed(shift(tokens, 1 + k, 1)[:, :S])
        if k and hasattr(draft, "mask_hidden"):  # it reads neither its own tokens nor its own states
            embedding = base.embed(torch.full((1, S), MASK))
            hidden = (draft.mask_hidden.flatten() @ draft.fc.weight.t()).expand_as(hidden)
        hidden, normed = draft.layer_step(hidden, embedding, f.batch.positions_BS + k, attention)
        drafted.append(int(draft.logits(normed, base)[-1, 0].argmax()))
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_bases_and_drafts_are_those_of_training(tiny: Any, trained: dict[str, Any], kind: str) -> None:
    recorder = Recorder(build_drafter(trained[kind], tiny.base))
    found = decode(tiny.base, tiny.prompts, CONFIG, set(), draft=recorder)
    assert [g.tokens for g in found] == tiny.answers
    assert set(found[0].accepted_lengths[:-1]) == {LENGTH}  # every drafted token of the learned answer
    assert any(a < LENGTH for g in found[1:] for a in g.accepted_lengths)
    for text, drafts in recorder.notes[::5]:
        count = len(drafts)
        assert drafts == drafts_from_scratch(tiny.base, trained[kind], text)[:count], f"after {len(text)} tokens"


def test_medusa_proposes_no_more_than_its_heads(tiny: Any, trained: dict[str, Any]) -> None:
    longer = CONFIG.replace(max_draft_len=LENGTH + 2)
    found = decode(tiny.base, tiny.prompts[:2], longer, set(), draft=trained["medusa"])
    assert [g.tokens for g in found] == tiny.answers[:2]
    assert max(n for g in found for n in g.drafted_lengths) == LENGTH


def prepare_parallel(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A base in `folder`, and of every kind of draft the weights and what they give in one process."""
    from megatron_spec.runtime import distributed

    tiny_models.save_tiny(folder, vocab_size=VOCAB + 1)
    weights, alone = {}, {}
    for kind in KINDS:
        base = tiny_models.load(folder, distributed.initialize(), tiny_models.CAPTURES if kind in CAPTURING else ())
        draft = new_draft(base, kind)
        with torch.no_grad():
            for n, p in draft.named_parameters():
                if "linear" in n:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))) * 0.05)
        weights[kind] = tiny_models.whole_weights(draft)
        prompts = tiny_models.prompts()[:3]
        alone[kind] = [(g.tokens, g.accepted_lengths) for g in decode(base, prompts, CONFIG, set(), draft=draft)]
    return weights, alone


def parallel(folder: str, weights: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Answers and accepted lengths of every kind, with two pipeline stages of two tensor parallel ranks."""
    from megatron.core import parallel_state

    from megatron_spec.config import ParallelConfig
    from megatron_spec.runtime import distributed

    world = distributed.initialize(ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    found = {}
    for kind, values in weights.items():
        base = tiny_models.load(folder, world, tiny_models.CAPTURES if kind in CAPTURING else ())
        draft = new_draft(base, kind)
        tiny_models.set_weights(draft, values)
        found[kind] = [
            (g.tokens, g.accepted_lengths) for g in decode(base, tiny_models.prompts()[:3], CONFIG, set(), draft=draft)
        ]
    parallel_state.destroy_model_parallel()
    return found


def test_drafts_of_several_ranks_are_the_same(four_ranks: Any) -> None:
    for found in four_ranks.found:
        assert found["algorithms"] == four_ranks.algorithms_alone
