"""A second model as draft, user-defined drafters, and the selection of a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.commands.decode_inputs import _thinking_tokens
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.costs import Costs
from megatron_spec.decoding.drafters import Context, Drafter, Proposal, build_drafter
from megatron_spec.decoding.drafters.draft_target import check_tokenizers
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.options import decoding_type
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.data.chat_fixtures import CHATML, make_tokenizer
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.tiny_models import CONFIG


class Repeat(Drafter):
    """Proposes the last token again."""

    def __init__(self, base: Any, config: DecodeConfig) -> None:
        self.config = config

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        last = context.tokens_BL.gather(1, context.lengths_B[:, None] - 1)
        return Proposal(last.expand(-1, count).contiguous())


class Plain(Drafter):
    """Without a constructor."""

    prepare_draft_tokens = Repeat.prepare_draft_tokens


class Demanding(Plain):
    """Needs an argument that is never passed."""

    def __init__(self, base: Any, config: DecodeConfig, more: int) -> None: ...


class Beyond(Plain):
    """Proposes a token outside the base's vocabulary."""

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        found = super().prepare_draft_tokens(context, count)
        found.tokens_BN[-1, 1] = tiny_models.VOCAB
        return found


def tree(parents: list[int]) -> Proposal:
    """The same tree in three rows."""
    parents_BN = torch.tensor([parents] * 3)
    return Proposal(torch.zeros_like(parents_BN), parents_BN=parents_BN)


class Flat(Plain):
    """Returns a tensor without the row dimension."""

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        return Proposal(super().prepare_draft_tokens(context, count).tokens_BN[0])


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_base_as_its_own_draft_is_always_accepted(tiny: Any, batch_size: int) -> None:
    config = CONFIG.replace(batch_size=batch_size)
    found = decode(tiny.base, tiny.prompts, config, set(), draft=tiny.base)
    assert [g.tokens for g in found] == tiny.answers
    assert all(a == d for g in found for a, d in zip(g.accepted_lengths, g.drafted_lengths, strict=True))
    assert found[0].accepted_lengths == [3] * 6
    hot = config.replace(temperature=1.5, use_rejection_sampling=True)
    sampled = decode(tiny.base, tiny.prompts, hot, set(), draft=tiny.base)
    assert all(a == d for g in sampled for a, d in zip(g.accepted_lengths, g.drafted_lengths, strict=True))


def test_second_model_as_draft(tiny: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, seed=9, num_hidden_layers=2, hidden_size=16)
    small = tiny_models.load(tmp_path, tiny.base.world, captures=())
    for config in (CONFIG, CONFIG.replace(batch_size=1, max_draft_len=5)):
        found = decode(tiny.base, tiny.prompts, config, set(), draft=small)
        assert [g.tokens for g in found] == tiny.answers
    with torch.no_grad():  # what it drafted is its own greedy text
        text = tiny.prompts[0]
    seen: list[Proposal] = []
    drafter = build_drafter(small, tiny.base)
    assert drafter is not None
    real = drafter.prepare_draft_tokens
    drafter.prepare_draft_tokens = lambda c, n: (seen.append(real(c, n)), seen[-1])[1]  # type: ignore[method-assign]
    decode(tiny.base, [text], CONFIG.replace(max_new_tokens=8), set(), draft=drafter)
    known = [*text, tiny.answers[0][0]]
    expected = decode(small, [known], CONFIG.replace(max_new_tokens=3), set())[0].tokens
    assert seen[0].tokens_BN[0].tolist() == expected


def test_user_defined_drafter(tiny: Any) -> None:
    config = CONFIG.replace(decoding_type="User", drafter=f"{__name__}:Repeat")
    found = decode(tiny.base, tiny.prompts, config, set())
    assert [g.tokens for g in found] == tiny.answers and found[0].drafted_lengths[0] == 3
    plain = decode(tiny.base, tiny.prompts, config.replace(drafter=f"{__name__}:Plain"), set())
    assert [g.accepted_lengths for g in plain] == [g.accepted_lengths for g in found]
    for name, message in (
        (f"{__name__}:Demanding", r"Demanding\(base.*expected one that takes \(base, config\) or no"),
        ("nothing", "expected module:Class"), ("no.such:Thing", "cannot be imported"),
        (f"{__name__}:Path", "expected a class derived from"), (f"{__name__}:Missing", "found None"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            decode(tiny.base, tiny.prompts, config.replace(drafter=name), set())


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        ([1, 2], "returned list, expected megatron_spec.decoding.drafters.Proposal"),
        (Proposal(torch.zeros(3, 9, dtype=torch.int64)), "proposed 9 nodes, expected at most 3: propose `count`"),
        (Proposal(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(1)), r"proposed_B of shape \[1\], expected \[3\]"),
        (tree([-1, 1]), r"node 1 of row 0 has the parent 1, expected -1 .* or an earlier node"),
        (tree([-2]), r"node 0 of row 0 has the parent -2"),
        (tree([-1, 0, 1, 2]), "row 0 is 4 nodes deep, expected at most 3"),
        (
            Proposal(torch.zeros(3, 2, dtype=torch.int64), parents_BN=torch.zeros(3)),
            "found parents_BN of torch.float32",
        ),
    ],
)
def test_proposals_that_cannot_be_verified_are_refused(tiny: Any, proposed: Any, message: str) -> None:
    class Fixed(Plain):
        def prepare_draft_tokens(self, context: Context, count: int) -> Any:
            return proposed

        def max_nodes(self, count: int) -> int:
            return 4 if getattr(proposed, "parents_BN", None) is not None else count

    config = CONFIG.replace(decoding_type="User", drafter="x:Y")
    with pytest.raises(UserError, match=f"drafter Fixed.*{message}"):
        decode(tiny.base, tiny.prompts[:3], config, set(), draft=Fixed())


def test_tokens_outside_the_base_vocabulary_are_refused(tiny: Any) -> None:
    said = r"drafter Beyond proposed token id 83 \(row 2, node 1\), expected 0 to 82"
    for kind, message in (
        ("Beyond", said),
        ("Flat", r"proposed torch.int64 of shape \[3\], expected int64 \[3, nodes"),
    ):
        config = CONFIG.replace(decoding_type="User", drafter=f"{__name__}:{kind}")
        with pytest.raises(UserError, match=message):
            decode(tiny.base, tiny.prompts, config, set())
    relaxed = {"use_relaxed_acceptance_for_thinking": True, "begin_thinking_phase_token": 83}
    with pytest.raises(UserError, match="--begin-thinking-phase-token 83: the base has the tokens 0 to 82"):
        _thinking_tokens(CONFIG.replace(**relaxed), make_tokenizer(CHATML), tiny_models.VOCAB)


@pytest.mark.parametrize("rows", [-8, 8])
def test_draft_model_with_another_vocabulary_size(tiny: Any, tmp_path: Path, rows: int) -> None:
    save_tiny(tmp_path, seed=9, num_hidden_layers=2, hidden_size=16, vocab_size=tiny_models.VOCAB + rows)
    small = tiny_models.load(tmp_path, tiny.base.world, captures=())
    if rows > 0:
        small.head_weight[-1] = 100 * small.head_weight[: tiny_models.VOCAB].mean(0)  # would be chosen
    found = decode(tiny.base, tiny.prompts, CONFIG.replace(max_new_tokens=8), set(), draft=small)
    assert [g.tokens for g in found] == [answer[:8] for answer in tiny.answers]
    hot = CONFIG.replace(max_new_tokens=8, temperature=1.0, use_rejection_sampling=True)
    drafted, rare, often = (
        [g.tokens for g in decode(tiny.base, tiny.prompts, hot.replace(sa_threshold=n), set(), draft=small)]
        for n in (None, 1000, 1)  # a lookup finds ids that the draft model lacks
    )
    assert drafted == rare != often


def test_ngram_by_configuration(tiny: Any) -> None:
    found = decode(tiny.base, tiny.prompts, CONFIG.replace(decoding_type="NGram"), set())
    assert [g.tokens for g in found] == tiny.answers and any(g.drafted_lengths for g in found)


def test_decoding_type_matches_the_draft() -> None:
    assert decoding_type("eagle3.1", None) == "Eagle3" and decoding_type("eagle-mtp", "MTP") == "MTP"
    assert decoding_type("eagle3", "Eagle") == "Eagle3"  # the spelling of TensorRT-LLM's older releases
    assert [DecodeConfig(decoding_type=name).decoding_type for name in ("UserProvided", "User_Provided")] == [
        "User"
    ] * 2
    assert DecodeConfig(decoding_type="Draft_Target").decoding_type == "DraftTarget"
    with pytest.raises(UserError, match="--mtp-from-base"):
        decoding_type(None, "MTP")
    assert decoding_type(None, "NGram") == "NGram" == decoding_type("medusa", "NGram")
    with pytest.raises(UserError, match="--decoding-type Eagle, but the draft is medusa, which decodes as Medusa"):
        decoding_type("medusa", "Eagle")
    with pytest.raises(UserError, match="needs a draft"):
        decoding_type(None, "Eagle3")


def test_tokenizers_are_compared() -> None:
    base = make_tokenizer(CHATML)
    check_tokenizers(base, make_tokenizer(CHATML), "draft")
    other = make_tokenizer(CHATML)
    other.add_tokens(["<more>"])
    with pytest.raises(UserError, match=r"draft: its tokenizer differs .*extra tokens: 1"):
        check_tokenizers(base, other, "draft")
    with pytest.raises(UserError, match=r"tokens with different ids: 1 "):
        check_tokenizers(other, base, "draft")


def test_costs_per_phase(tiny: Any) -> None:
    costs = Costs()
    [found] = decode(tiny.base, tiny.prompts[:1], CONFIG, set(), draft=tiny.draft, costs=costs)
    assert {k: len(v) for k, v in costs.seconds.items()} == {
        "prefill": 1,
        "draft": 6,
        "base": 6,
        "read": 7,
        "observe": 6,
    }
    assert all(costs.typical(k) > 0 for k in costs.seconds) and costs.typical("no") == 0 and len(found.tokens) == 25
