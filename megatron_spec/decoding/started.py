"""The host's records: answers, running sequences, and steps that the device computes while the host goes on.

B rows of a step, P tokens that a sequence may emit in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_spec.decoding.drafters import Observation
from megatron_spec.decoding.rows import Outcomes


@dataclass
class Generation:
    """The answer to one prompt, with statistics.

    Attributes:
        tokens: the answer, including the stop token if there is one.
        stopped: True if it ended with a stop token, False if it was truncated by max_new_tokens or the context limit.
        num_base_forwards: base forwards this sequence took part in, including the prefill.
        accepted_lengths: tokens emitted minus one, per verification. A draft token that ends the text counts as the
            bonus token, so len(tokens) == 1 + sum(accepted_lengths) + len(accepted_lengths) always holds. Empty
            without a drafter.
        drafted_lengths: draft tokens per verification along a path (the depth of a tree); those after a token that
            ends the text do not count.
        drafted_steps: verifications with at least one draft token.
        accepted_after_end: draft tokens accepted after the token that ends the text. Serving engines count these, too.
        rejected: indices of the tokens that the base put in place of a draft token that it rejected.
    """

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    num_base_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_lengths: list[int] = field(default_factory=list)
    drafted_steps: int = 0
    accepted_after_end: int = 0
    rejected: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], stopped: int) -> None:
        """Add the tokens that a step emitted; `stopped`: the last of them is a stop token."""
        self.tokens += tokens
        self.stopped = bool(stopped)
        self.num_base_forwards += 1

    def add_verification(self, accepted: int, emitted: int, stopped: int, proposed: int) -> None:
        """Add the statistics of a verification (see `rows.Outcomes`)."""
        self.accepted_lengths.append(emitted - 1)
        self.drafted_lengths.append(emitted - 1 if stopped else proposed)
        self.drafted_steps += proposed > 0
        self.accepted_after_end += max(0, accepted - (emitted - 1))
        if emitted == accepted + 1 <= proposed:
            self.rejected.append(len(self.tokens) - 1)


@dataclass
class Sequenced:
    """The host's record of a running sequence.

    Attributes:
        index: index of the prompt.
        generation: the answer so far.
    """

    index: int
    generation: Generation


class Started:
    """A step that was started and not read yet.

    A sequence may end, or move to another row, when the step before is read.

    Attributes:
        sequences: those of the rows of the step.
        rows_B: rows that they are in now; -1: the sequence has ended.
        table: waits for the step and returns its table (`Rows.advance`).
        most: P.
        verified: the step verifies; else it is a prefill.
        seen: what the drafter has yet to observe.
    """

    def __init__(
        self, sequences: Sequence[Sequenced], first: int, table: Callable[[], Tensor], most: int, verified: bool = False
    ) -> None:
        """Args: first: row of the first sequence; the others follow it."""
        self.sequences, self.table, self.most, self.verified = list(sequences), table, most, verified
        self.rows_B: NDArray[np.int64] = np.arange(first, first + len(self.sequences))
        self.seen: Observation | None = None

    def move(self, ended: list[int], source: list[int], target: list[int]) -> None:
        """Sequences in rows `ended` have ended, those in rows `source` are in rows `target` now."""
        if len(self.rows_B):
            now = np.arange(max(self.rows_B.max(), *ended, *source) + 1)
            now[ended] = -1
            now[source] = target
            self.rows_B = np.where(self.rows_B >= 0, now[self.rows_B], -1)

    def alive(self, outcomes: Outcomes) -> tuple[list[Sequenced], NDArray[np.int64], Outcomes]:
        """(sequences, their rows, their outcomes), without those that have ended before this step."""
        alive_B = self.rows_B >= 0
        if alive_B.all():
            return self.sequences, self.rows_B, outcomes
        kept = [sequence for sequence, alive in zip(self.sequences, alive_B.tolist(), strict=True) if alive]
        return kept, self.rows_B[alive_B], Outcomes._make(column[alive_B] for column in outcomes)
