"""A tiny base, ragged prompts, and a draft overfitted on the base's answer to the first of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import DecodeConfig, ObjectiveConfig
from megatron_spec.config.presets import eagle_config
from tests.unit_tests.base.tiny import save_tiny

CAPTURES = (0, 2, 5)
VOCAB = 83
LIMIT = 64
"""max_position_embeddings of the tiny base."""
CONFIG = DecodeConfig(max_draft_len=3, max_new_tokens=25, batch_size=3)


def prompts() -> list[list[int]]:
    """Ragged; the last one leaves room for only five tokens."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (6, 17, 1, 30, 9, 12, LIMIT - 5)]


def save_base(folder: Path) -> Any:
    """Write the base; returns its transformers model."""
    return save_tiny(folder)


def load(folder: Path | str, world: Any, captures: tuple[int, ...] = CAPTURES) -> Any:
    from megatron_spec.checkpoint.base_import import inspect_base, load_base

    return load_base(inspect_base(folder), world, captures)


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], new: int, stop: set[int]) -> list[int]:
    """transformers' answer, the stop token included."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=min(new, LIMIT - len(prompt)), eos_token_id=sorted(stop) or None, pad_token_id=0,
    )  # fmt: skip
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def new_draft(base: Any, draft_tokens: list[int] | None) -> Any:
    """An EagleDraft with its initial values, and a reduced vocabulary if tokens are given."""
    from megatron_spec.drafts import build_draft
    from megatron_spec.drafts.vocab import DraftVocab

    vocab = DraftVocab.full(VOCAB) if draft_tokens is None else DraftVocab(torch.tensor(draft_tokens), VOCAB)
    config = eagle_config(base.config, overrides={"capture_layer_ids": CAPTURES, "draft_vocab_size": len(vocab)})
    draft = build_draft(config, vocab, base.world, torch.float32)
    draft.initialize(base, None, seed=3)
    return draft


def overfit(base: Any, prompt: list[int], answer: list[int], draft: Any, steps: int) -> float:
    """Train the draft on one conversation with plain Adam; returns the accuracy of the worst draft step."""
    from megatron_spec.base.schedule import run_base

    tokens_BS = torch.tensor([prompt + answer])
    turns_BS = torch.tensor([[0] * len(prompt) + [1] * len(answer)], dtype=torch.int32)
    positions_BS = torch.arange(tokens_BS.shape[1])[None]
    batch = Batch(tokens_BS, positions_BS, turns_BS, torch.zeros_like(turns_BS))
    [(captures, state)] = run_base(base, [batch])
    features = Features(batch, captures, state)
    objective = ObjectiveConfig(ttt_steps=CONFIG.max_draft_len, loss="hard_ce")
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        losses = draft(features, base, objective)
        optimizer.zero_grad()
        (losses.total / losses.rows_T[0]).backward()
        optimizer.step()
    return float((losses.correct_T / losses.rows_T).min())


def whole_weights(draft: Any) -> dict[str, Tensor]:
    """Weights of a draft built without tensor parallelism."""
    return {name: p.detach().clone() for name, p in draft.named_parameters()}


def set_weights(draft: Any, weights: dict[str, Tensor]) -> None:
    """Give each rank its shard of `whole_weights`."""
    for name, p in draft.named_parameters():
        value = weights[name]
        if getattr(p, "tensor_model_parallel", False):
            value = value.chunk(draft.tp_group.size(), dim=p.partition_dim)[draft.tp_group.rank()]
        p.data.copy_(value)


CHAT_CONFIG = DecodeConfig(max_draft_len=3, max_new_tokens=12, batch_size=2)


def save_chat_base(folder: Path) -> None:
    """A base for the byte-level tokenizer of the chat tests."""
    save_tiny(folder, seed=2, vocab_size=261, max_position_embeddings=256, initializer_range=0.4)


def chat_tokenizer() -> Any:
    from tests.unit_tests.data.chat_fixtures import CHATML, make_tokenizer

    return make_tokenizer(CHATML)


QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "math", "turns": ["What is 2 + 2?"]},
    {"question_id": 2, "category": "math", "turns": ["And 3 + 3? Think well before you answer."]},
    {"question_id": 7, "category": "", "turns": ["Hello.", "Goodbye."]},
    {"question_id": 9, "turns": ["Hi"], "reference": ["there"]},
    {"question_id": 10, "category": "qa", "turns": ["Who are you?", "And I?"]},
]


def write_questions(path: Path) -> Path:
    import json

    path.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    return path


def some_stops(base: Any, prompts: list[Any]) -> set[int]:
    """Tokens that end some answers of the chat base but not all."""
    from megatron_spec.data.chat import ChatEncoder
    from megatron_spec.decoding.engine import decode
    from megatron_spec.generation.prompts import Dialogue

    encoder = ChatEncoder(chat_tokenizer())
    asked = [Dialogue(p).ask(encoder, 256) or [] for p in prompts]
    answers = [g.tokens for g in decode(base, asked, CHAT_CONFIG, set())]
    return {answers[2][4], answers[4][3]}
