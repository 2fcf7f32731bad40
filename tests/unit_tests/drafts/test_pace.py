"""D-PACE weights of EAGLE-3's steps: chunk by chunk, in one pass over the head, equal to the plain version."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron_spec.config import ObjectiveConfig
from megatron_spec.config.machine import Machine
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.unroll import Supervision
from megatron_spec.ops import head, plain
from megatron_spec.planning.paths import NO_PATHS, PATHS, Paths, Setting
from tests.unit_tests.drafts.plain_eagle3 import PlainEagle, assert_same, conversations, eagle_config, features
from tests.unit_tests.drafts.test_block_loss_kernels import Counts
from tests.unit_tests.drafts.test_eagle import make

D = 12
ALIGNMENTS = ("serving", "paper", "target")


def use_kernel(draft: EagleDraft, *more: str) -> None:
    """Only the plain twin of the loss kernel, and of these paths."""
    others = tuple(name for name in PATHS if name not in ("loss_kernel", *more))
    draft.paths = Paths(Setting(Machine(kernels="plain"), draft=draft.config, off=others))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the loss operators that ran."""
    found: list[str] = []
    for name in ("largest", "largest_product", "soft_rows", "mixed_rows"):
        inner = getattr(plain, name)
        monkeypatch.setattr(plain, name, lambda *a, n=name, f=inner: found.append(n) or f(*a))
    return found


@pytest.mark.parametrize("rows", [1, 9, 1000])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("in_vocab_only", "alpha"), [(True, 0.5), (False, 0.2), (True, 0.05)])
def test_equals_the_plain_version(
    alignment: Any, in_vocab_only: bool, alpha: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that some steps alone supervise, two documents, tokens outside the vocabulary; several chunks, and one."""
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": rows * 4 * D})
    goal = {"alignment": alignment, "in_vocab_only": in_vocab_only, "replay_weight": 3.0, "temperature": 0.8}
    objective = ObjectiveConfig(ttt_steps=4, step_weights="d-pace", pace_alpha=alpha, **goal)
    check(objective, kernel=False)
    draft, ends = make(eagle_config())
    f = features(conversations(), draft.config, torch.float64)
    paced, decayed = draft(f, ends, objective), draft(f, ends, ObjectiveConfig(ttt_steps=4, **goal))
    assert not torch.allclose(paced.total, decayed.total)
    torch.testing.assert_close(paced.loss_T, decayed.loss_T)


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "hard_ce", "tv"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_with_the_loss_kernel(alignment: Any, loss: Any, operators: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": 9 * 8 * D})
    check(
        ObjectiveConfig(ttt_steps=4, step_weights="d-pace", alignment=alignment, loss=loss, temperature=0.8),
        kernel=True,
    )
    whole = "soft_rows" if loss in ("soft_ce", "kl") else "mixed_rows"
    assert {*operators} == {"largest", whole} and operators.count("largest") == operators.count(whole) > 2


@pytest.mark.parametrize("weights", ["decay", "d-pace"])
@pytest.mark.parametrize("loss", ["soft_ce", "kl", "hard_ce", "tv"])
def test_with_sums_of_the_product(weights: Any, loss: Any, operators: list[str], monkeypatch: Any) -> None:
    """Loss and weights take the log-sum-exps that the product found, and do not look for them again."""
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": 9 * 8 * D})
    goal = ObjectiveConfig(ttt_steps=4, step_weights=weights, loss=loss, temperature=0.8)
    check(goal, True, "product_epilogues")
    assert {*operators} == {"largest_product"} and len(operators) > 2


def check(objective: ObjectiveConfig, kernel: bool, *more: str) -> None:
    """Losses, metrics and every gradient in fp64."""
    draft, ends = make(eagle_config())
    parameters = {n: p.detach().clone().requires_grad_() for n, p in draft.named_parameters()}
    f = features(conversations(), draft.config, torch.float64)
    total, stats = PlainEagle(draft.config, parameters, ends, draft.vocab)(f, objective)
    if kernel:
        use_kernel(draft, *more)
    assert_same(draft, draft(f, ends, objective), total, stats, parameters)


@pytest.mark.parametrize("kernel", [False, True])
def test_takes_no_product_more(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vocabulary; and no more rows of logits are in memory."""
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": 9 * 4 * D})
    products = []
    for weights in ("decay", "d-pace"):
        draft, ends = make(eagle_config(), torch.float32)
        draft.paths = NO_PATHS
        if kernel:
            use_kernel(draft)
        f = features(conversations(), draft.config, torch.float32)
        with Counts(D) as found:
            draft(f, ends, ObjectiveConfig(ttt_steps=4, step_weights=weights)).total.backward()
        products.append(found.products)
    assert products[0] == products[1] > 0


def test_a_chunk_has_all_steps_of_its_rows() -> None:
    found = Supervision.of(conversations(), 4, "target")
    rows = torch.cat(found.rows)
    order, chunks = found.by_row(9)
    assert len(chunks) > 2 and all(part.stop - part.start <= 9 for part in chunks)
    assert sorted(order.tolist()) == list(range(len(rows))) and chunks[-1].stop == len(rows)
    sets = [{*rows[order[part]].tolist()} for part in chunks]
    assert not any(a & b for a, b in itertools.combinations(sets, 2))
    assert {*found.counts_P.tolist()} == {1, 2, 3, 4} and len(found.counts_P) == len(found.active[0])  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("kernel", [False, True])
def test_nothing_supervised(kernel: bool) -> None:
    draft, ends = make(eagle_config())
    if kernel:
        use_kernel(draft)
    f = features(conversations(), draft.config, torch.float64)
    f.batch.turns_BS.zero_()
    losses = draft(f, ends, ObjectiveConfig(ttt_steps=3, step_weights="d-pace"))
    losses.total.backward()
    assert not losses.total.detach() and not any(p.grad is not None and p.grad.any() for p in draft.parameters())
