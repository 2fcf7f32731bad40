"""Answers from the base: on-policy training conversations, written to disk as soon as they are finished.

`synthesize` yields conversations; `synthesize_to_file` writes them. While it runs, every data-parallel rank appends
lines to its own part file beside the output. A killed run loses only what was in flight: a rerun reads the parts
(ignoring a half-written last line), skips finished prompts and appends. Finally rank 0 merges the parts into the output
in the order of the prompts and removes them.

OUTPUT.meta.json records what the answers depend on (base, decoding settings, stop tokens). A rerun with other
settings, or other questions under the same identifiers, is refused. OUTPUT.rejected lists prompts without an answer,
and why.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_spec.base.model import FrozenBase
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.workers import tokeniser_threads
from megatron_spec.decoding.engine import decode_batches
from megatron_spec.decoding.session import DecodeSession
from megatron_spec.generation.answers import answer_ids
from megatron_spec.generation.outputs import ANOTHER, meta_path, rejected_path, require_recorded
from megatron_spec.generation.parts import known_lines, merge, parts
from megatron_spec.generation.prompts import Dialogue, Prompt, ask_all, check_stop_ids, questions
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import (
    changed_settings,
    drop_half_line,
    read_json,
    write_json,
    writing,
)

log = logging.getLogger(__name__)

WINDOW = 2**15
"""Dialogues of one round that are answered together: memory holds the token ids of a window."""


def synthesize(
    base: FrozenBase,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    config: DecodeConfig,
    *,
    stop_ids: set[int],
    draft: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    save_rejections: bool = False,
) -> Iterator[list[dict[str, Any]]]:
    """Answer the prompts. Collective over the model-parallel ranks.

    The next step of the device is running while the caller handles what it got, so making and writing records costs no
    time while it is shorter than a step.

    Args:
        stop_ids: tokens that end an answer (data.tokenizer.stop_token_ids).
        draft: used for speculative decoding (same text, faster).
        template_kwargs: see `ChatTemplate`.
        save_rejections: records get `rejected` (`data.conversations.Rejections`).

    Yields:
        The records that ended in one step, with `conversation_id`, `category`, `conversations` (messages), `truncated`
        (no stop token before max_new_tokens or the end of the context), `tools` and `chat_template_kwargs` if used,
        `answer_ids` if tokenising the text does not reproduce the answers (`generation.answers`) and, when a round
        could not be answered, `problem`. `conversations` is empty when the first round was not answered.
    """
    encoder = ChatEncoder(
        tokenizer, stop_ids, template_kwargs=template_kwargs, vocab_size=base.vocab_size,
        threads=tokeniser_threads(),
    )  # fmt: skip
    limit = base.config.max_position_embeddings
    check_stop_ids(stop_ids)
    session = DecodeSession()
    for window in _windows(prompts, config.batch_size):
        while asking := ask_all(window, encoder, limit):
            seeds = [d.seed(config.seed) for d, _ in asking]
            asked = [ids for _, ids in asking]
            for ended in decode_batches(base, asked, config, stop_ids, draft, seeds, session=session):
                for i, answer in ended:
                    asking[i][0].take(answer.tokens, answer.stopped, tokenizer, answer.rejected)
                if complete := [asking[i][0] for i, _ in ended if not asking[i][0].waits]:
                    yield _records(complete, encoder, save_rejections)
        if unasked := [d for d in window if d.unasked]:
            yield _records(unasked, encoder, save_rejections)


def _windows(prompts: Iterable[Prompt], batch_size: int) -> Iterator[list[Dialogue]]:
    """Windows of dialogues that are answered together, round by round.

    Single-round dialogues finish as soon as they are answered, so many of them share a window, in which free rows are
    always refilled. Longer ones finish after their last round: their windows are a few batches, or a killed run would
    lose them all.
    """
    prompts = list(prompts)
    single = [p for p in prompts if len(p.rounds) == 1]
    several = sorted((p for p in prompts if len(p.rounds) > 1), key=lambda p: len(p.rounds))
    for some, size in ((single, max(WINDOW, 4 * batch_size)), (several, 4 * batch_size)):
        for start in range(0, len(some), size):
            yield [Dialogue(p) for p in some[start : start + size]]


def _records(
    dialogues: Sequence[Dialogue], encoder: ChatEncoder, save_rejections: bool = False
) -> list[dict[str, Any]]:
    """The lines of dialogues; their texts are tokenised together."""
    answered = [d for d in dialogues if d.answers]
    found = iter(answer_ids(encoder, [d.answered() for d in answered]))
    records = [_record(d, encoder, next(found) if d.answers else None) for d in dialogues]
    for record, dialogue in zip(records, dialogues, strict=True) if save_rejections else ():
        greetings = sum(m["role"] == "assistant" for m in dialogue.messages) - len(dialogue.answers)
        turns = [*[None] * greetings, *dialogue.rejected]
        record["rejected"] = {"tokenizer": encoder.vocabulary_hash, "turns": turns}
    return records


def _record(dialogue: Dialogue, encoder: ChatEncoder, ids: dict[str, Any] | None) -> dict[str, Any]:
    prompt = dialogue.prompt
    record: dict[str, Any] = {
        "conversation_id": prompt.identifier,
        "category": prompt.category,
        "conversations": dialogue.messages,
        "truncated": dialogue.truncated,
    }
    more = {
        "tools": prompt.tools,
        "chat_template_kwargs": {**encoder.template.kwargs, **prompt.template_kwargs},
        "answer_ids": ids,
        "problem": dialogue.problem,
    }
    return {**record, **{key: value for key, value in more.items() if value}}


def _from_rank_0(value: Any, world: World) -> Any:
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=world.device)
    return box[0]


def answer_settings(config: DecodeConfig, stop_ids: set[int], about: dict[str, Any]) -> dict[str, Any]:
    """Everything the text of an answer depends on besides its prompt. Batch size and draft change only the speed.

    Args:
        about: identity of base and tokenizer, and the dtype.
    """
    seed = config.seed if config.temperature > 0 else None
    values = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature, "seed": seed}
    return {**about, **values, "stop_ids": sorted(stop_ids)}


def _answers_prompt(record: dict[str, Any], prompt: Prompt, template_kwargs: dict[str, Any]) -> bool:
    """True when the record has the questions of `prompt`, or the first of them if it ended early."""
    kwargs = {**template_kwargs, **prompt.template_kwargs}
    if (record.get("tools"), record.get("chat_template_kwargs", {})) != (prompt.tools, kwargs):
        return False
    found, expected = questions(record["conversations"]), questions(m for r in prompt.rounds for m in r)
    ended_early = record.get("truncated") or record.get("problem")
    return found == (expected[: len(found)] if ended_early else expected)


def check_output(output: Path | str, prompts: Sequence[Prompt], settings: dict[str, Any]) -> list[str]:
    """Identifiers of the prompts that an earlier run into `output` answered. Writes nothing.

    Args:
        settings: `answer_settings`, with or without the base's fingerprint, which may not be known yet.

    Raises UserError when `output` was not written by such a run, or that run had other settings or questions.
    """
    output = Path(output)
    if output.is_dir():
        raise UserError(f"--output {output} is a folder, expected a file")
    require_recorded(output, (output, *parts(output)))
    if next(known_lines(output), None) is None:
        return []
    old = read_json(meta_path(output))
    left_out = sorted(old.keys() - settings.keys() - {"base_fingerprint"})  # options are recorded only where given
    if changed := changed_settings(old, {**settings, **dict.fromkeys(left_out)}):
        raise UserError(f"{output} was answered with other settings ({changed}): {ANOTHER}")
    kwargs = settings.get("chat_template_kwargs", {})
    asked = {p.identifier: p for p in prompts}
    fits = {
        (i := record["conversation_id"]): i not in asked or _answers_prompt(record, asked[i], kwargs)
        for _, _, _, record in known_lines(output)
    }
    if wrong := [i for i in fits if not fits[i]]:
        raise UserError(
            f"{output}: {len(wrong)} conversations answer other questions than the prompts with the same identifier "
            f"({', '.join(wrong[:5])}): {ANOTHER}"
        )
    return list(fits)


def _known_everywhere(output: Path, prompts: Sequence[Prompt], meta: dict[str, Any], world: World) -> set[str]:
    """`check_output` on rank 0; its result, or its UserError, reaches every rank."""
    answer: list[str] | str = []
    if world.rank == 0:
        try:
            answer = check_output(output, prompts, meta)
            write_json(meta_path(output), meta)
        except UserError as e:
            answer = str(e)
    answer = _from_rank_0(answer, world)
    if isinstance(answer, str):
        raise UserError(answer)
    return set(answer)


def synthesize_to_file(
    base: FrozenBase,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: DecodeConfig,
    output: Path | str,
    *,
    stop_ids: set[int],
    draft: Any = None,
    about: dict[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    save_rejections: bool = False,
) -> int:
    """Answer the prompts that are not yet in `output`, split over data-parallel ranks; every rank calls it.

    All ranks of a run, and of a rerun, must see the same folder. Prompts without any answer are listed in
    OUTPUT.rejected.

    Args:
        about: identity of base and tokenizer, JSON-serialisable; kept in OUTPUT.meta.json with the settings.
        template_kwargs: see `ChatTemplate`.
        save_rejections: see `synthesize`; `about` then identifies the draft and how it is used.

    Returns:
        Number of conversations answered by this run on all ranks.

    Raises:
        UserError: the output has answers of another base, with other settings, or to other questions; or no prompt
            could be answered.
    """
    output, world = Path(output), base.world
    given: dict[str, Any] = {"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else {}
    given["dtype"] = str(base.dtype).removeprefix("torch.")
    meta = answer_settings(config, stop_ids, {**given, **(about or {})})
    known = _known_everywhere(output, prompts, meta, world)
    todo = [p for p in prompts if p.identifier not in known]
    if len(todo) < len(prompts):
        log.info("%s: found %d of %d conversations", output, len(prompts) - len(todo), len(prompts))
    mine = todo[world.dp_rank :: world.dp_size]
    writes = world.tp_rank == 0 and world.pp_rank == 0
    part = output.with_name(f"{output.name}.part{world.dp_rank}")
    output.parent.mkdir(parents=True, exist_ok=True)
    if writes:
        drop_half_line(part)
    options = {"draft": draft, "stop_ids": stop_ids, "template_kwargs": template_kwargs}
    options["save_rejections"] = save_rejections
    with writing(part), open(part if writes else os.devnull, "a", encoding="utf-8") as file:
        done = 0
        for records in synthesize(base, tokenizer, mine, config, **options):
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            file.flush()
            before, done = done, done + len(records)
            if done // config.batch_size > before // config.batch_size or done == len(mine):
                log.info("answered %d of %d conversations", done, len(mine))
    if world.size > 1:
        dist.barrier()
    problems = _from_rank_0(merge(output, prompts) if world.rank == 0 else {}, world)
    return len(todo) - _unanswered(prompts, problems, output)


def _unanswered(prompts: Sequence[Prompt], problems: dict[str, str], output: Path) -> int:
    """Number of prompts without an answer. Raises UserError when no prompt has one."""
    unanswered = [p for p in prompts if p.identifier in problems]
    if prompts and len(unanswered) == len(prompts):
        first = unanswered[0]
        raise UserError(
            f"none of {len(prompts)} prompts could be answered, the first ({first.where or first.identifier}): "
            f"{problems[first.identifier]}; {rejected_path(output)} lists all of them"
        )
    return len(unanswered)
