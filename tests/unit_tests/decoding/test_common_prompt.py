"""Prompts that are all the same are read once; the answers are those of prompts that are read one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.session import DecodeSession
from megatron_spec.decoding.step import DeviceSteps
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.cpu_recorder import CpuRecorder
from tests.unit_tests.decoding.tiny_models import CONFIG

HOT = CONFIG.replace(temperature=1.3, batch_size=4)
SEEDS = list(range(5, 24))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often prompts were read."""
    found: Counter[str] = Counter()

    def noted(name: str) -> Any:
        real = getattr(DeviceSteps, name)

        def call(*args: Any) -> Any:
            found[name] += 1
            return real(*args)

        return call

    for name in ("prefill", "read_common", "begin"):
        monkeypatch.setattr(DeviceSteps, name, noted(name))
    return found


def _alone(base: Any, prompt: list[int], stop: set[int]) -> list[list[int]]:
    return [decode(base, [prompt], HOT, stop, seeds=[seed])[0].tokens for seed in SEEDS]


@pytest.mark.parametrize("recorded", [False, True])
def test_answers_are_those_of_single_prompts(tiny: Any, calls: Counter[str], recorded: bool) -> None:
    prompt = tiny.prompts[1]
    stop = set(range(0, tiny_models.VOCAB, 9))  # answers of many lengths
    expected = _alone(tiny.base, prompt, stop)
    assert calls == {"prefill": len(SEEDS)} and len({len(tokens) for tokens in expected}) > 5
    calls.clear()
    session = DecodeSession(CpuRecorder() if recorded else None)
    for _ in range(3):  # the third call replays every shape
        found = decode(tiny.base, [list(prompt) for _ in SEEDS], HOT, stop, seeds=SEEDS, session=session)
        assert [g.tokens for g in found] == expected
        assert [g.num_base_forwards for g in found] == [len(tokens) for tokens in expected]
    assert calls["prefill"] == 0 and calls["read_common"] == 3 and calls["begin"] > 3
    if recorded:
        assert session.recorder.replayed > 0


def test_plain_twin_different_prompts_and_drafts_read_every_prompt(tiny: Any, calls: Counter[str]) -> None:
    prompt, stop = tiny.prompts[1], {3}
    expected = _alone(tiny.base, prompt, stop)
    base = tiny_models.load(tiny.folder, tiny.base.world)
    base.paths = base.paths.without("common_prompt")
    assert [g.tokens for g in decode(base, [prompt] * len(SEEDS), HOT, stop, seeds=SEEDS)] == expected
    found = decode(tiny.base, [prompt] * len(SEEDS), HOT, stop, draft=tiny.draft, seeds=SEEDS)
    assert [g.tokens for g in found] == expected
    other = [*prompt[:-1], prompt[-1] ^ 1]
    found = decode(tiny.base, [prompt] * 4 + [other], HOT, stop, seeds=SEEDS[:5])
    assert [g.tokens for g in found[:4]] == expected[:4]
    assert calls["read_common"] == calls["begin"] == 0 and calls["prefill"] > len(SEEDS)


def test_another_call_reads_the_prompt_again(tiny: Any) -> None:
    """Weights may have changed in the meantime."""
    base = tiny_models.load(tiny.folder, tiny.base.world)
    session, prompts = DecodeSession(CpuRecorder()), [tiny.prompts[1]] * 6
    before = decode(base, prompts, HOT, set(), session=session)
    base.model.decoder.layers[2].mlp.linear_fc2.weight.mul_(1.5)
    after = decode(base, prompts, HOT, set(), session=session)
    alone = [decode(base, [prompt], HOT, set(), seeds=[i])[0].tokens for i, prompt in enumerate(prompts)]
    assert [g.tokens for g in after] == alone != [g.tokens for g in before]
