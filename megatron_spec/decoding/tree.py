"""Trees of draft tokens: shape, visibility and the longest accepted path. A chain is a tree without branches.

Row 0 of a verification is the last known token, row 1 + n is node n.

B rows of the batch, N nodes, S = N + 1 verification rows, M tree nodes, P = depth of the deepest node + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Tree:
    """Shape of the trees of a batch.

    Attributes:
        parent_row_BN: int64 verification row of each node's parent.
        depth_BN: int64 depth of each node, 1 for children of the last known token.
        above_BSS: bool, row s sees row r of its tree: r is s or an ancestor of s.
    """

    parent_row_BN: Tensor
    depth_BN: Tensor
    above_BSS: Tensor

    @staticmethod
    def of(parents_BN: Tensor, depth: int) -> Tree:
        """From the parent of each node (-1: the last known token); parents come before their children.

        Args:
            depth: upper bound of the nodes' depth.
        """
        B, N = parents_BN.shape
        row_BN = parents_BN + 1
        parent_BS = torch.cat([row_BN.new_zeros(B, 1), row_BN], dim=1)
        above_BSS = torch.eye(N + 1, dtype=torch.bool, device=parents_BN.device).expand(B, -1, -1)
        depth_BS, up_BS = torch.zeros_like(parent_BS), parent_BS
        here_S = torch.arange(N + 1, device=parents_BN.device)
        is_node_BS = (here_S > 0).expand(B, -1)
        for _ in range(depth):  # one generation up per iteration; the root is its own parent
            depth_BS = depth_BS + is_node_BS
            above_BSS = above_BSS | (up_BS[:, :, None] == here_S)
            is_node_BS = is_node_BS & (up_BS > 0)
            up_BS = parent_BS.gather(1, up_BS)
        return Tree(row_BN, depth_BS[:, 1:], above_BSS)


def longest_path(
    ok_BN: Tensor, parent_row_BN: Tensor, depth_BN: Tensor, depth: int, score_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The deepest path of accepted nodes in each tree.

    Args:
        ok_BN: the node is accepted if its parent is.
        depth: depth of the deepest node.
        score_BN: in [0, 1), breaks ties between paths of equal length.

    Returns:
        int64 [B, P] verification rows of the path from row 0 on (entries past its end are meaningless), and int64
        [B] its length in nodes.
    """
    B = ok_BN.shape[0]
    alive_BS = torch.cat([ok_BN.new_ones(B, 1), ok_BN], dim=1)
    for _ in range(depth):
        alive_BS = torch.cat([alive_BS[:, :1], ok_BN & alive_BS.gather(1, parent_row_BN)], dim=1)
    rank_BN = torch.where(alive_BS[:, 1:], depth_BN + (0.0 if score_BN is None else score_BN), 0.0)
    value_B, best_B = torch.cat([rank_BN.new_zeros(B, 1), rank_BN], dim=1).max(dim=1)
    accepted_B = value_B.long()
    parent_BS = torch.cat([parent_row_BN.new_zeros(B, 1), parent_row_BN], dim=1)
    path_BP = torch.zeros(B, depth + 1, dtype=torch.int64, device=ok_BN.device)
    for d in range(depth, 0, -1):
        on_B = accepted_B >= d
        path_BP[:, d] = torch.where(on_B, best_B, 0)
        best_B = torch.where(on_B, parent_BS.gather(1, best_B[:, None])[:, 0], best_B)
    return path_BP, accepted_B


def paths_to_parents(paths: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int], list[int]]:
    """(parents, levels from 0, ranks) of the nodes of a fixed tree, given by its paths sorted by length."""
    index = {path: i for i, path in enumerate(paths)}
    parents = [index[p[:-1]] if len(p) > 1 else -1 for p in paths]
    return parents, [len(p) - 1 for p in paths], [p[-1] for p in paths]


def best_nodes(score_BM: Tensor, parents_BM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` nodes with the highest scores. They form a tree, because no node's score exceeds its parent's.

    Returns int64 [B, count] their indices among the M nodes, ascending, and int64 [B, count] their parents, as indices
    into the kept nodes.
    """
    B, M = score_BM.shape
    # Stable sort: ties keep the earlier node, so no child is kept without its parent.
    kept_BN = score_BM.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    place_BM = torch.full((B, M + 1), -1, dtype=torch.int64, device=score_BM.device)
    place_BM.scatter_(1, kept_BN + 1, torch.arange(kept_BN.shape[1], device=score_BM.device).expand(B, -1))
    return kept_BN, place_BM.gather(1, parents_BM.gather(1, kept_BN) + 1)
