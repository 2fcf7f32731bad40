"""Train several drafts for one base on equal data and time, and compare what the base accepts of them.

    python benchmarks/ablate_drafts.py --base BASE --prompts mt_bench.jsonl gsm8k.jsonl --output runs/compare --bf16

1. The base writes its own training conversations without any prompt: it continues the bare header of a user turn, then
   answers what it wrote (sampled questions without duplicates, greedy answers; --answer-temperature and
   --user-questions change that). Its features are computed once.
2. The --drafters (EAGLE-3, EAGLE-1, MTP and Medusa; also block drafts) train on them, in the same order, for --seconds
   each; NGram needs no training. Every draft decodes the same questions with the same base. Other draft lengths and
   trees follow.
3. Ablations of EAGLE-3 (benchmarks/draft_kinds.py) train for equally many steps, each with one setting changed; with
   --ablation-seeds 3 three times, each time from other first weights and with the batches in another order.
4. The other drafts train for as many steps as these; or, part `seconds`, for as many as fit --ablation-seconds.
5. A suffix automaton looks up the text beside every draft, at several thresholds, and alone.
6. EAGLE-3 answers its training questions, and trains on with other weights where the base rejected its tokens (replay).
   Controls: the same rows with weight 1, and the rows as they were for as long as recording and training took.
7. Base and drafts are fake-quantised (fp8, PTQ) and decode; the drafts train on for a while (QAT) and decode again.
   As a control the unquantised drafts train on for as many steps.

With --temperature T the questions of the later tables are also answered by sampling, with --rejection by rejection
sampling, and every figure gets another beside it.

--parts chooses among them, so that several GPUs can share the work (each its --output, the same --data). On a GPU that
others use, too, the clock is no measure: `--parts step_times --step-times FILE`, while it is quiet, writes the median
milliseconds of a training step of every drafter, and later calls with that FILE train for the steps that fit the
seconds.

Block drafts are named by layers, slots and, where they are not the base's, key/value heads: "dflash 2 x 8",
"dspark 2 x 5 kv 14"; with " late" they start from late captures and an MLP of the base. A block of 5 slots proposes 4
tokens (DFlash) or 5 (DSpark).
OUTPUT/results.jsonl gets a line as soon as a figure is there and OUTPUT/acceptance.md the tables; a second start with
the same OUTPUT goes on where the first ended. `benchmarks/acceptance_page.py` puts the tables into docs/acceptance.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison_flags import add_flags
from benchmarks.draft_kinds import ABLATIONS, DRAFTERS, HEADLINE, USUAL, drafter, kind_of
from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.runtime.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparison import Comparison, Draft

log = logging.getLogger("megatron_spec.ablate_drafts")

PARTS = ("drafters", "lengths", "ablations", "steps", "lookup", "replay", "fp8")
ON_REQUEST = ("step_times", "seconds")
"""Parts that only --parts chooses."""
THRESHOLDS = (2, 3, 4, 6, 8)
"""Of the lookup beside a draft: tokens that must have occurred before."""
WEIGHTS = (1.0, 2.0, 4.0, 8.0)
"""Of steps that predict a token which the base put in place of a rejected one; 1 is the control."""


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    add_flags(p, conversations=2048, answer_tokens=160, questions=80, max_new_tokens=128, batch_size=256)
    p.add_argument("--seconds", type=float, default=20.0, help="training time of each draft (default: 20)")
    p.add_argument("--ablation-seconds", type=float, default=10.0, help="of EAGLE-3; its steps are those of all")
    p.add_argument("--step-times", metavar="FILE", help="JSON: name -> ms of a training step; see above")
    p.add_argument("--ablation-seeds", type=cli.at_least_one, default=1, help="trainings of each (default: 1)")
    p.add_argument(
        "--ablations", nargs="+", choices=ABLATIONS, default=USUAL, metavar="NAME",
        help=f"some of: {'; '.join(ABLATIONS)} (default: all but those in fp8, which need --bf16 and a Hopper GPU)",
    )  # fmt: skip
    p.add_argument(
        "--drafters", nargs="+", type=drafter, default=list(HEADLINE), metavar="NAME",
        help=f"drafts to compare, some of: {', '.join(DRAFTERS)}, and block drafts such as 'dflash 2 x 8' or "
        f"'dspark 2 x 5 kv 14' (default: {', '.join(HEADLINE)})",
    )  # fmt: skip
    p.add_argument("--mask-token-id", type=int, help="of block drafts (default: found in the tokenizer)")
    p.add_argument("--steps", type=cli.at_least_one, help="of ablations and equal steps (default: by the clock)")
    p.add_argument("--ttt-steps", type=cli.at_least_one, help="draft steps in training (default: --max-draft-len)")
    p.add_argument("--qat-seconds", type=float, default=4.0, help="of each draft after quantisation (default: 4)")
    p.add_argument(
        "--few-questions", type=cli.at_least_one, default=40, help="of each set, for all but the first table"
    )
    p.add_argument(
        "--timed-questions", type=cli.at_least_one, default=2, help="of each set, answered one by one (default: 2)"
    )
    p.add_argument("--global-batch-size", type=cli.at_least_one, default=32)
    p.add_argument("--seq-length", type=cli.at_least_one, default=320)
    p.add_argument(
        "--answer-temperature", type=float, nargs="+", metavar="T",
        help="of the training answers, which take several in turn; 0 is greedy (default: 0)",
    )  # fmt: skip
    p.add_argument("--user-questions", metavar="JSONL", help="questions that replace as many of the base's own")
    p.add_argument(
        "--temperature", type=float, help="answer the few questions at this temperature, too, several times each"
    )
    p.add_argument("--rejection", action="store_true", help="with rejection sampling (default: the base's own samples)")
    p.add_argument(
        "--parts", nargs="+", choices=PARTS + ON_REQUEST, default=PARTS, metavar="PART",
        help=f"what is done: some of {', '.join(PARTS + ON_REQUEST)} (default: {', '.join(PARTS)})",
    )  # fmt: skip
    p.add_argument("--deadline", type=float, default=1e9, metavar="SECONDS", help="start nothing new after these")
    p.add_argument("--reserve", type=float, default=0.0, help="of these seconds, kept for the quantised drafts")
    return p


def compare_algorithms(run: Comparison) -> list[Draft]:
    """Drafts of every algorithm on equal data and time, and NGram. Returns the trained ones."""
    options: dict[str, Any] = {
        "decoding_type": "NGram",
        "max_matching_ngram_size": 3,
        "is_public_pool": False,
        "is_use_oldest": False,
    }
    run.measure("NGram", None, {}, **options)
    trained: list[Draft] = []
    for name in run.args.drafters:
        if run.late():
            break
        draft = run.trained(
            run.new(name, kind_of(name)), run.args.seconds, run.args.lr, steps=run.steps_in(name, run.args.seconds)
        )
        trained.append(draft)
        run.measure(name, lambda draft=draft: run.module(draft), draft.about)
    return trained


def vary_decoding(run: Comparison, trained: list[Draft]) -> None:
    """Trees of EAGLE-3 and Medusa; a longer chain of those that run on their own output."""
    longer = {"max_draft_len": 2 * run.args.max_draft_len}
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 16}
    for draft in (d for d in trained if d.name in HEADLINE):  # a block has the length it was trained with
        ways = {"tree": tree} if draft.name == "medusa" else {f"length {longer['max_draft_len']}": longer}
        ways |= {"tree": tree} if draft.name == "eagle3" else {}
        for way, changes in ways.items():
            if run.late(run.args.reserve):
                return
            run.measure(f"{draft.name} {way}", lambda d=draft: run.module(d), draft.about, few=True, **changes)


def pace(run: Comparison) -> int:
    """--steps, or those of EAGLE-3 in --ablation-seconds (not measured itself: its schedule goes by the clock)."""
    if run.args.steps:
        return int(run.args.steps)
    if fitting := run.steps_in("eagle3", run.args.ablation_seconds):
        return fitting
    steps: int = run.trained(run.new("pace", kind_of("eagle3")), run.args.ablation_seconds, run.args.lr).about["steps"]
    return steps


def ablation(run: Comparison, name: str, seed: int, steps: int) -> None:
    """EAGLE-3 trained with one setting changed for so many steps, and measured."""
    fresh = run.new(f"ablation {name}{f' seed {seed}' if seed else ''}", kind_of(name, ABLATIONS), seed)
    draft = run.trained(fresh, 0.0, run.args.lr, steps=steps)
    run.measure(draft.name, lambda: run.module(draft), draft.about, few=True)


def ablate(run: Comparison, steps: int) -> None:
    """EAGLE-3 with one setting changed at a time, equal data and steps; seed by seed."""
    names = dict.fromkeys(["defaults", *run.args.ablations])
    for seed in range(run.args.ablation_seeds):
        for name in names:
            if run.late(run.args.reserve):
                return
            ablation(run, name, seed, steps)


def equal_steps(run: Comparison, steps: int) -> list[Draft]:
    """The other drafts after as many steps as the ablations, and so as much data. Returns them."""
    trained: list[Draft] = []
    if run.late(run.args.reserve):
        return trained
    ablation(run, "defaults", 0, steps)
    for name in run.args.drafters:
        if run.late(run.args.reserve):
            break
        if name == "eagle3":
            continue
        fresh = run.new(f"equal steps {name}", kind_of(name))
        draft = run.trained(fresh, 0.0, run.args.lr, steps=steps)
        trained.append(draft)
        run.measure(draft.name, lambda draft=draft: run.module(draft), draft.about, few=True)
    return trained


def equal_seconds(run: Comparison) -> list[Draft]:
    """Every drafter after the steps that fit --ablation-seconds. Returns them."""
    trained: list[Draft] = []
    for name in run.args.drafters:
        if run.late(run.args.reserve):
            break
        fresh = run.new(f"equal seconds {name}", kind_of(name))
        steps = run.steps_in(name, run.args.ablation_seconds)
        draft = run.trained(fresh, 0.0, run.args.lr, steps=steps)
        trained.append(draft)
        run.measure(draft.name, lambda draft=draft: run.module(draft), draft.about, few=True)
    return trained


def timed(args: argparse.Namespace) -> list[str]:
    """Drafters whose steps are timed; EAGLE-3 sets the pace of the ablations."""
    return list(dict.fromkeys(["eagle3", *args.drafters]))


def time_steps(run: Comparison) -> None:
    """Write --step-times; names that are there already are timed again, others stay."""
    path = Path(run.args.step_times)
    found = read_step_times(path) if path.is_file() else {}
    for name in timed(run.args):
        found[name] = run.step_ms(run.new(name, kind_of(name)), run.args.lr)
        log.info("%s: %.2f ms a step", name, found[name])
        write_json(path, found)


def read_step_times(path: Path, names: Sequence[str] = ()) -> dict[str, float]:
    """{name: ms}. Raises UserError for another file, and unless it has all `names`."""
    how = "write it with --parts step_times"
    try:
        found = read_json(path)
    except (OSError, ValueError) as e:
        raise UserError(f"--step-times {path}: cannot be read ({e}): {how}") from None
    if not isinstance(found, dict) or not all(isinstance(x, int | float) and x > 0 for x in found.values()):
        raise UserError(f"--step-times {path}: expected names with milliseconds above 0: {how}")
    if missing := [name for name in names if name not in found]:
        raise UserError(f"--step-times {path} has no {', '.join(missing)}, only {', '.join(found)}: {how}")
    return found


def check(args: argparse.Namespace) -> dict[str, float] | None:
    """The times of --step-times, if this call reads them. Raises UserError for parts that need it, and for flags
    without effect."""
    if args.temperature is not None and args.temperature <= 0:
        raise UserError(f"--temperature {args.temperature:g}: expected above 0; greedy is without it")
    if any(value < 0 for value in args.answer_temperature or ()):
        raise UserError(f"--answer-temperature {min(args.answer_temperature):g}: expected 0 (greedy) or above")
    if args.rejection and args.temperature is None:
        raise UserError("--rejection needs --temperature")
    for flag in ("answer-temperature", "user-questions"):
        if args.data and getattr(args, flag.replace("-", "_")) is not None:
            raise UserError(f"--{flag} does nothing with --data, which has its conversations: leave it out")
    if args.step_times is None:
        if asked := [part for part in ON_REQUEST if part in args.parts]:
            raise UserError(f"--parts {' '.join(asked)}: give --step-times FILE")
        return None
    if "step_times" in args.parts:
        if len(args.parts) > 1:
            raise UserError("--parts step_times writes what the other parts read: choose it alone")
        return None
    return read_step_times(Path(args.step_times), timed(args))


def look_up(run: Comparison, trained: list[Draft]) -> None:
    """The suffix automaton alone, then beside every draft."""
    if run.late(run.args.reserve):
        return
    run.measure("SA", None, {}, few=True, decoding_type="SA")
    for draft in trained:
        for threshold in THRESHOLDS:
            if run.late(run.args.reserve):
                return
            name = f"{draft.name} + SA {threshold}"
            run.measure(name, lambda draft=draft: run.module(draft), draft.about, few=True, sa_threshold=threshold)


def replay(run: Comparison, source: Path, steps: int) -> None:
    """EAGLE-3 after `steps`, then after as many more with each weight of what the base rejected; seed by seed."""
    for seed in range(run.args.ablation_seeds):
        if run.late(run.args.reserve):
            return
        end = f" seed {seed}" if seed else ""
        first = run.trained(
            run.new(f"before replay{end}", kind_of("defaults", ABLATIONS), seed), 0.0, run.args.lr, steps=steps
        )
        record = run.output / f"rejections-{seed}.jsonl"
        seconds = run.rejections(first, source, record, steps * run.args.global_batch_size)
        longer = steps + round(seconds * steps / first.about["seconds"])
        more_of(run, replace(first, name=f"replay none, longer{end}"), longer)
        run.read(record)
        for weight in WEIGHTS:
            goal = first.objective.replace(replay_weight=weight)
            more_of(run, replace(first, name=f"replay weight {weight:g}{end}", objective=goal), steps)
        run.read(source)


def more_of(run: Comparison, draft: Draft, steps: int) -> None:
    """A draft trained on and measured."""
    if run.late(run.args.reserve):
        return
    after = run.trained(draft, 0.0, run.args.lr, steps=steps)
    run.measure(after.name, lambda: run.module(after), after.about, few=True)


def train_on(run: Comparison, trained: list[Draft]) -> dict[str, int]:
    """Unquantised drafts trained for as long as QAT: what the training alone brings. Returns name -> steps."""
    steps = {}
    for draft in trained:
        if run.late():
            break
        control = replace(draft, name=f"{draft.name} without QAT")
        after = run.trained(control, run.args.qat_seconds, run.args.lr / 10)
        steps[draft.name] = after.about["steps"]
        run.measure(after.name, lambda after=after: run.module(after), after.about, few=True)
    return steps


def quantise(run: Comparison, trained: list[Draft], steps: dict[str, int]) -> None:
    """fp8: base and drafts fake-quantised, then trained on."""
    from megatron_spec.config import QuantConfig
    from megatron_spec.features.online import OnlineFeatures
    from megatron_spec.quantization.calibrate import calibrate

    calibrated = []
    for i, draft in enumerate(trained):
        if run.late():
            return
        quant = QuantConfig() if i == 0 else QuantConfig(base="none")  # the base once
        module, few = run.module(draft), [[b] for b in run.batches[:8]]
        run.base.capture(draft.config.capture_layer_ids)
        calibrate(run.base, module, OnlineFeatures(run.base), few, draft.objective, quant, run.world)
        weights = {n: t.detach().clone() for n, t in module.state_dict().items()}
        calibrated.append(replace(draft, name=f"{draft.name} fp8 QAT", weights=weights))
    run.answer_alone("fp8")
    run.compute_features()
    for before, draft in zip(trained, calibrated, strict=True):
        if not run.late():
            run.measure(f"{before.name} fp8 PTQ", lambda draft=draft: run.module(draft, True), {}, few=True)
    for before, draft in zip(trained, calibrated, strict=True):
        if run.late():
            return
        more = steps.get(before.name, 0)
        after = run.trained(draft, run.args.qat_seconds, run.args.lr / 10, quantised=True, steps=more)
        run.measure(draft.name, lambda after=after: run.module(after, True), after.about, few=True)


def main(args: argparse.Namespace) -> None:
    """Everything, the most important first."""
    from benchmarks.acceptance_page import write_page
    from benchmarks.comparison import Comparison

    args.step_ms = check(args)
    asked = [kind_of(name) for name in {*args.drafters, "eagle3"}]
    asked += [kind_of(name, ABLATIONS) for name in ("defaults", *args.ablations)]
    run = Comparison(args, asked)
    if "step_times" in args.parts:
        run.read(run.conversations())
        time_steps(run)
        return
    try:
        source = run.conversations()
        run.read(source)
        run.ask()
        run.answer_alone("bf16" if args.bf16 else "float32")
        trained = compare_algorithms(run) if {"drafters", "lengths", "fp8"} & set(args.parts) else []
        if "lengths" in args.parts:
            vary_decoding(run, trained)
        steps = pace(run) if {"ablations", "steps", "replay"} & set(args.parts) and not run.late(args.reserve) else 0
        if "ablations" in args.parts:
            ablate(run, steps)
        equal = equal_steps(run, steps) if "steps" in args.parts else []
        equal += equal_seconds(run) if "seconds" in args.parts else []
        if "lookup" in args.parts:
            look_up(run, [*trained, *equal])
        if "replay" in args.parts:
            replay(run, source, steps)
        if "fp8" in args.parts:
            quantise(run, trained, train_on(run, trained))
    finally:
        write_page([str(run.results.path)], Path(args.output) / "acceptance.md")
        log.info("tables: %s", Path(args.output) / "acceptance.md")


if __name__ == "__main__":
    cli.run(make_parser(), main)
