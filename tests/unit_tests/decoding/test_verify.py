"""Acceptance rules: lossless ones by statistics, typical and relaxed by their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding import sampling
from megatron_spec.decoding.drafters import Context, Drafter, Proposal
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.options import check_options
from megatron_spec.decoding.tree import Tree
from megatron_spec.decoding.verify import Drafted, Draws, Verdict, verify
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.tiny_models import CONFIG

THINKING = {
    "use_relaxed_acceptance_for_thinking": True, "begin_thinking_phase_token": 1, "end_thinking_phase_token": 2,
}  # fmt: skip
V = 7
TRIALS = 60000


def base_logits() -> Tensor:
    """[first token, second token, V] logits of the third: a base that remembers two tokens."""
    return torch.randn(V, V, V, generator=torch.Generator().manual_seed(2)) * 2


def expected_pairs(first: int, config: DecodeConfig) -> Tensor:
    """[V, V] probability of the base's next two tokens after (0, first), with textbook top-k and top-p."""
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    def p(logits: Tensor) -> Tensor:
        scores = logits[None].double() / config.temperature
        scores = TopKLogitsWarper(config.top_k)(None, scores) if config.top_k else scores
        return (TopPLogitsWarper(config.top_p)(None, scores) if config.top_p < 1 else scores).softmax(-1)[0]

    table = base_logits()
    one = p(table[0, first])
    return torch.stack([one[t] * p(table[first, t]) for t in range(V)])


def emitted_pairs(verdict: Verdict, table: Tensor, config: DecodeConfig, group: Any, extra: Tensor) -> Tensor:
    """[V, V] counts of the first two emitted tokens; where one was emitted, the base's next choice follows."""
    first = verdict.emitted_BP[:, 0]
    second = verdict.emitted_BP[:, 1] if verdict.emitted_BP.shape[1] > 1 else first
    scaled = sampling.likely(table[1, first] / config.temperature, config.top_k, config.top_p, group)
    own = sampling.draw(sampling.probabilities(scaled, group), extra)
    second = torch.where(verdict.accepted_B > 0, second, own)
    return torch.bincount(first * V + second, minlength=V * V).view(V, V)


def chi_square_is_fine(counts: Tensor, expected: Tensor) -> bool:
    """Pearson's statistic below mean + 5 standard deviations of its distribution, impossible cells empty."""
    expected = expected * counts.sum()
    possible = expected > 1e-9
    statistic = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    return bool(counts[~possible].sum() == 0) and float(statistic) < freedom + 5 * (2 * max(freedom, 1)) ** 0.5


SAMPLING = [
    dict(temperature=1.0), dict(temperature=0.5), dict(temperature=1.7), dict(temperature=1.0, top_k=3),
    dict(temperature=1.3, top_p=0.8), dict(temperature=0.9, top_k=5, top_p=0.7),
]  # fmt: skip


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@pytest.mark.parametrize("rule", ["chain", "tree", "rejection"])
def test_next_two_tokens_follow_the_base_distribution(tiny: Any, options: dict[str, Any], rule: str) -> None:
    """The last known token is 1; a bad drafter proposes the next tokens."""
    config = DecodeConfig(**options, use_rejection_sampling=rule == "rejection")
    group, table = tiny.base.world.tp, base_logits()
    draws = torch.rand(TRIALS, 3, 4, generator=torch.Generator().manual_seed(len(str(options))))
    if rule == "tree":  # two children, the first of which has two
        tokens = torch.tensor([[2, 5, 0, 3]]).expand(TRIALS, -1)
        tree = Tree.of(torch.tensor([[-1, -1, 0, 0]]).expand(TRIALS, -1), 2)
        drafted = Drafted(tokens, torch.ones_like(tokens).bool(), tree, 2)
        logits = torch.stack([table[0, 1], table[1, 2], table[1, 5], table[2, 0], table[2, 3]])
        logits = logits.expand(TRIALS, -1, -1)
    else:
        q = torch.rand(2, V, generator=torch.Generator().manual_seed(9)).softmax(-1)
        q[0, 3] = 0
        q = q / q.sum(-1, keepdim=True)
        if rule == "rejection":
            tokens = torch.stack([sampling.draw(q[i].expand(TRIALS, -1), draws[:, i, 2]) for i in range(2)], dim=1)
        else:
            tokens = torch.tensor([[2, 4]]).expand(TRIALS, -1)
        drafted = Drafted(tokens, torch.ones_like(tokens).bool(), None, 2)
        drafted.q_BNV = q.expand(TRIALS, -1, -1) if rule == "rejection" else None
        first, second = tokens[:, 0], tokens[:, 1]
        logits = torch.stack([table[0, 1].expand(TRIALS, -1), table[1, first], table[first, second]], dim=1)
    verdict = verify(logits, drafted, Draws(draws[:, :, 0], draws[:, :, 1]), config, group)
    counts = emitted_pairs(verdict, table, config, group, draws[:, 0, 3])
    assert chi_square_is_fine(counts, expected_pairs(1, config))
    assert rule != "rejection" or 0.02 < float((verdict.accepted_B > 0).float().mean()) < 0.98


def test_rejection_acceptance_rate_is_the_overlap(tiny: Any) -> None:
    """P(accept) = sum of min(p, q), and 1 for q = p."""
    config = DecodeConfig(temperature=1.0, use_rejection_sampling=True)
    p = base_logits()[0, 1].softmax(-1)
    for q in (torch.full((V,), 1 / V), p):
        draws = torch.rand(TRIALS, 2, 3, generator=torch.Generator().manual_seed(4))
        tokens = sampling.draw(q.expand(TRIALS, -1), draws[:, 0, 2])[:, None]
        drafted = Drafted(tokens, torch.ones_like(tokens).bool(), None, 1, q.expand(TRIALS, 1, -1))
        logits = p.log().expand(TRIALS, 2, -1)
        verdict = verify(logits, drafted, Draws(draws[:, :, 0], draws[:, :, 1]), config, tiny.base.world.tp)
        shared = float(torch.minimum(p, q).sum())
        assert float(verdict.accepted_B.float().mean()) == pytest.approx(shared, abs=0.01)


def test_typical_acceptance_by_its_definition(tiny: Any) -> None:
    """threshold min(0.09, 0.3 exp(-H)): a flat distribution accepts more, a sharp one only the likely."""
    config = DecodeConfig(temperature=0.7, typical_acceptance=True)
    sharp, flat = torch.tensor([5.0, 2.5, 0, 0, 0, 0, 0]), torch.tensor([0.3, 0.2, 0.1, 0, 0, 0, 0])
    uneven = torch.tensor([0.7, 0.7, 0.7, 0.7, 0.7, 0, -0.5])  # p of the last two: between both bounds, below both
    for logits, token in ((sharp, 0), (sharp, 1), (sharp, 2), (flat, 0), (flat, 6), (uneven, 5), (uneven, 6)):
        p = (logits.double() / 0.7).softmax(-1)
        bar = min(0.09, 0.3 * float((p * p.log()).sum().exp()))
        tokens = torch.tensor([[token]])
        drafted = Drafted(tokens, torch.ones_like(tokens).bool(), None, 1)
        half = torch.full((1, 2), 0.5)
        verdict = verify(logits.expand(1, 2, -1), drafted, Draws(half, half), config, tiny.base.world.tp)
        assert int(verdict.accepted_B) == int(float(p[token]) > bar), (logits, token)
        assert verdict.accepted_B == 0 or int(verdict.emitted_BP[0, 0]) == token
    # Of two paths equally long the likelier one.
    tree = Tree.of(torch.tensor([[-1, -1, 0, 1]]), 2)
    drafted = Drafted(torch.tensor([[4, 0, 1, 0]]), torch.ones(1, 4).bool(), tree, 2)
    verdict = verify(flat.expand(1, 5, -1), drafted, Draws(*[torch.full((1, 3), 0.5)] * 2), config, tiny.base.world.tp)
    assert verdict.path_BP is not None and verdict.path_BP.tolist() == [[0, 2, 4]]
    assert verdict.emitted_BP[0, :2].tolist() == [0, 0]


@pytest.mark.parametrize("rule", ["chain", "tree", "rejection"])
@pytest.mark.parametrize("valid", [True, False])
def test_invalid_nodes_are_never_accepted(tiny: Any, rule: str, valid: bool) -> None:
    """The base's own choice is accepted only where the node is valid; after an invalid one p itself is sampled."""
    config = DecodeConfig(temperature=1.0, use_rejection_sampling=True) if rule == "rejection" else DecodeConfig()
    logits = torch.tensor([3.0, 0, 0, 0, 0, 0, 0]).expand(1, 2, -1)  # p(0) = 0.77
    tree = Tree.of(torch.tensor([[-1]]), 1) if rule == "tree" else None
    q = torch.eye(V)[:1, None] if rule == "rejection" else None
    drafted = Drafted(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[valid]]), tree, 1, q)
    verdict = verify(logits, drafted, Draws(*[torch.full((1, 2), 0.5)] * 2), config, tiny.base.world.tp)
    assert int(verdict.accepted_B) == valid and int(verdict.emitted_BP[0, 0]) == 0


class Second(Drafter):
    """Always proposes the base's second choice, given in advance."""

    def __init__(self, table: dict[int, int]) -> None:
        self.table = table

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        known = context.lengths_B.tolist()
        tokens = [[self.table.get(n + d, 0) for d in range(count)] for n in known]
        return Proposal(torch.tensor(tokens))


def test_relaxed_acceptance_only_while_thinking(tiny: Any) -> None:
    prompt = tiny.prompts[1]
    begin, end = prompt[3], 0
    relaxed = CONFIG.replace(
        use_relaxed_acceptance_for_thinking=True, relaxed_topk=2, relaxed_delta=1e3, max_draft_len=1,
        begin_thinking_phase_token=begin, end_thinking_phase_token=end,
    )  # fmt: skip

    def second_best(text: list[int]) -> int:
        with torch.no_grad():
            return int(tiny.model(torch.tensor([text])).logits[0, -1].topk(2).indices[1])

    [plain] = decode(tiny.base, [prompt], CONFIG, set())
    wish = second_best([*prompt, plain.tokens[0]])
    drafter = Second({len(prompt) + 1: wish})
    [thinking] = decode(tiny.base, [prompt], relaxed, set(), draft=drafter)
    assert thinking.tokens[:2] == [plain.tokens[0], wish] and thinking.accepted_lengths[0] == 1
    strict = relaxed.replace(relaxed_delta=1e-9)
    [near] = decode(tiny.base, [prompt], strict, set(), draft=drafter)
    assert near.tokens == plain.tokens
    over = relaxed.replace(begin_thinking_phase_token=prompt[1], end_thinking_phase_token=prompt[3])
    [spoken] = decode(tiny.base, [prompt], over, set(), draft=drafter)
    assert spoken.tokens == plain.tokens  # the thinking had ended in the prompt
    # A draft that ends the thinking is the last one to be judged mildly.
    ended = relaxed.replace(end_thinking_phase_token=wish, max_draft_len=2)
    after = second_best([*prompt, plain.tokens[0], wish])
    [found] = decode(tiny.base, [prompt], ended, set(), draft=Second({len(prompt) + 1: wish, len(prompt) + 2: after}))
    assert found.tokens[1] == wish and found.accepted_lengths[0] == 1


@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_rejection_sampling_runs_in_the_engine(tiny: Any, kind: str) -> None:
    from tests.unit_tests.decoding.test_every_algorithm import new_draft

    draft = tiny.draft if kind == "draft" else new_draft(tiny.base, "medusa")
    config = CONFIG.replace(temperature=0.3, use_rejection_sampling=True)
    first = decode(tiny.base, tiny.prompts, config, set(), draft=draft)
    again = decode(tiny.base, tiny.prompts[2:3], config, set(), draft=draft, seeds=[2])
    assert again[0].tokens == first[2].tokens  # whatever is decoded beside it
    assert all(0 <= t < tiny_models.VOCAB for g in first for t in g.tokens)
    accepted = [a for g in first for a in g.accepted_lengths]
    assert 0 < sum(accepted) < 3 * len(accepted)


def test_options_without_effect_are_refused() -> None:
    for kind, options, message in (
        ("Eagle3", dict(medusa_choices="[[0]]"), "--medusa-choices is an option of Medusa"),
        ("NGram", dict(use_dynamic_tree=True), "--use-dynamic-tree is an option of Eagle3"),
        ("Eagle3", dict(dynamic_tree_max_topK=2), "--dynamic-tree-max-topK shapes the dynamic tree"),
        ("Eagle3", dict(is_public_pool=False), "--is-public-pool is an option of NGram"),
        ("Medusa", dict(use_dynamic_tree=True, medusa_choices="[[0]]"), "one tree"),
        ("User", {}, "--drafter module:Class"),
        ("DraftTarget", {}, "--speculative-model"),
        ("Eagle3", dict(relaxed_topk=3), "--relaxed-topk does nothing without"),
        ("Eagle3", dict(posterior_alpha=0.1), "--posterior-alpha does nothing without"),
        (
            "Eagle3",
            dict(temperature=1.0, use_rejection_sampling=True, typical_acceptance=True),
            "one acceptance rule",
        ),
        ("Medusa", dict(temperature=1.0, typical_acceptance=True, top_p=0.5), "--top-p: --typical-acceptance accepts"),
        ("Eagle3", dict(use_relaxed_acceptance_for_thinking=True), "the tokenizer has no <think>"),
        ("Eagle3", dict(relaxed_topk=1, relaxed_delta=0.5, **THINKING), "best token alone with --relaxed-topk 1 and"),
        ("Eagle3", dict(relaxed_topk=9, **THINKING), "best token alone with --relaxed-topk 9 and --relaxed-delta 0"),
        ("Eagle3", dict(temperature=1.0, use_rejection_sampling=True, use_dynamic_tree=True), "drafts a chain"),
    ):
        with pytest.raises(UserError, match=message):
            check_options(DecodeConfig(**options), kind)  # type: ignore[arg-type]
    for options in (dict(top_k=3), dict(top_p=0.5), dict(typical_acceptance=True), dict(top_p=0.0, temperature=1.0)):
        with pytest.raises(UserError, match=r"needs a temperature|must be in"):
            DecodeConfig(**options)  # type: ignore[arg-type]
