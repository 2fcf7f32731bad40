"""A session replays the recordings of earlier calls, and records anew when anything they hold has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.decoding.engine import decode, decode_batches
from megatron_spec.decoding.session import DecodeSession
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.cpu_recorder import CpuRecorder
from tests.unit_tests.decoding.tiny_models import CONFIG


@pytest.fixture
def base(tiny: Any) -> Any:
    """A base of its own, which a test may change."""
    return tiny_models.load(tiny.folder, tiny.base.world)


def _tokens(*args: Any, **options: Any) -> list[Any]:
    return [(g.tokens, g.accepted_lengths) for g in decode(*args, **options)]


def _record_all(session: DecodeSession, *args: Any, **options: Any) -> list[Any]:
    """Decode until every shape of these calls is recorded: one that occurs once in a call is, in the third."""
    found = [_tokens(*args, **options, session=session) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_second_call_records_nothing(tiny: Any, drafts: bool) -> None:
    draft = tiny.draft if drafts else None
    session, asked = DecodeSession(CpuRecorder()), tiny.prompts[:4]
    first = _record_all(session, tiny.base, asked, CONFIG, set(), draft=draft)
    recorded, replayed = session.recorder.recorded, session.recorder.replayed
    assert recorded and first == _tokens(tiny.base, asked, CONFIG, set(), draft=draft)
    assert _tokens(tiny.base, asked, CONFIG, set(), draft=draft, session=session) == first
    again = _tokens(tiny.base, asked[::-1], CONFIG, set(), draft=draft, session=session)
    assert again[::-1] == first
    assert session.recorder.recorded == recorded and session.recorder.replayed > replayed


def test_one_prompt_at_a_time(tiny: Any) -> None:
    session, found = DecodeSession(CpuRecorder()), []
    for prompt in sorted(tiny.prompts, key=len, reverse=True):
        found += _tokens(tiny.base, [prompt], CONFIG, set(), draft=tiny.draft, session=session)
    order = sorted(range(len(tiny.prompts)), key=lambda i: -len(tiny.prompts[i]))
    assert [tokens for tokens, _ in found] == [tiny.answers[i] for i in order]
    assert session.recorder.recorded <= 4  # a draft, a base and an observation for all of them


def _weight(base: Any) -> Any:
    return base.model.decoder.layers[2].mlp.linear_fc2.weight


def _scale_weight(base: Any, draft: Any) -> None:
    """In place: recordings read the new values, so this alone records nothing."""
    _weight(base).mul_(1.5)


def _replace_weight(base: Any, draft: Any) -> None:
    weight = _weight(base)
    weight.data = weight.data * 1.5


def _hook(base: Any, draft: Any) -> None:
    base.model.decoder.layers[2].mlp.linear_fc2.register_forward_pre_hook(lambda m, args: (args[0] * 1.5, *args[1:]))


def _setting(base: Any, draft: Any) -> None:
    draft.a_setting = 1


CHANGES: dict[str, tuple[Callable[[Any, Any], None], bool]] = {
    "weight in place": (_scale_weight, False), "weight replaced": (_replace_weight, True), "hook": (_hook, True),
    "setting": (_setting, True),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_between_two_calls_is_seen(base: Any, tiny: Any, change: str) -> None:
    make, records = CHANGES[change]
    draft, session = tiny_models.new_draft(base, None), DecodeSession(CpuRecorder())
    asked = tiny.prompts[:3]
    before = _record_all(session, base, asked, CONFIG, set(), draft=draft)
    recorded = session.recorder.recorded
    make(base, draft)
    found = _tokens(base, asked, CONFIG, set(), draft=draft, session=session)
    assert found == _tokens(base, asked, CONFIG, set(), draft=draft)
    assert (session.recorder.recorded > recorded) == records
    assert change == "setting" or [t for t, _ in found] != [t for t, _ in before]


def test_another_configuration_or_draft_starts_anew(tiny: Any) -> None:
    session, sampled = DecodeSession(CpuRecorder()), CONFIG.replace(temperature=0.8)
    other = tiny_models.new_draft(tiny.base, None)
    for config, draft, stops in ((CONFIG, tiny.draft, set()), (sampled, tiny.draft, set()), (sampled, other, set()),
                                 (sampled, other, {tiny.answers[0][3]}), (CONFIG, tiny.draft, set())):  # fmt: skip
        recorded = session.recorder.recorded
        found = _tokens(tiny.base, tiny.prompts[:3], config, stops, draft=draft, session=session)
        assert found == _tokens(tiny.base, tiny.prompts[:3], config, stops, draft=draft)
        assert session.recorder.recorded > recorded


def test_other_seeds_use_the_same_recordings(tiny: Any) -> None:
    session, sampled, asked = DecodeSession(CpuRecorder()), CONFIG.replace(temperature=0.8), tiny.prompts[:1]
    first = _record_all(session, tiny.base, asked, sampled, set(), draft=tiny.draft)
    recorded, other = session.recorder.recorded, sampled.replace(seed=1)
    found = _tokens(tiny.base, asked, other, set(), draft=tiny.draft, session=session)
    assert found == _tokens(tiny.base, asked, other, set(), draft=tiny.draft) and found[0][0] != first[0][0]
    assert session.recorder.recorded == recorded


def test_a_drafter_that_reads_texts_forgets_those_of_before(tiny: Any) -> None:
    session, drafter = DecodeSession(CpuRecorder()), NGramDrafter(2)
    first = _tokens(tiny.base, tiny.prompts, CONFIG, set(), draft=drafter, session=session)
    assert _tokens(tiny.base, tiny.prompts, CONFIG, set(), draft=drafter, session=session) == first


def test_a_call_within_a_call_has_its_own_memory(tiny: Any) -> None:
    session, found = DecodeSession(CpuRecorder()), {}
    given: dict[str, Any] = {"draft": tiny.draft, "session": session}
    decode(tiny.base, tiny.prompts, CONFIG, set(), **given)
    batches: Iterator[Any] = decode_batches(tiny.base, tiny.prompts, CONFIG, set(), **given)
    for ended in batches:
        found.update({i: answer.tokens for i, answer in ended})
        assert decode(tiny.base, tiny.prompts[:1], CONFIG, set(), **given)[0].tokens == tiny.answers[0]
    assert [found[i] for i in sorted(found)] == tiny.answers


def test_memory_is_not_kept_without_recordings_or_after_clear(tiny: Any) -> None:
    plain, session = DecodeSession(), DecodeSession(CpuRecorder())
    decode(tiny.base, tiny.prompts, CONFIG.replace(cuda_graphs=False), set(), session=plain)
    decode(tiny.base, tiny.prompts, CONFIG, set(), session=session)
    assert plain._buffers is None and session._buffers is not None
    session.clear()
    assert session._buffers is None
