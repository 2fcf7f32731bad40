"""One base and one overfitted draft for the tests of decoding, generation and evaluation; log levels for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit_tests.decoding import tiny_models


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A test that runs a script, which sets up logging, leaves no log level behind."""
    loggers = [logging.getLogger(name) for name in ("megatron_spec", "megatron.core")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def trained_tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `tiny` is made of, once for a process."""
    from megatron_spec.decoding.engine import decode
    from megatron_spec.runtime import distributed

    torch.set_num_threads(1)
    world = distributed.initialize()
    folder = Path(tmp_path_factory.mktemp("base"))
    model = tiny_models.save_base(folder)
    base, prompts = tiny_models.load(folder, world), tiny_models.prompts()
    answers = [tiny_models.reference_greedy(model, p, tiny_models.CONFIG.max_new_tokens, set()) for p in prompts]
    # Some tokens more than are decoded: the last drafts look beyond the answer.
    more = decode(base, prompts[:1], tiny_models.CONFIG.replace(max_new_tokens=30), set())[0].tokens
    spoken = {t for a in answers for t in a[:4]} | set(more)
    # An even number, to be split in two.
    spoken |= set([t for t in range(tiny_models.VOCAB) if t not in spoken][: len(spoken) % 2])
    draft_tokens = sorted(spoken)
    draft = tiny_models.new_draft(base, draft_tokens)
    worst = tiny_models.overfit(base, prompts[0], more, draft, steps=150)
    return SimpleNamespace(
        folder=folder, model=model, base=base, prompts=prompts, answers=answers, draft_tokens=draft_tokens,
        draft=draft, worst_accuracy=worst,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(trained_tiny: Any) -> Any:
    """folder, model (transformers), base, prompts, answers (transformers, no stop tokens), draft_tokens, draft.

    Base and draft are in the process groups of now: other files may have ended those that they were made in.
    """
    from megatron_spec.runtime import distributed

    base = tiny_models.load(trained_tiny.folder, distributed.initialize())
    draft = tiny_models.new_draft(base, trained_tiny.draft_tokens)
    draft.load_state_dict(trained_tiny.draft.state_dict())
    return SimpleNamespace(**{**vars(trained_tiny), "base": base, "draft": draft})


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """folder, base, tokenizer, prompts, stop_ids for conversations."""
    from megatron_spec.generation.prompts import read_prompts
    from megatron_spec.runtime import distributed

    folder = Path(tmp_path_factory.mktemp("chat"))
    tiny_models.save_chat_base(folder)
    base = tiny_models.load(folder, distributed.initialize(), captures=())
    questions = tiny_models.write_questions(folder / "questions.jsonl")
    prompts = read_prompts(questions)
    tokenizer = tiny_models.chat_tokenizer()
    tokenizer.save_pretrained(folder)
    return SimpleNamespace(
        folder=folder, base=base, tokenizer=tokenizer, questions=questions, prompts=prompts,
        stop_ids=tiny_models.some_stops(base, prompts),
    )  # fmt: skip
