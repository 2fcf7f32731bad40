"""Synthetic questions: after the bare header of a user turn, the base continues as the user (arXiv 2406.08464).

A draw depends only on its number and the seed, and the first distinct questions are kept. So the result does not depend
on batch size or layout, and a killed run resumes where it stopped.
"""

from __future__ import annotations

import itertools
import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_spec.base.model import FrozenBase
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.tokenizer import special_ids
from megatron_spec.decoding.engine import decode_batches
from megatron_spec.decoding.session import DecodeSession
from megatron_spec.generation.prompts import Prompt, iter_prompts
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import changed_settings, read_json, write_json, write_text

log = logging.getLogger(__name__)

DRAWS_PER_QUESTION = 10
"""Maximum number of draws per requested question."""


def draw_questions(
    base: FrozenBase, encoder: ChatEncoder, numbers: range, config: DecodeConfig, stop_ids: set[int],
    session: DecodeSession | None = None,
) -> dict[int, str]:  # fmt: skip
    """Draw number -> question. Collective over all ranks; every rank gets all questions.

    Draws that do not end within max_new_tokens and empty draws are left out.
    """
    world, tokenizer, header = base.world, encoder.tokenizer, encoder.question_ids()
    mine = list(numbers)[world.dp_rank :: world.dp_size]
    seeds = [zlib.crc32(f"question:{config.seed}:{number}".encode()) for number in mine]
    ends = stop_ids | special_ids(tokenizer)  # a template may end user turns and answers with different tokens
    found: dict[int, str] = {}
    if mine:
        drawn = decode_batches(base, [header] * len(mine), config, ends, None, seeds, session=session)
        for i, answer in itertools.chain.from_iterable(drawn):
            text = tokenizer.decode(answer.tokens[:-1], skip_special_tokens=True).strip() if answer.stopped else ""
            if text:
                found[mine[i]] = text
    if world.size > 1:
        parts: list[Any] = [None] * world.size
        dist.all_gather_object(parts, found)
        found = {number: text for part in parts for number, text in part.items()}
    return found


def _same(text: str) -> str:
    """Key of a question for deduplication."""
    return " ".join(text.casefold().split())


def write_questions(
    base: FrozenBase,
    tokenizer: Any,
    count: int,
    config: DecodeConfig,
    path: Path,
    stop_ids: set[int],
    about: dict[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Draw `count` distinct questions and write them to `path` (a prompt file). Collective over all ranks.

    Args:
        config: decoding configuration; temperature must be positive.
        about: identity of base and tokenizer, written with the settings to PATH.meta.json, which a rerun must match.
        template_kwargs: see `ChatTemplate`.

    Raises UserError when `path` was made with other settings, or when no draw gives a question.
    """
    world, encoder = base.world, ChatEncoder(tokenizer, template_kwargs=template_kwargs)
    kept = _begin(path, config, about or {}, world)
    drawn, session = max(kept, default=-1) + 1, DecodeSession()
    while len(kept) < count and drawn < DRAWS_PER_QUESTION * count + 100:
        numbers = range(drawn, drawn + max(config.batch_size * world.dp_size, min(count - len(kept), 1024)))
        seen = {_same(text) for text in kept.values()}
        for number, text in sorted(draw_questions(base, encoder, numbers, config, stop_ids, session).items()):
            if _same(text) not in seen and len(kept) < count:
                seen.add(_same(text))
                kept[number] = text
        drawn = numbers.stop
        if world.rank == 0:
            _write(path, kept)
            log.info("%d questions from %d draws", len(kept), drawn)
    if not kept:
        raise UserError(f"the base asked nothing in {drawn} draws: is it a chat model, and is this its template?")
    if len(kept) < count:
        log.warning("%s: %d distinct questions instead of %d: the base repeats itself", path, len(kept), count)
    if world.size > 1:
        dist.barrier()
    return list(iter_prompts(path, count))


def _write(path: Path, questions: dict[int, str]) -> None:
    lines = [{"conversation_id": f"draw-{number}", "turns": [text]} for number, text in questions.items()]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _about(path: Path) -> Path:
    return path.with_name(f"{path.name}.meta.json")


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
            write_json(_about(path), meta)
        except UserError as error:
            box = [str(error)]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, device=world.device)
    if isinstance(box[0], str):
        raise UserError(box[0])
    found: dict[int, str] = box[0]
    return found


def _read(path: Path, meta: dict[str, Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    if path.is_file():
        old = read_json(_about(path))
        if changed := changed_settings(old, meta):
            raise UserError(f"{path} was drawn with other settings ({changed}): use another output file")
        for prompt in iter_prompts(path):
            found[int(prompt.identifier.removeprefix("draw-"))] = prompt.rounds[0][0]["content"]
    return found


def check_questions(path: Path, config: DecodeConfig, about: dict[str, Any]) -> dict[int, str]:
    """Draw number -> question of an earlier `write_questions` run into `path`; `about` may be incomplete.

    Raises UserError when that run had other settings, or when these settings cannot give distinct questions.
    """
    if config.temperature <= 0:
        raise UserError("--question-temperature: expected a number greater than 0: at 0 all questions are the same")
    return _read(path, _settings(config, about))
