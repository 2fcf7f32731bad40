"""The running sequences on the device: known tokens, lengths, limits and random numbers, one row each.

Rows 0 .. running - 1 are in use. A step stores what it emits without synchronising; the host reads one table per step
(`Outcomes`).

B rows, P tokens that a step may emit, L length of the token buffer, N tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_spec.config import DecodeConfig
from megatron_spec.decoding.cache import Moves
from megatron_spec.decoding.matches import extended, matches_of
from megatron_spec.runtime.platform import to_device


class Outcomes(NamedTuple):
    """Results of a step, one entry per row: the table that `Rows.advance` returns, on the host.

    Attributes:
        accepted: number of accepted draft tokens, including those after a token that ends the text.
        emitted: number of tokens added to the text.
        stopped: 1 if the last of them is a stop token.
        finished: 1 if the sequence has ended, by a stop token or at its limit.
        proposed: depth of the deepest valid draft token.
        tokens_BP: the emitted tokens, then meaningless ones.
    """

    accepted: NDArray[np.int64]
    emitted: NDArray[np.int64]
    stopped: NDArray[np.int64]
    finished: NDArray[np.int64]
    proposed: NDArray[np.int64]
    tokens_BP: NDArray[np.int64]


_NUMBERS = Outcomes._fields[:-1]
NUMBERS = len(_NUMBERS)
"""Columns of a table before the tokens."""


def read_outcomes(table_BX: Tensor) -> Outcomes:
    """The columns of a table on the host."""
    table = table_BX.numpy()
    return Outcomes._make([*table.T[:NUMBERS], table[:, NUMBERS:]])


class Rows:
    """State of the running sequences; one row per cache row.

    Attributes:
        tokens_BL: int64 prompt and answer; entries from the length on are meaningless.
        length_B: int64 number of known tokens.
        prompt_B: int64 length of the prompt.
        limit_B: int64 maximum length, including the prompt.
        uniform_BN3: random numbers in [0, 1) per answer token: the base's choice, acceptance, the draft's choice.
        matches_BL: int32 matches of every position (`matches`), for a lookup beside the draft; else None.
    """

    def __init__(
        self, rows: int, slots: int, config: DecodeConfig, stop_ids: set[int], device: torch.device, drafted: bool
    ) -> None:  # fmt: skip
        """Args: drafted: there is a drafter; without one nothing is looked up."""
        self.config = config
        self.tokens_BL = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        self.length_B = torch.ones(rows, dtype=torch.int64, device=device)
        self.prompt_B = torch.ones_like(self.length_B)
        self.limit_B = torch.ones_like(self.length_B)
        self.uniform_BN3 = torch.zeros(rows, config.max_new_tokens if config.temperature > 0 else 1, 3, device=device)
        self.matches_BL: Tensor | None = None
        if drafted and config.sa_threshold is not None:
            self.matches_BL = torch.zeros(rows, slots, dtype=torch.int32, device=device)
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)

    def place(
        self, first: int, texts: Sequence[Sequence[int]], prompts: Sequence[int], limits: Sequence[int],
        seeds: Sequence[int],
    ) -> None:  # fmt: skip
        """Fill the rows from `first` on.

        Args:
            texts: prompts, with the answer so far if there is one.
            prompts: lengths of the prompts.
            limits: maximum lengths of the texts.
        """
        here, device = slice(first, first + len(texts)), self.tokens_BL.device
        _fill(self.tokens_BL[here], texts)
        if self.matches_BL is not None:
            _fill(self.matches_BL[here], [matches_of(text) for text in texts])
        numbers = to_device(torch.tensor([[len(text) for text in texts], list(prompts), list(limits)]), device)
        self.length_B[here], self.prompt_B[here], self.limit_B[here] = numbers
        if self.config.temperature > 0:
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            # The base's choices first, so that they do not depend on what else is drawn.
            drawn = [torch.rand(3, self.config.max_new_tokens, generator=g).t() for g in generators]
            self.uniform_BN3[here] = to_device(torch.stack(drawn), device)

    def draws(self, batch: int, count: int, first: int = 0) -> Tensor:
        """[B, count, 3] random numbers of the next `count` tokens of rows first .. first + batch - 1."""
        here = slice(first, first + batch)
        first_B = self.length_B[here] - self.prompt_B[here]
        index_BP = first_B[:, None] + torch.arange(count, device=first_B.device)
        index_BP = index_BP.clamp(max=self.uniform_BN3.shape[1] - 1)
        return self.uniform_BN3[here].gather(1, index_BP[:, :, None].expand(-1, -1, 3))

    def advance(self, first: int, chosen_BP: Tensor, accepted_B: Tensor, proposed_B: Tensor) -> Tensor:
        """Extend rows `first`.. by the emitted tokens, which are stored already, up to a stop token.

        Returns the table of `Outcomes`, [B, X].
        """
        here = slice(first, first + chosen_BP.shape[0])
        stops_BP = (chosen_BP[:, :, None] == self.stop_ids).any(dim=2)
        stops_BP = stops_BP & (torch.arange(chosen_BP.shape[1], device=chosen_BP.device) <= accepted_B[:, None])
        stopped_B = stops_BP.any(dim=1)
        emitted_B = torch.where(stopped_B, stops_BP.long().argmax(dim=1), accepted_B) + 1
        length_B = torch.minimum(self.length_B[here] + emitted_B, self.limit_B[here])  # bounds unused rows
        if self.matches_BL is not None:
            matches_BL, tokens_BL = self.matches_BL[here], self.tokens_BL[here]
            matches_BL.copy_(extended(matches_BL, tokens_BL, self.length_B[here], length_B, chosen_BP.shape[1]))
        self.length_B[here] = length_B
        finished_B = stopped_B | (length_B >= self.limit_B[here])
        numbers = {
            "accepted": accepted_B, "emitted": emitted_B, "stopped": stopped_B, "finished": finished_B,
            "proposed": proposed_B,
        }  # fmt: skip
        return torch.cat([torch.stack([numbers[name] for name in _NUMBERS], dim=1), chosen_BP], dim=1)

    def move(self, moves: Moves) -> None:
        """Copy rows over others."""
        matches = () if self.matches_BL is None else (self.matches_BL,)
        moves.copy(self.tokens_BL, self.length_B, self.prompt_B, self.limit_B, self.uniform_BN3, *matches)


def _fill(rows_BL: Tensor, lines: Sequence[Sequence[int]]) -> None:
    """Write lines of any length to rows, then zeros."""
    whole_BL = torch.nn.utils.rnn.pad_sequence([torch.tensor(x, dtype=rows_BL.dtype) for x in lines], batch_first=True)
    rows_BL.zero_()
    rows_BL[:, : whole_BL.shape[1]] = to_device(whole_BL, rows_BL.device)
