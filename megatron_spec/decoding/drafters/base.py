"""Interface between the engine and drafters.

B rows of the running batch, S rows of one base forward, N draft nodes, L token buffer, C captures width, H base hidden
size, V vocabulary. The engine keeps the running sequences in rows 0..B-1; a drafter keeps its state in the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


def in_one(states_SBH: Tensor) -> Tensor:
    """The states, copied if their rows are not in order in memory: torch multiplies such rows one by one along S, and
    reads the weight for each."""
    return states_SBH.flatten(0, 1).unflatten(0, states_SBH.shape[:2])


@dataclass
class Observation:
    """Result of a base forward (prefill or verification) for engine rows `first .. first + B - 1`.

    Attributes:
        first: first engine row that the tensors refer to.
        slots_BS: int64 positions of the S rows, consecutive within a sequence.
        next_tokens_BS: int64 token after each of them (accepted, or the base's choice).
        counts_B: int64 number of leading rows that are final; later rows hold rejected drafts or padding.
        captures_SBC: captures of the rows.
        state_SBH: final state of the rows.
        key_slots: upper bound of the positions, known without a device synchronisation; unset in a prefill.
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
    """State of the running sequences, rows 0..B-1.

    Attributes:
        tokens_BL: int64 prompt and emitted tokens; entries from the length on are meaningless.
        lengths_B: int64 number of known tokens. The base has not read the last one yet.
        uniform_BK: random numbers in [0, 1), one per draft token, to sample from the draft's distribution (rejection
            sampling); None: draft greedily.
        temperature: temperature of that distribution.
        lengths: lengths_B of the running rows, known without a device synchronisation.
        key_slots: upper bound of all positions, draft nodes included; likewise.
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
        proposed_B: int64 number of leading nodes that are valid in each row; None: all.
        parents_BN: int64 parent of each node, -1: the last known token. Parents come before their children, and
            siblings differ. None: a chain.
        q_BNV: distributions over the whole vocabulary that the tokens of a chain were sampled from with
            Context.uniform_BK; None: drafted greedily.
    """

    tokens_BN: Tensor
    proposed_B: Tensor | None = None
    parents_BN: Tensor | None = None
    q_BNV: Tensor | None = None


class Drafter:
    """Proposes tokens for every running sequence. User-defined drafters derive from it; only `prepare_draft_tokens` is
    required."""

    fixed_shapes = False
    """True if `observe` (outside a prefill) and `prepare_draft_tokens` use the same memory in every call and never read
    values on the host. They may then be replayed as a CUDA graph, with unused rows after the running ones."""

    def open(self, rows: int, max_length: int) -> None:
        """Allocate state for `rows` sequences of up to `max_length` tokens, and reset."""

    def observe(self, seen: Observation) -> None:
        """Update the state with verified rows, and roll back what was computed from rejected drafts."""

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """Propose chains of up to `count` tokens, or trees of up to that depth."""
        raise NotImplementedError

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """Copy the state of rows `source` to rows `target`, those of finished sequences."""

    def max_nodes(self, count: int) -> int:
        """Maximum number of nodes that `prepare_draft_tokens` returns for depth `count`."""
        return count
