"""Table and summary.json of a finished chain run: python tools/summarize_run.py RUN_DIR

RUN_DIR is the --output of examples/post_training/train_eagle3_and_export.sh.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.runtime.files import read_json, write_json

STAGES = (
    "synthesize", "calibrate_vocab", "convert", "finetune", "quantize", "qat", "export_bf16", "export",
    "validate_bf16", "validate_lookup", "validate_fp8",
)  # fmt: skip
FOLDERS = {"bf16": "finetuned", "fp8": "qat"}
"""Where the metrics of each training are."""


def final_metrics(run: Path) -> dict[str, list[float]]:
    """Loss and accuracy per draft step, averaged over the last tenth of a run (one step has few conversations)."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is missing: the chain did not finish")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tail = lines[-max(5, len(lines) // 10) :]
    rows = sum(m["supervised_rows"] for m in tail) or 1
    return {
        name: [sum(m[name][k] * m["supervised_rows"] for m in tail) / rows for k in range(len(tail[-1][name]))]
        for name in ("loss_per_step", "accuracy_per_step")
    }


def summarize(run: Path) -> dict[str, Any]:
    """The figures of the table as one dictionary; a chain without fp8 or without a lookup has none of these figures."""
    names = [name for name in ("bf16", "lookup", "fp8") if name == "bf16" or (run / f"validate_{name}.json").is_file()]
    reports = {name: read_json(run / f"validate_{name}.json") for name in names}
    trained = {name: final_metrics(run / folder) for name, folder in FOLDERS.items() if name in reports}
    seconds = {}
    for name in STAGES:
        file = run / ".stages" / name
        if file.is_file():
            seconds[name] = float(file.read_text())
    plain, found = reports["bf16"], {}
    for name, report in reports.items():
        found[f"acceptance_length_{name}"] = report["acceptance_length"]
        found[f"acceptance_length_{name}_ci95"] = report["ci95"]
        found[f"acceptance_per_position_{name}"] = report["acceptance_per_position"]
        found[f"dtype_{name}"] = report["about"]["dtype"]
        kind = "" if name == "bf16" else f"_{name}"
        found[f"text_answers{kind}"] = report["answers"]
        found[f"text_identical{kind}"] = report["text_identical"]
        # `mismatches` lists exact ties, too, which are no differences; an older report does not count them.
        found[f"text_mismatches{kind}"] = report.get("differences", len(report["mismatches"]))
        found[f"text_near_ties{kind}"] = report["near_ties"]
    for name, metrics in trained.items():
        found |= {f"{key}_{name}": values for key, values in metrics.items()}
    return {
        **found,
        "tokens_per_second_base": plain["base"]["tokens_per_second"],
        "tokens_per_second_draft": plain["speculative"]["tokens_per_second"],
        "seconds_per_stage": seconds,
        "seconds_total": round(sum(seconds.values()), 1),
        **({"export_dir": str((run / "export").resolve())} if "fp8" in reports else {}),
        "export_dir_bf16": str((run / "export_bf16").resolve()),
        "plot": str((run / "training.png").resolve()),
    }


def _verdict(s: dict[str, Any], kind: str) -> str:
    wrong, ties, answers = s[f"text_mismatches{kind}"], s[f"text_near_ties{kind}"], s[f"text_answers{kind}"]
    if s[f"text_identical{kind}"]:
        return f"yes, all {answers} answers"
    return f"NO, {wrong} of {answers} answers differ ({ties} of them where two tokens are as good as equal)"


def _steps(s: dict[str, Any]) -> list[str]:
    """Loss and accuracy of every draft step."""
    fp8 = "loss_per_step_fp8" in s
    lines = ["draft step      loss bf16  accuracy bf16" + ("   loss fp8   accuracy fp8" if fp8 else "")]
    for i, (loss, right) in enumerate(zip(s["loss_per_step_bf16"], s["accuracy_per_step_bf16"], strict=True)):
        line = f"{i:>10}   {loss:>12.3f} {100 * right:>13.1f}%"
        if fp8:
            line += f" {s['loss_per_step_fp8'][i]:>10.3f} {100 * s['accuracy_per_step_fp8'][i]:>13.1f}%"
        lines.append(line)
    return lines


def _acceptance(s: dict[str, Any], kind: str, name: str) -> str:
    length, interval = s[f"acceptance_length_{kind}"], s[f"acceptance_length_{kind}_ci95"]
    if length is None:
        return f"acceptance length {name} none: no answer was longer than one token"
    positions = " ".join(f"{100 * p:.0f}%" for p in s[f"acceptance_per_position_{kind}"])
    return (
        f"acceptance length {name} {length:.3f}  (95 % confidence {interval[0]:.3f}-{interval[1]:.3f}; "
        f"per position {positions})"
    )


def table(s: dict[str, Any]) -> str:
    """The summary as text."""
    lines = _steps(s)
    for kind, name in (("bf16", "bf16 "), ("lookup", "with a lookup"), ("fp8", "fp8  ")):
        if f"acceptance_length_{kind}" in s:
            lines.append(_acceptance(s, kind, name))
    simulated = f"; fp8 is simulated in {s['dtype_fp8']}" if "dtype_fp8" in s else ""
    lines.append(f"(bf16 is the unquantised draft, computed in {s['dtype_bf16']}{simulated})")
    lines.append(f"text identical to the base's greedy text: {_verdict(s, '')}")
    if "text_identical_lookup" in s:
        lines.append(f"with the lookup:                          {_verdict(s, '_lookup')}")
    if "text_identical_fp8" in s:
        lines.append(f"with the fp8 base and draft:              {_verdict(s, '_fp8')}")
    lines.append("seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in s["seconds_per_stage"].items()))
    lines.append(f"total {s['seconds_total']:.0f} s")
    if "export_dir" in s:
        lines.append(f"exported draft and base, fp8: {s['export_dir']}")
    lines.append(f"exported draft, bf16: {s['export_dir_bf16']}")
    lines.append(f"plot: {s['plot']}")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> None:
    """Print the table, write RUN_DIR/summary.json."""
    run = Path(args.run)
    summary = summarize(run)
    write_json(run / "summary.json", summary)
    print(table(summary))
    print(f"summary: {(run / 'summary.json').resolve()}")


if __name__ == "__main__":
    parser = cli.Parser(__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="output folder of the chain")
    cli.run(parser, main)
