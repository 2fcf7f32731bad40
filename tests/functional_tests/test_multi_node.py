"""Two torchrun agents with an address each, and the SLURM script with stand-ins for SLURM's own commands."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests.script_helpers import ROOT, environment, make_base, write_conversations

SLURM = ROOT / "examples" / "post_training" / "slurm"


def convert_and_train(root: Path) -> None:
    """A fresh draft, and two steps in this process."""
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    convert(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")
    train = TrainConfig(train_iters=2, global_batch_size=2, lr_decay_style="constant")
    goal = ObjectiveConfig(ttt_steps=2)
    run = FinetuneRun(f"{root}/draft", f"{root}/one", f"{root}/train.jsonl", train, goal, ParallelConfig(), 64)
    assert finetune(run)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nodes")
    make_base(root / "base")
    write_conversations(root / "train.jsonl", 6)
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    convert_and_train(root)
    return root


def training(root: Path, save: str, iterations: int) -> list[str]:
    return [
        "--load", f"{root}/draft", "--save", f"{root}/{save}", "--data", f"{root}/train.jsonl", "--seq-length", "64",
        "--train-iters", str(iterations), "--global-batch-size", "2", "--ttt-steps", "2",
        "--lr-decay-style", "constant",
    ]  # fmt: skip


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_nodes_train_what_one_process_trains(root: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = str(ROOT / "examples" / "post_training" / "finetune.py")
    agents = []
    for node in (1, 2):
        start = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}",
            "--local-addr", f"127.0.0.{node}", script, *training(root, "two", 2), "--pipeline-model-parallel-size", "2",
        ]  # fmt: skip
        agents.append(
            subprocess.Popen(
                start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(CUDA_VISIBLE_DEVICES="")
            )
        )
    said = [agent.communicate(timeout=250)[0].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(text[-3000:] for text in said)
    assert any("PP 2, layers per stage [4, 4]" in text for text in said)
    assert losses(root / "two") == pytest.approx(losses(root / "one"), rel=1e-5)


SRUN = """#!/usr/bin/env bash
while [ $# -gt 0 ]; do case $1 in --overlap) shift ;; --*) shift 2 ;; *) break ;; esac; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in show) echo localhost ;; requeue) echo "$2" >> "$REQUEUED" ;; esac
"""


def test_the_slurm_script_saves_is_queued_again_and_goes_on(root: Path, tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "repository").symlink_to(ROOT)  # its processes are found by this path
    job = environment(
        CUDA_VISIBLE_DEVICES="",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", REPO=f"{tmp_path}/repository", PYTHON=sys.executable,
        SLURM_SUBMIT_DIR=str(SLURM), SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="n",
        GPUS="1", TP="1", PRECISION="", REQUEUED=f"{tmp_path}/requeued", DRAFT=f"{root}/draft", SAVE=f"{root}/slurm",
        DATA=f"{root}/train.jsonl",
    )  # fmt: skip
    flags = training(root, "slurm", 100_000)[6:]
    script = ["bash", str(SLURM / "finetune.sbatch")]
    run = subprocess.Popen([*script, *flags], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=job)
    assert run.stdout is not None
    seen = ""
    for line in run.stdout:
        seen += line
        if re.search(r"step 2/100000", line):
            run.send_signal(signal.SIGUSR1)
            break
    seen += run.communicate(timeout=200)[0]
    assert run.returncode == 0, seen[-3000:]
    stopped = re.search(r"stopped by a signal at iteration (\d+): queued again", seen)
    assert stopped and (tmp_path / "requeued").read_text().split() == [str(os.getpid())], seen[-3000:]
    last = int(stopped[1])
    assert (root / "slurm" / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)
    flags[flags.index("100000")] = str(last + 2)
    done = subprocess.run([*script, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=job)
    assert done.returncode == 0 and f"at iteration {last}" in done.stdout, done.stdout[-3000:]
    iterations = [json.loads(x)["iteration"] for x in (root / "slurm" / "metrics.jsonl").read_text().splitlines()]
    assert iterations == list(range(1, last + 3))


@pytest.mark.parametrize("script", sorted(SLURM.glob("*.sbatch")), ids=lambda p: p.stem)
def test_scripts_are_valid_and_ask_for_nothing_unknown(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    name = re.search(r"^launch (\w+)\.py", script.read_text(), re.MULTILINE)
    if name is None:
        return  # it starts a server, not a script of the chain
    sys.path.insert(0, str(ROOT / "examples" / "post_training"))
    try:
        known = __import__(name[1]).parser()._option_string_actions
    finally:
        sys.path.pop(0)
    command = script.read_text().split("launch ", 1)[1].split('"$@"')[0]
    for flag in re.findall(r" (--[a-z][a-z0-9-]+)", command):
        assert flag in known, flag
