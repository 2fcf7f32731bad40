"""Prompts of one group that wait for a row, and how long their texts may become."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from megatron_spec.config import BaseConfig, UserError
from megatron_spec.decoding.started import Generation

PREFILL_TOKENS = 16384
"""Maximum number of prompt tokens (padding included) per prefill forward: bounds its memory."""

SHORT_PROMPT = 256
"""Prompts of up to this many tokens are grouped in one cache."""


def check_lengths(prompts: Sequence[Sequence[int]], limit: int) -> None:
    """Raise UserError for an empty prompt, or one that leaves no room for an answer."""
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < limit:
            raise UserError(
                f"decoding: prompt {i} has {len(prompt)} tokens, expected 1 to {limit - 1} (the base's "
                f"max_position_embeddings is {limit}): leave it out or shorten it"
            )


def groups(prompts: Sequence[Sequence[int]], room: int = 0, rows: int = 1, more: int = 0) -> Iterator[list[int]]:
    """Indices of prompts, longest first. A group's prompts are at least half as long as its longest, which sizes the
    caches, or of any length where a cache is small enough.

    Args:
        room: slots of a cache that may hold prompts of any length.
        rows: maximum number of rows of a cache.
        more: slots of a row after the prompt.
    """
    group: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        longest = len(prompts[group[0]]) if group else 0
        fits = min(len(group) + 1, rows) * (longest + more) <= room
        if group and not fits and 2 * max(len(prompts[i]), SHORT_PROMPT) < longest:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


class Waiting:
    """The queue of a group.

    Attributes:
        prompts: all prompts, by index.
        queue: indices of the waiting ones, longest text first, so that the prompts of a batch have similar lengths.
        max_new_tokens: maximum length of an answer.
        config: of the base.
        unfinished: answers so far, of texts that crossed longrope's boundary and wait for another prefill.
        equal: all prompts of the group are the same.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], group: Iterable[int], max_new_tokens: int, config: BaseConfig
    ) -> None:
        self.prompts, self.max_new_tokens, self.config = prompts, max_new_tokens, config
        self.queue = deque(group)
        self.unfinished: dict[int, Generation] = {}
        first = prompts[self.queue[0]]
        self.equal = len(self.queue) > 1 and all(prompts[i] is first or prompts[i] == first for i in self.queue)

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

    @property
    def alike(self) -> bool:
        """True if all waiting texts are the same."""
        return self.equal and not self.unfinished

    def take(self, free: int, as_one: bool = False) -> list[int]:
        """The next prompts for one prefill, at most `free`. Args: as_one: only one of them is read."""
        most = free if as_one else max(1, PREFILL_TOKENS // len(self.text(self.queue[0])))
        count = min(free, most, len(self.queue))
        return [self.queue.popleft() for _ in range(count)]

    def begin(self, i: int) -> Generation:
        """The answer to a prompt that was taken: so far, or a new one."""
        return self.unfinished.pop(i) if i in self.unfinished else Generation()

    def put_back(self, i: int, generation: Generation) -> None:
        """The text of prompt i waits for another prefill."""
        self.unfinished[i] = generation
        self.queue = deque(sorted([*self.queue, i], key=lambda i: -len(self.text(i))))
