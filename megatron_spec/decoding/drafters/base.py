"""What the engine asks of anything that proposes tokens.

B rows of the running batch, S rows of one base forward, N draft nodes, L token buffer, C captures width, H base hidden
size, V vocabulary. The engine keeps the running sequences in rows 0..B-1; a drafter keeps its state in the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Observation:
    """What one base forward (a prefill or a verification) made certain for rows `first .. first + B - 1`.

    Attributes:
        first: first engine row the tensors refer to.
        slots_BS: int64 positions of the S rows, those of a sequence consecutive.
        next_tokens_BS: int64 the token that follows each of them (verified, or the base's own choice).
        counts_B: int64 number of leading rows that are final; rows after them hold rejected drafts or padding.
        captures_SBC: captured base layers of the rows.
        state_SBH: base state after the final norm of the rows.
        key_slots: a bound of the positions, known without looking at the device; not set in a prefill.
        prefill: the rows begin their sequences.
    """

    first: int
    slots_BS: Tensor
    next_tokens_BS: Tensor
    counts_B: Tensor
    captures_SBC: Tensor
    state_SBH: Tensor
    key_slots: int = 0
    prefill: bool = False


@dataclass
class Context:
    """The running sequences: all that is known of rows 0..B-1.

    Attributes:
        tokens_BL: int64 prompt and emitted tokens; entries at and past the length are meaningless.
        lengths_B: int64 number of known tokens. The last one has not been read by the base yet.
        uniform_BK: one number in [0, 1) for each place to be drafted, when drafts are to be drawn from the draft's own
            distribution (rejection sampling); None: the most likely tokens are wanted.
        temperature: of that distribution.
        lengths: lengths_B of the running rows, known without looking at the device.
        key_slots: a bound of all positions, draft nodes included; likewise.
    """

    tokens_BL: Tensor
    lengths_B: Tensor
    uniform_BK: Tensor | None = None
    temperature: float = 1.0
    lengths: Sequence[int] = ()
    key_slots: int = 0


@dataclass
class Proposal:
    """Draft tokens for every running row: a chain, or a tree of one shape per row.

    Attributes:
        tokens_BN: int64 tokens of the nodes.
        proposed_B: int64 how many leading nodes of a row count; None: all.
        parents_BN: int64 node that a node follows, -1: the last known token. Parents come before their children,
            children of one parent differ. None: a chain.
        q_BNV: distributions over the whole vocabulary from which the tokens of a chain were drawn with
            Context.uniform_BK; None: they were not drawn.
    """

    tokens_BN: Tensor
    proposed_B: Tensor | None = None
    parents_BN: Tensor | None = None
    q_BNV: Tensor | None = None


class Drafter:
    """Proposes tokens for every running sequence. Drafters of users derive from it and need one method."""

    fixed_shapes = False
    """`observe` (but of a prefill) and `prepare_draft_tokens` use the same memory every time and never read values
    on the host: they may then run from a CUDA graph, with idle rows after the running ones."""

    def open(self, rows: int, max_length: int) -> None:
        """Make room for `rows` sequences of up to `max_length` tokens; forgets everything before."""

    def observe(self, seen: Observation) -> None:
        """Take in verified rows. What was computed from rejected drafts at or after them is thereby rolled back."""

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """Propose chains of up to `count` tokens, or trees of up to that depth."""
        raise NotImplementedError

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """Copy the state of rows `source` to rows `target` (finished sequences make room)."""

    def max_nodes(self, count: int) -> int:
        """Most nodes that `prepare_draft_tokens` returns for depth `count`."""
        return count
