"""P-EAGLE equals a dense-mask reference in fp64: losses and the gradient of every parameter, rows dropped or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_spec.batch import Batch
from megatron_spec.config import EagleConfig, ObjectiveConfig, UserError, presets
from megatron_spec.drafts.peagle import PEagleDraft, computed_rows, kept_rows
from tests.unit_tests.drafts.plain_eagle3 import V, assert_same, conversations, eagle_config, features
from tests.unit_tests.drafts.plain_peagle import PlainPEagle
from tests.unit_tests.drafts.test_eagle import make

ALL = {"row_keep": 1.0, "row_keep_least": 1.0}
SOME = {"row_keep": 0.8, "row_keep_least": 0.6}


def peagle(**changes: Any) -> EagleConfig:
    return eagle_config(**{"algorithm": "p-eagle", "mask_token_id": 7, "num_hidden_layers": 2, **changes})


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every row": ({}, ALL),
    "rows dropped": ({}, SOME),
    "one layer, whole vocabulary, kl": ({"num_hidden_layers": 1, "draft_vocab_size": V}, {**SOME, "loss": "kl"}),
    "its own embedding, another width": (
        {"target_hidden_size": 12, "norm_before_residual": True}, {**SOME, "in_vocab_only": False},
    ),
    "window": ({"sliding_window": 5}, SOME),
    "target alignment": ({}, {**SOME, "alignment": "target", "loss": "hard_ce"}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_dense_mask(name: str) -> None:
    config, goal = peagle(**CASES[name][0]), ObjectiveConfig(ttt_steps=4, **CASES[name][1])
    draft, ends = make(config)
    assert isinstance(draft, PEagleDraft)
    f = features(conversations(), config, torch.float64)
    torch.manual_seed(4)
    kept = kept_rows(f.batch, goal)
    assert bool(kept.all()) == (name == "every row")
    parameters = {n: p.detach().clone().requires_grad_() for n, p in draft.named_parameters()}
    plain = PlainPEagle(config, parameters, ends, draft.vocab)
    plain.kept_TBS = kept
    total, stats = plain(f, goal)
    losses = draft(f, ends, goal)
    assert_same(draft, losses, total, stats, parameters)


def test_kept_rows_are_nested_and_depend_only_on_seed_and_content() -> None:
    tokens = torch.randint(0, V, (2, 3000), generator=torch.Generator().manual_seed(1))
    zeros = torch.zeros(2, 3000, dtype=torch.int32)
    batch = Batch(tokens, torch.arange(3000).repeat(2, 1), zeros, zeros)
    goal = ObjectiveConfig(ttt_steps=6, row_keep=0.7, row_keep_least=0.25)
    torch.manual_seed(3)
    kept = kept_rows(batch, goal)
    assert kept[0].all() and not (kept[1:] & ~kept[:-1]).any()
    shares = kept.flatten(1).double().mean(1)
    torch.testing.assert_close(shares, torch.tensor([1, 0.7, 0.49, 0.343, 0.25, 0.25]).double(), rtol=0, atol=0.02)
    # the second conversation after a part of the first, in one row
    both = Batch(
        torch.cat([tokens[:1, :100], tokens[1:]], 1), torch.cat([torch.arange(100), torch.arange(3000)])[None],
        torch.zeros(1, 3100, dtype=torch.int32), (torch.arange(3100) >= 100).int()[None],
    )  # fmt: skip
    assert torch.equal(kept_rows(both, goal)[:, 0, 100:], kept[:, 1])
    torch.manual_seed(4)
    assert not torch.equal(kept_rows(batch, goal), kept)


def test_rows_are_dropped_only_in_training() -> None:
    draft, ends = make(peagle())
    f, goal = features(conversations(), draft.config, torch.float64), ObjectiveConfig(ttt_steps=4, **SOME)
    torch.manual_seed(4)
    trained = draft(f, ends, goal).rows_T
    with torch.no_grad():
        evaluated = draft(f, ends, goal).rows_T
    assert trained[0] == evaluated[0] and (trained[1:] < evaluated[1:]).all()


def test_sequence_parallel_ranks_compute_equally_many_rows() -> None:
    active = [
        torch.arange(12),
        torch.tensor([1, 4, 5, 9, 11]),
        torch.tensor([4, 9]),
        torch.tensor([], dtype=torch.long),
    ]
    assert [x.tolist() for x in computed_rows(active, 12, 1)] == [x.tolist() for x in active[1:]]
    found = computed_rows(active, 12, 4)
    assert [len(x) for x in found] == [8, 4, 0]
    for before, rows, wanted in zip([torch.arange(12), *found], found, active[1:], strict=False):
        assert torch.isin(wanted, rows).all() and torch.isin(rows, before).all() and (rows.diff() > 0).all()


def test_a_batch_without_supervised_rows_has_zero_gradients() -> None:
    draft, ends = make(peagle())
    f = features(conversations(), draft.config, torch.float64)
    f = dataclasses.replace(f, batch=dataclasses.replace(f.batch, turns_BS=torch.zeros_like(f.batch.turns_BS)))
    losses = draft(f, ends, ObjectiveConfig(ttt_steps=3))
    losses.total.backward()
    assert not losses.rows_T.any() and all(not p.grad.any() for p in draft.parameters() if p.grad is not None)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(UserError, match="p-eagle needs mask_token_id"):
        peagle(mask_token_id=None)
    with pytest.raises(UserError, match=r"mask_token_id 31 is not in the base's vocabulary of 31"):
        peagle(mask_token_id=V)
    with pytest.raises(UserError, match="mask_token_id is an option of p-eagle, found with eagle3"):
        eagle_config(mask_token_id=3)
    with pytest.raises(UserError, match="--ttt-steps 1: p-eagle"):
        presets.objective_for(peagle(), ObjectiveConfig(ttt_steps=1))
    with pytest.raises(UserError, match="--detach: no effect on p-eagle"):
        presets.objective_for(peagle(), ObjectiveConfig(detach=True))
    with pytest.raises(UserError, match="--row-keep: only for p-eagle, the draft is eagle3"):
        presets.objective_for(eagle_config(), ObjectiveConfig(row_keep=0.5))
