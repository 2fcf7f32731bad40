"""Acceptance while a draft trains: the base decodes held-out prompts with the draft as it is, and the best is kept.

Loss says how well the draft follows the base on given text; acceptance is what it is trained for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_spec.build import Loaded, respec
from megatron_spec.checkpoint import sharded
from megatron_spec.commands.data import check_file
from megatron_spec.config import Config, DecodeConfig, ParallelConfig, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.decoding.engine import Generation, decode
from megatron_spec.evaluation.acceptance import acceptance_stats
from megatron_spec.generation.prompts import Dialogue, read_prompts
from megatron_spec.planning import layouts
from megatron_spec.runtime.files import read_json, write_json
from megatron_spec.training.metrics import truncate_log

log = logging.getLogger(__name__)

BEST, LOG = "best", "acceptance.jsonl"
"""Inside --save: a checkpoint of the draft that was accepted most, without optimizer state; a line per measurement."""

FILES = {BEST, LOG}


@dataclass(frozen=True)
class EvalRequest(Config):
    """What finetune.py is asked to measure.

    Attributes:
        data: held-out prompts; their first questions are asked.
        interval: steps between measurements; 0: none.
        num_prompts: of the file.
        max_draft_len, max_new_tokens: see DecodeConfig.
    """

    data: str | None = None
    interval: int = 0
    num_prompts: int = 32
    max_draft_len: int = 3
    max_new_tokens: int = 64


def check(request: EvalRequest, parallel: ParallelConfig, other_base: dict[str, bool]) -> None:
    """Refuse what cannot be measured, before anything loads.

    Args:
        other_base: flags whose base has no cache to decode with -> whether they are set.
    """
    if (request.data is None) != (request.interval == 0):
        raise UserError("--eval-data and --eval-acceptance-interval belong together: give both, or neither")
    if request.interval == 0:
        return
    layouts.check("decode", parallel)
    check_file(str(request.data), "--eval-data")
    wrong = [flag for flag, given in other_base.items() if given]
    if wrong:
        raise UserError(
            f"--eval-acceptance-interval decodes with the base, which {wrong[0]} leaves out: drop one of them"
        )


class AcceptanceEvaluator:
    """Measures every `interval` steps; all ranks call it together.

    SAVE/acceptance.jsonl gets a line per measurement, SAVE/best the draft that did best.
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
        self.stop_ids = set(stop_token_ids(folder, opened))
        self.config = DecodeConfig(
            max_draft_len=request.max_draft_len, max_new_tokens=request.max_new_tokens, batch_size=request.num_prompts
        )
        self.log_file = self.save / LOG
        if world.rank == 0:
            truncate_log(self.log_file, resumed_at)
        record = self.save / BEST / "acceptance.json"
        self.best = float(read_json(record)["acceptance_length"]) if resumed_at and record.is_file() else 0.0

    def __call__(self, iteration: int, last: bool) -> None:
        """Measure when it is time, or at the end of training."""
        if iteration % self.request.interval and not last:
            return
        base, draft = self.loaded.base, self.loaded.draft
        training = draft.training
        draft.eval()
        found = decode(base, self.questions, self.config, self.stop_ids, draft=draft) if self.questions else []
        draft.train(training)
        stats = acceptance_stats(_everywhere(found, base.world))
        length = stats.acceptance_length or 0.0
        record: dict[str, Any] = {
            "iteration": iteration, "acceptance_length": length, "ci95": stats.acceptance_length_ci95,
            "acceptance_per_position": stats.acceptance_per_position, "prompts": stats.prompts,
        }  # fmt: skip
        low, high = stats.acceptance_length_ci95 or (0.0, 0.0)
        better = length > self.best
        log.info(
            "step %d  acceptance length %.3f (95%% %.3f-%.3f) on %d held-out prompts%s", iteration, length, low, high,
            stats.prompts, ", the best so far" if better else "",
        )  # fmt: skip
        if base.world.rank == 0:
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if better:
            self.best = length
            self._keep(iteration, record)

    def _keep(self, iteration: int, record: dict[str, Any]) -> None:
        loaded, world = self.loaded, self.loaded.base.world
        sharded.save(
            self.save / BEST, respec(loaded.spec, iteration=iteration), loaded.draft, loaded.vocab, world,
            extra={"iteration": iteration, "consumed_samples": 0}, base_amax=loaded.base_amax, run_config=record,
            keep=1,
        )  # fmt: skip
        if world.rank == 0:
            write_json(self.save / BEST / "acceptance.json", record)


def _everywhere(found: list[Generation], world: Any) -> list[Generation]:
    """The answers of all data-parallel ranks, so that every rank comes to the same figures."""
    if world.dp_size == 1:
        return found
    parts: list[Any] = [None] * world.dp_size
    dist.all_gather_object(parts, found, group=world.dp)
    return [g for part in parts for g in part]
