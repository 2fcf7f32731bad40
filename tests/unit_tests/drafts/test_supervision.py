"""Supervised rows of each step: a hand-written example, and random rows against loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_spec.batch import Batch
from megatron_spec.drafts.contract import shift
from megatron_spec.drafts.unroll import Supervision, supervised_rows
from tests.unit_tests.drafts.plain_eagle3 import plain_supervised

#        row    0  1  2  3  4  5  6  7  8  9  pad
TURNS = [0, 0, 1, 1, 1, 0, 2, 2, 2, 2, 0]
DOCUMENTS = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1]
EXPECTED = {
    # t_{j+1}..t_{j+2+k} in one turn: tokens 2-4 and 6-9
    "serving": [[1, 2, 5, 6, 7], [1, 5, 6], [5]],
    "paper": [[2, 3, 4, 6, 7], [1, 2, 3, 5, 6], [0, 1, 2, 4, 5]],
    "target": [[0, 1, 2, 4, 5, 6, 7], [0, 1, 3, 4, 5, 6], [0, 2, 3, 4, 5]],
}


def batch(turns: list[list[int]], documents: list[list[int]]) -> Batch:
    ids = torch.zeros(len(turns), len(turns[0]), dtype=torch.int64)
    return Batch(ids, ids, torch.tensor(turns, dtype=torch.int32), torch.tensor(documents, dtype=torch.int32))


@pytest.mark.parametrize("alignment", list(EXPECTED))
def test_by_hand(alignment: Any) -> None:
    found = supervised_rows(batch([TURNS], [DOCUMENTS]), 3, alignment)
    assert [mask[0].nonzero()[:, 0].tolist() for mask in found] == EXPECTED[alignment]


@pytest.mark.parametrize("alignment", list(EXPECTED))
def test_random_rows(alignment: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    B, S, T = 16, 20, 5
    documents = (torch.rand(B, S, generator=generator) < 0.15).cumsum(1)
    turns = (torch.rand(B, S, generator=generator) < 0.3).cumsum(1) * (torch.rand(B, S, generator=generator) < 0.8)
    documents[:4, 15:], turns[:4, 15:] = -1, 0
    example = batch(turns.tolist(), documents.tolist())
    found = supervised_rows(example, T, alignment)
    for k, b, j in torch.cartesian_prod(torch.arange(T), torch.arange(B), torch.arange(S)).tolist():
        expected = plain_supervised(turns[b].tolist(), documents[b].tolist(), j, k, alignment)
        assert bool(found[k, b, j]) == expected, (k, b, j)
    assert found.any() and not found.all()


def test_rows_point_at_their_teacher() -> None:
    example = batch([TURNS, TURNS[::-1]], [DOCUMENTS, [0] * 11])
    plan = Supervision.of(example, 3, "serving")
    for k, (rows, teacher) in enumerate(zip(plan.rows, plan.teacher_rows, strict=True)):
        assert len(rows) > 0
        assert torch.equal(plan.teacher_U[teacher], rows + (1 + k) * 2)  # row j of the same sequence, 1 + k later
    assert len(plan.teacher_U) == len(set(plan.teacher_U.tolist()))


def test_more_steps_than_tokens() -> None:
    assert not supervised_rows(batch([[1, 1]], [[0, 0]]), 4, "paper").any()
    assert shift(torch.arange(3), 5, 0, fill=-1).tolist() == [-1, -1, -1]


def test_planned_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun ahead is what would be computed now; it serves only the settings and the batch it is for."""
    computed: list[Batch] = []
    inner = Supervision._of
    monkeypatch.setattr(Supervision, "_of", staticmethod(lambda batch, *a: computed.append(batch) or inner(batch, *a)))
    host = batch([TURNS], [DOCUMENTS])
    both = dataclasses.replace(host, host=host)  # as on a GPU
    expected = Supervision.of(both, 3, "serving")
    Supervision.ahead(both, 3, "serving")
    found = [Supervision.of(both, 3, "serving") for _ in range(2)]
    assert len(computed) == 2, "computed once before, and once in the thread"
    for each in found:
        for name, value in vars(expected).items():
            torch.testing.assert_close(getattr(each, name), value, msg=name)
    assert len(Supervision.of(both, 2, "serving").rows) == 2 and len(computed) == 3
    assert dataclasses.replace(both).planned is None and both.to("cpu").planned is None
    Supervision.ahead(host, 3, "serving")
    assert host.planned is None, "without a host copy, it would take the cores of the step itself"
