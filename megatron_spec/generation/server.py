"""Answers from a served model: on-policy conversations through any OpenAI-compatible endpoint.

Every finished conversation is immediately written as a line of OUTPUT, so a rerun resumes (`generation.answer_file`).

Connection failures, 408, 409, 429 and 5xx, and malformed answers are retried with growing pauses, on another endpoint
if there are several. A request that the server refuses (400, 422) rejects its conversation; a missing model or key
(401, 403, 404) ends the run, and so do many consecutive conversations without an answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_spec.config import UserError
from megatron_spec.data.conversations import parse_message
from megatron_spec.generation.answer_file import AnswerFile, opening
from megatron_spec.generation.answers import Message
from megatron_spec.generation.prompts import Prompt
from megatron_spec.runtime import lock
from megatron_spec.runtime.files import writing

log = logging.getLogger(__name__)

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
WRONG_REQUEST = frozenset({400, 413, 422})
GIVE_UP_AFTER = 20
"""Consecutive unanswered conversations after which the servers count as gone."""


@dataclass(frozen=True)
class ServerOptions:
    """Endpoints and request options.

    Attributes:
        urls: endpoints, e.g. http://host:8000/v1.
        model: name of the served model; None: the first one that a server lists.
        sampling: request parameters under OpenAI's names (temperature, max_tokens, top_p, ...).
        extra_body: further parameters of engines (top_k, min_p).
        template_kwargs: arguments of the chat template; a prompt's own take precedence, and lines keep those used.
        system_prompt: prepended to conversations without a system turn.
        concurrency: conversations in flight, over all endpoints.
        retries: attempts after the first.
        keep_truncated: write conversations whose last answer was cut.
        timeout: seconds per answer.
        seed: combined with conversation and turn to the seed of each answer.
    """

    urls: tuple[str, ...]
    model: str | None = None
    api_key: str = "none"
    sampling: dict[str, Any] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    concurrency: int = 64
    retries: int = 8
    keep_truncated: bool = False
    timeout: float = 600.0
    seed: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


class Rejected(Exception):
    """A conversation cannot be answered; the message states why."""


class Unanswered(Exception):
    """No endpoint answered in any attempt."""


@dataclass
class Totals:
    """Counts of one run.

    Attributes:
        cut: conversations whose last answer reached the token limit.
        unreturned: answers whose text has far fewer bytes than the server counts tokens.
        seconds: time since a server first responded.
    """

    written: int = 0
    rejected: int = 0
    unanswered: int = 0
    tokens: int = 0
    retries: int = 0
    cut: int = 0
    unreturned: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)


class Endpoints:
    """Clients of all endpoints; requests go to the least busy one that did not just fail."""

    def __init__(self, options: ServerOptions, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep) -> None:
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise UserError("the openai package is not installed: pip install 'megatron-spec[data]'") from None
        common: dict[str, Any] = {"api_key": options.api_key, "timeout": options.timeout, "max_retries": 0}
        self.clients = [AsyncOpenAI(base_url=url, **common) for url in options.urls]
        self.options, self.sleep = options, sleep
        self.busy = [0] * len(self.clients)
        self.failures = [0] * len(self.clients)
        self.retried = 0

    async def model(self) -> str:
        """Name of the served model; queried, with the usual retries, when it is not given."""
        if self.options.model is not None:  # some servers list everything they could load, or fail to list
            return self.options.model

        async def ask(client: Any) -> str:
            """The first model that the server lists."""
            names = [model.id async for model in client.models.list()]
            if not names:
                raise UserError(f"{client.base_url} serves no model")
            return str(names[0])

        return await self._try(ask)

    async def answer(self, model: str, messages: list[Message], seed: int | None, prompt: Prompt) -> Any:
        """First choice of the response, with its `usage`. Raises Rejected or Unanswered."""
        sampling = {**self.options.sampling, **({} if seed is None else {"seed": seed})}
        if prompt.tools:
            sampling["tools"] = prompt.tools
        kwargs = {**self.options.template_kwargs, **prompt.template_kwargs}
        extra = {**self.options.extra_body, **({"chat_template_kwargs": kwargs} if kwargs else {})}

        async def ask(client: Any) -> Any:
            """First choice of one request."""
            response = await client.chat.completions.create(
                model=model, messages=messages, extra_body=extra or None, **sampling
            )
            choices = getattr(response, "choices", None)
            if not choices or choices[0].message is None or not choices[0].finish_reason:
                raise ValueError("the answer has no choice or no finish reason")
            return choices[0], getattr(response, "usage", None)

        return await self._try(ask)

    async def _try(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        problem = ""
        for attempt in range(self.options.retries + 1):
            i = min(range(len(self.clients)), key=lambda k: (self.failures[k] > 0, self.busy[k], self.failures[k]))
            self.busy[i] += 1
            try:
                found = await ask(self.clients[i])
                self.failures[i] = 0
                return found
            except (UserError, asyncio.CancelledError):
                raise
            except Exception as error:
                problem = f"{self.options.urls[i]}: {_say(error)}"
                wait = _pause(error, attempt, problem)
                self.failures[i] += 1
            finally:
                self.busy[i] -= 1
            if attempt < self.options.retries:
                if not self.retried:
                    log.warning("%s: trying again, up to %d times", problem, self.options.retries)
                self.retried += 1
                await self.sleep(wait)
        raise Unanswered(problem)


def _say(error: Exception) -> str:
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{cause}"[:300]


def _pause(error: Exception, attempt: int, problem: str) -> float:
    """Seconds until the next attempt. Raises Rejected or UserError when another attempt would not help."""
    import openai

    # Errors without a status: a refused, broken or slow connection, or an unreadable answer.
    status = error.status_code if isinstance(error, openai.APIStatusError) else None
    if status in WRONG_REQUEST:
        raise Rejected(problem) from None
    if status is not None and status not in AGAIN and status < 500:
        raise UserError(f"{problem}: check --url, --model and the key") from None
    if not isinstance(error, (openai.OpenAIError, ValueError, OSError, AttributeError, TypeError)):
        raise error
    pause = min(60.0, 0.5 * 2.0**attempt) * random.uniform(0.75, 1.25)
    after = error.response.headers.get("retry-after", "") if isinstance(error, openai.APIStatusError) else ""
    return max(pause, min(float(after), 300.0)) if after.replace(".", "", 1).isdigit() else pause


def kept_message(choice: Any, where: str) -> Message:
    """The message that a line keeps of an answer: text, reasoning (under either name), tool calls.

    Raises Rejected for an answer without text or call, or with text that cannot be encoded.
    """
    message = choice.message
    thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    calls = [call.model_dump(exclude_none=True) for call in getattr(message, "tool_calls", None) or []]
    given = {"content": message.content, "reasoning_content": thought, "tool_calls": calls}
    if not calls and not (isinstance(message.content, str) and message.content.strip()):
        raise Rejected(f"{where} got an empty answer (finish reason {choice.finish_reason})")
    try:
        return parse_message({"role": "assistant", **{k: v for k, v in given.items() if v or k == "content"}}, where)
    except UserError as error:
        raise Rejected(f"{where} got an answer that cannot be stored: {error}") from None


def is_short(message: Message, tokens: int) -> bool:
    """True when the server counts far more tokens than the text has bytes: it did not return everything (reasoning)."""
    kept = json.dumps([message.get(k) for k in ("content", "reasoning_content", "tool_calls")], ensure_ascii=False)
    return tokens > len(kept.encode()) + 16


async def hold(prompt: Prompt, endpoints: Endpoints, model: str, totals: Totals) -> tuple[dict[str, Any], int]:
    """(record, generated tokens) of one conversation; its rounds are asked sequentially."""
    options, reasons, tokens = endpoints.options, [], 0
    messages = opening(prompt, options.system_prompt)
    for number, asked in enumerate(prompt.rounds):
        messages = [*messages, *asked]
        seed = None if options.seed is None else zlib.crc32(f"{options.seed}:{prompt.identifier}:{number}".encode())
        choice, usage = await endpoints.answer(model, messages, seed, prompt)
        written = getattr(usage, "completion_tokens", 0) or 0
        tokens += written
        messages.append(kept_message(choice, f"round {number}"))
        called = choice.finish_reason == "stop" and messages[-1].get("tool_calls")  # so say some servers
        reasons.append("tool_calls" if called else choice.finish_reason)
        totals.unreturned += is_short(messages[-1], written)
        if reasons[-1] != "stop":
            break
    kwargs = {**options.template_kwargs, **prompt.template_kwargs}
    record = {
        "conversation_id": prompt.identifier, "category": prompt.category, "conversations": messages,
        "finish_reasons": reasons, "truncated": reasons[-1] not in ("stop", "tool_calls"),
        **({"tools": prompt.tools} if prompt.tools else {}), **({"chat_template_kwargs": kwargs} if kwargs else {}),
    }  # fmt: skip
    if left := len(prompt.rounds) - len(reasons):
        why = "called a tool" if reasons[-1] == "tool_calls" else f"was cut (finish reason {reasons[-1]})"
        record["problem"] = f"round {len(reasons) - 1} {why}, so {left} further rounds were not asked"
    return record, tokens


def _write(file: IO[str], record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()


async def _generate(
    prompts: Iterable[Prompt], output: Path, endpoints: Endpoints, report: Callable[[Totals], None]
) -> Totals:
    options, totals = endpoints.options, Totals()
    model = await endpoints.model()
    start = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    meta = {
        "model": model, "sampling": options.sampling, "extra_body": options.extra_body, "seed": options.seed,
        "system_prompt": options.system_prompt, "keep_truncated": options.keep_truncated,
        **({"chat_template_kwargs": options.template_kwargs} if options.template_kwargs else {}),
    }  # fmt: skip
    answers = AnswerFile(output, meta)
    waiting = answers.left(prompts, options.system_prompt, options.template_kwargs)
    in_a_row = 0
    good, bad = answers.open()

    async def work() -> None:
        """Answer conversations until none is left."""
        nonlocal in_a_row
        for prompt in waiting:  # one iterator shared by all workers, so none reads ahead
            try:
                record, tokens = await hold(prompt, endpoints, model, totals)
                totals.tokens += tokens
                kept = options.keep_truncated or not record["truncated"]
                totals.cut += record["truncated"]
                _write(good if kept else bad, record if kept else {"problem": "the last answer was cut", **record})
                totals.written, totals.rejected = totals.written + kept, totals.rejected + (not kept)
                in_a_row = 0
            except Rejected as error:
                _write(bad, {"conversation_id": prompt.identifier, "problem": str(error)})
                totals.rejected += 1
            except Unanswered as error:
                totals.unanswered += 1
                in_a_row += 1
                log.warning("%s: %s", prompt.identifier, error)
                if in_a_row >= GIVE_UP_AFTER:
                    raise UserError(
                        f"{in_a_row} conversations in a row were not answered (the last by {error}): finished ones "
                        f"are in {output}; a rerun resumes"
                    ) from None
            totals.retries, totals.seconds = endpoints.retried, time.monotonic() - start
            report(totals)

    with writing(output), good, bad:
        tasks = [asyncio.ensure_future(work()) for _ in range(options.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return totals


def generate_from_server(
    prompts: Iterable[Prompt],
    output: Path | str,
    options: ServerOptions,
    report: Callable[[Totals], None] = lambda totals: None,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> Totals:
    """Answer the prompts that are not yet in `output`.

    Args:
        prompts: consumed lazily: memory holds only the prompts in flight and the ids of finished ones.
        report: called after every conversation.
        sleep: replaced in tests.

    Raises UserError when the settings differ from those of an earlier run, when another run writes to `output`, when
    the server does not have the model, or when no endpoint answers any more.
    """

    async def main() -> Totals:
        """Run all workers concurrently."""
        endpoints = Endpoints(options, sleep)
        try:
            return await _generate(prompts, Path(output), endpoints, report)
        except Unanswered as error:
            raise UserError(
                f"no server named its model: {error}: is it running, is --url right? --model NAME skips this query"
            ) from None
        finally:
            for client in endpoints.clients:
                await client.close()

    with lock.exclusive(output, file=True):
        totals = asyncio.run(main())
    why = f" ({output}.rejected lists the reasons)" if totals.rejected else ""
    log.info(
        "%s: %d answered, %d rejected%s, %.0f tokens/s", output, totals.written, totals.rejected, why, totals.speed
    )
    if totals.cut:
        log.warning("%d conversations were cut at the token limit: a larger --max-tokens lets them end", totals.cut)
    if totals.unreturned:
        log.warning(
            "%d answers have far less text than the server counts tokens: it does not return everything that the model "
            "wrote (reasoning), so a draft would not learn it; check the server's reasoning parser", totals.unreturned,
        )  # fmt: skip
    return totals
