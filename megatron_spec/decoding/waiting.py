"""Prompts of one group that wait for a row, and how long their texts may become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_spec.config import BaseConfig
from megatron_spec.decoding.started import Generation

PREFILL_TOKENS = 16384
"""Maximum number of prompt tokens (padding included) per prefill forward: bounds its memory."""


@dataclass
class Waiting:
    """The queue of a group.

    Attributes:
        prompts: all prompts, by index.
        queue: indices of the waiting ones, longest text first, so that the prompts of a batch have similar lengths.
        max_new_tokens: maximum length of an answer.
        config: of the base.
        unfinished: answers so far, of texts that crossed longrope's boundary and wait for another prefill.
    """

    prompts: Sequence[Sequence[int]]
    queue: list[int]
    max_new_tokens: int
    config: BaseConfig
    unfinished: dict[int, Generation] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.queue)

    def limit(self, i: int) -> int:
        """Maximum length of prompt i with its answer."""
        return min(len(self.prompts[i]) + self.max_new_tokens, self.config.max_position_embeddings)

    def text(self, i: int) -> list[int]:
        """Prompt i and the answer so far."""
        return [*self.prompts[i], *(self.unfinished[i].tokens if i in self.unfinished else ())]

    def row_limit(self, i: int) -> int:
        """Maximum length of prompt i with its answer in one row: its limit, or longrope's boundary."""
        short = self.config.rope.longest_short
        return self.limit(i) if short is None or len(self.text(i)) > short else min(self.limit(i), short + 1)

    def take(self, free: int) -> list[int]:
        """The next prompts, at most `free`, for one prefill."""
        count = max(1, min(free, PREFILL_TOKENS // len(self.text(self.queue[0])), len(self.queue)))
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken

    def begin(self, i: int) -> Generation:
        """The answer to a prompt that was taken: so far, or a new one."""
        return self.unfinished.pop(i) if i in self.unfinished else Generation()

    def put_back(self, i: int, generation: Generation) -> None:
        """The text of prompt i waits for another prefill."""
        self.unfinished[i] = generation
        self.queue.append(i)
        self.queue.sort(key=lambda i: -len(self.text(i)))
