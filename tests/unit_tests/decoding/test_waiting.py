"""Which prompts share a cache, and when free rows are refilled."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_spec.decoding import engine
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.session import weight_bytes
from megatron_spec.decoding.step import DeviceSteps
from megatron_spec.decoding.waiting import groups
from megatron_spec.runtime import platform
from tests.unit_tests.decoding.tiny_models import CONFIG

LENGTHS = (300, 2000, 1200, 40, 900, 260)
PROMPTS = [[0] * length for length in LENGTHS]


def test_a_group_holds_prompts_of_similar_lengths() -> None:
    assert list(groups(PROMPTS)) == [[1, 2], [4], [0, 5, 3]]  # 300 is less than half of 900, 40 counts as 256


@pytest.mark.parametrize(
    "rows, room, expected",
    [
        (6, 6 * 2010, [[1, 2, 4, 0, 5, 3]]),  # a cache for all of them fits
        (6, 6 * 2010 - 1, [[1, 2, 4, 0, 5], [3]]),
        (6, 3 * 2010, [[1, 2, 4], [0, 5, 3]]),
        (2, 2 * 2010, [[1, 2, 4, 0, 5, 3]]),  # two rows serve all of them, one after the other
    ],
)
def test_a_group_holds_prompts_of_any_length_in_a_small_cache(rows: int, room: int, expected: list[list[int]]) -> None:
    assert list(groups(PROMPTS, room, rows, more=10)) == expected


def test_the_weights_of_the_base_leave_less_room(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "reads_by_sequence", lambda _: True)
    weights = weight_bytes(tiny.base)
    for more, slots in ((40, 10), (0, 0), (-400, 0)):  # a quarter of what the weights leave
        memory = float(weights + more * tiny.base.cache_bytes(1))
        monkeypatch.setattr(platform, "device_memory", lambda memory=memory: memory)
        assert engine._room(tiny.base) == slots


@pytest.mark.parametrize("memory, prefills", [(float("inf"), 3), (1e9, 1), (1.0, 3)])
def test_unlike_prompts_decode_together_where_memory_allows(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, memory: float, prefills: int
) -> None:
    monkeypatch.setattr("megatron_spec.decoding.waiting.SHORT_PROMPT", 1)
    monkeypatch.setattr(engine, "reads_by_sequence", lambda _: True)
    monkeypatch.setattr(platform, "device_memory", lambda: memory)
    taken: list[int] = []
    read = DeviceSteps.prefill

    def noted(self: DeviceSteps, first: int, count: int, widest: int) -> Any:
        taken.append(count)
        return read(self, first, count, widest)

    monkeypatch.setattr(DeviceSteps, "prefill", noted)
    prompts = [tiny.prompts[0] + tiny.answers[0][:9], tiny.prompts[0], tiny.prompts[0][:2]]
    assert len(prompts[0]) > 2 * len(prompts[1])
    expected = [tiny.answers[0][9:], tiny.answers[0]]
    found = decode(tiny.base, prompts, CONFIG.replace(batch_size=16), set())
    assert [g.tokens[:16] for g in found[:2]] == [e[:16] for e in expected]
    assert len(taken) == prefills and sum(taken) == 3


def test_rows_are_filled_before_the_next_step(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill reads few prompts at a time, but begun, filling goes on until every row is in use."""
    events: list[str] = []
    for name in ("prefill", "verify"):
        call = getattr(DeviceSteps, name)
        monkeypatch.setattr(
            DeviceSteps, name, lambda self, *args, call=call, name=name: events.append(name) or call(self, *args)
        )
    monkeypatch.setattr("megatron_spec.decoding.waiting.PREFILL_TOKENS", 1)
    prompts = [tiny.prompts[0]] * 4 + [tiny.prompts[1]]
    found = decode(tiny.base, prompts, CONFIG.replace(batch_size=5), set())
    assert [g.tokens for g in found] == [tiny.answers[0]] * 4 + [tiny.answers[1]]
    assert events == ["prefill"] * 5 + ["verify"] * 24
    assert engine.REFILL > 1 / 5  # a single free row alone would not have been filled
