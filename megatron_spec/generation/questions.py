"""Synthetic questions: after the bare header of a user turn, the base continues as the user (arXiv 2406.08464).

A draw depends only on its number and the seed, and the first distinct questions are kept. So, but for rounding, the
result does not depend on batch size or layout, and a killed run resumes after its last question.

The header is read once, and a row is refilled as soon as its draw ends: draws end in any order and are taken in that of
their numbers, so that no device waits for a long one. Those that have begun when there are enough are dropped.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_spec.base.model import FrozenBase
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.tokenizer import special_ids
from megatron_spec.decoding.costs import Costs
from megatron_spec.decoding.engine import decode_batches
from megatron_spec.generation.outputs import meta_path
from megatron_spec.generation.prompts import Prompt, iter_prompts
from megatron_spec.runtime import platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import append_text, changed_settings, drop_half_line, read_json, write_json

log = logging.getLogger(__name__)

DRAWS_PER_QUESTION = 10
"""Maximum number of draws per requested question."""
MOST_ROWS = 1024
"""Draws side by side by default on a GPU, if their memory is at most a `PART` of the GPU's."""
PART = 1 / 16
STREAM = 1 << 17
"""Draws of one call of the engine, which holds them all in its queue."""
LOG_EVERY = 1024
"""Draws between two messages."""


def rows_of(base: FrozenBase, config: DecodeConfig, header: int) -> int:
    """Draws that are decoded side by side: `config.batch_size`, on a GPU doubled within `MOST_ROWS` and `PART`.

    Draws are short and share their prompt, so more of them fit than prompts with answers. Collective over all ranks.

    Args:
        header: tokens of the prompt.
    """
    memory, most, rows = platform.device_memory(), 0, config.batch_size
    if math.isfinite(memory):
        logits = 16 * base.vocab_size  # of the sampled row, in all data types
        each = base.cache_bytes(header + config.max_new_tokens + 1) + logits
        most = min(MOST_ROWS, int(PART * memory / each))
    while 2 * rows <= most:
        rows *= 2
    return min(_from_all(rows, base.world))


def _from_all(value: Any, world: World) -> list[Any]:
    """The values of all ranks, in their order."""
    values = [value]
    if world.size > 1:
        values = [None] * world.size
        dist.all_gather_object(values, value)
    return values


class _Draws:
    """This rank's share of the draws in `numbers`. Every `until` continues where the last one stopped.

    A draw is its question, '' if it has no text, None if it does not end within max_new_tokens.
    """

    def __init__(
        self, base: FrozenBase, encoder: ChatEncoder, numbers: range, config: DecodeConfig, stop_ids: set[int],
        costs: Costs | None,
    ) -> None:  # fmt: skip
        world, self.tokenizer = base.world, encoder.tokenizer
        self.mine = numbers[world.dp_rank :: world.dp_size]
        self.taken, self.ended = 0, dict[int, str | None]()  # by index in `mine`
        ends = stop_ids | special_ids(self.tokenizer)  # a template may end user turns and answers with different tokens
        seeds = [zlib.crc32(f"question:{config.seed}:{number}".encode()) for number in self.mine]
        header = encoder.question_ids()
        self.batches = decode_batches(base, [header] * len(self.mine), config, ends, None, seeds, costs)

    def until(self, number: int) -> dict[int, str | None]:
        """Number -> draw, of the next ones below `number`."""
        after = bisect_left(self.mine, number)
        wanted = range(self.taken, after)
        left = sum(i not in self.ended for i in wanted)
        while left:
            for i, answer in next(self.batches):
                self.ended[i] = self._text(answer.tokens) if answer.stopped else None
                left -= i < after
        self.taken = after
        return {self.mine[i]: self.ended.pop(i) for i in wanted}

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens[:-1], skip_special_tokens=True)).strip()

    def close(self) -> None:
        """Drop the draws that have begun, and free their memory."""
        self.batches.close()


def draw_questions(
    base: FrozenBase, encoder: ChatEncoder, numbers: range, config: DecodeConfig, stop_ids: set[int],
    costs: Costs | None = None,
) -> Generator[dict[int, str | None], None, None]:  # fmt: skip
    """The draws of all ranks in the order of their numbers, some at a time; `config.batch_size` are decoded together.

    Collective over all ranks, every rank gets all draws: number -> question, '' for a draw without text, None for one
    that does not end within max_new_tokens. Later draws have begun when earlier ones are yielded: close the iterator.
    """
    world = base.world
    parts = 16 if world.size == 1 else 4  # gathering the draws waits for the slowest rank
    window = max(1, config.batch_size * world.dp_size // parts)
    for first in range(0, len(numbers), STREAM):
        part = numbers[first : first + STREAM]
        with closing(_Draws(base, encoder, part, config, stop_ids, costs)) as draws:
            for number in range(part.start, part.stop, window):
                found = _from_all(draws.until(min(number + window, part.stop)), world)
                yield dict(sorted(itertools.chain.from_iterable(each.items() for each in found)))


def _same(text: str) -> str:
    """Key of a question for deduplication."""
    return " ".join(text.casefold().split())


def distinct(found: Mapping[int, str | None], seen: set[str], count: int, outcomes: Counter[str]) -> dict[int, str]:
    """The first `count` distinct questions among draws, added to `seen`; `outcomes` counts the draws up to the last."""
    new: dict[int, str] = {}
    for number, text in found.items():
        if len(new) == count:
            break
        key = _same(text) if text else ""
        outcome = "not ended" if text is None else "empty" if not text else "repeated" if key in seen else "new"
        outcomes[outcome] += 1
        if text and outcome == "new":
            seen.add(key)
            new[number] = text
    return new


def drawn(identifier: str) -> bool:
    """True for an identifier of a synthesised question."""
    return re.fullmatch(r"draw-\d+", identifier) is not None


def write_questions(
    base: FrozenBase,
    tokenizer: Any,
    count: int,
    config: DecodeConfig,
    path: Path,
    stop_ids: set[int],
    about: dict[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    rows: int | None = None,
) -> list[Prompt]:
    """Draw `count` distinct questions and write them to `path` (a prompt file). Collective over all ranks.

    Args:
        config: decoding configuration; temperature must be positive. What it says of drafting is for the answers.
        about: identity of base and tokenizer, written with the settings to PATH.meta.json, which a rerun must match.
        template_kwargs: see `ChatTemplate`.
        rows: draws that are decoded together; default: `rows_of`. But for rounding, the questions do not depend on it.

    Raises UserError when `path` was made with other settings, or when no draw gives a question.
    """
    world, encoder = base.world, ChatEncoder(tokenizer, template_kwargs=template_kwargs)
    kept = _begin(path, config, about or {}, world)
    seen, outcomes = {_same(text) for text in kept.values()}, Counter[str]()
    numbers = range(max(kept, default=-1) + 1, DRAWS_PER_QUESTION * count + 100 if len(kept) < count else 0)
    config = _alone(config)
    config = config.replace(batch_size=rows or rows_of(base, config, len(encoder.question_ids())))
    logged = 0
    with closing(draw_questions(base, encoder, numbers, config, stop_ids)) as draws:
        for found in draws:
            new = distinct(found, seen, count - len(kept), outcomes)
            kept.update(new)
            if world.rank == 0:
                append_text(path, "".join(_line(*each) for each in new.items()))
            if outcomes.total() - logged >= LOG_EVERY or len(kept) == count:
                logged = outcomes.total()
                log.info("%d questions from %d draws", len(kept), numbers.start + logged)
            if len(kept) == count:
                break
    _report(path, kept, count, outcomes, config)
    if world.size > 1:
        dist.barrier()
    return list(iter_prompts(path, count))


def _alone(config: DecodeConfig) -> DecodeConfig:
    """The same sampling without a draft."""
    names = ("seed", "temperature", "top_k", "top_p", "max_new_tokens", "batch_size", "cuda_graphs")
    return DecodeConfig(**{name: getattr(config, name) for name in names})


def _report(path: Path, kept: dict[int, str], count: int, outcomes: Counter[str], config: DecodeConfig) -> None:
    """Say what became of the draws. Raises UserError when there is no question."""
    drawn = outcomes.total()
    if not kept:
        raise UserError(f"the base asked nothing in {drawn} draws: is it a chat model, and is this its template?")
    if drawn:
        log.info(
        "%d draws: %d new questions, %d repeated another one, %d did not end within %d tokens, %d had no text",
        drawn, outcomes["new"], outcomes["repeated"], outcomes["not ended"], config.max_new_tokens, outcomes["empty"],
    )  # fmt: skip
    if len(kept) < count:
        log.warning("%s: %d distinct questions instead of %d: the base repeats itself", path, len(kept), count)


def _line(number: int, question: str) -> str:
    return json.dumps({"conversation_id": f"draw-{number}", "turns": [question]}, ensure_ascii=False) + "\n"


def _settings(config: DecodeConfig, about: dict[str, Any]) -> dict[str, Any]:
    """Everything the questions depend on."""
    names = ("seed", "temperature", "top_k", "top_p", "max_new_tokens")
    return {**about, **{name: getattr(config, name) for name in names}}


def _begin(path: Path, config: DecodeConfig, about: dict[str, Any], world: World) -> dict[int, str]:
    """Draw number -> question of an earlier run. Only rank 0 reads; its UserError is raised on every rank."""
    box: list[Any] = [None]
    meta = _settings(config, about)
    if world.rank == 0:
        try:
            box = [check_questions(path, config, about)]
            write_json(meta_path(path), meta)
            drop_half_line(path)
        except UserError as error:
            box = [str(error)]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, device=world.device)
    if isinstance(box[0], str):
        raise UserError(box[0])
    found: dict[int, str] = box[0]
    return found


def _read(path: Path, meta: dict[str, Any]) -> dict[int, str]:
    """Draw number -> question; what a killed run left of a line is not read."""
    found: dict[int, str] = {}
    if not path.is_file():
        return found
    if changed := changed_settings(read_json(meta_path(path)), meta):
        raise UserError(f"{path} was drawn with other settings ({changed}): use another output file")
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            [question] = record["turns"]
            found[int(record["conversation_id"].removeprefix("draw-"))] = str(question)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} line {number} is not a drawn question: use another output file") from error
    return found


def check_questions(path: Path, config: DecodeConfig, about: dict[str, Any]) -> dict[int, str]:
    """Draw number -> question of an earlier `write_questions` run into `path`; `about` may be incomplete.

    Raises UserError when that run had other settings, or when these settings cannot give distinct questions.
    """
    if config.temperature <= 0:
        raise UserError("--question-temperature: expected a number greater than 0: at 0 all questions are the same")
    return _read(path, _settings(config, about))
