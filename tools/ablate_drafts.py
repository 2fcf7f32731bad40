"""Train several drafts for one base on equal data and time, and compare what the base accepts of them.

    python tools/ablate_drafts.py --base BASE --prompts mt_bench.jsonl gsm8k.jsonl --output runs/compare --bf16

1. The base writes its own training conversations without any prompt: it continues the bare header of a user turn, then
   answers what it wrote (sampled questions without duplicates, greedy answers). Its features are computed once.
2. EAGLE-3, EAGLE-1, MTP and Medusa train on them, in the same order, for --seconds each; NGram needs no training.
   Ablations of EAGLE-3 train for equally many steps, each with one setting changed.
3. Every draft decodes the same questions with the same base; then base and drafts are fake-quantised (fp8, PTQ) and
   trained on for a while (QAT), and decode again.

OUTPUT/results.jsonl gets a line as soon as a figure is there; OUTPUT/train.jsonl holds the conversations. One process.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import DecodeConfig, ObjectiveConfig, QuantConfig, TrainConfig, UserError

log = logging.getLogger("megatron_spec.ablate_drafts")

HEADLINE = ("eagle3", "eagle1", "eagle-mtp", "medusa")
ABLATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "detach": {"detach": True},
    "alignment target": {"alignment": "target"},
    "alignment paper": {"alignment": "paper"},
    "decay 1.0": {"step_decay": 1.0},
    "all rows (no in_vocab_only)": {"in_vocab_only": False},
    "loss lk": {"loss": "lk"},
}


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--base", required=True, metavar="DIR", help="base model, Hugging Face folder")
    p.add_argument("--prompts", required=True, nargs="+", metavar="JSONL", help="question files, one set each")
    p.add_argument("--output", required=True, metavar="DIR")
    p.add_argument("--conversations", type=cli.at_least_one, default=2048, help="to train on (default: 2048)")
    p.add_argument("--answer-tokens", type=cli.at_least_one, default=160, help="most tokens of an answer in training")
    p.add_argument("--seconds", type=float, default=20.0, help="training time of each draft (default: 20)")
    p.add_argument("--ablation-seconds", type=float, default=10.0, help="of the default EAGLE-3; its steps for all")
    p.add_argument("--qat-seconds", type=float, default=4.0, help="of each draft after quantisation (default: 4)")
    p.add_argument("--draft-vocab-size", type=cli.at_least_one, default=8192, help="of EAGLE-3 (default: 8192)")
    p.add_argument("--questions", type=cli.at_least_one, default=80, help="of each set (default: 80)")
    p.add_argument(
        "--few-questions", type=cli.at_least_one, default=40, help="of each set, for ablations (default: 40)"
    )
    p.add_argument("--max-new-tokens", type=cli.at_least_one, default=128)
    p.add_argument("--max-draft-len", type=cli.at_least_one, default=4)
    p.add_argument("--batch-size", type=cli.at_least_one, default=256)
    p.add_argument("--global-batch-size", type=cli.at_least_one, default=32)
    p.add_argument("--seq-length", type=cli.at_least_one, default=320)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--deadline", type=float, default=1e9, help="start nothing new after so many seconds")
    p.add_argument("--reserve", type=float, default=0.0, help="of these seconds, kept for the quantised drafts")
    p.add_argument("--bf16", action="store_true")
    return p


@dataclass
class Question:
    """What is asked: the set it belongs to and its tokens, history included."""

    name: str
    ids: list[int]


@dataclass
class Draft:
    """A trained draft: how to build it anew, and its weights."""

    name: str
    config: Any
    vocab: Any
    objective: ObjectiveConfig
    weights: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


class Comparison:
    """Base, data and questions of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from megatron_spec import distributed, presets
        from megatron_spec.checkpoint.base_import import inspect_base, load_base
        from megatron_spec.data.chat import ChatEncoder
        from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids

        self.args, self.start, self.output = args, time.monotonic(), Path(args.output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.ref = inspect_base(args.base)
        self.world = distributed.initialize()
        if self.world.size > 1:
            raise UserError("ablate_drafts.py compares on one process: start it with plain python")
        self.captures = presets.default_capture_ids(self.ref.config.num_layers)
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.base = load_base(self.ref, self.world, self.captures, self.dtype)
        self.tokenizer = load_tokenizer(args.base)
        self.stop_ids = set(stop_token_ids(args.base, self.tokenizer))
        self.encoder = ChatEncoder(self.tokenizer)
        self.decode = DecodeConfig(
            max_draft_len=args.max_draft_len, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size
        )

    def late(self, reserve: float = 0.0) -> bool:
        """True when nothing new should be started, with `reserve` seconds kept for what follows."""
        return time.monotonic() - self.start > self.args.deadline - reserve

    def note(self, kind: str, **values: Any) -> None:
        """Append a line to results.jsonl."""
        line = {"kind": kind, "at": round(time.monotonic() - self.start, 1), **values}
        with (self.output / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        log.info("%s", {k: v for k, v in line.items() if k not in ("sets", "costs")})

    # --- data ---------------------------------------------------------------------------------------------------

    def user_turns(self, count: int) -> list[str]:
        """Questions that the base writes itself behind the bare header of a user turn, without duplicates."""
        from megatron_spec.decoding.engine import decode

        mark = "\u241f"
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        header = self.tokenizer.encode(text.split(mark)[0], add_special_tokens=False)
        config = DecodeConfig(max_new_tokens=96, batch_size=4 * self.args.batch_size, temperature=0.9)
        found: dict[str, None] = {}
        for attempt in range(4):
            seeds = [attempt * 10_000_000 + i for i in range(count)]
            for g in decode(self.base, [header] * count, config, self.stop_ids, seeds=seeds):
                turn = self.tokenizer.decode(g.tokens[:-1], skip_special_tokens=True).strip()
                if g.stopped and turn:
                    found[turn] = None
            if len(found) >= count:
                break
        return list(found)[:count]

    def write_conversations(self) -> Path:
        """OUTPUT/train.jsonl; an existing one is used."""
        from megatron_spec.decoding.engine import decode

        path = self.output / "train.jsonl"
        if path.is_file():
            return path
        turns = self.user_turns(self.args.conversations)
        asked = [[{"role": "user", "content": t}] for t in turns]
        prompts = [self.tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in asked]
        config = DecodeConfig(max_new_tokens=self.args.answer_tokens, batch_size=4 * self.args.batch_size)
        lines, tokens = [], 0
        for messages, g in zip(asked, decode(self.base, prompts, config, self.stop_ids), strict=True):
            answer = self.tokenizer.decode(g.tokens[:-1] if g.stopped else g.tokens, skip_special_tokens=True)
            tokens += len(g.tokens)
            if answer.strip():
                conversation = [*messages, {"role": "assistant", "content": answer}]
                lines.append(json.dumps({"conversations": conversation, "truncated": not g.stopped}) + "\n")
        path.write_text("".join(lines), encoding="utf-8")
        self.note("data", conversations=len(lines), answer_tokens=tokens)
        return path

    def read(self, path: Path) -> None:
        """Batches of one pass over the conversations, their features, and the draft vocabulary."""
        from megatron_spec.chain.data import open_dataset
        from megatron_spec.data.loader import BatchLoader
        from megatron_spec.data.vocab_counts import count_supervised, coverage, select_draft_ids
        from megatron_spec.drafts.vocab import DraftVocab

        dataset = open_dataset(str(path), self.args.base, self.args.seq_length)
        size = self.args.global_batch_size
        loader = BatchLoader(dataset, size, size, device=self.world.device)
        self.batches = [loader.step(i * size)[0] for i in range(max(1, len(dataset) // size))]
        counts = count_supervised(dataset, self.ref.config.vocab_size)
        ids = select_draft_ids(counts, min(self.args.draft_vocab_size, self.ref.config.vocab_size), self.stop_ids)
        self.vocab, self.whole = DraftVocab(ids, len(counts)), DraftVocab.full(len(counts))
        self.compute_features()
        self.note("features", steps=len(self.batches), **coverage(counts, ids))

    def compute_features(self) -> None:
        """Features of every batch, kept in memory."""
        from megatron_spec.features.online import OnlineFeatures

        source = OnlineFeatures(self.base)
        self.features = [source.features([b])[0] for b in self.batches]

    def ask(self) -> None:
        """The base's own answers give the histories of later rounds; all questions, with its answers."""
        from megatron_spec.decoding.engine import decode
        from megatron_spec.decoding.prompts import Dialogue, read_prompts

        self.questions: list[Question] = []
        limit = self.ref.config.max_position_embeddings
        dialogues = [
            (Path(f).stem, Dialogue(p)) for f in self.args.prompts for p in read_prompts(f, self.args.questions)
        ]
        while asking := [(n, d, ids) for n, d in dialogues if d.waits and (ids := d.ask(self.encoder, limit))]:
            answers = decode(self.base, [ids for *_, ids in asking], self.decode, self.stop_ids)
            for (name, dialogue, ids), answer in zip(asking, answers, strict=True):
                self.questions.append(Question(name, ids))
                dialogue.take(answer.tokens, answer.stopped, self.tokenizer)
        self.answer_alone()

    def answer_alone(self) -> None:
        """The text every draft must give, and the cost of a step without one."""
        from megatron_spec.decoding.engine import Costs, decode

        start = time.monotonic()
        ids = [q.ids for q in self.questions]
        self.alone = [g.tokens for g in decode(self.base, ids, self.decode, self.stop_ids)]
        seconds = time.monotonic() - start
        costs = Costs()
        decode(self.base, ids[:2], self.decode.replace(batch_size=1, max_new_tokens=48), set(), costs=costs)
        self.step_seconds = costs.mean("base")
        tokens = sum(map(len, self.alone))
        self.note("alone", questions=len(ids), tokens=tokens, seconds=seconds, step_seconds=self.step_seconds)

    # --- training -----------------------------------------------------------------------------------------------

    def new(self, algorithm: str, objective: ObjectiveConfig) -> Draft:
        """An untrained draft of an algorithm."""
        from megatron_spec import presets

        base = self.ref.config
        if algorithm == "medusa":
            config: Any = presets.medusa_config(base, num_heads=objective.ttt_steps)
            return Draft(algorithm, config, self.whole, objective)
        vocab = self.vocab if algorithm.startswith("eagle3") else self.whole
        config = presets.eagle_config(base, algorithm, {"draft_vocab_size": len(vocab)})
        return Draft(algorithm, config, vocab, objective)

    def module(self, draft: Draft, quantised: bool = False) -> Any:
        """The draft as a module, with its weights or fresh ones."""
        from megatron_spec.chain.convert import new_draft
        from megatron_spec.quantization.attach import attach_quantizers

        module = new_draft(self.base, draft.config, draft.vocab, self.world, self.dtype, seed=1234)
        if quantised:
            attach_quantizers(module, QuantConfig(), "draft")
        if draft.weights:
            module.load_state_dict(draft.weights)
        return module

    def train(self, draft: Draft, steps: int, lr: float, quantised: bool = False) -> Draft:
        """The draft after `steps` steps over the data in order."""
        from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
        from megatron_spec.training.step import Trainer

        config = TrainConfig(
            train_iters=steps, lr=lr, lr_warmup_iters=min(10, steps // 4), bf16=self.args.bf16, adam_beta2=0.99,
            global_batch_size=self.args.global_batch_size,
        )  # fmt: skip
        ddp = wrap_ddp(self.module(draft, quantised), self.world, config)
        trainer = Trainer(self.world, ddp, *build_optimizer(ddp, self.world, config), self.base, draft.objective)
        start, last = time.monotonic(), None
        for i in range(steps):
            last = trainer.step([self.features[i % len(self.features)]], f"step {i}", 1)
        assert last is not None
        sums = last.sums.tolist()
        about = {
            "steps": steps, "seconds": time.monotonic() - start, "passes": steps / len(self.features),
            "accuracy": [c / max(r, 1) for c, r in zip(sums[1], sums[3], strict=True)],
            "parameters": sum(p.numel() for p in ddp.module.parameters()),
        }  # fmt: skip
        weights = {n: t.detach().clone() for n, t in ddp.module.state_dict().items()}
        return Draft(draft.name, draft.config, draft.vocab, draft.objective, weights, about)

    def steps_for(self, draft: Draft, seconds: float, quantised: bool = False) -> int:
        """How many steps fit into the time, after a warm-up."""
        self.train(draft, 4, self.args.lr, quantised)
        return max(4, int(seconds / (self.train(draft, 8, self.args.lr, quantised).about["seconds"] / 8)))

    # --- measuring ----------------------------------------------------------------------------------------------

    def measure(self, name: str, draft: Any, about: dict[str, Any], few: bool = False, **changes: Any) -> None:
        """Acceptance on all questions (or the first few of each set) and predicted speed-up, noted as one line."""
        from megatron_spec.decoding.acceptance import acceptance_stats, by_category
        from megatron_spec.decoding.engine import Costs, decode

        config = self.decode.replace(**changes)
        chosen = list(self._chosen(self.args.few_questions if few else 10**9))
        ids = [self.questions[i].ids for i in chosen]
        start = time.monotonic()
        found = decode(self.base, ids, config, self.stop_ids, draft=draft)
        seconds = time.monotonic() - start
        same = sum(g.tokens == self.alone[i] for g, i in zip(found, chosen, strict=True))
        costs = Costs()
        slow = config.replace(batch_size=1, max_new_tokens=32)
        decode(self.base, ids[:2], slow, set(), draft=draft, costs=costs)
        step = sum(costs.mean(phase) for phase in ("draft", "base", "observe"))
        stats = acceptance_stats(found)
        self.note(
            "measured", name=name, decode=changes, **about, questions=len(ids), identical=same / len(ids),
            seconds_to_decode=seconds, tokens=sum(len(g.tokens) for g in found), overall=stats.to_dict(),
            predicted_speedup=(stats.acceptance_length or 0) * self.step_seconds / step,
            costs={phase: costs.mean(phase) for phase in costs.counts}, alone_step=self.step_seconds,
            sets={k: v.to_dict() for k, v in by_category(found, [self.questions[i].name for i in chosen]).items()},
        )  # fmt: skip

    def _chosen(self, of_each: int) -> Iterator[int]:
        counts: dict[str, int] = {}
        for i, question in enumerate(self.questions):
            counts[question.name] = counts.get(question.name, 0) + 1
            if counts[question.name] <= of_each:
                yield i


def compare_algorithms(run: Comparison) -> list[Draft]:
    """Drafts of every algorithm on equal data and time; NGram; longer and shorter chains and trees."""
    objective, trained = ObjectiveConfig(ttt_steps=run.args.max_draft_len), []
    for algorithm in HEADLINE:
        fresh = run.new(algorithm, objective)
        draft = run.train(fresh, run.steps_for(fresh, run.args.seconds), run.args.lr)
        trained.append(draft)
        run.measure(algorithm, run.module(draft), draft.about)
    options = {"decoding_type": "NGram", "max_matching_ngram_size": 3, "is_public_pool": False, "is_use_oldest": False}
    run.measure("NGram", None, {}, **options)
    return trained


def vary_decoding(run: Comparison, trained: list[Draft]) -> None:
    """Other draft lengths and trees with the first draft, trees with Medusa."""
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 16}
    for draft in (trained[0], trained[-1]):
        if not run.late():
            run.measure(f"{draft.name} tree", run.module(draft), draft.about, few=True, **tree)
    for draft in trained[:3]:
        if not run.late():
            run.measure(f"{draft.name} K=8", run.module(draft), {}, few=True, max_draft_len=8)


def ablate(run: Comparison) -> None:
    """EAGLE-3 with one setting changed at a time, equal data and steps."""
    steps = 0
    for name, changes in ABLATIONS.items():
        if run.late(run.args.reserve):
            return
        draft = run.new("eagle3", ObjectiveConfig(ttt_steps=run.args.max_draft_len, **changes))
        steps = steps or run.steps_for(draft, run.args.ablation_seconds)
        draft = run.train(draft, steps, run.args.lr)
        run.measure(f"ablation: {name}", run.module(draft), draft.about, few=True)


def quantise(run: Comparison, trained: list[Draft]) -> None:
    """fp8: base and drafts fake-quantised, then trained on."""
    from megatron_spec.features.online import OnlineFeatures
    from megatron_spec.quantization.calibrate import calibrate

    calibrated = []
    for i, draft in enumerate(trained):
        quant = QuantConfig() if i == 0 else QuantConfig(base="none")  # the base once
        module = run.module(draft)
        few = [[b] for b in run.batches[:8]]
        calibrate(run.base, module, OnlineFeatures(run.base), few, draft.objective, quant, run.world)
        weights = {n: t.detach().clone() for n, t in module.state_dict().items()}
        calibrated.append(Draft(draft.name, draft.config, draft.vocab, draft.objective, weights))
    run.answer_alone()
    run.compute_features()
    for draft in calibrated:
        if not run.late():
            run.measure(f"{draft.name} fp8 PTQ", run.module(draft, True), {}, few=True)
    for draft in calibrated:
        if run.late():
            return
        after = run.train(draft, run.steps_for(draft, run.args.qat_seconds, True), run.args.lr / 10, True)
        run.measure(f"{draft.name} fp8 QAT", run.module(after, True), after.about, few=True)


def main(args: argparse.Namespace) -> None:
    """Everything, the most important first."""
    run = Comparison(args)
    run.read(run.write_conversations())
    run.ask()
    trained = compare_algorithms(run)
    vary_decoding(run, trained)
    ablate(run)
    quantise(run, trained)


if __name__ == "__main__":
    cli.run(make_parser(), main)
