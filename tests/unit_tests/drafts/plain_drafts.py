"""EAGLE-1, EAGLE-3.1, MTP and Medusa as in their papers: loops over rows, dense masks, full logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.batch import Features
from megatron_spec.config import EagleConfig, MedusaConfig, ObjectiveConfig
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds, plain_row_loss, plain_supervised, replay_of

VOCAB = 33


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x_SND: Tensor, positions_S: Tensor, theta: float) -> Tensor:
    half = x_SND.shape[-1] // 2
    angle = positions_S[:, None].float() * (1.0 / theta ** (torch.arange(half).float() / half))  # fp32 by design
    cos, sin = (f(angle)[:, None].to(x_SND.dtype) for f in (torch.cos, torch.sin))
    a, b = x_SND[..., :half], x_SND[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class PlainDraft:
    """One conversation at a time, from a dictionary of parameters."""

    def __init__(self, config: EagleConfig, parameters: dict[str, Tensor], ends: StandInEnds, ids: Tensor) -> None:
        self.config, self.p, self.ends, self.ids = config, parameters, ends, ids

    def start(self, f: Features, b: int) -> Tensor:
        if not self.config.algorithm.startswith("eagle3"):
            return f.state_SBH[:, b]
        x, eps = f.captures_SBC[:, b], self.config.rms_norm_eps
        if self.config.norm_before_fc:
            x = rms(x, self.p["input_norm.weight"], eps)
        if self.config.fc_norm:
            H = self.config.target_hidden_size
            parts = [x[:, i * H : (i + 1) * H] for i in range(x.shape[1] // H)]
            x = torch.cat([rms(part, self.p[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], -1)
        return x @ self.p["fc.weight"].T

    def block(self, prefix: str, h: Tensor, x: Tensor, pos: Tensor, mask: Tensor, seen: list[Any]) -> Tensor:
        """Residual stream h, attention input x."""
        w, config = {n.removeprefix(prefix): p for n, p in self.p.items()}, self.config
        N, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q = rotate((x @ w["self_attn.q_proj.weight"].T).view(-1, N, D), pos, config.rope.theta)
        k = rotate((x @ w["self_attn.k_proj.weight"].T).view(-1, G, D), pos, config.rope.theta)
        seen.append((k, (x @ w["self_attn.v_proj.weight"].T).view(-1, G, D)))
        keys, values = torch.cat([k for k, _ in seen]), torch.cat([v for _, v in seen])
        heads = []
        for n in range(N):
            score = (q[:, n] @ keys[:, n * G // N].T / math.sqrt(D)).masked_fill(~mask, -math.inf)
            heads.append(score.softmax(-1) @ values[:, n * G // N])
        h = h + torch.cat(heads, -1) @ w["self_attn.o_proj.weight"].T
        y = rms(h, w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gated = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        return h + gated @ w["mlp.down_proj.weight"].T

    def step(self, h: Tensor, e: Tensor, pos: Tensor, mask: Tensor, seen: list[list[Any]]) -> tuple[Tensor, Tensor]:
        """(state fed back, logits)."""
        p, eps, count = self.p, self.config.rms_norm_eps, self.config.num_hidden_layers
        if self.config.algorithm == "eagle1":
            h = torch.cat([e, h], -1) @ p["fc.weight"].T
            for i in range(count):
                x = h if i == 0 else rms(h, p[f"layers.{i}.input_layernorm.weight"], eps)
                h = self.block(f"layers.{i}.", h, x, pos, mask, seen[i])
            return h, h @ self.ends.head.T
        if self.config.algorithm == "eagle-mtp":
            parts = [rms(e, p["layers.0.enorm.weight"], eps), rms(h, p["layers.0.hnorm.weight"], eps)]
            h = torch.cat(parts, -1) @ p["layers.0.eh_proj.weight"].T
            x = rms(h, p["layers.0.input_layernorm.weight"], eps)
            h = self.block("layers.0.", h, x, pos, mask, seen[0])
            normed = rms(h, p["layers.0.shared_head.norm.weight"], eps)
            return (normed if self.config.norm_output else h), normed @ self.ends.head.T
        norms = rms(e, p["midlayer.input_layernorm.weight"], eps), rms(h, p["midlayer.hidden_norm.weight"], eps)
        h = self.block("midlayer.", h, torch.cat(norms, -1), pos, mask, seen[0])
        normed = rms(h, p["norm.weight"], eps)
        return (normed if self.config.norm_output else h), normed @ p["lm_head.weight"].T

    def conversation(self, f: Features, b: int, goal: ObjectiveConfig, stats: Tensor, noise: Tensor | None) -> Tensor:
        batch, S = f.batch, f.batch.tokens_BS.shape[1]
        tokens, turns, documents = (x[b].tolist() for x in (batch.tokens_BS, batch.turns_BS, batch.documents_BS))
        z = f.state_SBH[:, b] @ self.ends.head.T
        h = self.start(f, b) + (0 if noise is None else noise[:, b])
        trunk = torch.tensor([[i <= j and documents[i] == documents[j] for i in range(S)] for j in range(S)])
        seen: list[list[Any]] = [[] for _ in range(self.config.num_hidden_layers)]
        total = torch.zeros((), dtype=h.dtype)
        for k in range(goal.ttt_steps):
            e = self.ends.table[[tokens[j + 1 + k] if j + 1 + k < S else 0 for j in range(S)]]
            mask = torch.cat([trunk] + [torch.eye(S, dtype=torch.bool)] * k, 1)
            h, logits = self.step(h, e, batch.positions_BS[b] + k, mask, seen)
            for j in range(S):
                if not plain_supervised(turns, documents, j, k, goal.alignment):
                    continue
                teacher, best = z[j + 1 + k], int(z[j + 1 + k].argmax())
                p, q = teacher[self.ids].softmax(-1), logits[j].softmax(-1)
                stats[k, 1] += int(self.ids[q.argmax()]) == best
                stats[k, 2] += torch.minimum(p, q).sum().detach()
                stats[k, 3] += 1
                if best in self.ids.tolist():
                    loss, replay = (
                        plain_row_loss(goal.loss_kind, p, q, int(p.argmax())),
                        replay_of(goal, batch, b, j + 2 + k),
                    )
                    if self.config.algorithm == "eagle1":
                        d = (h[j] - f.state_SBH[j + 1 + k, b]).abs()
                        smooth = torch.where(d < 1, d * d / 2, d - 0.5).mean()
                        stats[k, 0] += (goal.feature_weight * smooth + goal.token_weight * loss).detach()
                        loss = goal.feature_weight * smooth + replay * goal.token_weight * loss
                    else:
                        stats[k, 0] += loss.detach()
                        loss = replay * loss
                    total = total + goal.decay**k * loss
        return total

    def __call__(self, f: Features, goal: ObjectiveConfig, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(total, stats [T, (loss, correct, overlap, rows)])."""
        stats = torch.zeros(goal.ttt_steps, 4, dtype=f.state_SBH.dtype)
        rows = range(f.batch.tokens_BS.shape[0])
        return torch.stack([self.conversation(f, b, goal, stats, noise) for b in rows]).sum(), stats


def plain_medusa(
    config: MedusaConfig, p: dict[str, Tensor], ends: StandInEnds, f: Features, goal: ObjectiveConfig
) -> tuple[Tensor, Tensor]:
    """(total, stats [heads, (loss, correct, overlap, rows)]): hard labels are the tokens of the data."""
    stats, total = torch.zeros(config.num_heads, 4, dtype=f.state_SBH.dtype), []
    B, S = f.batch.tokens_BS.shape
    for i, b, j in ((i, b, j) for i in range(config.num_heads) for b in range(B) for j in range(S)):
        turns, documents = f.batch.turns_BS[b].tolist(), f.batch.documents_BS[b].tolist()
        if not plain_supervised(turns, documents, j, i, goal.alignment):
            continue
        x = f.state_SBH[j, b]
        for layer in range(config.num_layers):
            prefix = f"heads.{i}.blocks.{layer}.linear."
            inner = p[prefix + "weight"] @ x + p[prefix + "bias"]
            x = x + inner / (1 + (-inner).exp())
        head = ends.head if config.share_base_head else p[f"heads.{i}.lm_head.weight"]
        q, teacher = (head @ x).softmax(-1), (ends.head @ f.state_SBH[j + 1 + i, b]).softmax(-1)
        loss = plain_row_loss(goal.loss_kind, teacher, q, int(f.batch.tokens_BS[b, j + 2 + i]))
        found = [loss.detach(), q.argmax() == teacher.argmax(), torch.minimum(teacher, q).sum().detach(), 1]
        stats[i] += torch.tensor([float(x) for x in found], dtype=stats.dtype)
        total.append(goal.decay**i * replay_of(goal, f.batch, b, j + 2 + i) * loss)
    return torch.stack(total).sum(), stats
