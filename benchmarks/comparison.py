"""What benchmarks/ablate_drafts.py works with: base, data and questions, drafts that train and decode, figures on disk.

Everything is on disk as soon as it is there, so a run that was cut off goes on: figures in results.jsonl, a line each,
trained drafts in drafts/, questions with the base's answers in questions.json.
"""

from __future__ import annotations

import argparse
import gc
import logging
import platform
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import Answers
from benchmarks.comparison_flags import check_sets
from benchmarks.draft_kinds import Kind
from benchmarks.results import Results
from megatron_spec.base.direct import run_in_fp8
from megatron_spec.base.model import FrozenBase
from megatron_spec.batch import Batch, Features
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.commands.convert import MASKED, fresh_config, new_draft
from megatron_spec.commands.data import check_file, open_dataset
from megatron_spec.config import (
    BlockConfig,
    DecodeConfig,
    ObjectiveConfig,
    QuantConfig,
    TrainConfig,
    UserError,
    presets,
)
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.loader import BatchLoader
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.data.vocab_counts import count_supervised, coverage, select_draft_ids
from megatron_spec.decoding.costs import now
from megatron_spec.decoding.engine import decode
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.generation.prompts import Dialogue, Prompt, read_prompts
from megatron_spec.generation.questions import write_questions
from megatron_spec.generation.synthesize import synthesize_to_file
from megatron_spec.planning.paths import Paths
from megatron_spec.quantization.attach import attach_quantizers
from megatron_spec.runtime import distributed
from megatron_spec.runtime.files import read_json, sha256_of, write_json, write_text
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer

log = logging.getLogger("megatron_spec.ablate_drafts")

SETTINGS = (
    "prompts", "seconds", "ablation_seconds", "qat_seconds", "draft_vocab_size", "questions", "few_questions",
    "timed_questions", "max_new_tokens", "max_draft_len", "batch_size", "global_batch_size", "seq_length", "lr", "bf16",
    "ttt_steps", "step_ms", "answer_temperature", "user_questions", "data", "conversations", "answer_tokens",
    "mask_token_id",
)  # fmt: skip
"""Flags that the figures depend on."""
TICKS = 1000
TIMED_GROUPS = 9
"""Groups of steps whose median time counts."""


class ByTheClock:
    """A learning rate schedule of `TICKS` steps that goes by time: equal seconds are equal schedules."""

    def __init__(self, scheduler: Any, seconds: float) -> None:
        self.scheduler, self.seconds, self.begun, self.done = scheduler, seconds, time.monotonic(), 0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def step(self, increment: int) -> None:
        """Go on to where the clock is, whatever the number of training steps."""
        due = min(TICKS, int(TICKS * self.elapsed / self.seconds))
        self.scheduler.step(increment=due - self.done)
        self.done = due


REDUCED = ("eagle3", "p-eagle")
"""Algorithms with a head of their own, over the draft vocabulary."""


@dataclass
class Draft:
    """A draft: how to build it, and its weights once it is trained."""

    name: str
    config: Any
    vocab: Any
    objective: ObjectiveConfig
    seed: int = 0
    """Of its first weights, and of the order of the batches."""
    train: dict[str, Any] = field(default_factory=dict)
    """See `Kind`."""
    fp8: tuple[str, ...] = ()
    """See `Kind`. It decodes with the base as it was loaded, and in bf16."""
    weights: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


def order_of(batches: int, step: int, seed: int) -> int:
    """The batch of a step: as they come for seed 0, else in another order in every pass."""
    passed, place = divmod(step, batches)
    if seed == 0:
        return place
    generator = torch.Generator().manual_seed(1_000_003 * seed + passed)
    return int(torch.randperm(batches, generator=generator)[place])


def _content(flag: str, path: str) -> str:
    """Name and hash of a file: figures of its earlier content are not gone on with. Raises UserError without it."""
    check_file(path, flag)
    return f"{Path(path).name} {sha256_of(path)[:12]}"


class Comparison(Answers):
    """Base, data and questions of one run on one process."""

    def __init__(self, args: argparse.Namespace, kinds: Sequence[Kind] = (), more: Sequence[str] = ()) -> None:
        """State of a run, new or gone on with.

        Args:
            kinds: of the drafts that will be trained: the base captures the layers that any of them reads.
            more: flags that the figures depend on besides `SETTINGS`.
        """
        self.args, self.output = args, Path(args.output)
        self.batches: list[Batch] = []
        self._in_fp8: tuple[FrozenBase, list[Features]] | None = None
        check_sets(args.prompts)
        (self.output / "drafts").mkdir(parents=True, exist_ok=True)
        self.ref, self.world = inspect_base(args.base), distributed.initialize()
        if self.world.size > 1:
            raise UserError("ablate_drafts.py compares on one process: start it with plain python")
        cuda = self.world.device.type == "cuda"
        settings = {name: getattr(args, name) for name in (*SETTINGS, *more)}
        settings["prompts"] = [_content("--prompts", p) for p in args.prompts]
        for name in ("data", "user_questions"):
            path = settings[name]
            settings[name] = _content(f"--{name.replace('_', '-')}", path) if path else None
        device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
        about = {"base": Path(args.base).name, "fingerprint": self.ref.fingerprint, "device": device}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        name = "step_times.jsonl" if "step_times" in args.parts else "results.jsonl"
        self.results = Results(self.output / name, {**about, **versions, **settings})
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.captured = sorted({i for kind in kinds for i in self.config_of(kind).capture_layer_ids})
        self.base = load_base(self.ref, self.world, self.captured, self.dtype)
        for kind in kinds:
            Paths(replace(self.base.paths.setting, draft=self.config_of(kind), wanted=kind.fp8)).check()
        self.tokenizer = load_tokenizer(args.base)
        self.stop_ids = set(stop_token_ids(args.base, self.tokenizer))
        self.decode = DecodeConfig(
            max_draft_len=args.max_draft_len, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size
        )
        self.cost_tokens, self.trial, self.timed_steps = (96, 32, 12) if cuda else (24, 1, 1)

    def late(self, reserve: float = 0.0) -> bool:
        """True when nothing new should be started, with `reserve` seconds kept for what follows."""
        return time.monotonic() - self.results.start > self.args.deadline - reserve

    # --- data ---------------------------------------------------------------------------------------------------

    def conversations(self) -> Path:
        """--data, or OUTPUT/train.jsonl, which the base writes when it is not there: questions and answers."""
        if self.args.data:
            return Path(self.args.data)
        path = self.output / "train.jsonl"
        config = self.decode.replace(batch_size=4 * self.args.batch_size, max_new_tokens=self.args.answer_tokens)
        prompts, temperatures = self._prompts(config), self.args.answer_temperature or [0.0]
        parts = [self.output / f"train-{i}.jsonl" for i in range(len(temperatures))]
        for i, (part, temperature) in enumerate(zip(parts, temperatures, strict=True)):
            synthesize_to_file(
                self.base, self.tokenizer, prompts[i :: len(parts)], config.replace(temperature=temperature), part,
                draft=None, stop_ids=self.stop_ids, about={"base": self.ref.fingerprint},
            )  # fmt: skip
        with ExitStack() as stack:  # a line ends at a line feed alone: texts may hold other separators
            files = [stack.enter_context(part.open(encoding="utf-8", newline="\n")) for part in parts]
            write_text(path, "".join(line for each in zip_longest(*files, fillvalue="") for line in each))
        return path

    def _prompts(self, config: DecodeConfig) -> list[Prompt]:
        """Questions to answer: --user-questions and, up to --conversations, the base's own, in random order."""
        count = self.args.conversations
        prompts = read_prompts(self.args.user_questions, count) if self.args.user_questions else []
        if len(prompts) < count:
            hot = config.replace(temperature=0.9, max_new_tokens=96)
            prompts += write_questions(
                self.base, self.tokenizer, count - len(prompts), hot, self.output / "questions.jsonl", self.stop_ids,
                {"base": self.args.base},
            )  # fmt: skip
        return random.Random(0).sample(prompts, len(prompts))

    def rejections(self, draft: Draft, source: Path, path: Path, count: int) -> float:
        """Seconds in which the base answers `count` questions of `source` with a draft; `path` records rejections."""
        name = path.name
        if not self.results.has("rejections", name):
            module = self.module(draft)
            self.base.capture(module.config.capture_layer_ids)
            size = 4 * self.args.batch_size
            config = self.decode.replace(batch_size=size, max_new_tokens=self.args.answer_tokens)
            start = now()
            synthesize_to_file(
                self.base, self.tokenizer, read_prompts(source, count), config, path, draft=module,
                stop_ids=self.stop_ids, about={"base": self.ref.fingerprint, "draft": name}, save_rejections=True,
            )  # fmt: skip
            self.results.add("rejections", name=name, seconds=now() - start)
        return next(float(x["seconds"]) for x in self.results.lines if x.get("name") == name)

    def read(self, path: Path) -> None:
        """Batches of one pass over the conversations, their features, and the draft vocabulary."""
        dataset = open_dataset(str(path), self.args.base, self.args.seq_length)
        size = self.args.global_batch_size
        loader = BatchLoader(dataset, size, size, device=self.world.device)
        self.batches = [loader.step(i * size)[0] for i in range(max(1, len(dataset) // size))]
        counts = count_supervised(dataset, self.ref.config.vocab_size)
        self.counts, ids = counts, self.draft_ids(counts, self.args.draft_vocab_size)
        self.vocab = DraftVocab(ids, len(counts))
        self.compute_features()
        if not self.results.has("data"):
            self.results.add("data", conversations=len(dataset), steps=len(self.batches), **coverage(counts, ids))

    def draft_ids(self, counts: Any, size: int) -> Any:
        """The `size` tokens of the draft vocabulary."""
        return select_draft_ids(counts, min(size, self.ref.config.vocab_size), self.stop_ids)

    def compute_features(self) -> None:
        """Features of every batch, kept in memory; those of before are dropped first."""
        self.features: list[Features] = []
        self.base.capture(self.captured)
        source = OnlineFeatures(self.base)
        self.features = [source.features([b])[0] for b in self.batches]

    def in_fp8(self) -> tuple[FrozenBase, list[Features]]:
        """A second copy of the base, with linears and head in fp8, and its features of every batch: for training."""
        if self._in_fp8 is None:
            base = load_base(self.ref, self.world, self.captured, self.dtype)
            run_in_fp8(base)
            source = OnlineFeatures(base)
            self._in_fp8 = base, [source.features([b])[0] for b in self.batches]
        return self._in_fp8

    def ask(self) -> None:
        """All questions; the base's own answers are the histories of later rounds."""
        path = self.output / "questions.json"
        if path.is_file():
            self.questions = [(name, ids) for name, ids in read_json(path)]
            return
        self.questions, limit, encoder = [], self.ref.config.max_position_embeddings, ChatEncoder(self.tokenizer)
        dialogues = [
            (Path(f).stem, Dialogue(p)) for f in self.args.prompts for p in read_prompts(f, self.args.questions)
        ]
        while asking := [(n, d, ids) for n, d in dialogues if d.waits and (ids := d.ask(encoder, limit))]:
            answers = decode(self.base, [ids for *_, ids in asking], self.decode, self.stop_ids)
            for (name, dialogue, ids), answer in zip(asking, answers, strict=True):
                self.questions.append((name, ids))
                dialogue.take(answer.tokens, answer.stopped, self.tokenizer)
        if ended := [f"{d.prompt.identifier}: {d.problem}" for _, d in dialogues if d.problem]:
            log.warning("%d dialogues ended before their last question, the first: %s", len(ended), ended[0])
        write_json(path, self.questions)

    # --- drafts -------------------------------------------------------------------------------------------------

    def vocab_of(self, kind: Kind) -> DraftVocab:
        """The reduced vocabulary for drafts with a head of their own, the whole one for the others."""
        if self.batches and kind.algorithm.startswith(REDUCED):
            return DraftVocab(self.draft_ids(self.counts, kind.vocab), len(self.counts)) if kind.vocab else self.vocab
        return DraftVocab.full(self.ref.config.vocab_size)

    def config_of(self, kind: Kind) -> Any:
        """Its architecture."""
        fields = dict(kind.fields)
        if kind.algorithm in MASKED and self.args.mask_token_id is not None:
            fields["mask_token_id"] = self.args.mask_token_id
        if kind.algorithm == "medusa":
            fields["num_heads"] = self.args.max_draft_len
        return fresh_config(self.ref, kind.algorithm, fields, self.vocab_of(kind))

    def new(self, name: str, kind: Kind, seed: int = 0) -> Draft:
        """An untrained draft."""
        config = self.config_of(kind)
        steps = {} if isinstance(config, BlockConfig) else {"ttt_steps": self.args.ttt_steps or self.args.max_draft_len}
        if kind.algorithm == "medusa":
            steps = {"ttt_steps": config.num_heads}
        goal = presets.objective_for(config, ObjectiveConfig(**{**steps, **kind.objective}))
        return Draft(name, config, self.vocab_of(kind), goal, seed, kind.train, kind.fp8)

    def seen_by(self, draft: Draft, features: Features) -> Features:
        """Features with the captures of a draft alone."""
        wanted = draft.config.capture_layer_ids
        if list(wanted) == self.captured:
            return features
        parts = features.captures_SBC.chunk(max(1, len(self.captured)), dim=-1)
        if not wanted:
            return replace(features, captures_SBC=features.captures_SBC[..., :0])
        return replace(features, captures_SBC=torch.cat([parts[self.captured.index(i)] for i in wanted], dim=-1))

    def module(self, draft: Draft, quantised: bool = False) -> Any:
        """The draft as a module, with its weights or fresh ones."""
        module = new_draft(self.base, draft.config, draft.vocab, self.world, self.dtype, seed=1234 + draft.seed)
        if quantised:
            attach_quantizers(module, QuantConfig(), "draft")
        if draft.weights:
            module.load_state_dict(draft.weights)
        return module

    def _trainer(self, draft: Draft, lr: float, quantised: bool, ticks: int) -> Trainer:
        """A fresh module, optimizer and schedule of so many steps."""
        gc.collect()  # DDP and its hooks hold each other: parameters and gradients of the last draft are still there
        config = TrainConfig(
            train_iters=ticks, lr=lr, lr_warmup_iters=max(1, ticks // 50),
            bf16=self.args.bf16, adam_beta2=0.99, global_batch_size=self.args.global_batch_size, **draft.train,
        )  # fmt: skip
        module = self.module(draft, quantised)
        if "draft_fp8" in draft.fp8:
            module.paths = module.paths.asked_for("draft_fp8")
            module.paths.under(draft.objective).check()
        ddp = wrap_ddp(module, self.world, config)
        ends = self.in_fp8()[0] if "base_fp8" in draft.fp8 else self.base
        return Trainer(self.world, ddp, *build_optimizer(ddp, self.world, config), ends, draft.objective)

    def _step(self, trainer: Trainer, draft: Draft, step: int) -> Any:
        """A step on the batch whose turn it is."""
        features = self.in_fp8()[1] if "base_fp8" in draft.fp8 else self.features
        batch = self.seen_by(draft, features[order_of(len(features), step, draft.seed)])
        return trainer.step([batch], f"step {step}", 1)

    def step_ms(self, draft: Draft, lr: float) -> float:
        """Milliseconds of a training step: the median of several groups of steps, after kernels are compiled."""
        self.train(draft, lr, False, steps=self.trial)
        trainer, times = self._trainer(draft, lr, False, TICKS), []
        for group in range(TIMED_GROUPS):
            start = now()
            for i in range(self.timed_steps):
                self._step(trainer, draft, group * self.timed_steps + i)
            times.append((now() - start) / self.timed_steps)
        return 1e3 * statistics.median(times)

    def steps_in(self, name: str, seconds: float) -> int:
        """Steps of a drafter that fit so many seconds by --step-times; 0 without it."""
        if self.args.step_ms is None:
            return 0
        return max(1, int(1e3 * seconds / self.args.step_ms[name]))

    def train(self, draft: Draft, lr: float, quantised: bool, *, seconds: float = 0.0, steps: int = 0) -> Draft:
        """The draft after some seconds of training over the data in order, or after some steps."""
        trainer = self._trainer(draft, lr, quantised, steps or TICKS)
        clock = ByTheClock(trainer.scheduler, seconds)
        if not steps:
            trainer.scheduler = clock  # type: ignore[assignment]
        start, done, last = now(), 0, None
        while done < steps if steps else clock.elapsed < seconds:
            done, last = done + 1, self._step(trainer, draft, done)
        sums = [[0.0]] * 4 if last is None else last.sums
        ddp = trainer.ddp
        correct, rows = torch.as_tensor(sums)[[1, 3]].tolist()
        about = {
            "steps": done, "seconds": now() - start, "passes": done / len(self.features),
            "accuracy": [c / max(r, 1) for c, r in zip(correct, rows, strict=True)],
            "loss": 0.0 if last is None else float(last.loss),
            "seed": draft.seed, "parameters": sum(p.numel() for p in ddp.module.parameters()),
        }  # fmt: skip
        weights = {n: t.detach().clone() for n, t in ddp.module.state_dict().items()}
        return replace(draft, weights=weights, about=about)

    def trained(self, draft: Draft, seconds: float, lr: float, quantised: bool = False, steps: int = 0) -> Draft:
        """The draft after so many seconds of training (or `steps`), from disk when it is there.

        Raises UserError for a draft on disk of another number of steps.
        """
        path = self.output / "drafts" / f"{draft.name.replace(' ', '_').replace('/', '_')}.pt"
        if path.is_file():
            kept = torch.load(path, map_location=self.world.device, weights_only=True)
            if steps and kept["about"]["steps"] != steps:
                raise UserError(
                    f"{path} was trained for {kept['about']['steps']} steps, now {steps} are asked for: use another "
                    "--output"
                )
            return replace(draft, weights=kept["weights"], about=kept["about"])
        # Kernels are compiled before, for the row counts of several batches.
        self.train(draft, lr, quantised, steps=self.trial)
        after = self.train(draft, lr, quantised, seconds=seconds, steps=steps)
        part = path.with_suffix(".part")
        torch.save({"weights": after.weights, "about": after.about}, part)
        part.replace(path)
        return after
