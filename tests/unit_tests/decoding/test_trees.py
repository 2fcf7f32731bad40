"""Trees: shapes, equal text, nodes equal to those of chains, and more accepted tokens than a chain."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.drafters import Context, Drafter, Proposal, build_drafter
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.options import read_choices
from megatron_spec.decoding.tree import Tree, best_nodes, longest_path
from megatron_spec.ops.visibility import visible_slots
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.tiny_models import CONFIG

PARENTS = [[-1, -1, 0, 2, 1, 0], [-1, 0, 1, 2, 3, 4]]


def test_depths_and_ancestors() -> None:
    tree = Tree.of(torch.tensor(PARENTS), 6)
    assert tree.depth_BN.tolist() == [[1, 1, 2, 3, 2, 2], [1, 2, 3, 4, 5, 6]]
    above = tree.above_BSS[0].long().tolist()
    assert above[4] == [1, 1, 0, 1, 1, 0, 0]  # node 3 follows node 2, which follows node 0
    assert above[5] == [1, 0, 1, 0, 0, 1, 0] and above[0] == [1, 0, 0, 0, 0, 0, 0]
    assert torch.equal(tree.above_BSS[1], torch.ones(7, 7).tril().bool())  # a chain is causal
    visible = visible_slots(torch.tensor([2, 0]), tree.above_BSS, 11)
    assert visible[0, 4].long().tolist() == [1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert visible[1, 2].long().tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_longest_path_against_every_path() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        parents = [int(torch.randint(-1, n, (), generator=generator)) if n else -1 for n in range(7)]
        ok = torch.rand(1, 7, generator=generator) < 0.7
        tree = Tree.of(torch.tensor([parents]), 7)
        path, accepted = longest_path(ok, tree.parent_row_BN, tree.depth_BN, 7)
        paths = []
        for node in range(7):
            way = [node]
            while parents[way[0]] >= 0:
                way.insert(0, parents[way[0]])
            if all(ok[0, n] for n in way):
                paths.append(way)
        longest = max(map(len, paths), default=0)
        found = path[0, : longest + 1].tolist()
        assert int(accepted) == longest and found[0] == 0
        assert longest == 0 or [n - 1 for n in found[1:]] in paths


def test_best_nodes_form_a_tree() -> None:
    parents = torch.tensor([[-1, -1, 0, 0, 1, 4]])
    scores = torch.tensor([[-1.0, -0.5, -1.0, -3.0, -0.5, -2.0]])  # ties between parent and child
    kept, of_kept = best_nodes(scores, parents, 4)
    assert kept.tolist() == [[0, 1, 2, 4]] and of_kept.tolist() == [[-1, -1, 0, 1]]


def tree_config(**changes: Any) -> DecodeConfig:
    return CONFIG.replace(use_dynamic_tree=True, dynamic_tree_max_topK=3, max_total_draft_tokens=7, **changes)


class Wide(Drafter):
    """The right token among wrong ones at every level, at varying ranks."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers

    def max_nodes(self, count: int) -> int:
        return 3 * count

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        tokens, parents = [], []
        for text, length in zip(context.tokens_BL.tolist(), context.lengths_B.tolist(), strict=True):
            known = text[:length]
            prompt = max((p for p in self.answers if tuple(known[: len(p)]) == p), key=len)
            answer = self.answers[prompt]
            coming = (answer + [0] * count)[length - len(prompt) :][:count]
            row, above, right = [], [], -1
            for d, token in enumerate(coming):
                place = (length + d) % 3
                row += [token if i == place else (token + 1 + i) % tiny_models.VOCAB for i in range(3)]
                above += [right] * 3
                right = 3 * d + place
            tokens.append(row)
            parents.append(above)
        device = context.tokens_BL.device
        return Proposal(torch.tensor(tokens, device=device), None, torch.tensor(parents, device=device))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_correct_path_is_found_among_siblings(tiny: Any, batch_size: int) -> None:
    answers = {tuple(p): a for p, a in zip(tiny.prompts, tiny.answers, strict=True)}
    config = CONFIG.replace(batch_size=batch_size)
    found = decode(tiny.base, tiny.prompts, config, set(), draft=Wide(answers))
    assert [g.tokens for g in found] == tiny.answers
    assert all(a == d for g in found for a, d in zip(g.accepted_lengths, g.drafted_lengths, strict=True))
    assert found[0].accepted_lengths == [3] * 6


def test_dynamic_tree_gives_the_text_and_accepts_more_than_a_chain(tiny: Any) -> None:
    draft = tiny_models.new_draft(tiny.base, tiny.draft_tokens)
    for (name, p), (_, trained) in zip(draft.named_parameters(), tiny.draft.named_parameters(), strict=True):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
        p.data.copy_(trained + 0.08 * noise)  # a draft that errs
    counts = {}
    for name, config in (("chain", CONFIG), ("tree", tree_config()), ("one", tree_config().replace(batch_size=1))):
        found = decode(tiny.base, tiny.prompts, config, set(), draft=draft)
        assert [g.tokens for g in found] == tiny.answers, name
        assert all(a <= d <= 3 for g in found for a, d in zip(g.accepted_lengths, g.drafted_lengths, strict=True))
        counts[name] = [g.accepted_lengths for g in found]
    assert counts["one"] == counts["tree"]
    assert sum(map(sum, counts["tree"])) > sum(map(sum, counts["chain"])) > 0
    narrow = tree_config().replace(dynamic_tree_max_topK=1, max_total_draft_tokens=3)
    assert [g.accepted_lengths for g in decode(tiny.base, tiny.prompts, narrow, set(), draft=draft)] == counts["chain"]


def test_tree_nodes_are_the_most_likely_paths(tiny: Any) -> None:
    """Against a chain per path: joint probabilities of all paths, of which the highest are kept."""
    drafter = build_drafter(tiny.draft, tiny.base, tree_config())
    assert drafter is not None
    seen: list[Proposal] = []
    real = drafter.prepare_draft_tokens
    drafter.prepare_draft_tokens = lambda c, n: (seen.append(real(c, n)), seen[-1])[1]  # type: ignore[method-assign]
    decode(tiny.base, tiny.prompts[1:2], tree_config(max_new_tokens=2 + CONFIG.max_draft_len), set(), draft=drafter)
    proposal = seen[0]
    assert proposal.parents_BN is not None
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(
        zip(proposal.tokens_BN[0].tolist(), proposal.parents_BN[0].tolist(), strict=True)
    ):
        paths[node] = (*paths[parent], token)

    class Forced(Drafter):
        """Drafts a given path and records the log-probability of each token."""

        def __init__(self, path: tuple[int, ...]) -> None:
            self.inner: Any = build_drafter(tiny.draft, tiny.base)
            self.path, self.logp, self.best = path, 0.0, ()

        def __getattribute__(self, name: str) -> Any:
            if name in ("open", "observe", "move_rows"):
                return getattr(self.inner, name)
            return super().__getattribute__(name)

        def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
            if not self.best:
                fed, normed = self.inner.fed_back_BH[None, :1], self.inner.normed_BH[None, :1]
                for k in range(len(self.path) + 1):
                    if k:
                        slots = self.inner.position_B[:1, None] + k
                        token = torch.tensor([[self.path[k - 1]]])
                        fed, normed = self.inner._step(
                            fed, token, slots, self.inner._earlier(slots, 0, context.key_slots)
                        )
                    logp = tiny.draft.logits(normed, tiny.base)[0, 0].log_softmax(-1)
                    if k < len(self.path):
                        self.logp += float(logp[tiny.draft.vocab.draft_ids[self.path[k]]])
                top = logp.topk(3)
                self.best = tuple(
                    zip(tiny.draft.vocab.target_ids[top.indices].tolist(), top.values.tolist(), strict=True)
                )
            return self.inner.prepare_draft_tokens(context, count)

    def force(path: tuple[int, ...]) -> Forced:
        forced = Forced(path)
        decode(
            tiny.base, tiny.prompts[1:2], CONFIG.replace(max_new_tokens=2 + CONFIG.max_draft_len), set(), draft=forced
        )
        return forced

    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    everything: dict[tuple[int, ...], float] = {}
    for _ in range(CONFIG.max_draft_len):
        level = {}
        for path, score in frontier:
            forced = force(path)
            assert forced.logp == pytest.approx(score, abs=1e-4)
            level.update({(*path, token): score + logp for token, logp in forced.best})
        everything.update(level)
        frontier = sorted(level.items(), key=lambda x: -x[1])[:3]
    expected = sorted(everything, key=lambda p: -everything[p])[:7]
    assert {paths[n] for n in range(7)} == set(expected)


def test_medusa_trees(tiny: Any) -> None:
    from tests.unit_tests.decoding.test_every_algorithm import new_draft

    base, draft = tiny.base, new_draft(tiny.base, "medusa")
    every = "[" + ",".join(str(list(p)) for n in (1, 2) for p in itertools.product(range(4), repeat=n)) + "]"
    chain = decode(base, tiny.prompts, CONFIG, set(), draft=draft)
    found = decode(base, tiny.prompts, CONFIG.replace(medusa_choices=every), set(), draft=draft)
    dynamic = decode(base, tiny.prompts, tree_config(), set(), draft=draft)
    alone = decode(base, tiny.prompts, CONFIG.replace(medusa_choices="[[0],[0,0],[0,0,0]]"), set(), draft=draft)
    assert [g.tokens for g in found] == [g.tokens for g in dynamic] == tiny.answers
    assert [g.accepted_lengths for g in alone] == [g.accepted_lengths for g in chain]
    assert max(d for g in found for d in g.drafted_lengths) == 2
    total = [sum(sum(g.accepted_lengths) for g in x) for x in (chain, found, dynamic)]
    assert total[1] > total[0] and total[2] > total[0]
    for few in ("[[0]]", "[[0],[1]]"):  # fewer nodes than the longest chain has
        found = decode(base, tiny.prompts, CONFIG.replace(medusa_choices=few), set(), draft=draft)
        assert [g.tokens for g in found] == tiny.answers
    with pytest.raises(UserError, match="found a path of 4 tokens and rank 0, but the draft has 3 heads"):
        deep = CONFIG.replace(medusa_choices="[[0],[0,0],[0,0,0],[0,0,0,0]]")
        decode(base, tiny.prompts[:1], deep, set(), draft=draft)


def test_choices_are_read_and_checked(tmp_path: Any) -> None:
    (tmp_path / "tree.json").write_text("[[0, 1], [0], [2]]")
    assert read_choices(str(tmp_path / "tree.json")) == ((0,), (2,), (0, 1))
    for text in ("[[0, 1]]", "[]", "[[0], [0]]", "[[-1]]", "nothing.json", "[0]", "[[0.5]]"):
        with pytest.raises(UserError, match="--medusa-choices"):
            read_choices(text)
