"""Greedy, sampled and speculative decoding against transformers and against each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.decoding import engine
from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.decoding.engine import decode, two_best
from megatron_spec.decoding.step import DeviceSteps
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.tiny_models import CONFIG


def _consistent(generation: Any) -> bool:
    accepted, drafted = generation.accepted_lengths, generation.drafted_lengths
    return (
        len(generation.tokens) == 1 + sum(accepted) + len(accepted)
        and len(accepted) == len(drafted) == generation.num_base_forwards - 1
        and all(0 <= a <= d <= CONFIG.max_draft_len for a, d in zip(accepted, drafted, strict=True))
    )


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_base_alone_equals_transformers(tiny: Any, batch_size: int) -> None:
    done: list[tuple[int, int]] = []
    config = CONFIG.replace(batch_size=batch_size)
    found = decode(tiny.base, tiny.prompts, config, set(), progress=lambda n, total: done.append((n, total)))
    assert [g.tokens for g in found] == tiny.answers
    assert [len(g.tokens) for g in found] == [25] * 6 + [5]  # the last one meets the context limit
    assert not any(g.stopped for g in found) and found[0].num_base_forwards == 25
    assert found[0].accepted_lengths == []
    assert done == [(i, 7) for i in range(1, 8)]


def test_answers_are_handed_out_while_the_next_step_runs(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(event: str, function: Any) -> Any:
        """The function, after a note."""

        def call(*args: Any) -> Any:
            events.append(event)
            return function(*args)

        return call

    for name in ("prefill", "verify"):
        monkeypatch.setattr(DeviceSteps, name, noted("start", getattr(DeviceSteps, name)))
    monkeypatch.setattr(engine, "read_outcomes", noted("read", engine.read_outcomes))
    stop = {tiny.answers[0][7], tiny.answers[1][0], tiny.answers[3][-1]}
    lengths: list[int] = []
    for ended in engine.decode_batches(tiny.base, tiny.prompts, CONFIG.replace(batch_size=16), stop):
        assert ended
        lengths += [len(answer.tokens) for _, answer in ended]
        events.append("answers")
    assert len(lengths) == len(tiny.prompts) and lengths == sorted(lengths)  # in the order in which they end
    steps = events.count("start")
    assert steps == events.count("read") == max(lengths) and events[-2:] == ["read", "answers"]
    assert [e for e in events if e != "answers"] == ["start", "read"] * steps
    before_last = [i for i, e in enumerate(events[:-1]) if e == "answers"]
    assert before_last and all(events[i - 1] == "start" and events[i + 1] == "read" for i in before_last)


def test_stop_tokens_end_answers_as_in_transformers(tiny: Any) -> None:
    stop = {tiny.answers[0][7], tiny.answers[1][0], tiny.answers[3][-1]}
    expected = [tiny_models.reference_greedy(tiny.model, p, CONFIG.max_new_tokens, stop) for p in tiny.prompts]
    for draft in (None, tiny.draft, NGramDrafter(2)):
        found = decode(tiny.base, tiny.prompts, CONFIG, stop, draft=draft)
        assert [g.tokens for g in found] == expected
        assert [g.stopped for g in found] == [e[-1] in stop for e in expected]
        if draft is tiny.draft:  # it drafts every token: three a step, also those after the stop token
            answer = found[0]
            assert answer.drafted_steps == len(answer.accepted_lengths) > 0
            assert sum(answer.accepted_lengths) + answer.accepted_after_end == 3 * answer.drafted_steps
            assert answer.accepted_after_end > 0
    lengths = {len(e) for e in expected}
    assert 1 in lengths and len(lengths) > 2  # one answer ends with the prefill, others at different steps


def test_untrained_draft_does_not_change_the_text(tiny: Any) -> None:
    draft = tiny_models.new_draft(tiny.base, None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    found = decode(tiny.base, tiny.prompts, CONFIG, set(), draft=draft)
    assert [g.tokens for g in found] == tiny.answers
    assert all(map(_consistent, found))
    accepted = [a for g in found for a in g.accepted_lengths]
    assert sum(accepted) / len(accepted) < 0.3


def test_overfitted_draft_is_accepted_to_the_last_token(tiny: Any) -> None:
    assert tiny.worst_accuracy == 1.0
    assert len(tiny.draft.vocab) < tiny_models.VOCAB  # drafts go through d2t
    [found] = decode(tiny.base, tiny.prompts[:1], CONFIG, set(), draft=tiny.draft)
    assert found.tokens == tiny.answers[0]
    assert found.accepted_lengths == [3] * 6 and found.drafted_lengths == [3] * 6  # 1 + 6 * 4 = 25
    assert found.num_base_forwards == 7


@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("draft_len", [1, 3, 5])
def test_partly_accepted_drafts_do_not_change_the_text(tiny: Any, batch_size: int, draft_len: int) -> None:
    config = CONFIG.replace(batch_size=batch_size, max_draft_len=draft_len)
    # Beside its own prompt the draft meets prefixes of its conversation, where it errs sometimes.
    prompts = [*tiny.prompts, tiny.prompts[0][2:] + tiny.answers[0][:3], tiny.prompts[0] + tiny.answers[0][:9]]
    expected = decode(tiny.base, prompts, config, set())
    found = decode(tiny.base, prompts, config, set(), draft=tiny.draft)
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    accepted = {a for g in found for a in g.accepted_lengths}
    assert 0 in accepted and draft_len in accepted
    assert [g.rejected for g in found] == list(map(_replaced, found)) and any(g.rejected for g in found)


def _replaced(g: Any) -> list[int]:
    """Index of the last token of every step that accepted less than was proposed."""
    ends = [sum(g.accepted_lengths[: i + 1]) + i + 1 for i in range(len(g.accepted_lengths))]
    steps = zip(ends, g.accepted_lengths, g.drafted_lengths, strict=True)
    return [end for end, accepted, proposed in steps if accepted < proposed]


def test_a_rejection_may_end_the_answer(tiny: Any) -> None:
    """A stop token that the base puts in place of a rejected one is recorded; one that the draft proposed is not."""
    own, other = tiny.answers[0], tiny.answers[1]
    for tokens, prompt, rejected in ((own, tiny.prompts[0], False), (other, tiny.prompts[1], True)):
        draft = tiny.draft if not rejected else _wrong(tiny)
        last = next(i for i in range(5, 20) if tokens[i] not in tokens[:i])
        [found] = decode(tiny.base, [prompt], CONFIG, {tokens[last]}, draft=draft)
        assert found.stopped and len(found.tokens) == last + 1
        assert found.rejected == (list(range(1, last + 1)) if rejected else [])


def _wrong(tiny: Any) -> Any:
    """A draft that never proposes what the base says (greedy text of the second prompt)."""
    draft = tiny_models.new_draft(tiny.base, None)
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    return draft


def test_ngram_draft_finds_repetitions(tiny: Any) -> None:
    prompt = tiny.prompts[0] + tiny.answers[0] + tiny.prompts[0]
    [alone] = decode(tiny.base, [prompt], CONFIG, set())
    [found] = decode(tiny.base, [prompt], CONFIG, set(), draft=NGramDrafter(3))
    assert found.tokens == alone.tokens and _consistent(found)
    assert any(d < CONFIG.max_draft_len for d in found.drafted_lengths) or sum(found.accepted_lengths) > 0


def test_sampling_is_seeded_and_drafts_do_not_change_it(tiny: Any) -> None:
    config = CONFIG.replace(temperature=1.5)
    seeds = list(range(len(tiny.prompts)))
    first = decode(tiny.base, tiny.prompts, config, set(), seeds=seeds)
    alone = decode(tiny.base, tiny.prompts[2:3], config, set(), seeds=seeds[2:3])
    assert alone[0].tokens == first[2].tokens  # whatever is decoded beside it
    assert first[0].tokens != tiny.answers[0]
    assert decode(tiny.base, tiny.prompts[:1], config, set(), seeds=[99])[0].tokens != first[0].tokens
    spoken = decode(tiny.base, tiny.prompts, config, set(), draft=tiny.draft, seeds=seeds)
    assert [g.tokens for g in spoken] == [g.tokens for g in first]


def test_bad_prompts_and_sequence_parallelism_are_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="prompt 1 has 0 tokens"):
        decode(tiny.base, [[1], []], CONFIG, set())
    with pytest.raises(UserError, match="prompt 0 has 64 tokens, expected 1 to 63"):
        decode(tiny.base, [[1] * tiny_models.LIMIT], CONFIG, set())
    with pytest.raises(UserError, match=r"found a draft of type Linear .*expected a draft"):
        decode(tiny.base, [[1]], CONFIG, set(), draft=torch.nn.Linear(1, 1))
    parallel = dataclasses.replace(tiny.base.world.parallel, tensor_model_parallel_size=2, sequence_parallel=True)
    monkeypatch.setattr(tiny.base.world, "parallel", parallel)
    with pytest.raises(UserError, match="--sequence-parallel"):
        decode(tiny.base, [[1]], CONFIG, set())


def test_two_best_logits_equal_transformers(tiny: Any) -> None:
    with torch.no_grad():
        expected = tiny.model(torch.tensor([tiny.prompts[1]])).logits[0, -1].topk(2)
    values, ids = two_best(tiny.base, tiny.prompts[1])
    assert ids == expected.indices.tolist()
    assert torch.allclose(torch.tensor(values), expected.values, atol=1e-4)
