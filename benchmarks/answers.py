"""Questions answered with a draft and without: acceptance, identical texts and speed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.results import Results
from megatron_spec.base.model import FrozenBase
from megatron_spec.config import DecodeConfig
from megatron_spec.decoding.costs import Costs, now
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.replay import timed_recorder_for
from megatron_spec.decoding.session import DecodeSession
from megatron_spec.decoding.started import Generation
from megatron_spec.evaluation.acceptance import acceptance_stats, by_category
from megatron_spec.runtime.files import read_json, write_json

SAMPLES = 4
"""Answers to a question at --temperature."""


class Answers:
    """What measures drafts on the questions of a run.

    Attributes:
        questions: (set, token ids) of every question.
        stop_ids: tokens that end an answer.
        decode: how all decode, where a measurement does not change it.
        cost_tokens: length of the answers whose steps are timed.
    """

    args: argparse.Namespace
    output: Path
    results: Results
    base: FrozenBase
    questions: list[tuple[str, list[int]]]
    stop_ids: set[int]
    decode: DecodeConfig
    cost_tokens: int

    def answer_alone(self, name: str) -> None:
        """The text every draft must give, and the cost of a step without one; `name` is the precision."""
        path = self.output / f"alone-{name}.json"
        ids = [ids for _, ids in self.questions]
        if not path.is_file():
            self.cost(None, self.decode)  # warm
            found, seconds = self._timed(ids, self.decode, None)
            tokens, step = [g.tokens for g in found], sum(self.cost(None, self.decode).values())
            single = self.single(None, self.decode)
            write_json(path, {"tokens": tokens, "step": step, "seconds": seconds, "single": single})
            count = sum(map(len, tokens))
            self.results.add(
                "alone", name=name, questions=len(ids), tokens=count, seconds=seconds, step_seconds=step,
                tokens_per_second=count / seconds, single=single,
            )  # fmt: skip
        found = read_json(path)
        self.alone, self.step_seconds, self.alone_seconds = found["tokens"], found["step"], found["seconds"]
        self.alone_single = found["single"]

    def cost(self, draft: Any, config: DecodeConfig) -> dict[str, float]:
        """Seconds of the phases of a step of one sequence."""
        costs, config = Costs(), config.replace(batch_size=1, max_new_tokens=self.cost_tokens)
        decode(self.base, [ids for _, ids in self.questions[:2]], config, set(), draft=draft, costs=costs)
        return {phase: costs.typical(phase) for phase in ("draft", "base", "observe")}

    def single(self, draft: Any, config: DecodeConfig) -> dict[str, float]:
        """Tokens/s at batch 1, prefill included, of the first --timed-questions of each set.

        All are answered once before, so that no time goes into recording CUDA graphs, as in an engine that runs on.
        """
        config, speeds, session = config.replace(batch_size=1), {}, DecodeSession()
        for _ in range(2):
            for name in dict.fromkeys(name for name, _ in self.questions):
                ids = [ids for n, ids in self.questions if n == name][: self.args.timed_questions]
                start = now()
                found = decode(self.base, ids, config, self.stop_ids, draft=draft, session=session)
                speeds[name] = sum(len(g.tokens) for g in found) / (now() - start)
        return speeds

    def _timed(self, ids: list[list[int]], config: DecodeConfig, draft: Any) -> tuple[list[Generation], float]:
        """(answers, seconds without those of recording CUDA graphs)."""
        recorder, start = timed_recorder_for(self.base, config.cuda_graphs), now()
        found = decode(self.base, ids, config, self.stop_ids, draft=draft, session=DecodeSession(recorder))
        return found, now() - start - (recorder.seconds if recorder else 0.0)

    def few(self) -> list[int]:
        """The first --few-questions of each set."""
        return list(self._first(self.args.few_questions))

    def _first(self, of_each: int) -> Iterator[int]:
        counts: dict[str, int] = {}
        for i, (name, _) in enumerate(self.questions):
            counts[name] = counts.get(name, 0) + 1
            if counts[name] <= of_each:
                yield i

    def measure(self, name: str, draft: Any, about: dict[str, Any], few: bool = False, **changes: Any) -> None:
        """Acceptance on all questions (or a few of each set) and predicted speed-up, as one line; with --temperature a
        line of sampled answers, too.

        Args:
            draft: makes the module; not called when the figures are there.
        """
        greedy, hot = not self.results.has("measured", name), self._hot(draft is not None, changes)
        hot = None if hot is None or self._sampled(name) else hot
        if not greedy and hot is None:
            return
        module, config = draft() if draft else None, self.decode.replace(**changes)
        self.base.capture(module.config.capture_layer_ids if module is not None else ())
        if greedy:
            self._answer(name, module, config, about, few, changes)
        if hot is not None:
            self._sample(name, module, hot, about)

    @property
    def _way(self) -> dict[str, Any]:
        """How answers are sampled."""
        return {"temperature": self.args.temperature, "rejection": self.args.rejection, "samples": SAMPLES}

    def _sampled(self, name: str) -> bool:
        """True when the sampled answers are there."""
        wanted = {"kind": "sampled", "name": name, **self._way}
        return any(wanted.items() <= line.items() for line in self.results.lines if line["kind"] == "sampled")

    def _hot(self, drafted: bool, changes: dict[str, Any]) -> DecodeConfig | None:
        """How answers are sampled; None: not at all (rejection sampling needs a chain with probabilities)."""
        if self.args.temperature is None:
            return None
        if self.args.rejection and (not drafted or changes.get("use_dynamic_tree")):
            return None
        return self.decode.replace(
            **changes, temperature=self.args.temperature, use_rejection_sampling=self.args.rejection
        )

    def _sample(self, name: str, module: Any, config: DecodeConfig, about: dict[str, Any]) -> None:
        """Acceptance when the few questions are answered `SAMPLES` times each, from seeds of their own."""
        chosen = [i for i in self.few() for _ in range(SAMPLES)]
        found = decode(self.base, [self.questions[i][1] for i in chosen], config, self.stop_ids, draft=module)
        tokens, steps = ([0] * (len(chosen) // SAMPLES) for _ in range(2))
        for place, g in enumerate(found):
            steps[place // SAMPLES] += len(g.accepted_lengths)
            tokens[place // SAMPLES] += sum(g.accepted_lengths) + len(g.accepted_lengths)
        self.results.add(
            "sampled", name=name, **self._way, **about, few=asdict(acceptance_stats(found)), few_tokens=tokens,
            few_steps=steps, sets={
                k: asdict(v) for k, v in by_category(found, [self.questions[i][0] for i in chosen]).items()
            },
        )  # fmt: skip

    def _answer(
        self, name: str, module: Any, config: DecodeConfig, about: dict[str, Any], few: bool, changes: dict[str, Any]
    ) -> None:
        """Greedy answers, and their speed."""
        first = set(self.few())
        chosen = sorted(first) if few else list(range(len(self.questions)))
        ids = [self.questions[i][1] for i in chosen]
        costs, single = self.cost(module, config), self.single(module, config)
        found, seconds = self._timed(ids, config, module)
        same = sum(g.tokens == self.alone[i] for g, i in zip(found, chosen, strict=True))
        stats, step = acceptance_stats(found), sum(costs.values())
        some: list[Generation] = [g for g, i in zip(found, chosen, strict=True) if i in first]
        self.results.add(
            "measured", name=name, decode=changes, **about, questions=len(ids), identical=same / len(ids),
            seconds_to_decode=seconds, tokens=sum(len(g.tokens) for g in found), overall=asdict(stats),
            speedup=None if few else self.alone_seconds / seconds,
            single=single, single_speedup={k: v / self.alone_single[k] for k, v in single.items()},
            predicted_speedup=(stats.acceptance_length or 0) * self.step_seconds / step, costs=costs,
            alone_step=self.step_seconds, few=asdict(acceptance_stats(some)),
            few_tokens=[sum(g.accepted_lengths) + len(g.accepted_lengths) for g in some],
            few_steps=[len(g.accepted_lengths) for g in some],
            sets={k: asdict(v) for k, v in by_category(found, [self.questions[i][0] for i in chosen]).items()},
        )  # fmt: skip
