"""What the engine asks of anything that proposes tokens.

B rows of the running batch, S new rows of one base forward, K draft tokens per verification step, C captures width,
H base hidden size. The engine keeps the running sequences in rows 0..B-1; a drafter keeps its state in the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class Observation:
    """What one base forward (a prefill or a verification) made certain for rows `first .. first + B - 1`.

    Attributes:
        first: first engine row the tensors speak of.
        slots_BS: int64 positions of the S rows the base has just read.
        next_tokens_BS: int64 the token that follows each of them (verified, or the base's own choice).
        counts_B: int64 number of leading rows that are final; rows behind them hold rejected drafts or padding.
        captures_SBC: captured base layers of the rows.
        state_SBH: base state after the final norm of the rows.
    """

    first: int
    slots_BS: Tensor
    next_tokens_BS: Tensor
    counts_B: Tensor
    captures_SBC: Tensor
    state_SBH: Tensor


@dataclass
class Context:
    """The running sequences: all that is known of rows 0..B-1.

    Attributes:
        tokens_BL: int64 prompt and emitted tokens; entries at and behind the length are meaningless.
        lengths_B: int64 number of known tokens. The last one has not been read by the base yet.
    """

    tokens_BL: Tensor
    lengths_B: Tensor


class Drafter(Protocol):
    """Proposes a chain of tokens for every running sequence."""

    def open(self, rows: int, max_length: int) -> None:
        """Make room for `rows` sequences of up to `max_length` tokens; forgets everything before."""
        ...

    def observe(self, seen: Observation) -> None:
        """Take in verified rows. What was computed from rejected drafts at or behind them is thereby rolled back."""
        ...

    def prepare_draft_tokens(self, context: Context, count: int) -> tuple[Tensor, Tensor | None]:
        """Propose up to `count` tokens a row.

        Returns int64 tokens [B, count], and int64 [B] how many of them are proposed (None: all of them).
        """
        ...

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """Copy the state of rows `source` to rows `target` (finished sequences make place)."""
        ...
