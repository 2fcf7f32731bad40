"""Acceptance during training: the base decodes held-out prompts with the current draft, and the best draft is kept.

The loss measures how well the draft matches the base on given text; acceptance is the objective.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_spec.build import Loaded, respec
from megatron_spec.checkpoint import sharded
from megatron_spec.commands.features import template_hash
from megatron_spec.commands.runs import EvalRequest
from megatron_spec.config import DecodeConfig, QuantConfig, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.started import Generation
from megatron_spec.evaluation.acceptance import AcceptanceStats, acceptance_stats
from megatron_spec.generation.prompts import Dialogue, read_prompts
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import append_text, read_json, sha256_of, write_json
from megatron_spec.training.metrics import truncate_log

log = logging.getLogger(__name__)

BEST, LOG = "best", "acceptance.jsonl"
"""In --save: the checkpoint with the highest acceptance, without optimizer state; a line per measurement."""

FILES = {BEST, LOG}


class AcceptanceEvaluator:
    """Measures acceptance every `interval` steps. Collective.

    SAVE/acceptance.jsonl gets a line per measurement, SAVE/best the draft with the highest acceptance.
    """

    def __init__(
        self, request: EvalRequest, loaded: Loaded, save: str, tokenizer: str | None, resumed_at: int,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.request, self.loaded, self.save = request, loaded, Path(save)
        world = loaded.base.world
        folder = tokenizer or str(loaded.base_ref.path)
        opened = load_tokenizer(folder)
        encoder = ChatEncoder(opened, template_kwargs=template_kwargs, vocab_size=loaded.base.vocab_size)
        limit = loaded.base.config.max_position_embeddings
        prompts = read_prompts(str(request.data), request.num_prompts)
        asked = [Dialogue(p).ask(encoder, limit) for p in prompts]
        self.questions = [ids for ids in asked if ids is not None][world.dp_rank :: world.dp_size]
        if all(ids is None for ids in asked):
            raise UserError(f"--eval-data {request.data}: every prompt is longer than the base's {limit} positions")
        if (left_out := sum(ids is None for ids in asked)) and world.rank == 0:
            log.warning(
                "--eval-data %s: %d of %d prompts are longer than the base's %d positions and are not asked",
                request.data, left_out, len(asked), limit,
            )  # fmt: skip
        self.stop_ids = set(stop_token_ids(folder, opened, loaded.base_ref.path))
        self.config = DecodeConfig(
            max_draft_len=request.max_draft_len, max_new_tokens=request.max_new_tokens, batch_size=request.num_prompts
        )
        self.log_file = self.save / LOG
        self.last_measured = _last_measured(self.log_file, resumed_at, world)
        self.measured = {
            "eval_data": sha256_of(str(request.data)), "tokenizer": template_hash(folder, template_kwargs),
            "eval_prompts": request.num_prompts, "eval_draft_len": request.max_draft_len,
            "eval_tokens": request.max_new_tokens, "quantised": _quantised(loaded.spec.quant),
        }  # fmt: skip
        self.best = self._known_best() if resumed_at else 0.0

    def _known_best(self) -> float:
        """Acceptance length of the best draft of this run so far; 0 without one, or if it was measured differently."""
        path = self.save / BEST / "acceptance.json"
        if not path.is_file():
            return 0.0
        record = read_json(path)
        before = {**self.measured, **record.get("measured", {})}
        changed = [f"{k} {before[k]} -> {v}" for k, v in self.measured.items() if before[k] != v]
        if not changed:
            return float(record["acceptance_length"])
        log.warning(
            "%s: the best draft so far was measured differently (%s): the next measurement replaces it", path.parent,
            ", ".join(changed),
        )  # fmt: skip
        return 0.0

    def __call__(self, iteration: int, last: bool, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Measure if it is due, or at the end of training; stops at once, without a result, if interrupted.

        Returns False if it was interrupted.
        """
        if (iteration % self.request.interval and not last) or iteration <= self.last_measured:
            return True
        base = self.loaded.base
        found = _everywhere(self._answers(interrupted), base.world)
        if found is None:
            log.warning("the acceptance evaluation of step %d was interrupted", iteration)
            return False
        self._record(iteration, acceptance_stats(found))
        return True

    def _answers(self, interrupted: Callable[[], bool]) -> list[Generation] | None:
        """Answers to this rank's questions; None if interrupted by a signal."""
        base, draft = self.loaded.base, self.loaded.draft
        training, stopped = draft.training, _AgreedStop(base.world, interrupted)
        draft.eval()
        try:
            asked = self.questions
            found = decode(base, asked, self.config, self.stop_ids, draft=draft, stop=stopped) if asked else []
        finally:
            draft.train(training)
        return None if stopped.stopped else found

    def _record(self, iteration: int, stats: AcceptanceStats) -> None:
        length = stats.acceptance_length or 0.0
        record: dict[str, Any] = {
            "iteration": iteration, "acceptance_length": length, "ci95": stats.acceptance_length_ci95,
            "acceptance_per_position": stats.acceptance_per_position, "prompts": stats.prompts,
            "measured": self.measured,
        }  # fmt: skip
        low, high = stats.acceptance_length_ci95 or (0.0, 0.0)
        better = length > self.best
        log.info(
            "step %d  acceptance length %.3f (95%% %.3f-%.3f) on %d held-out prompts%s", iteration, length, low, high,
            stats.prompts, ", the best so far" if better else "",
        )  # fmt: skip
        if better:
            self.best = length
            self._keep(iteration, record)
        if self.loaded.base.world.rank == 0:  # last: without its line, it is measured again
            append_text(self.log_file, json.dumps(record) + "\n")

    def _keep(self, iteration: int, record: dict[str, Any]) -> None:
        loaded, world = self.loaded, self.loaded.base.world
        sharded.save(
            self.save / BEST, respec(loaded.spec, iteration=iteration), loaded.draft, loaded.vocab, world,
            extra={"iteration": iteration, "consumed_samples": 0}, base_amax=loaded.base_amax, run_config=record,
            keep=1,
        )  # fmt: skip
        if world.rank == 0:
            write_json(self.save / BEST / "acceptance.json", record)


def _last_measured(log_file: Path, resumed_at: int, world: World) -> int:
    """Iteration of the last measurement up to `resumed_at`, -1 without one; later lines are dropped. Collective."""
    found = [-1]
    if world.rank == 0:
        truncate_log(log_file, resumed_at)
        lines = log_file.read_text(encoding="utf-8").splitlines() if log_file.is_file() else []
        found = [json.loads(lines[-1])["iteration"] if lines else -1]
    dist.broadcast_object_list(found, src=0, device=world.device)
    return found[0]


def _quantised(quant: QuantConfig | None) -> str:
    return "no" if quant is None else f"base {quant.base}, draft {quant.draft}"


class _AgreedStop:
    """True on all model parallel ranks as soon as one of them is interrupted: they decode in lockstep."""

    def __init__(self, world: World, interrupted: Callable[[], bool]) -> None:
        self.world, self.interrupted, self.stopped = world, interrupted, False

    def __call__(self) -> bool:
        flag = torch.tensor(float(self.interrupted()), device=self.world.device)
        for group in (self.world.tp, self.world.pp):
            if group.size() > 1:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        self.stopped = bool(flag)
        return self.stopped


def _everywhere(found: list[Generation] | None, world: World) -> list[Generation] | None:
    """The answers of all data-parallel ranks in the order of the questions; None if one was interrupted."""
    if world.dp_size == 1:
        return found
    parts: list[Any] = [None] * world.dp_size
    dist.all_gather_object(parts, found, group=world.dp)
    if any(part is None for part in parts):
        return None
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]
