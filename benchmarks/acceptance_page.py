"""Markdown tables of acceptance from the results of benchmarks/ablate_drafts.py.

    python benchmarks/acceptance_page.py runs/compare/results.jsonl --write docs/acceptance.md

Without --write they are printed. With it they replace the text between <!--measured--> and <!--/measured--> in PAGE (a
page without these marks is overwritten). Several results are listed in order; FILE:ablations,lengths selects tables of
a run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.evaluation.acceptance import bootstrap_ci95, change_ci95
from megatron_spec.runtime.files import write_text

BEGIN, END = "<!--measured-->", "<!--/measured-->"
Line = dict[str, Any]


def read_results(path: Path) -> list[Line]:
    """Its lines; the first has the settings. Raises UserError for other files."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: expected results.jsonl of benchmarks/ablate_drafts.py ({e})") from None
    if not lines or lines[0].get("kind") != "settings":
        raise UserError(
            f"{path}: the first line has no settings: expected results.jsonl of benchmarks/ablate_drafts.py"
        )
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; '' without rows."""
    if not rows:
        return ""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def length_of(stats: Line) -> str:
    """Acceptance length with its interval."""
    text = f"{stats['acceptance_length'] or 0.0:.3f}"
    if stats["acceptance_length_ci95"] is None:
        return text
    low, high = stats["acceptance_length_ci95"]
    return f"{text} ({low:.3f}-{high:.3f})"


def _positions(stats: Line) -> str:
    return " ".join(f"{x:.0%}" for x in stats["acceptance_per_position"])


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _training(line: Line) -> str:
    if "steps" not in line:
        return "none"
    return (
        f"{line['parameters'] / 1e6:.1f} M, {line['steps']} steps, {line['passes']:.1f} passes, {line['seconds']:.0f} s"
    )


def _drafters(found: dict[str, Line]) -> str:
    rows = [
        [name, _training(x), length_of(x["overall"]), _positions(x["overall"]), f"{x['identical']:.1%}",
         _times(x["predicted_speedup"]), _times(_measured(x)), _times(x["speedup"])]
        for name, x in _longest_first(found, "overall") if x["speedup"] is not None
    ]  # fmt: skip
    head = [
        "drafter",
        "training",
        "acceptance length (95 %)",
        "per position",
        "same text",
        "predicted",
        "batch 1",
        "whole batch",
    ]
    return table(head, rows)


def _longest_first(found: dict[str, Line], stats: str) -> list[tuple[str, Line]]:
    return sorted(found.items(), key=lambda item: item[1][stats]["acceptance_length"] or 0.0, reverse=True)


def _sets(found: dict[str, Line]) -> str:
    lines = {name: x for name, x in found.items() if x["speedup"] is not None}
    names = sorted({name for x in lines.values() for name in x["sets"]})
    rows = [[name, *(length_of(x["sets"][s]) if s in x["sets"] else "-" for s in names)] for name, x in lines.items()]
    return table(["acceptance length", *names], rows)


def _difference(line: Line, base: Line) -> float:
    return (line["few"]["acceptance_length"] or 0.0) - (base["few"]["acceptance_length"] or 0.0)


def change(line: Line, base: Line | None) -> str:
    """Change against `base`, with a paired interval if there are figures per question."""
    if base is None or line is base:
        return "-"
    text = f"{_difference(line, base):+.3f}"
    if not (line.get("few_steps") and base.get("few_steps")):  # an older run
        return text
    if not (sum(line["few_steps"]) and sum(base["few_steps"])):  # all answers have one token
        return text
    found = change_ci95((line["few_tokens"], line["few_steps"]), (base["few_tokens"], base["few_steps"]))
    return text if found is None else f"{text} ({found[0]:+.3f} to {found[1]:+.3f})"


def _some(found: dict[str, Line], chosen: Sequence[str], base: Line | None, what: str) -> str:
    """Acceptance on the few questions of each set, beside that of `base`."""
    rows = []
    for name in chosen:
        line = found[name]
        stats = line["few"]
        rows.append([name, length_of(stats), _positions(stats), change(line, base), _share(line.get("identical"))])
    return table([what, "acceptance length (95 %)", "per position", "change (95 %)", "same text"], rows)


def pooled(lines: Sequence[Line]) -> Line:
    """One setting trained with several seeds, pooled per question.

    If a line comes from an older run, without figures per question, pooled over all questions and without interval.
    """
    if not all("few_steps" in line for line in lines):
        steps = sum(line["few"]["steps"] for line in lines)
        tokens = sum((line["few"]["acceptance_length"] or 0.0) * line["few"]["steps"] for line in lines)
        return {"few": {"acceptance_length": tokens / steps if steps else None, "acceptance_length_ci95": None}}
    sums = {k: [sum(x) for x in zip(*(line[k] for line in lines), strict=True)] for k in ("few_tokens", "few_steps")}
    asked = [(t, s) for t, s in zip(sums["few_tokens"], sums["few_steps"], strict=True) if s]
    few = {
        "acceptance_length": sum(sums["few_tokens"]) / sum(sums["few_steps"]) if asked else None,
        "acceptance_length_ci95": bootstrap_ci95(*zip(*asked, strict=True)) if asked else None,
    }
    return {"few": few, **sums}


def ablations(found: dict[str, Line], prefix: str = "ablation ", control: str = "defaults") -> str:
    """The table of the settings whose names begin with `prefix`, seeds after them."""
    seeds: dict[str, list[Line]] = {}
    for name, line in found.items():
        if name.startswith(prefix):
            seeds.setdefault(setting_of(name.removeprefix(prefix)), []).append(line)
    return settings_table(seeds, control)


def setting_of(name: str) -> str:
    """The name without its seed."""
    return re.sub(r" seed \d+$", "", name)


def settings_table(seeds: dict[str, list[Line]], control: str) -> str:
    """One row per setting; with several seeds, pooled, and the change of each against `control`."""
    least = min(map(len, seeds.values()), default=0)
    if least < 2 or control not in seeds:
        first = {name: lines[0] for name, lines in seeds.items()}
        return _some(first, list(first), first.get(control), "EAGLE-3 trained with")
    rows, base = [], [*seeds[control][:least]]
    for name, lines in seeds.items():
        if name == control:
            each = [f"{x['few']['acceptance_length'] or 0.0:.3f}" for x in base]
        else:
            each = [f"{_difference(x, b):+.3f}" for x, b in zip(lines, base, strict=False)]
        whole = pooled(lines[:least])
        moved = "-" if name == control else change(whole, pooled(base))
        rows.append([name, length_of(whole["few"]), moved, " ".join(each)])
    head = ["EAGLE-3 trained with", "acceptance length (95 %)", "change (95 %)", f"each of {least} seeds"]
    return table(head, rows)


def _steps(found: dict[str, Line], what: str = "steps") -> str:
    """Drafts of every algorithm after the same number of steps, or of seconds."""
    first = {"eagle3": found["ablation defaults"]} if "ablation defaults" in found and what == "steps" else {}
    prefix = f"equal {what} "
    others = {n.removeprefix(prefix): x for n, x in found.items() if n.startswith(prefix) and " + SA " not in n}
    rows = [
        [name, _training(line), length_of(line["few"]), _positions(line["few"]), _times(line.get("predicted_speedup")),
         _times(_measured(line))]
        for name, line in _longest_first({**first, **others}, "few") if others
    ]  # fmt: skip
    head = ["drafter", "training", "acceptance length (95 %)", "per position", "predicted", "measured"]
    return table(head, rows)


def _lookup(found: dict[str, Line]) -> str:
    """Drafts combined with a lookup; the change is against the draft alone."""
    drafts = dict.fromkeys(name.rpartition(" + SA ")[0] for name in found if " + SA " in name)
    alone = [name for name in ("SA",) if name in found]
    rows = [_looked_up(name, found[name], None) for name in alone]
    for draft in (name for name in drafts if name in found):
        rows.append(_looked_up(draft, found[draft], None))
        rows += [_looked_up(n, x, found[draft]) for n, x in found.items() if n.startswith(f"{draft} + SA ")]
    head = ["decoding", "acceptance length (95 %)", "change (95 %)", "predicted speed-up", "measured speed-up"]
    return table(head, rows)


def _looked_up(name: str, line: Line, base: Line | None) -> list[str]:
    predicted, measured = _times(line["predicted_speedup"]), _times(_measured(line))
    return [name, length_of(line["few"]), change(line, base), predicted, measured]


def _measured(line: Line) -> float | None:
    """Speed-up at batch 1, the mean over the question sets."""
    speeds = line.get("single_speedup")
    return sum(speeds.values()) / len(speeds) if speeds else None


def _lengths_and_trees(found: dict[str, Line]) -> str:
    drafts = [name for name, x in found.items() if x["speedup"] is not None]
    parts = []
    for draft in drafts:
        longer = [f"{d} " for d in drafts if d.startswith(f"{draft} ")]  # "eagle3 late" is no way of decoding "eagle3"
        others = [n for n in found if n.startswith(f"{draft} ") and not f"{n} ".startswith(tuple(longer))]
        others = [n for n in others if "fp8" not in n and "QAT" not in n]
        if others:
            parts.append(_some(found, [draft, *others], found[draft], "decoding"))
    return "\n".join(parts)


def _fp8(found: dict[str, Line], precision: str) -> str:
    parts = []
    for draft in [name for name, x in found.items() if x["speedup"] is not None]:
        forms = [n for n in (f"{draft} without QAT", f"{draft} fp8 PTQ", f"{draft} fp8 QAT") if n in found]
        if forms:
            named = {f"{draft} {precision}": found[draft], **{n: found[n] for n in forms}}
            parts.append(_some(named, list(named), found[draft], "precision of base and draft"))
    return "\n".join(parts)


def _sampled(lines: Sequence[Line], few: str) -> str:
    """Figures of sampled answers, as the ablations and others of the greedy ones."""
    ways: dict[tuple[float, bool, int], dict[str, Line]] = {}
    for line in lines:
        if line["kind"] == "sampled":
            way = line["temperature"], line["rejection"], line["samples"]
            ways.setdefault(way, {})[line["name"]] = line
    parts = []
    for (temperature, rejection, samples), found in ways.items():
        how = "with rejection sampling" if rejection else "where a draft token is right if the base samples it, too"
        others = [name for name in found if not name.startswith(("ablation ", "replay "))]
        tables = [
            ablations(found),
            ablations(found, "replay ", "weight 1"),
            _some(found, others, None, "drafter"),
        ]
        title = f"At temperature {temperature:g} {how}, {samples} answers to each question. {few}."
        parts.append("\n".join([f"{title}\n", *filter(None, tables)]))
    return "\n".join(parts)


PARTS = ("drafters", "sets", "lengths", "ablations", "steps", "seconds", "lookup", "replay", "fp8", "sampled")
"""Names of the tables of a run, in order."""


def parse_results(text: str) -> tuple[Path, tuple[str, ...]]:
    """'FILE' or 'FILE:PART,PART' -> the file and its tables to show. Raises UserError for an unknown part."""
    path, colon, chosen = text.rpartition(":")
    if not colon or Path(text).is_file():
        return Path(text), PARTS
    parts = tuple(chosen.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"{text}: no table is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return Path(path), parts


def _count(found: dict[str, Line]) -> str:
    """'1234 steps each, ' of the ablations."""
    line = found.get("ablation defaults", {})
    return f"{line['steps']} steps each, " if "steps" in line else ""


def render(path: Path, wanted: Sequence[str] = PARTS) -> str:
    """The tables of one run."""
    lines = read_results(path)
    found, alone = ({x["name"]: x for x in lines if x["kind"] == kind} for kind in ("measured", "alone"))
    settings, data = lines[0], next((x for x in lines if x["kind"] == "data"), {})
    precision = "bf16" if settings["bf16"] else "float32"
    base = alone.get(precision)
    timed = set(wanted) - {"ablations", "steps", "seconds", "replay", "sampled"} and any(
        "steps" in x and x["speedup"] is not None for x in found.values()
    )
    spent = f", about {settings['seconds']:g} s of training for each draft" if timed else ""
    text = [
        f"### {settings['base']} on {settings['device']}\n",
        f"torch {settings['torch']}, {precision}, greedy, {settings['max_draft_len']} draft tokens, answers of at most "
        f"{settings['max_new_tokens']} tokens, batches of {settings['batch_size']}; "
        f"{data.get('conversations', 0)} training conversations of the base's own{spent}; "
        f"draft vocabulary of EAGLE-3 {settings['draft_vocab_size']} tokens "
        f"({data.get('coverage', 0):.1%} of the answers' tokens).",
    ]
    if base:
        text[-1] += (
            f" The base alone: {base['step_seconds'] * 1000:.2f} ms a step at batch 1, "
            f"{base['tokens_per_second']:.0f} tokens/s in batches; {base['questions']} questions."
        )
    few = f"On the first {settings['few_questions']} questions of each set"
    tables = {
        "drafters": ("**Drafters**, all questions.", _drafters(found)),
        "sets": ("**Question sets.**", _sets(found)),
        "lengths": (f"**Draft length and trees.** {few}.", _lengths_and_trees(found)),
        "ablations": (f"**Ablations**, {_count(found)}equal data and steps. {few}.", ablations(found)),
        "steps": (f"**Equal steps**, the same batches for every draft. {few}.", _steps(found)),
        "seconds": (
            f"**Equal seconds**: as many steps as fit {settings['ablation_seconds']:g} s. {few}.",
            _steps(found, "seconds"),
        ),
        "lookup": (
            f"**A suffix automaton** (SA), alone and beside a draft from a match of so many tokens. {few}; speed-ups "
            "are those at batch 1, the measured one is the mean over the sets.",
            _lookup(found),
        ),
        "replay": (
            f"**Replay**: EAGLE-3 trained on with a weight for what the base rejected. {few}.",
            ablations(found, "replay ", "weight 1"),
        ),
        "fp8": (
            f"**fp8** of base and draft, simulated, so there is no speed to measure. {few}.",
            _fp8(found, precision),
        ),
        "sampled": ("**Sampled answers.**", _sampled(lines, few)),
    }
    chosen = [tables[part] for part in PARTS if part in wanted]
    return "\n".join([*text, *(f"\n{title}\n\n{body}" for title, body in chosen if body)])


def write_page(results: Sequence[str], page: Path) -> None:
    """Write the tables between the marks of `page`, or a page with only the tables."""
    tables = "\n".join(render(*parse_results(text)) for text in results)
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    if BEGIN in old and END in old:
        before, after = old.split(BEGIN)[0], old.split(END)[1]
    else:
        before = after = ""
    write_text(page, f"{before}{BEGIN}\n{tables}\n{END}{after or chr(10)}")


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument(
        "results", nargs="+", metavar="JSONL[:TABLES]",
        help=f"results.jsonl of a run, several for several runs; TABLES: some of {','.join(PARTS)}",
    )  # fmt: skip
    p.add_argument("--write", metavar="PAGE", help="markdown page to write them into")
    return p


def main(args: argparse.Namespace) -> None:
    """Print or write."""
    if args.write:
        write_page(args.results, Path(args.write))
    else:
        print("\n".join(render(*parse_results(text)) for text in args.results))


if __name__ == "__main__":
    cli.run(make_parser(), main)
