"""DFlash and DSpark as in their papers: a dense mask of slots x (context rows + slots), autograd.

P blocks, C slots, S sequence, B batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [R, heads, D] at positions [R]."""
    D = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, D, 2, dtype=torch.int64).float() / D)
    angle = positions[:, None].float() * inverse
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def block_states(
    w: Weights, config: Any, captures_SC: Tensor, positions_S: Tensor, documents_S: Tensor,
    anchors: list[int], embedded_PCH: Tensor,
) -> Tensor:  # fmt: skip
    """[P * C, H] normed states of the slots of one sequence."""
    eps, theta, C, D = config.rms_norm_eps, config.rope.theta, config.block_size, config.head_dim
    context = norm(captures_SC @ w["fc.weight"].t(), w["hidden_norm.weight"], eps)
    anchor = torch.tensor(anchors).repeat_interleave(C)
    slot = torch.arange(C).repeat(len(anchors))
    place = positions_S[anchor] + slot
    S = len(positions_S)
    row = torch.arange(S)
    see_context = (row[None] < anchor[:, None]) & (documents_S[None] == documents_S[anchor][:, None])
    whole = torch.cat([see_context, anchor[:, None] == anchor[None]], 1)
    mask = whole
    if config.causal:
        mask = mask & torch.cat([see_context, slot[None] <= slot[:, None]], 1)
    if config.sliding_window is not None:
        distance = place[:, None] - torch.cat([positions_S, place])[None]
        mask = mask & (distance < config.sliding_window)
    x = embedded_PCH.flatten(0, 1)
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}."
        a = p + "self_attn."
        h = norm(x, w[p + "input_layernorm.weight"], eps)
        both = torch.cat([context, h])
        heads = lambda t: t.unflatten(-1, (-1, D))  # noqa: E731
        q = turn(norm(heads(h @ w[a + "q_proj.weight"].t()), w[a + "q_norm.weight"], eps), place, theta)
        k = norm(heads(both @ w[a + "k_proj.weight"].t()), w[a + "k_norm.weight"], eps)
        k = turn(k, torch.cat([positions_S, place]), theta)
        v = heads(both @ w[a + "v_proj.weight"].t())
        n = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        scores = torch.einsum("rhd,thd->hrt", q, k) / math.sqrt(D)
        seen = whole if i in config.full_attention_layers else mask
        shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
        x = x + torch.einsum("hrt,thd->rhd", shares, v).flatten(1) @ w[a + "o_proj.weight"].t()
        h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].t(), h @ w[p + "mlp.up_proj.weight"].t()
        x = x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].t()
    return norm(x, w["norm.weight"], eps)


def markov(w: Weights, config: Any, m: Tensor, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """(input of W2 for one slot, next memory) of DSpark's three Markov heads."""
    r = config.markov_rank
    if config.markov_head_type == "gated":
        G, b = w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"]
        return m / (1 + torch.exp(-(G[:, :-r] @ x + G[:, -r:] @ m + b))), memory
    if config.markov_head_type == "rnn":
        J, b = w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"]
        a = J[:, :r] @ memory + J[:, r : 2 * r] @ m + J[:, 2 * r :] @ x + b
        keep = torch.sigmoid(a[:r])
        return torch.tanh(a[2 * r :]), keep * memory + (1 - keep) * torch.tanh(a[r : 2 * r])
    return m, memory


def plain_loss(
    w: Weights, config: Any, goal: Any, features: Any, anchors: list[list[int]], table: Tensor, head: Tensor,
    vocab: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """The sum of the losses over the supervised slots of all blocks of a batch; `anchors` for every sequence.

    `vocab`: tokens of a reduced draft vocabulary.
    """
    vocab = list(range(len(head))) if vocab is None else vocab
    own, reads_text = w.get("lm_head.weight", head), goal.loss_kind in ("hard_ce", "ce_l1")
    batch, C, first = features.batch, config.block_size, 0 if config.algorithm == "dspark" else 1
    gamma = goal.block_gamma or {8: 4.0, 10: 5.0, 16: 7.0}.get(C, 4.0)
    total = head.new_zeros(())
    for b, places in enumerate(anchors):
        if not places:
            continue
        tokens, turns = batch.tokens_BS[b], batch.turns_BS[b]
        ids = torch.full((len(places), C), config.mask_token_id)
        ids[:, 0] = tokens[places]
        states = block_states(
            w, config, features.captures_SBC[:, b], batch.positions_BS[b], batch.documents_BS[b], places, table[ids]
        ).unflatten(0, (-1, C))
        for p, a in enumerate(places):
            count = 0  # supervised slots: the tokens after the anchor that belong to its turn
            while count < C - first and a + 1 + count < len(tokens) and turns[a + 1 + count] == turns[a]:
                count += 1
            prefix, losses, products, counts = 1.0, [], [], []
            memory = head.new_zeros(config.markov_rank)
            for k in range(count):
                x = states[p, first + k]
                logits = x @ own.t()
                m = None
                if first == 0:
                    m = w["markov_head.markov_w1.weight"][tokens[a + k]]
                    latent, memory = markov(w, config, m, x, memory)
                    logits = logits + w["markov_head.markov_w2.weight"] @ latent
                whole = features.state_SBH[a + k, b] @ head.t()
                target, top, token = whole[vocab].softmax(-1), int(whole.argmax()), int(tokens[a + 1 + k])
                label = (
                    vocab.index(token if token in vocab else top) if {token, top} & {*vocab} else int(target.argmax())
                )
                text = token in vocab or not (reads_text or goal.block_weights != "exponential")
                counts.append(not goal.in_vocab_only or (top in vocab and text))
                logq = logits.log_softmax(-1)
                q = logq.exp()
                loss = {
                    "soft_ce": lambda: -(target * logq).sum(),
                    "kl": lambda: (target * (target.log() - logq)).sum(),
                    "hard_ce": lambda: -logq[label],
                    "ce_l1": lambda: -goal.ce_weight * logq[label] + goal.l1_weight * (q - target).abs().sum(),
                }[goal.loss_kind]()
                if m is not None and goal.backbone_weight:
                    plain = (x @ own.t()).log_softmax(-1)
                    bare = -goal.ce_weight * plain[label] + goal.l1_weight * (plain.exp() - target).abs().sum()
                    loss = goal.backbone_weight * bare + (1 - goal.backbone_weight) * loss
                if m is not None and config.confidence_head:
                    seen = torch.cat([x, m]) if config.confidence_reads_markov else x
                    logit = w["confidence_head.proj.weight"][0] @ seen + w["confidence_head.proj.bias"][0]
                    accepted = 1 - (q - target).abs().sum().detach() / 2
                    bce = -accepted * F.logsigmoid(logit) - (1 - accepted) * F.logsigmoid(-logit)
                    loss = loss + goal.confidence_weight * bce
                accepted = float(q[label].detach()) if token in vocab else 0.0
                prefix = prefix * ((1 - goal.pace_alpha) * accepted + goal.pace_alpha)
                losses.append(loss)
                products.append(prefix * counts[-1])
            for k, loss in enumerate(losses):
                weight = math.exp(-k / gamma) if goal.block_weights == "exponential" else sum(products[k:])
                total = total + counts[k] * weight * loss
    return total
