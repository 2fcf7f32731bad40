"""Driver of scale.py: every layout of a machine's GPUs against one GPU, in child processes; tables and JSON.

Each line that a child prints is a result. A layout that crashes, or prints nothing for `PATIENCE` seconds, is reported
as failed, and the remaining layouts run in new processes.
"""

from __future__ import annotations

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

SCRIPT = Path(__file__).with_name("scale.py")
PATIENCE = 240.0
Finding = dict[str, Any]


def layouts(gpus: int, engine: bool) -> tuple[list[str], list[str]]:
    """(layouts for equality, for throughput) on `gpus` GPUs, with Transformer Engine's layers if `engine`."""
    n = gpus
    equal = [f"tp{n}", f"tp{n}sp", f"pp{n}", f"dp{n}", f"cp{n}"]
    fast = [f"dp{n}", f"pp{n}", f"tp{n}", f"tp{n}sp", f"cp{n}@16384x1"]
    if n >= 4:
        equal += ["tp2pp2", "cp2", "tp2cp2sp"]
    return equal + ([f"tp{n}te", f"tp{n}spte", f"pp{n}te", f"cp{n}te"] if engine else []), fast


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
    throughput without some fast paths."""

    gpus: int
    kinds: list[str]
    only: list[str] | None
    tiny: bool
    without: tuple[str, ...] = ()

    def of(self, every: list[str]) -> list[str]:
        """The chosen ones; a layout is also chosen by its name before @."""
        return [x for x in every if self.only is None or {x, x.split("@")[0]} & set(self.only)]

    def check(self, *lists: list[str]) -> None:
        """End the program if a chosen layout is in none of the lists."""
        every = list(dict.fromkeys(x for found in lists for x in found))
        if missing := [x for x in self.only or () if not any(x in (y, y.split("@")[0]) for y in every)]:
            raise SystemExit(f"--layouts: found {' '.join(missing)}, expected some of {' '.join(every)}")


def prove(chosen: Chosen, output: Path | None, reference: Path | None) -> int:
    """Equality and throughput on several GPUs; prints tables. Returns the exit status."""
    import importlib.util

    engine, gpus = _cuda() and importlib.util.find_spec("transformer_engine") is not None, chosen.gpus
    equal, fast = layouts(gpus, engine)
    chosen.check(equal, fast)
    equal, fast = chosen.of(equal), chosen.of(fast)
    report: dict[str, Any] = {"gpus": gpus, "transformer_engine": engine, "equality": [], "speed": [], "failed": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = ["--reference", str(reference or temporary)]
        off = ["--without", *chosen.without] if chosen.without else []
        alone = sorted({"one" + name[name.index("@") :] if "@" in name else "one" for name in fast})
        parts = [
            ("equality", 1, ["one", *(["onete"] if any("te" in x for x in equal) else [])], ["--no-speed", *folder]),
            ("equality", gpus, equal, ["--no-speed", *folder]),
            ("speed", 1, alone, ["--no-equality", *off]),
            ("speed", gpus, fast, ["--no-equality", "--features-ahead", "8", "--warmup", "1", "--steps", "4", *off]),
        ]
        for kind, count, wanted, own in parts:
            if kind not in chosen.kinds or not (equal if kind == "equality" else fast):
                continue
            findings, failures = run(count, wanted, [*own, *(["--tiny"] if chosen.tiny else [])])
            report[kind] += findings
            report["failed"] += [f"{kind} {failure}" for failure in failures]
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
