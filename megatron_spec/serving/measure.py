"""Measures an OpenAI-compatible server: latency percentiles, tokens per second and acceptance.

Requests are streamed chat completions, so the time to the first token is known. A fixed number of workers keeps as many
requests in flight; each takes the next prompt when its answer is complete. Acceptance is computed from the counters of
the server's /metrics before and after, if it has them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_spec.config import UserError

log = logging.getLogger(__name__)

Messages = Sequence[Any]
"""A chat: {"role", "content"}, the last one to be answered."""

QUANTILES = (50, 90, 99)
_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
"""Our name -> vLLM's counter (without the suffix '_total')."""
_SGLANG = ("sglang:spec_verify_calls", "sglang:generation_tokens", "sglang:num_requests")
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Answer:
    """One request. Times in seconds."""

    text: str
    tokens: int
    first_token: float
    """From sending to the first token."""
    latency: float
    """From sending to the last token."""

    @property
    def between_tokens(self) -> float | None:
        """Mean time between two tokens; None for an answer of one token."""
        return (self.latency - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Level:
    """One concurrency at one server.

    Attributes:
        concurrency: requests in flight.
        requests, tokens: requests answered, and tokens of all answers.
        seconds: from the first request to the last token.
        tokens_per_second: of all answers together.
        first_token_ms, latency_ms, between_tokens_ms: percentiles by name ('p50', ...).
        acceptance: acceptance_length, acceptance_per_position, ...; {} if the server does not report it.
    """

    concurrency: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token_ms: dict[str, float]
    latency_ms: dict[str, float]
    between_tokens_ms: dict[str, float]
    acceptance: dict[str, Any] = field(default_factory=dict)


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99 in milliseconds, each the smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return {}
    places = {q: min(len(ordered) - 1, max(0, -(-len(ordered) * q // 100) - 1)) for q in QUANTILES}
    return {f"p{q}": round(1000 * ordered[i], 3) for q, i in places.items()}


# ---- the server's own counters


def read_counters(url: str) -> dict[str, float]:
    """Samples of URL/metrics by name and labels, summed over engines and models; {} if there are none."""
    root = re.sub(r"/v1/?$", "", url.rstrip("/"))
    try:
        with urllib.request.urlopen(f"{root}/metrics", timeout=10) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError):
        return {}
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(?:\{([^}]*)\})?\s+(\S+)", text, re.M):
        position = re.search(r'position="(\d+)"', labels)
        key = name.removesuffix("_total") + (f"[{position[1]}]" if position else "")
        try:
            found[key] = found.get(key, 0.0) + float(value)
        except ValueError:
            continue
    return found


def acceptance(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Acceptance between two readings; {} if nothing was drafted or the server has no counters."""
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    found: dict[str, Any] = {ours: int(change[name]) for ours, name in _COUNTERS.items() if name in change}
    if all(name in change for name in _SGLANG):
        drafts, tokens, requests = (int(change[name]) for name in _SGLANG)
        # Of an answer's tokens the prompt's forward gives one, and every verification one beside those it accepts.
        found = {"drafts": drafts, "accepted_tokens": max(tokens - requests - drafts, 0)}
    if not found.get("drafts") or "accepted_tokens" not in found:
        return {}
    found["acceptance_length"] = round(1 + found["accepted_tokens"] / found["drafts"], 4)
    if found.get("draft_tokens"):
        found["accepted_share"] = round(found["accepted_tokens"] / found["draft_tokens"], 4)
    positions = sorted(int(n[len(_PER_POSITION) + 1 : -1]) for n in change if n.startswith(f"{_PER_POSITION}["))
    if positions:
        taken = [change[f"{_PER_POSITION}[{i}]"] for i in positions]
        found["acceptance_per_position"] = [round(t / found["drafts"], 4) for t in taken]
    return found


# ---- requests


def _text(delta: Any) -> str:
    """New text of a chunk; that of a reasoning parser (its field differs between engines) consists of tokens, too."""
    names = ("reasoning_content", "reasoning", "content")
    return "".join(text for name in names if (text := getattr(delta, name, None)))


class Server:
    """An OpenAI-compatible server.

    Args:
        url: with or without '/v1'.
        model: served model name; None queries the server.
        options: options of every request: max_tokens, temperature, ...
    """

    def __init__(self, url: str, model: str | None, options: dict[str, Any], api_key: str = "none") -> None:
        self.url = url.rstrip("/")
        base = self.url if self.url.endswith("/v1") else f"{self.url}/v1"
        try:
            import openai
        except ModuleNotFoundError:
            raise UserError("openai is not installed: pip install 'megatron-spec[serving]'") from None
        self._error = openai.OpenAIError
        self.client = openai.AsyncOpenAI(base_url=base, api_key=api_key, max_retries=0, timeout=600)
        self.model, self.options, self._warned = model, options, False

    async def find_model(self) -> str:
        """The model's name. Raises UserError when the server does not answer."""
        if self.model is None:
            try:
                self.model = (await self.client.models.list()).data[0].id
            except (self._error, IndexError) as e:
                raise UserError(f"{self.url} names no model ({type(e).__name__}: {e}): is the server up?") from None
        return self.model

    async def ask(self, messages: Messages) -> Answer:
        """One streamed answer to chat messages. Raises UserError with what the server said."""
        start = time.perf_counter()
        first = last = None
        parts: list[str] = []
        tokens, chunks, streamed = None, 0, False
        try:
            stream = await self.client.chat.completions.create(
                model=await self.find_model(), messages=messages, stream=True,
                stream_options={"include_usage": True}, **self.options,
            )  # fmt: skip
            async for chunk in stream:
                streamed = True
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
                if chunk.choices and (text := _text(chunk.choices[0].delta)):
                    last = time.perf_counter()
                    first = first or last
                    chunks += 1
                    parts.append(text)
        except self._error as e:
            raise UserError(f"{self.url}: {type(e).__name__}: {e}") from None
        if not streamed:
            raise UserError(f"{self.url}: the server did not stream its answer, so its tokens have no times")
        end = time.perf_counter()
        if tokens is None:
            tokens = chunks
            self._warn_uncounted()
        return Answer("".join(parts), tokens, (first or end) - start, (last or end) - start)

    def _warn_uncounted(self) -> None:
        """Say once that tokens are counted otherwise."""
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: the server reports no usage: every streamed chunk counts as one token, though a draft makes "
                "chunks of several", self.url,
            )  # fmt: skip


async def run_level(server: Server, prompts: Sequence[Messages], concurrency: int) -> tuple[Level, list[str]]:
    """All prompts with so many in flight: (figures, texts in the order of the prompts)."""
    answers: list[Answer | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def work() -> None:
        """Ask what is left."""
        for i in waiting:
            answers[i] = await server.ask(prompts[i])

    await server.find_model()
    before = read_counters(server.url)
    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    found = [a for a in answers if a is not None]
    tokens = sum(a.tokens for a in found)
    level = Level(
        concurrency, len(found), tokens, round(seconds, 4), round(tokens / seconds, 3),
        percentiles(a.first_token for a in found),
        percentiles(a.latency for a in found),
        percentiles(t for a in found if (t := a.between_tokens) is not None),
        acceptance(before, read_counters(server.url)),
    )  # fmt: skip
    return level, [a.text for a in found]


async def warm_up(server: Server, prompts: Sequence[Messages], count: int) -> None:
    """`count` answers whose times do not count."""
    for i in range(count):
        await server.ask(prompts[i % len(prompts)])
