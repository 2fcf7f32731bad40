"""Dynamic trees (EAGLE-2, arXiv 2406.16858): expand and keep the nodes with the highest joint draft probability.

B rows of the running batch, k children of a node and nodes expanded per level, M candidate nodes, N nodes kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_spec.decoding.drafters.base import Proposal
from megatron_spec.decoding.tree import best_nodes


@dataclass
class Level:
    """The expanded nodes of one level.

    Attributes:
        depth: 1 for children of the last known token.
        tokens_Bk: int64 tokens of the nodes.
        parent_Bk: int64 index of each node's parent among the expanded nodes of the previous level (0 at depth 1).
        above_BkM: bool, node sees expanded node m (numbered level by level): itself and its ancestors.
    """

    depth: int
    tokens_Bk: Tensor
    parent_Bk: Tensor
    above_BkM: Tensor


class Children(Protocol):
    """Log-probabilities and tokens [B, k, k] of the most likely children of every node of a level."""

    def __call__(self, level: Level) -> tuple[Tensor, Tensor]: ...


def grow(logp_Bk: Tensor, tokens_Bk: Tensor, depth: int, total: int, children: Children) -> Proposal:
    """The `total` most likely nodes of a tree of `depth` levels.

    Args:
        logp_Bk, tokens_Bk: log-probabilities and tokens of the last known token's children.
        children: called for levels 1 .. depth - 1.
    """
    B, k = tokens_Bk.shape
    score_Bk, index_Bk = logp_Bk, torch.arange(k, device=tokens_Bk.device).expand(B, -1)
    parent_Bk = torch.zeros_like(index_Bk)
    above_BkM = torch.zeros(B, k, 0, dtype=torch.bool, device=tokens_Bk.device)
    scores, tokens, parents = [score_Bk], [tokens_Bk], [torch.full_like(index_Bk, -1)]
    itself = torch.eye(k, dtype=torch.bool, device=tokens_Bk.device).expand(B, -1, -1)
    for level in range(1, depth):
        inherited = above_BkM.gather(1, parent_Bk[:, :, None].expand(-1, -1, above_BkM.shape[2]))
        above_BkM = torch.cat([inherited, itself], dim=2)
        logp_Bkk, ids_Bkk = children(Level(level, tokens_Bk, parent_Bk, above_BkM))
        score_BM, ids_BM = (score_Bk[:, :, None] + logp_Bkk).flatten(1), ids_Bkk.flatten(1)
        first = k + (level - 1) * k * k
        scores.append(score_BM)
        tokens.append(ids_BM)
        parents.append(index_Bk.repeat_interleave(k, dim=1))
        score_Bk, place_Bk = score_BM.topk(k, dim=1)
        tokens_Bk, parent_Bk, index_Bk = ids_BM.gather(1, place_Bk), place_Bk // k, place_Bk + first
    kept_BN, parents_BN = best_nodes(torch.cat(scores, 1), torch.cat(parents, 1), total)
    return Proposal(torch.cat(tokens, 1).gather(1, kept_BN), None, parents_BN)
