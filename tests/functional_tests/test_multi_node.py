"""Two torchrun agents with an address each, and the SLURM script with stand-ins for SLURM's own commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests.script_helpers import ROOT, environment, write_inputs
from tests.worlds import free_port

SLURM = ROOT / "examples" / "post_training" / "slurm"


def convert_and_train(root: Path) -> None:
    """A fresh draft, and two steps in this process."""
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.config import ObjectiveConfig, TrainConfig

    convert(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")
    train = TrainConfig(train_iters=2, global_batch_size=2, lr_decay_style="constant")
    goal = ObjectiveConfig(ttt_steps=2)
    run = FinetuneRun(f"{root}/draft", f"{root}/one", f"{root}/train.jsonl", train, goal, seq_length=64)
    assert finetune(run)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_inputs(tmp_path_factory.mktemp("nodes"), 6)
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


def test_two_nodes_equal_one_process(root: Path) -> None:
    port = free_port()
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
[ -z "${STEPS:-}" ] || echo "$*" >> "$STEPS"
while [ $# -gt 0 ]; do
  case $1 in --overlap | --*=* | --kill-on-bad-exit) shift ;; --*) shift 2 ;; *) break ;; esac
done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
  requeue) echo "$2" >> "$REQUEUED" ;;
  show) case $2 in hostnames) echo localhost ;; job) echo "   Command=$COMMAND" ;; esac ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$PWD" "$@" > "$RECORD"
"""


def stand_ins(folder: Path, **programs: str) -> str:
    """Value of PATH with stand-ins for SLURM's commands, and `programs`, before all others."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, **programs}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_slurm_script_saves_requeues_and_resumes(root: Path, tmp_path: Path) -> None:
    path = stand_ins(tmp_path)
    (tmp_path / "c++ [1]").symlink_to(ROOT)  # its processes are found by this path
    job = environment(
        CUDA_VISIBLE_DEVICES="",
        PATH=path, REPO=f"{tmp_path}/c++ [1]", PYTHON=sys.executable,
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


TASK = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "CONTAINER": "image.sqsh"}
GIVEN = {
    "BASE": "/m/base", "DRAFT": "/r/c0", "LOAD": "/r/c1", "SAVE": "/r/c2", "DATA": "train.jsonl", "VOCAB": "/r/vocab",
    "FEATURES": "", "EXPORT": "/out", "OUTPUT": "answers.jsonl",
}  # fmt: skip
FLAGS = {
    "calibrate": ["--draft-vocab-size", "32"], "finetune": ["--train-iters", "9"], "export": ["--export-extra-modules"],
    "validate": ["--output", "v.json"], "extract_features": ["--seq-length", "64"],
}  # fmt: skip


def submit(script: str, tmp_path: Path, *flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    """As sbatch starts a script: a copy of it, in another folder, with what SLURM sets."""
    original = SLURM / f"{script}.sbatch"
    spool = tmp_path / "spool" / "slurm_script"
    spool.parent.mkdir(exist_ok=True)
    spool.write_text(original.read_text())
    env = environment(
        PATH=stand_ins(tmp_path, python=PYTHON), PYTHON=f"{tmp_path}/python", RECORD=f"{tmp_path}/record",
        STEPS=f"{tmp_path}/steps", COMMAND=f"{original} --export-dir x", **{**TASK, **GIVEN, **more},
    )  # fmt: skip
    return subprocess.run(["bash", str(spool), *flags], cwd=tmp_path, env=env, capture_output=True, text=True)


def test_a_job_that_is_stopped_before_its_first_checkpoint_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program stands for one that still loads: the job gets its signal, and so does the program, which ends."""
    program = """#!/usr/bin/env bash
kill -USR1 "$(ps -o ppid= -p $PPID | tr -d ' ')"
exit 138
"""
    monkeypatch.setitem(globals(), "PYTHON", program)
    job = submit("finetune", tmp_path, REQUEUED=f"{tmp_path}/requeued", CONTAINER="")
    assert job.returncode == 0, job.stderr
    assert "stopped by a signal at iteration 0: queued again" in job.stdout
    assert (tmp_path / "requeued").read_text().split() == ["7"]


@pytest.mark.parametrize("script", sorted(p.stem for p in SLURM.glob("*.sbatch") if p.stem != "server_generate"))
def test_scripts_run_from_any_folder_through_the_container(script: str, tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MAX": "3"}
    given = {**array, "FEATURES": "/features"} if script == "extract_features" else {}
    done = submit(script, tmp_path, *FLAGS.get(script, []), **given)
    assert done.returncode == 0, done.stderr
    assert "--container-image image.sqsh --container-mounts" in (tmp_path / "steps").read_text()
    folder, *words = (tmp_path / "record").read_text().splitlines()
    assert folder == str(tmp_path)  # relative paths mean what the reader typed
    index = next(i for i, word in enumerate(words) if word.endswith(".py"))
    program, arguments = Path(words[index]), words[index + 1 :]
    assert program.is_file() and program.is_relative_to(ROOT)
    assert script == "calibrate" or words[:4] == ["-m", "torch.distributed.run", "--nnodes", "2"]
    sys.path.insert(0, str(program.parent))
    try:
        module = __import__(program.stem)
    finally:
        sys.path.pop(0)
    parsed = (module.parser if hasattr(module, "parser") else module.make_parser)().parse_args(arguments)
    if script == "extract_features":
        assert parsed.part == (3, 4)


def test_variables_that_are_not_read_are_named(tmp_path: Path) -> None:
    both = submit("finetune", tmp_path, "--train-iters", "9", FEATURES="/f", CONTAINER="", MOUNTS="/a:/a")
    assert both.returncode == 0 and "DATA=train.jsonl is not read" in both.stderr, both.stderr
    assert "MOUNTS=/a:/a is not used" in both.stderr
    assert "--offline-data\n/f\n" in (tmp_path / "record").read_text()
    neither = submit("finetune", tmp_path, "--train-iters", "9", DATA="")
    assert neither.returncode != 0 and "DATA: conversations, or FEATURES" in neither.stderr
    made_up = submit("generate", tmp_path, "--synthesize", "9", DATA="")
    assert made_up.returncode == 0 and "--data" not in (tmp_path / "record").read_text().split()


def test_single_tasks_of_an_array_can_be_repeated(tmp_path: Path) -> None:
    """--array 3,7 of sixteen: the number of parts is not that of the tasks."""
    again = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MAX": "7", "FEATURES": "/f"}
    done = submit("extract_features", tmp_path, "--seq-length", "64", **again, SHARDS="16")
    assert done.returncode == 0 and "--part\n7/16\n" in (tmp_path / "record").read_text(), done.stderr
    for shards, words in ({}, "set SHARDS"), ({"SHARDS": "4"}, "parts are numbered from 0"):
        (tmp_path / "record").unlink(missing_ok=True)
        done = submit("extract_features", tmp_path, "--seq-length", "64", **again, **shards)
        assert done.returncode != 0 and words in done.stderr and not (tmp_path / "record").exists()
