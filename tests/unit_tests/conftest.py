"""One base and one overfitted draft for all tests of decoding, generation and evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit_tests.decoding import setting


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """folder, model (transformers), base, prompts, answers (transformers, no stop tokens), draft_tokens, draft."""
    from megatron_spec.decoding.engine import decode
    from megatron_spec.runtime import distributed

    torch.set_num_threads(1)
    world = distributed.initialize()
    folder = Path(tmp_path_factory.mktemp("base"))
    model = setting.save_base(folder)
    base, prompts = setting.load(folder, world), setting.prompts()
    answers = [setting.reference_greedy(model, p, setting.CONFIG.max_new_tokens, set()) for p in prompts]
    # Some tokens more than are decoded: the last drafts look beyond the answer.
    more = decode(base, prompts[:1], setting.CONFIG.replace(max_new_tokens=30), set())[0].tokens
    spoken = {t for a in answers for t in a[:4]} | set(more)
    spoken |= set([t for t in range(setting.VOCAB) if t not in spoken][: len(spoken) % 2])  # even, to be split in two
    draft_tokens = sorted(spoken)
    draft = setting.new_draft(base, draft_tokens)
    worst = setting.overfit(base, prompts[0], more, draft, steps=150)
    return SimpleNamespace(
        folder=folder, model=model, base=base, prompts=prompts, answers=answers, draft_tokens=draft_tokens,
        draft=draft, worst_accuracy=worst,
    )  # fmt: skip


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """folder, base, tokenizer, prompts, stop_ids for conversations."""
    from megatron_spec.generation.prompts import read_prompts
    from megatron_spec.runtime import distributed

    folder = Path(tmp_path_factory.mktemp("chat"))
    setting.save_chat_base(folder)
    base = setting.load(folder, distributed.initialize(), captures=())
    questions = setting.write_questions(folder / "questions.jsonl")
    prompts = read_prompts(questions)
    return SimpleNamespace(
        folder=folder, base=base, tokenizer=setting.chat_tokenizer(), questions=questions, prompts=prompts,
        stop_ids=setting.some_stops(base, prompts),
    )  # fmt: skip


@pytest.fixture(scope="session")
def four_ranks(tiny: Any, chat: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """found: what `ranks.all_cases` gave on each rank; siblings_alone: those cases in one process."""
    from tests.unit_tests.decoding import ranks, test_siblings
    from tests.worlds import run_world

    folder = Path(tmp_path_factory.mktemp("siblings"))
    weights, alone = test_siblings.prepare_parallel(folder)
    chat.tokenizer.save_pretrained(chat.folder)
    layouts = (str(tiny.folder), str(chat.folder), setting.whole_weights(tiny.draft), tiny.draft_tokens, chat.stop_ids)
    questions = (str(chat.folder), [{}, {"tensor_model_parallel_size": 2}])
    found = run_world(4, ranks.all_cases, layouts, (str(folder), weights), questions)
    return SimpleNamespace(found=found, siblings_alone=alone)
