"""The teacher by its kernels' plain twins, of a whole or split head, against the plain teacher of the same ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_spec.drafts.teacher import TeacherHead, teacher_of
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.losses.vocab_parallel import Teacher
from megatron_spec.ops import plain
from megatron_spec.planning.paths import NO_PATHS
from megatron_spec.runtime import platform
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds
from tests.worlds import run_world

V = 31
VOCABULARIES = {
    "some": torch.arange(0, V, 3), "the first ones": torch.arange(1, 13), "the last ones": torch.arange(15, V),
    "all": torch.arange(V),
}  # fmt: skip


def compare_fields(found: Teacher, expected: Teacher) -> None:
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(found, name), value, msg=lambda m, name=name: f"{name}: {m}")


def compare(epilogues: bool) -> list[int]:
    """Rows whose argmax is in the draft vocabulary, of each vocabulary."""
    platform.activate()
    dist.init_process_group("gloo")
    counts, group = [], dist.group.WORLD
    assert group is not None
    ends = StandInEnds(8, torch.float64, group, vocab_size=V, padding=-V % 6)
    if dist.get_rank() == 0:
        ends.head_weight[4] = ends.head_weight[3]  # ties, within and outside the draft vocabulary
    ends.head_fp8 = None  # type: ignore[attr-defined]
    state = torch.randn(40, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ids in VOCABULARIES.values():
        vocab = DraftVocab(ids, V)
        for temperature in (1.0, 1.7):
            expected = TeacherHead(ends, vocab, group)(state, temperature)
            head = TeacherHead(ends, vocab, group, plain, epilogues)
            given = expected.argmax_U.roll(1)  # of features from disk
            compare_fields(head(state, temperature), expected)
            compare_fields(head(state, temperature, given), TeacherHead(ends, vocab, group)(state, temperature, given))
            for empty in (head(state[:0], temperature), head(state[:0], temperature, given[:0])):
                assert len(empty.lse_U) == len(empty.label_U) == 0
        counts.append(int(expected.in_vocab_U.sum()))
    return counts


def heads_over_time() -> list[bool]:
    """Whether a draft's teacher is that of the head it is given: the first one, the same again, another one."""
    platform.activate()
    dist.init_process_group("gloo")
    group, vocab = dist.group.WORLD, DraftVocab(VOCABULARIES["some"], V)
    assert group is not None
    draft = SimpleNamespace(vocab=vocab, tp_group=group, paths=NO_PATHS, _teacher=None)
    ends = StandInEnds(8, torch.float32, group, vocab_size=V, padding=0)
    first = teacher_of(draft, ends)
    same = teacher_of(draft, ends) is first
    ends.head_weight = ends.head_weight.flip(0).contiguous()  # of a quantised base, or after a reload
    second, state = teacher_of(draft, ends), torch.ones(3, 8)
    found, expected = second(state, 1.0), TeacherHead(ends, vocab, group)(state, 1.0)
    return [same, second is not first, torch.equal(found.logits_UD, expected.logits_UD)]


def test_another_head_has_another_teacher() -> None:
    assert run_world(1, heads_over_time) == [[True, True, True]]


@pytest.mark.parametrize("epilogues", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_kernels(size: int, epilogues: bool) -> None:
    for counts in run_world(size, compare, epilogues):
        assert all(0 < count < 40 for count in counts[:3]) and counts[3] == 40
