"""What decoding accepts is what training measured: the same draft, teacher-forced, says where each step would end.

The training forward runs on prompt + greedy answer and tells for every row j and step k whether the draft's best token
is t_{j+2+k}. Along accepted tokens the draft of a chain reads the very tokens of the text, so walking over these hits
must give the accepted lengths of `decode`, step for step. A shifted position, a stale cache row or a feature of the
wrong row would change the drafts of one side only.

S sequence, T draft steps, R supervised rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import DecodeConfig, ObjectiveConfig, presets
from tests.functional_tests.script_helpers import WORDS, make_base

STEPS = 3
LAYERS = (1, 3, 4)
CONFIG = DecodeConfig(max_draft_len=STEPS, max_new_tokens=60, batch_size=4)
BLOCKS = {"dflash": STEPS + 1, "dspark": STEPS}
"""Block drafts and the size of their blocks."""
LEARNED = 9
"""Answers that the drafts are trained on; of the others they know little."""
ITERATIONS = {"eagle3": 70, "p-eagle": 110, "eagle1": 120, "eagle-mtp": 90, "dflash": 60, "dspark": 75}
"""Training of each draft: enough to be right sometimes, too little to be right always."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A base in float64 (no rounding decides an argmax), ragged prompts and its greedy answers."""
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.data.tokenizer import load_tokenizer
    from megatron_spec.decoding.engine import decode
    from megatron_spec.runtime import distributed

    torch.set_num_threads(1)
    folder = make_base(Path(tmp_path_factory.mktemp("predicts")) / "base")
    base = load_base(inspect_base(folder), distributed.initialize(), LAYERS, torch.float64)
    tokenizer = load_tokenizer(str(folder))
    prompts = [tokenizer.encode(" ".join(WORDS[i : i + 1 + i % 3]), add_special_tokens=False) for i in range(12)]
    answers = [g.tokens for g in decode(base, prompts, CONFIG, set())]
    features = [text_features(base, p, a) for p, a in zip(prompts, answers, strict=True)]
    return SimpleNamespace(base=base, prompts=prompts, answers=answers, features=features)


def text_features(base: Any, prompt: list[int], answer: list[int]) -> Features:
    """What the base says on one text, of which the answer is supervised."""
    from megatron_spec.base.schedule import run_base

    tokens_BS = torch.tensor([prompt + answer])
    S = tokens_BS.shape[1]
    turns_BS = (torch.arange(S) >= len(prompt)).int()[None]
    batch = Batch(tokens_BS, torch.arange(S)[None], turns_BS, torch.zeros_like(turns_BS))
    [(captures, state)] = run_base(base, [batch])
    return Features(batch, captures, state)


def partly_trained(place: Any, kind: str) -> Any:
    """A draft after a few steps on most of the answers."""
    from megatron_spec.drafts import build_draft
    from megatron_spec.drafts.vocab import DraftVocab

    base = place.base
    overrides: dict[str, Any] = {}
    vocab = DraftVocab.full(base.config.vocab_size)
    if kind in ("eagle3", "p-eagle"):  # a reduced vocabulary: ids of the draft are not those of the base
        spoken = sorted({t for a in place.answers[:LEARNED] for t in a})
        vocab = DraftVocab(torch.tensor(spoken), base.config.vocab_size)
        overrides = {"capture_layer_ids": LAYERS, "draft_vocab_size": len(vocab)}
        overrides |= {"mask_token_id": 3} if kind == "p-eagle" else {}
    if kind in BLOCKS:
        overrides = {"mask_token_id": 3, "block_size": BLOCKS[kind], "capture_layer_ids": LAYERS}
        rnn = {"markov_rank": 8, "markov_head_type": "rnn"}
        overrides |= rnn if kind == "dspark" else {"sliding_window": 6}
        config: Any = presets.block_config(base.config, kind, overrides)
    else:
        config = presets.eagle_config(base.config, kind, overrides)
    draft = build_draft(config, vocab, base.world, torch.float64)
    draft.initialize(base, None, seed=3)
    with torch.no_grad():  # attention starts near zero: a wrong position or cache row would not change an argmax
        for name, p in draft.named_parameters():
            if "self_attn" in name and "norm" not in name:
                p.mul_(15)
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    more: dict[str, Any] = {"feature_noise": 0.0, "token_weight": 1.0} if kind == "eagle1" else {}
    more |= {"row_keep": 0.9} if kind == "p-eagle" else {}
    goal = presets.objective_for(config, ObjectiveConfig(ttt_steps=STEPS, loss="hard_ce", **more))
    for i in range(ITERATIONS[kind]):
        losses = draft(place.features[i % LEARNED], base, goal)
        optimizer.zero_grad()
        (losses.total / losses.rows_T[0]).backward()
        optimizer.step()
    return draft.eval()


@torch.no_grad()
def block_hits(place: Any, draft: Any, features: Features) -> Tensor:
    """The same of a block draft, for every block of the answer: row j stands before the anchor."""
    from megatron_spec.drafts.anchors import BlockPlan

    plan = BlockPlan.of(features.batch, draft.config, 1000)
    text_S = features.batch.tokens_BS[0]
    found_TS = torch.zeros(STEPS, len(text_S), dtype=torch.bool)
    states = draft.states(features, plan, place.base, torch.cat(plan.supervision.rows))
    head = draft.block_head(states, draft.teacher_head(place.base).draft_rows(), plan)
    rows = head.rows
    added = head.low_Nr @ head.low_weight_Vr.t() if head.low_Nr is not None else torch.zeros(sum(map(len, rows)), 1)
    for k, added_RV in enumerate(added.split([len(r) for r in rows])):
        anchor_R = plan.layout.anchor_P[plan.supervision.rows[k] // draft.config.block_size]
        logits_RV = draft.logits(rows[k][None], place.base)[0] + added_RV
        found_TS[k, anchor_R - 1] = logits_RV.argmax(-1) == text_S[anchor_R + 1 + k]
    return found_TS


@torch.no_grad()
def hits(place: Any, draft: Any, features: Features, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """bool [T, S]: in the training forward the best token of row j at step k is t_{j+2+k}."""
    from megatron_spec.drafts import eagle3, recurrent

    if draft.config.algorithm in BLOCKS:
        return block_hits(place, draft, features)
    seen: list[Any] = []
    original = eagle3.head_losses

    def note(states: list[Tensor], weight_DH: Tensor, plan: Any, *others: Any, **options: Any) -> Any:
        seen.append((states, weight_DH, plan))
        return original(states, weight_DH, plan, *others, **options)

    for module in (eagle3, recurrent):
        monkeypatch.setattr(module, "head_losses", note)
    draft(features, place.base, ObjectiveConfig(ttt_steps=STEPS, in_vocab_only=False))
    monkeypatch.undo()
    [(states, weight_DH, plan)] = seen
    text_S = features.batch.tokens_BS[0]
    found_TS = torch.zeros(STEPS, len(text_S), dtype=torch.bool)
    for k, rows_R in enumerate(plan.rows):
        best_R = draft.vocab.target_ids[(states[k] @ weight_DH.t()).argmax(-1)]
        found_TS[k, rows_R] = best_R == text_S[rows_R + 2 + k]
    return found_TS


def predicted_lengths(hits_TS: Tensor, prompt: int) -> list[int]:
    """Accepted lengths of every verification step, walked over the hits of one text.

    The root row stands before the last known token: at first, before the first token of the answer.
    """
    S, j, lengths = hits_TS.shape[1], prompt - 1, []
    while j + 2 < S:
        run = hits_TS[:, j].long().cumprod(0).sum().item()
        emitted = min(int(run) + 1, S - (j + 2))  # the text may end inside the accepted tokens
        lengths.append(emitted - 1)
        j += emitted
    return lengths


@pytest.mark.parametrize("kind", list(ITERATIONS))
def test_accepted_lengths_equal_predictions_of_training(place: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_spec.decoding.engine import decode
    from megatron_spec.evaluation.acceptance import acceptance_stats

    draft = partly_trained(place, kind)
    found = decode(place.base, place.prompts, CONFIG, set(), draft=draft)
    assert [g.tokens for g in found] == place.answers
    shares = acceptance_stats(found).acceptance_per_position
    assert 0.1 < min(shares) <= max(shares) < 0.9, f"nothing to tell apart: {shares}"
    for prompt, features, spoken in zip(place.prompts, place.features, found, strict=True):
        expected = predicted_lengths(hits(place, draft, features, monkeypatch), len(prompt))
        assert spoken.accepted_lengths == expected, f"{kind}, prompt of {len(prompt)} tokens"
