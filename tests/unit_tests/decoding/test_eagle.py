"""Every proposal equals the draft's output without a cache, on recomputed features.

S rows, B batch, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_spec.decoding.drafters import Context, Drafter, Observation, Proposal
from megatron_spec.decoding.drafters.eagle import EagleDrafter
from megatron_spec.decoding.engine import decode
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.tiny_models import CAPTURES, CONFIG


class Recorder(Drafter):
    """A drafter that records each text with its proposal."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.notes: list[tuple[list[int], list[int]]] = []

    def open(self, rows: int, max_length: int) -> None:
        self.inner.open(rows, max_length)

    def observe(self, seen: Observation) -> None:
        self.inner.observe(seen)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        self.inner.move_rows(source, target)

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        proposal = self.inner.prepare_draft_tokens(context, count)
        for tokens, length, draft in zip(
            context.tokens_BL, context.lengths_B.tolist(), proposal.tokens_BN, strict=True
        ):
            self.notes.append((tokens[:length].tolist(), draft.tolist()))
        return proposal


@torch.no_grad()
def plain_drafts(tiny: Any, text: list[int], count: int) -> list[int]:
    """The chain from scratch: all rows, a growing list of own keys for the last row, captures from transformers."""
    outputs: dict[int, Tensor] = {}
    handles = [
        tiny.model.model.layers[i].register_forward_hook(
            lambda _m, _i, out, i=i: outputs.update({i: out[0] if isinstance(out, tuple) else out})
        )
        for i in CAPTURES
    ]
    tiny.model(torch.tensor([text[:-1]]))
    for handle in handles:
        handle.remove()
    draft, embedding = tiny.draft, tiny.model.model.embed_tokens
    hidden_SBH = draft.project(torch.cat([outputs[i] for i in CAPTURES], dim=-1).transpose(0, 1))
    positions_BS = torch.arange(len(text) - 1)[None]
    tokens = text[1:]
    past: list[tuple[Tensor, Tensor]] = []  # rotated keys and values of all rows, then of each own step

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past.append((k, v))
        keys, values = (torch.cat([kv[i] for kv in past])[:, 0] for i in (0, 1))  # [L, G, D]
        group = q.shape[2] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("snd,lnd->nsl", q[:, 0], keys) / math.sqrt(q.shape[-1])
        if len(past) == 1:
            causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~causal, -math.inf)
        return torch.einsum("nsl,lnd->snd", scores.softmax(-1), values).flatten(1)[:, None]

    drafted: list[int] = []
    for k in range(count):
        rows = torch.tensor([tokens if k == 0 else drafted[-1:]])
        hidden_SBH, normed_SBH = draft.layer_step(hidden_SBH, embedding(rows).transpose(0, 1), positions_BS, attention)
        best = int(draft.logits(normed_SBH[-1:]).argmax())
        drafted.append(int(draft.vocab.target_ids[best]))
        hidden_SBH, positions_BS = hidden_SBH[-1:], positions_BS[:, -1:] + 1
    return drafted


def test_drafts_equal_recomputation(tiny: Any) -> None:
    recorder = Recorder(EagleDrafter(tiny.draft, tiny.base))
    prompts = [*tiny.prompts, tiny.prompts[0][2:] + tiny.answers[0][:3]]
    found = decode(tiny.base, prompts, CONFIG.replace(batch_size=3), set(), draft=recorder)
    accepted = {a for g in found for a in g.accepted_lengths}
    assert len(accepted) >= 3  # rejected, partly accepted and wholly accepted drafts all happened
    assert len(recorder.notes) > 100
    for text, drafts in recorder.notes[::7]:
        assert drafts == plain_drafts(tiny, text, len(drafts)), f"after {len(text)} tokens"
    assert any(len(drafts) == CONFIG.max_draft_len for _, drafts in recorder.notes[::7])


def test_reduced_vocabulary_drafts_only_its_tokens(tiny: Any) -> None:
    recorder = Recorder(EagleDrafter(tiny.draft, tiny.base))
    decode(tiny.base, tiny.prompts[1:4], CONFIG, set(), draft=recorder)
    assert {t for _, drafts in recorder.notes for t in drafts} <= set(tiny.draft_tokens)
    assert len(tiny.draft_tokens) < tiny_models.VOCAB
