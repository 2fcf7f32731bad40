"""The same tokens under tensor, pipeline and data parallelism: one world of four ranks over several layouts.

What other files of decoding and generation compare on several ranks is here too: start-up is most of its cost.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from megatron_spec.config import ParallelConfig
from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.decoding.engine import decode, two_best
from megatron_spec.evaluation.validate import validate
from megatron_spec.generation.outputs import read_records
from megatron_spec.generation.prompts import read_prompts
from megatron_spec.generation.synthesize import synthesize_to_file
from tests.unit_tests.decoding import test_every_algorithm, tiny_models
from tests.unit_tests.decoding.tiny_models import CHAT_CONFIG, CONFIG
from tests.unit_tests.generation import test_questions
from tests.worlds import run_world

LAYOUTS = {
    "tp2pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def _answers(base: Any, draft: Any, prompts: list[list[int]]) -> dict[str, Any]:
    prompts = [*prompts[:3], prompts[-1]]
    hot, seeds = CONFIG.replace(temperature=1.5, max_new_tokens=6), list(range(4))
    spoken = decode(base, prompts, CONFIG, set(), draft=draft)
    tree = CONFIG.replace(use_dynamic_tree=True, dynamic_tree_max_topK=3, max_total_draft_tokens=8)
    filtered = hot.replace(top_k=20, top_p=0.9)
    others = {
        "tree": decode(base, prompts, tree, set(), draft=draft),
        "target": decode(base, prompts, CONFIG, set(), draft=base),
        "rejection": decode(
            base, prompts, filtered.replace(use_rejection_sampling=True), set(), draft=draft, seeds=seeds
        ),
        "lookup": decode(base, prompts, CONFIG.replace(sa_threshold=1), set(), draft=draft),
        "lookup, rejection": decode(
            base, prompts, hot.replace(use_rejection_sampling=True, sa_threshold=1), set(), draft=draft, seeds=seeds
        ),
        "same prompt": decode(base, [prompts[1]] * 7, hot, set(), seeds=range(7)),
        "typical": decode(base, prompts, hot.replace(typical_acceptance=True), set(), draft=draft, seeds=seeds),
        "filtered tree": decode(
            base, prompts, tree.replace(temperature=1.5, top_k=20, top_p=0.9), set(), draft=draft, seeds=seeds
        ),
    }
    return {
        **{name: [(g.tokens, g.accepted_lengths, g.drafted_lengths) for g in found] for name, found in others.items()},
        "alone": [g.tokens for g in decode(base, prompts, CONFIG, set())],
        "spoken": [g.tokens for g in spoken],
        "accepted": [g.accepted_lengths for g in spoken],
        "sampled": [g.tokens for g in decode(base, prompts, hot, set(), draft=draft, seeds=seeds)],
        "best": two_best(base, prompts[1])[1],
    }


def world_cases(
    folder: str, chat_folder: str, weights: dict[str, Tensor], draft_tokens: list[int], stop_ids: set[int]
) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_spec.runtime import distributed

    found: dict[str, Any] = {}
    for layout, sizes in LAYOUTS.items():
        world = distributed.initialize(ParallelConfig(**sizes))
        base = tiny_models.load(folder, world)
        draft = tiny_models.new_draft(base, draft_tokens)
        tiny_models.set_weights(draft, weights)
        found[layout] = _answers(base, draft, tiny_models.prompts())
        if layout == "pp2":  # and two data-parallel ranks
            chat = tiny_models.load(chat_folder, world, captures=())
            prompts, tokenizer = read_prompts(Path(chat_folder, "questions.jsonl")), tiny_models.chat_tokenizer()
            output = Path(chat_folder, "parallel.jsonl")
            found["count"] = synthesize_to_file(chat, tokenizer, prompts, CHAT_CONFIG, output, stop_ids=stop_ids)
            report = validate(chat, NGramDrafter(), prompts, tokenizer, CHAT_CONFIG, stop_ids=stop_ids)
            found["report"] = dataclasses.asdict(report)
        parallel_state.destroy_model_parallel()
    return found


def all_cases(layouts: tuple[Any, ...], algorithms: tuple[Any, ...], questions: tuple[Any, ...]) -> dict[str, Any]:
    """The result of each test's function on this rank."""
    return {
        "layouts": world_cases(*layouts),
        "algorithms": test_every_algorithm.parallel(*algorithms),
        "questions": test_questions.generated(*questions),
    }


@pytest.fixture(scope="module")
def four_ranks(tiny: Any, chat: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """found: results of `all_cases` on each rank; algorithms_alone: the same cases in one process."""
    folder = tmp_path_factory.mktemp("algorithms")
    weights, alone = test_every_algorithm.prepare_parallel(folder)
    layouts = (
        str(tiny.folder), str(chat.folder), tiny_models.whole_weights(tiny.draft), tiny.draft_tokens, chat.stop_ids,
    )  # fmt: skip
    questions = (str(chat.folder), [{}, {"tensor_model_parallel_size": 2}])
    found = run_world(4, all_cases, layouts, (str(folder), weights), questions)
    return SimpleNamespace(found=found, algorithms_alone=alone)


@pytest.fixture
def found(four_ranks: Any) -> list[dict[str, Any]]:
    return [cases["layouts"] for cases in four_ranks.found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_of_every_layout_decodes_as_one_process(found: list[dict[str, Any]], tiny: Any, layout: str) -> None:
    expected = _answers(tiny.base, tiny.draft, tiny.prompts)
    assert expected["alone"] == [*tiny.answers[:3], tiny.answers[-1]]
    assert expected["accepted"][0] == [3] * 6
    assert [tokens for tokens, _, _ in expected["tree"]] == expected["alone"] == [t for t, _, _ in expected["target"]]
    for rank, cases in enumerate(found):
        assert cases[layout] == expected, f"rank {rank}"


def test_data_parallel_ranks_write_one_file(found: list[dict[str, Any]], chat: Any, tmp_path: Path) -> None:
    alone = tmp_path / "alone.jsonl"
    synthesize_to_file(chat.base, chat.tokenizer, chat.prompts, CHAT_CONFIG, alone, stop_ids=chat.stop_ids)
    together = read_records(chat.folder / "parallel.jsonl")
    assert list(together.items()) == list(read_records(alone).items()) and len(together) == 5
    assert [cases["count"] for cases in found] == [5] * 4
    assert not list(chat.folder.glob("*.part*"))


def test_data_parallel_ranks_report_together(found: list[dict[str, Any]], chat: Any) -> None:
    expected = validate(chat.base, NGramDrafter(), chat.prompts, chat.tokenizer, CHAT_CONFIG, stop_ids=chat.stop_ids)
    for cases in found:
        report = cases["report"]
        [run] = report["runs"]
        assert run["text_identical"] and report["answers"] == expected.answers
        assert report["base"]["tokens"] == expected.base.tokens
        assert run["acceptance"]["acceptance_length"] == expected.first.acceptance.acceptance_length
        assert run["acceptance"]["steps"] == expected.first.acceptance.steps


def test_drafts_are_equal_on_all_ranks(four_ranks: Any) -> None:
    for found in four_ranks.found:
        assert len(found["algorithms"]) == len(test_every_algorithm.KINDS) + len(test_every_algorithm.STAGED)
        for name, answers in found["algorithms"].items():
            assert answers == four_ranks.algorithms_alone[name.split(",")[0]], name


def test_every_layout_writes_the_same_conversations(four_ranks: Any, chat: Any) -> None:
    one = test_questions.generated(str(chat.folder), [{}])[0]
    assert len(one) == 6 and all(r["conversations"][0]["role"] == "user" for r in one)
    for found in four_ranks.found:
        assert found["questions"] == [one, one]
