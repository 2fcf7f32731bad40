"""Memory and time of the data pipeline for files of several sizes: prepare -> calibrate -> finetune (2 steps).

    python benchmarks/data_scale.py --model SMOLLM2 --megabytes 100 1000

Conversations are made from source code, with the defects of real files: ShareGPT's names, duplicates, wrong roles,
questions without an answer. Every step is a process as a user starts it. Its memory is sampled twice a second: the
resident set of the largest process, and that of all processes with shared pages counted once. Memory that is equal for
all sizes does not grow with the data. Prints a Markdown table; all files are removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data_throughput import make_conversations
from megatron_spec import cli
from megatron_spec.config import UserError

ROOT = Path(__file__).resolve().parents[1]
PLACES = (0.25, 0.5, 0.75)
DRAFT_VOCAB = 16384


@dataclass
class Usage:
    """Usage of one command: seconds, and MiB of its largest process and of all processes, sampled twice a second."""

    seconds: float
    largest: list[float]
    together: list[float]

    def row(self, megabytes: int, name: str) -> str:
        """Row of the table."""
        places = " / ".join(f"{self.together[int(p * len(self.together))]:.0f}" for p in PLACES)
        return (
            f"| {megabytes} | {name} | {self.seconds:.0f} | {max(self.largest):.0f} | {max(self.together):.0f} "
            f"| {places} |"
        )


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--model", required=True, metavar="DIR", help="base, small enough for this machine")
    p.add_argument("--megabytes", type=cli.at_least_one, nargs="+", default=[100, 1000], metavar="N")
    p.add_argument("--seq-length", type=cli.at_least_one, default=512)
    p.add_argument("--work-dir", metavar="DIR", help="temporary folder with five times the space (default: /tmp)")
    return p


def watch(command: list[str], log: Path) -> Usage:
    """Run a script of the repository. Raises UserError with the end of its output if it fails."""
    start, largest, together = time.monotonic(), [0.0], [0.0]
    with log.open("w") as out:
        process = psutil.Popen([sys.executable, *command], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            sizes = [_sizes(one) for one in [process, *_children(process)]]
            if sizes[0][0]:  # 0: it has just ended
                largest.append(max(resident for resident, _ in sizes))
                together.append(sum(own for _, own in sizes))
            try:
                process.wait(0.5)
            except psutil.TimeoutExpired:
                continue
    if process.returncode:
        raise UserError(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return Usage(time.monotonic() - start, largest, together)


def _sizes(process: psutil.Process) -> tuple[float, float]:
    """MiB (resident, proportional share of shared pages); 0 if it has ended."""
    try:
        found = process.memory_full_info()
    except psutil.Error:
        return 0.0, 0.0
    return found.rss / 2**20, getattr(found, "pss", found.rss) / 2**20


def _children(process: psutil.Popen) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.Error:
        found = []
    return found


def steps(model: str, folder: Path, seq_length: int) -> dict[str, list[str]]:
    """Name of a step -> its command; each reads the output of earlier ones."""
    data, vocab, chain = f"{folder}/train.jsonl", f"{folder}/vocab", "examples/post_training"
    (folder / "eagle.json").write_text(json.dumps({"draft_vocab_size": DRAFT_VOCAB}))
    return {
        "prepare": ["tools/prepare_conversations.py", f"{folder}/raw.jsonl", "--output", data],
        "calibrate": [
            "tools/calibrate_draft_vocab.py", "--model", model, "--data", data, "--draft-vocab-size", str(DRAFT_VOCAB),
            "--save-dir", vocab, "--seq-length", str(seq_length),
        ],
        "convert": [
            f"{chain}/convert_model.py", "--load", model, "--save", f"{folder}/draft", "--draft-vocab", vocab,
        ],
        "finetune": [
            f"{chain}/finetune.py", "--load", f"{folder}/draft", "--save", f"{folder}/run", "--data", data, "--packing",
            "--seq-length", str(seq_length), "--train-iters", "2", "--global-batch-size", "4", "--ttt-steps", "3",
        ],
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Measure and print the table."""
    parent = Path(tempfile.mkdtemp(prefix="data-scale-", dir=args.work_dir))
    sys.stdout.write(
        "| MB | step | seconds | peak MiB | all | at "
        + " / ".join(f"{p:.0%}" for p in PLACES)
        + " of the time, all |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    try:
        for megabytes in args.megabytes:
            folder = parent / str(megabytes)
            folder.mkdir()
            make_conversations(folder / "raw.jsonl", megabytes, untidy=True)
            for name, command in steps(str(Path(args.model).resolve()), folder, args.seq_length).items():
                used = watch(command, folder / f"{name}.log")
                if name != "convert":
                    sys.stdout.write(used.row(megabytes, name) + "\n")
                    sys.stdout.flush()
                if name == "prepare":
                    (folder / "raw.jsonl").unlink()
                sys.stderr.write((folder / f"{name}.log").read_text()[-1500:])
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


if __name__ == "__main__":
    cli.run(make_parser(), measure)
