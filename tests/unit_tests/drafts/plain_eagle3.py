"""A base reduced to its ends, example batches, and a plain EAGLE-3 to compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.batch import Batch, Features
from megatron_spec.config import EagleConfig, ObjectiveConfig
from megatron_spec.drafts.contract import DraftLosses
from megatron_spec.drafts.vocab import DraftVocab

V = 31
SMALL_VOCAB = [0, 2, 3, 5, 8, 9, 11, 14, 17, 20, 24, 30]


class StandInEnds:
    """Embedding and LM head as plain matrices; the head is split over the group and padded with garbage rows."""

    def __init__(
        self,
        hidden: int,
        dtype: torch.dtype,
        group: Any = None,
        sequence_parallel: bool = False,
        vocab_size: int = V,
        padding: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.vocab_size, self.head_fp8 = vocab_size, None
        self.table = torch.randn(vocab_size, hidden, generator=generator).to(dtype)
        self.head = torch.randn(vocab_size, hidden, generator=generator).to(dtype)
        self.size, self.rank = (group.size(), group.rank()) if group is not None else (1, 0)
        self.sequence_parallel = sequence_parallel
        extra = 12 - vocab_size % 12 if padding is None else padding
        padded = torch.cat([self.head, torch.full((extra, hidden), 50.0, dtype=dtype)])
        self.head_weight = padded.chunk(self.size)[self.rank]

    def embed(self, tokens_BS: Tensor) -> Tensor:
        rows = F.embedding(tokens_BS, self.table).transpose(0, 1)
        return rows.chunk(self.size)[self.rank] if self.sequence_parallel else rows

    def logits(self, state_SBH: Tensor) -> Tensor:
        raise AssertionError("a draft reads head_weight in chunks")


def eagle_config(**changes: Any) -> EagleConfig:
    values: dict[str, Any] = {
        "algorithm": "eagle3", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "vocab_size": V, "draft_vocab_size": len(SMALL_VOCAB),
        "target_hidden_size": 16, "max_position_embeddings": 64, "capture_layer_ids": (0, 1, 2),
    }  # fmt: skip
    values.update(changes)
    return EagleConfig(**values)


def draft_vocab(config: EagleConfig) -> DraftVocab:
    if config.draft_vocab_size == config.vocab_size:
        return DraftVocab.full(config.vocab_size)
    return DraftVocab(torch.tensor(SMALL_VOCAB), config.vocab_size)


def conversations(length: int = 18) -> Batch:
    """Row 0: two assistant turns, then padding. Row 1: two packed documents, the second without padding.

    Some tokens are marked as `rejected_BS`, also outside the supervised turns and at the ends of rows.
    """
    tokens = torch.randint(0, V, (2, length), generator=torch.Generator().manual_seed(5))
    turns = torch.zeros(2, length, dtype=torch.int32)
    turns[0, 2:8], turns[0, 9:15] = 1, 2
    turns[1, 1:7], turns[1, 8:13], turns[1, 14:] = 1, 2, 3
    documents = torch.zeros(2, length, dtype=torch.int32)
    documents[0, 15:] = -1
    documents[1, 8:] = 1
    positions = torch.arange(length).repeat(2, 1)
    positions[1, 8:] -= 8
    rejected = torch.zeros(2, length, dtype=torch.bool)
    rejected[0, [0, 4, 7, 12, 14]] = rejected[1, [3, 6, 9, length - 1]] = True
    return Batch(tokens, positions, turns, documents, rejected_BS=rejected)


def replay_of(objective: ObjectiveConfig, batch: Batch, b: int, target: int) -> float:
    """Weight of a step of row b of the batch by the token that it predicts."""
    return objective.replay_weight if batch.rejected_BS is not None and batch.rejected_BS[b, target] else 1.0


def features(batch: Batch, config: EagleConfig, dtype: torch.dtype) -> Features:
    """Random captures and states for the batch."""
    generator = torch.Generator().manual_seed(7)
    B, S = batch.tokens_BS.shape
    H = config.target_hidden_size
    captures = torch.randn(S, B, len(config.capture_layer_ids) * H, generator=generator)
    state = torch.randn(S, B, H, generator=generator)
    return Features(batch, captures.to(dtype), state.to(dtype))


# The plain version: one conversation at a time, S x (k+1)S masks, whole logits, loops over rows.


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x_SND: Tensor, positions_S: Tensor, theta: float) -> Tensor:
    D = x_SND.shape[-1]
    frequency = 1.0 / theta ** (torch.arange(0, D, 2).float() / D)
    angle = positions_S[:, None].float() * frequency
    cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None].to(x_SND.dtype) for f in (torch.cos, torch.sin))
    a, b = x_SND[..., : D // 2], x_SND[..., D // 2 :]
    return x_SND * cos + torch.cat([-b, a], -1) * sin


def plain_supervised(turns: list[int], documents: list[int], j: int, k: int, alignment: str) -> bool:
    last = j + 2 + k
    if last >= len(turns) or documents[j] < 0 or any(documents[i] != documents[j] for i in range(j, last + 1)):
        return False
    if alignment == "serving":
        return turns[j + 1] > 0 and all(turns[i] == turns[j + 1] for i in range(j + 1, last + 1))
    return turns[j + k] > 0 if alignment == "paper" else turns[last] > 0


def plain_row_loss(kind: str, p: Tensor, q: Tensor, label: int) -> Tensor:
    if kind == "soft_ce":
        return -(p * q.log()).sum()
    if kind == "kl":
        return (p * (p / q).log()).sum()
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum()
    if kind == "tv":
        return (p - q).abs().sum() / 2
    if kind == "lk":
        return -torch.minimum(p, q).sum().log()
    if kind == "lk_hybrid":
        share = math.exp(-3 * float(torch.minimum(p, q).sum()))
        return share * (p * (p / q).log()).sum() + (1 - share) * (p - q).abs().sum() / 2
    return -q[label].log()


def plain_weight(
    objective: ObjectiveConfig, j: int, k: int, chances: dict[tuple[int, int], float], terms: dict[tuple[int, int], Any]
) -> float:
    """Of step k of row j; D-PACE: for every step m >= k in the loss the chance that steps 0..m are accepted."""
    if objective.step_weights != "d-pace":
        return objective.decay**k
    alpha = objective.pace_alpha
    reached = [(1 - alpha) * chances.get((j, m), 0.0) + alpha for m in range(objective.ttt_steps)]
    return sum(math.prod(reached[: m + 1]) for m in range(k, objective.ttt_steps) if (j, m) in terms)


class PlainEagle:
    """EAGLE-3 as in the paper, from a dictionary of parameters."""

    def __init__(
        self, config: EagleConfig, parameters: dict[str, Tensor], ends: StandInEnds, vocab: DraftVocab
    ) -> None:
        self.config, self.p, self.ends, self.ids = config, parameters, ends, vocab.target_ids
        count = config.num_hidden_layers
        self.prefixes = ["midlayer."] if count == 1 else [f"layers.{i}." for i in range(count)]

    def layer(
        self, i: int, h: Tensor, e: Tensor, pos: Tensor, mask: Tensor, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        w = {name[len(self.prefixes[i]) :]: p for name, p in self.p.items() if name.startswith(self.prefixes[i])}
        S, N, G, D = len(h), config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if i == 0:
            normed = _rms(h, w["hidden_norm.weight"], eps)
            x = torch.cat([_rms(e, w["input_layernorm.weight"], eps), normed], -1)
            h = normed if config.norm_before_residual else h
        else:
            x = _rms(h, w["input_layernorm.weight"], eps)

        def linear(y: Tensor, name: str) -> Tensor:
            return y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros((), dtype=y.dtype))

        def rotated(name: str, heads: int) -> Tensor:
            y = linear(x, f"self_attn.{name}_proj").view(S, heads, D)
            y = _rms(y, w[f"self_attn.{name}_norm.weight"], eps) if config.qk_norm else y
            size = int(D * config.rope.partial_rotary_factor)
            turned = _rotate(y[..., :size], pos, config.rope.theta) * config.rope.attention_factor
            return torch.cat([turned, y[..., size:]], -1)

        q, k, v = rotated("q", N), rotated("k", G), linear(x, "self_attn.v_proj").view(S, G, D)
        seen.append((k, v))
        keys, values = torch.cat([k for k, _ in seen]), torch.cat([v for _, v in seen])
        out = []
        for n in range(N):
            g = n // (N // G)
            score = (q[:, n] @ keys[:, g].T / math.sqrt(D)).masked_fill(~mask, -math.inf)
            out.append(score.softmax(-1) @ values[:, g])
        h = h + linear(torch.cat(out, -1), "self_attn.o_proj")
        x = _rms(h, w["post_attention_layernorm.weight"], eps)
        return h + linear(F.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj")

    def conversation(self, f: Features, b: int, objective: ObjectiveConfig, stats: Tensor) -> Tensor:
        """Weighted loss of row b of the batch; adds to stats [T, (loss, correct, overlap, rows)]."""
        batch, S, temperature = f.batch, f.batch.tokens_BS.shape[1], objective.temperature
        tokens, turns, documents = (x[b].tolist() for x in (batch.tokens_BS, batch.turns_BS, batch.documents_BS))
        z = f.state_SBH[:, b] @ self.ends.head.T
        h = f.captures_SBC[:, b] @ self.p["fc.weight"].T + self.p.get("fc.bias", torch.zeros((), dtype=z.dtype))
        trunk = torch.tensor([[i <= j and documents[i] == documents[j] for i in range(S)] for j in range(S)])
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.prefixes]
        terms: dict[tuple[int, int], Tensor] = {}
        chances: dict[tuple[int, int], float] = {}
        for k in range(objective.ttt_steps):
            e = self.p.get("embed_tokens.weight", self.ends.table)[
                [tokens[j + 1 + k] if j + 1 + k < S else 0 for j in range(S)]
            ]
            window = self.config.sliding_window or 10**6
            near = torch.tensor([[j + k - i < window for i in range(S)] for j in range(S)])
            mask = torch.cat([trunk & near] + [torch.eye(S, dtype=torch.bool)] * k, 1)
            for i in range(len(self.prefixes)):
                if objective.detach:
                    seen[i] = [(key.detach(), value.detach()) for key, value in seen[i]]
                h = self.layer(i, h, e, batch.positions_BS[b] + k, mask, seen[i])
            logits = _rms(h, self.p["norm.weight"], self.config.rms_norm_eps) @ self.p["lm_head.weight"].T
            for j in range(S):
                if not plain_supervised(turns, documents, j, k, objective.alignment):
                    continue
                teacher, best = z[j + 1 + k], int(z[j + 1 + k].argmax())
                p, q = (teacher[self.ids] / temperature).softmax(-1), (logits[j] / temperature).softmax(-1)
                stats[k, 1] += int(self.ids[q.argmax()]) == best
                stats[k, 2] += torch.minimum(p, q).sum().detach()
                stats[k, 3] += 1
                known = best in self.ids.tolist()
                chances[j, k] = float(q[p.argmax()]) if known else 0.0
                if known or not objective.in_vocab_only:
                    loss = plain_row_loss(objective.loss_kind, p, q, int(p.argmax()))
                    stats[k, 0] += loss.detach()
                    terms[j, k] = replay_of(objective, batch, b, j + 2 + k) * loss
            h = h.detach() if objective.detach else h
        weighted = [plain_weight(objective, j, k, chances, terms) * x for (j, k), x in terms.items()]
        return torch.stack(weighted).sum() if weighted else torch.zeros((), dtype=h.dtype)

    def __call__(self, f: Features, objective: ObjectiveConfig) -> tuple[Tensor, Tensor]:
        """(total, stats [T, (loss, correct, overlap, rows)]) of the whole micro-batch."""
        stats = torch.zeros(objective.ttt_steps, 4, dtype=f.state_SBH.dtype)
        rows = range(f.batch.tokens_BS.shape[0])
        return torch.stack([self.conversation(f, b, objective, stats) for b in rows]).sum(), stats


def assert_same(
    draft: nn.Module, losses: DraftLosses, total: Tensor, stats: Tensor, parameters: dict[str, Tensor]
) -> None:
    """Assert that losses, figures of every step and every gradient equal those of the plain version."""
    assert stats[:, 3].min() > 0, "the example must supervise every step"
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(losses.total, total, **close)
    found = torch.stack([losses.loss_T, losses.correct_T, losses.overlap_T, losses.rows_T], 1)
    torch.testing.assert_close(found, stats, **close)
    losses.total.backward()
    total.backward()
    for name, p in draft.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, f"{name} receives no gradient"
        torch.testing.assert_close(p.grad, parameters[name].grad, msg=lambda m, name=name: f"{name}: {m}", **close)
