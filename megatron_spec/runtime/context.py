"""Context parallelism: distribution of a sequence's rows over ranks, and exchange of rows.

The sequence is split into 2 * CP chunks of equal length, and rank r holds chunks r and 2 * CP - 1 - r, which balances
the work of causal attention (the layout of megatron-core and Transformer Engine). Tokens, positions, turns and
documents are small and stay whole on every rank, so shifts by a token need no communication; only activations are
sharded. Keys and values of a trunk are gathered once (ring attention, arXiv 2310.01889, sends the same volume), and
their gradients are reduced once.

S whole sequence, L = S / CP rows of this rank, B micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.runtime.platform import to_device


@dataclass(frozen=True)
class ContextShard:
    """This rank's part of every sequence.

    Attributes:
        group: the context-parallel ranks.
    """

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.group.size()

    @property
    def multiple(self) -> int:
        """The length of the whole sequence must be a multiple of this."""
        return 2 * self.size

    def chunks(self, S: int, rank: int | None = None) -> list[tuple[int, int]]:
        """(first, end) of the two chunks of a rank (default: this one), ascending."""
        assert S % self.multiple == 0, (S, self.multiple)
        r, length = self.group.rank() if rank is None else rank, S // self.multiple
        return [(c * length, (c + 1) * length) for c in (r, self.multiple - 1 - r)]

    def rows(self, S: int, device: torch.device | str) -> Tensor:
        """int64 [L]: global positions of this rank's rows, ascending."""
        return torch.cat([torch.arange(*chunk, device=device) for chunk in self.chunks(S)])

    def order(self, S: int, device: torch.device | str) -> Tensor:
        """int64 [S]: global positions in the order of the ranks' concatenated rows."""
        parts = [torch.arange(*chunk, device=device) for r in range(self.size) for chunk in self.chunks(S, r)]
        return torch.cat(parts)

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows of a whole tensor."""
        return x.index_select(dim, self.rows(x.shape[dim], x.device))

    def whole(self, x_L: Tensor) -> Callable[[], Tensor]:
        """Start an all-gather of [L, ...]; the result waits for it and returns the whole [S, ...], without gradient."""
        parts = x_L.new_empty(x_L.shape[0] * self.size, *x_L.shape[1:])
        work = dist.all_gather_into_tensor(parts, x_L.contiguous(), group=self.group, async_op=True)

        def wait() -> Tensor:
            """The rows in the order of the sequence."""
            work.wait()
            return torch.empty_like(parts).index_copy_(0, self.order(len(parts), parts.device), parts)

        return wait

    def own_sum(self, x_S: Tensor) -> Tensor:
        """[L, ...]: the sum of the ranks' [S, ...] at this rank's rows. Collective, without gradient."""
        ordered = x_S.index_select(0, self.order(len(x_S), x_S.device))
        mine = ordered.new_empty(len(ordered) // self.size, *ordered.shape[1:])
        dist.reduce_scatter_tensor(mine, ordered, group=self.group)
        return mine

    def gather(self, x_L: Tensor) -> Tensor:
        """All-gather [L, ...] to the whole [S, ...] on every rank. Gradients are summed over the ranks."""
        out: Tensor = _Gather.apply(x_L, self)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def pick(self, x_LBH: Tensor, rows_U: Tensor, ahead: int) -> Tensor:
        """[U, H]: rows of a sharded tensor, without gradient. Collective.

        Args:
            rows_U: flattened global rows (s * B + b), each on this rank or at most `ahead` rows after one of its
                chunks; only these boundary rows are communicated.
            ahead: draft steps, the same on every rank.
        """
        L, B = x_LBH.shape[:2]
        S = L * self.size
        # on the host, so as not to wait for the device
        ends = torch.arange(self.multiple)[:, None] * (S // self.multiple)
        border = (ends + torch.arange(ahead)).flatten().unique()
        border = border[border < S]
        place_S = torch.full((S,), -1, dtype=torch.int64)
        place_S[self.rows(S, "cpu")] = torch.arange(L)
        mine = place_S[border]
        place_S[border[mine < 0]] = L + (mine < 0).nonzero()[:, 0]
        mine, place_S = to_device(mine, x_LBH.device), to_device(place_S, x_LBH.device)
        borders = x_LBH[mine.clamp(min=0)] * (mine >= 0)[:, None, None]
        dist.all_reduce(borders, group=self.group)  # one rank has each row, all other ranks add zeros
        place_U = place_S[rows_U // B]
        return torch.cat([x_LBH, borders]).flatten(0, 1)[place_U * B + rows_U % B]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_L: Tensor, shard: ContextShard) -> Tensor:
        """Rows of all ranks [S, ...] from this rank's [L, ...], in the order of the sequence."""
        ctx.shard = shard
        return shard.whole(x_L)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None]:
        """Gradient of this rank's rows, summed over ranks."""
        return ctx.shard.own_sum(grad_S), None
