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
    "validate_bf16", "validate_fp8",
)  # fmt: skip


def final_metrics(run: Path, share: float = 0.1) -> dict[str, list[float]]:
    """Loss and accuracy per draft step, averaged over the last tenth of a run (one step has few conversations)."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is missing: the chain did not finish")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tail = lines[-max(5, int(share * len(lines))) :]
    rows = sum(m["supervised_rows"] for m in tail) or 1
    return {
        name: [sum(m[name][k] * m["supervised_rows"] for m in tail) / rows for k in range(len(tail[-1][name]))]
        for name in ("loss_per_step", "accuracy_per_step")
    }


def summarize(run: Path) -> dict[str, Any]:
    """The figures of the table as one dictionary."""
    plain, fp8 = read_json(run / "validate_bf16.json"), read_json(run / "validate_fp8.json")
    finetune, qat = final_metrics(run / "finetuned"), final_metrics(run / "qat")
    seconds = {}
    for name in STAGES:
        file = run / ".stages" / name
        if file.is_file():
            seconds[name] = float(file.read_text())
    return {
        "acceptance_length_bf16": plain["acceptance_length"],
        "acceptance_length_bf16_ci95": plain["ci95"],
        "acceptance_length_fp8": fp8["acceptance_length"],
        "acceptance_length_fp8_ci95": fp8["ci95"],
        "acceptance_per_position_bf16": plain["acceptance_per_position"],
        "acceptance_per_position_fp8": fp8["acceptance_per_position"],
        "dtype_bf16": plain["about"]["dtype"],
        "dtype_fp8": fp8["about"]["dtype"],
        "text_identical": plain["text_identical"],
        "text_mismatches": len(plain["mismatches"]),
        "text_near_ties": plain["near_ties"],
        "text_identical_fp8": fp8["text_identical"],
        "text_mismatches_fp8": len(fp8["mismatches"]),
        "text_near_ties_fp8": fp8["near_ties"],
        "text_answers": fp8["answers"],
        "tokens_per_second_base": plain["base"]["tokens_per_second"],
        "tokens_per_second_draft": plain["speculative"]["tokens_per_second"],
        "loss_per_step_bf16": finetune["loss_per_step"],
        "accuracy_per_step_bf16": finetune["accuracy_per_step"],
        "loss_per_step_fp8": qat["loss_per_step"],
        "accuracy_per_step_fp8": qat["accuracy_per_step"],
        "seconds_per_stage": seconds,
        "seconds_total": round(sum(seconds.values()), 1),
        "export_dir": str((run / "export").resolve()),
        "export_dir_bf16": str((run / "export_bf16").resolve()),
        "plot": str((run / "training.png").resolve()),
    }


def _verdict(s: dict[str, Any], kind: str) -> str:
    wrong, ties, answers = s[f"text_mismatches{kind}"], s[f"text_near_ties{kind}"], s["text_answers"]
    if s[f"text_identical{kind}"]:
        return f"yes, all {answers} answers"
    return f"NO, {wrong} of {answers} answers differ ({ties} of them where two tokens are as good as equal)"


def table(s: dict[str, Any]) -> str:
    """The summary as text."""
    lines = ["draft step      loss bf16  accuracy bf16   loss fp8   accuracy fp8"]
    columns = zip(
        s["loss_per_step_bf16"],
        s["accuracy_per_step_bf16"],
        s["loss_per_step_fp8"],
        s["accuracy_per_step_fp8"],
        strict=True,
    )
    lines += [
        f"{i:>10}   {a:>12.3f} {100 * b:>13.1f}% {c:>10.3f} {100 * d:>13.1f}%" for i, (a, b, c, d) in enumerate(columns)
    ]
    for kind in ("bf16", "fp8"):
        length, interval = s[f"acceptance_length_{kind}"], s[f"acceptance_length_{kind}_ci95"]
        if length is None:
            lines.append(f"acceptance length {kind:<5} none: no answer was longer than one token")
            continue
        positions = " ".join(f"{100 * p:.0f}%" for p in s[f"acceptance_per_position_{kind}"])
        lines.append(
            f"acceptance length {kind:<5} {length:.3f}  (95 % confidence {interval[0]:.3f}-{interval[1]:.3f}; "
            f"per position {positions})"
        )
    lines.append(
        f"(bf16 is the unquantised draft, computed in {s['dtype_bf16']}; fp8 is simulated in {s['dtype_fp8']})"
    )
    lines.append(f"text identical to the base's greedy text: {_verdict(s, '')}")
    lines.append(f"with the fp8 base and draft:              {_verdict(s, '_fp8')}")
    lines.append("seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in s["seconds_per_stage"].items()))
    lines.append(f"total {s['seconds_total']:.0f} s")
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
