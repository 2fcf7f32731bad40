"""Driver of scale.py: every layout of a machine's GPUs against one GPU, in child processes; tables and JSON.

Each line that a child prints is a result. A layout that crashes, or prints nothing for `PATIENCE` seconds, is reported
as failed, and the remaining layouts run in new processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import layouts, small_base
from megatron_spec.config import BaseConfig, UserError

SCRIPT = Path(__file__).with_name("scale.py")
PATIENCE = 240.0
Finding = dict[str, Any]


def run(gpus: int, wanted: list[str], flags: list[str]) -> tuple[list[Finding], list[str]]:
    """(results, failures) of layouts on `gpus` GPUs."""
    findings: list[Finding] = []
    failures: list[str] = []
    left = list(wanted)
    while left:
        start = [sys.executable]
        if gpus > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": "0"} if gpus == 1 and _cuda() else {})}
        child = subprocess.Popen(
            [*start, str(SCRIPT), *left, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip
        begun, last = _listen(child, findings)
        if child.returncode == 0:
            break
        failed = begun or left[0]
        failures.append(f"{failed}: {' | '.join(last)[-1500:]}")
        print(f"failed: {failures[-1]}", flush=True)
        left = left[left.index(failed) + 1 :]
    return findings, failures


def _listen(child: subprocess.Popen[str], findings: list[Finding]) -> tuple[str, deque[str]]:
    """Collect a child's results until it ends; returns (its current layout, its last other lines)."""
    begun, last = "", deque[str](maxlen=12)
    assert child.stdout is not None

    def watch() -> threading.Timer:
        timer = threading.Timer(PATIENCE, os.killpg, (child.pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()
        return timer

    timer = watch()
    for line in child.stdout:
        timer.cancel()
        timer = watch()
        if not line.startswith("{"):
            last.append(line.strip())
            continue
        entry = json.loads(line)
        if "begin" in entry:
            begun = entry["begin"]
            last.clear()
        else:
            findings.append(entry)
            print(line, end="", flush=True)
    child.wait()
    timer.cancel()
    return begun, last


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True)
class Chosen:
    """What to run: kinds ("equality", "speed") and layouts (None: all) on `gpus` GPUs, with miniatures if `tiny`, and
    throughput without some fast paths, at `ttt_steps` draft steps."""

    gpus: int
    kinds: list[str]
    only: list[str] | None
    tiny: bool
    without: tuple[str, ...] = ()
    model: str = "8b"
    ttt_steps: int | None = None

    def of(self, every: list[str]) -> list[str]:
        """The chosen ones; a layout is also chosen by its name before @."""
        return [x for x in every if self.only is None or {x, x.split("@")[0]} & set(self.only)]

    def possible(self, kind: str, wanted: list[str], count: int) -> tuple[list[str], list[str]]:
        """(those of `wanted` that `count` GPUs can run, why they cannot run the others)."""
        base, found, reasons = _shape(kind, self.model, self.tiny), [], []
        for name in wanted:
            try:
                layouts.check(name, base, count)
                found.append(name)
            except UserError as e:
                reasons.append(str(e))
        return found, reasons

    def flags(self, kind: str) -> list[str]:
        """Of the child processes of this kind."""
        found = ["--model", self.model, *(["--tiny"] if self.tiny else [])]
        if kind == "equality":
            return found
        steps = [] if self.ttt_steps is None else ["--ttt-steps", str(self.ttt_steps)]
        return [*found, *steps, *(["--without", *self.without] if self.without else [])]


def _shape(kind: str, model: str, tiny: bool) -> BaseConfig:
    if kind == "speed":
        return layouts.speed_shape(model, tiny)[1]
    return small_base.small_shape(layouts.has_experts(model), tiny)


def _engine() -> bool:
    return _cuda() and importlib.util.find_spec("transformer_engine") is not None


def check(gpus: int, model: str, only: list[str] | None, tiny: bool) -> None:
    """Raise UserError for a model that one GPU does not hold, and for a chosen layout that is unknown or impossible."""
    if model in layouts.TOO_LARGE and not tiny:
        raise UserError(f"--gpus compares with one GPU, which does not hold --model {model}: give layouts instead")
    for name in only or ():
        layouts.check(name, _shape("speed", model, tiny), gpus)
    every = list(
        dict.fromkeys(x for found in layouts.every(gpus, _engine(), layouts.has_experts(model)) for x in found)
    )
    if missing := [x for x in only or () if not any(x in (y, y.split("@")[0]) for y in every)]:
        raise UserError(f"--layouts: found {' '.join(missing)}, expected some of {' '.join(every)}")


def prove(chosen: Chosen, output: Path | None, reference: Path | None) -> int:
    """Equality and throughput on several GPUs; prints tables. Returns the exit status."""
    engine, gpus = _engine(), chosen.gpus
    equal, fast = (chosen.of(found) for found in layouts.every(gpus, engine, layouts.has_experts(chosen.model)))
    report: dict[str, Any] = {
        "gpus": gpus, "model": chosen.model, "transformer_engine": engine, "equality": [], "speed": [], "failed": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = ["--reference", str(reference or temporary)]
        alone = sorted({"one" + name[name.index("@") :] if "@" in name else "one" for name in fast})
        parts = [
            ("equality", 1, ["one", *(["onete"] if any("te" in x for x in equal) else [])], ["--no-speed", *folder]),
            ("equality", gpus, equal, ["--no-speed", *folder]),
            ("speed", 1, alone, ["--no-equality"]),
            ("speed", gpus, fast, ["--no-equality", "--features-ahead", "8", "--warmup", "1", "--steps", "4"]),
        ]
        for kind, count, wanted, own in parts:
            if kind not in chosen.kinds or not (equal if kind == "equality" else fast):
                continue
            wanted, impossible = chosen.possible(kind, wanted, count)
            findings, failures = run(count, wanted, [*own, *chosen.flags(kind)])
            report[kind] += findings
            report["failed"] += [f"{kind} {failure}" for failure in [*impossible, *failures]]
            if output is not None:  # save partial results
                output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n" + tables(report), flush=True)
    return 1 if report["failed"] else 0


def tables(report: dict[str, Any]) -> str:
    """Both Markdown tables."""
    rows = {(e["layout"], e["dtype"]): e for e in report["equality"]}
    lines = [
        "| layout | loss, fp32 | gradient, fp32 | loss, bf16 | gradient, bf16 | bf16 gradient from fp32 of one GPU |",
        "|---|---|---|---|---|---|",
    ]
    for layout in dict.fromkeys(e["layout"] for e in report["equality"]):
        cells = []
        for dtype, names in (
            ("float32", ("loss_difference", "gradient_difference")),
            ("bfloat16", ("loss_difference", "gradient_difference", "gradient_from_fp32")),
        ):
            entry = rows.get((layout, dtype), {})
            cells += [f"{entry[name]:.1e}" if name in entry else "" for name in names]
        lines.append(f"| {layout} | {' | '.join(cells)} |")
    one = {e["layout"]: e["tokens_per_second_per_gpu"] for e in report["speed"] if e["gpus"] == 1}
    lines += ["", "| layout | tokens/s | of it per GPU | ratio to one GPU | peak GiB a GPU |", "|---|---|---|---|---|"]
    for e in report["speed"]:
        at = "one" + (e["layout"][e["layout"].index("@") :] if "@" in e["layout"] else "")
        ratio = f"{e['tokens_per_second_per_gpu'] / one[at]:.1%}" if at in one else ""
        peak = "" if e["peak_gib"] is None else f"{e['peak_gib']:.1f}"
        speeds = f"{e['tokens_per_second']:,.0f} | {e['tokens_per_second_per_gpu']:,.0f}"
        lines.append(f"| {e['layout']} | {speeds} | {ratio} | {peak} |")
    return "\n".join([*lines, *(f"\nfailed: {failure}" for failure in report["failed"])])
