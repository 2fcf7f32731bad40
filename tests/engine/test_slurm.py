"""The batch scripts under a real SLURM of one machine: convert, and a training that is queued again and then cancelled.

Needs Debian's packages slurm-wlm and munge; the daemons are the test's own, in its folder and on ports of its own.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.engine.conftest import ROOT, free_port
from tests.functional_tests.script_helpers import environment, make_base, write_conversations

pytestmark = pytest.mark.engine
BATCH = ROOT / "examples" / "post_training" / "slurm"
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldPort={port}
SlurmdPort={second}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1
NodeName={host} CPUs={cpus} Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""A node that says it has the eight GPUs the scripts ask for; a job that is queued again starts after five seconds."""


def until(process: subprocess.Popen[bytes], done: Callable[[], bool], what: str, patience: float = 240) -> None:
    """Wait for `done`. AssertionError when the process ends first, or it takes too long."""
    deadline = time.monotonic() + patience
    while not done():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        assert process.poll() is None and time.monotonic() < deadline, what


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands reach the daemons."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    programs = [shutil.which(name, path=path) for name in (*DAEMONS, "sbatch")]
    if None in programs:
        pytest.skip("SLURM is not there: apt-get install slurm-wlm munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    gpus = [folder / f"gpu{i}" for i in range(8)]
    for gpu in gpus:
        gpu.touch()
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in gpus))
    values = {"host": platform.node().split(".")[0], "user": getpass.getuser(), "folder": folder, "port": free_port()}
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(**values, second=free_port(), cpus=os.cpu_count()), encoding="utf-8"
    )
    env = environment(
        SLURM_CONF=f"{folder}/slurm.conf", PYTHON=sys.executable, GPUS="1", TP="1", PRECISION="",
        GOMP_SPINCOUNT="10000", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    files = {name: f"{folder}/{name}" for name in ("key", "seed", "munged.pid", "munge.sock", "munged.log")}
    munged = ["--key-file", files["key"], "--seed-file", files["seed"], "--pid-file", files["munged.pid"],
              "--socket", files["munge.sock"], "--log-file", files["munged.log"]]  # fmt: skip
    commands = [[programs[0], "--foreground", "--force", *munged], [programs[1], "-D"], [programs[2], "-D"]]
    with ExitStack() as stack:
        for name, command in zip(DAEMONS, commands, strict=True):
            log = stack.enter_context((folder / f"{name}.out").open("wb"))
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)  # type: ignore[arg-type]
            stack.callback(stop, daemon)
            if name == "munged":
                until(daemon, (folder / "munge.sock").exists, "munged did not start")
        until(daemon, lambda: "idle" in say(env, "sinfo", "--noheader"), "no node became idle")
        yield env
        say(env, "scancel", "--user", getpass.getuser())
        until(daemon, lambda: not say(env, "squeue", "--noheader"), "a job did not end")


def stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    daemon.wait(timeout=60)


def say(env: dict[str, str], *command: str) -> str:
    """Output of one of SLURM's commands."""
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def test_a_training_is_queued_again_when_its_time_ends_and_not_when_it_is_cancelled(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    make_base(tmp_path / "base")
    write_conversations(tmp_path / "train.jsonl", 6)

    def submit(script: str, *flags: str, **variables: str) -> subprocess.Popen[bytes]:
        command = ["sbatch", "--wait", "--nodes", "1", str(BATCH / f"{script}.sbatch"), *flags]
        return subprocess.Popen(command, cwd=tmp_path, env={**cluster, **variables})

    def log(name: str) -> str:
        return "".join(p.read_text() for p in tmp_path.glob(f"spec-{name}-*.log"))

    draft, run = tmp_path / "draft", tmp_path / "run"
    assert submit("convert", BASE=f"{tmp_path}/base", DRAFT=f"{draft}").wait(timeout=240) == 0, log("convert")
    flags = ("--train-iters", "100000", "--seq-length", "64", "--global-batch-size", "2", "--ttt-steps", "2")
    job = submit("finetune", *flags, DRAFT=f"{draft}", SAVE=f"{run}", DATA=f"{tmp_path}/train.jsonl")
    until(job, lambda: "step 2/100000" in log("finetune"), "no step was trained")
    number = say(cluster, "squeue", "--noheader", "--format", "%i").strip()
    say(cluster, "scancel", "--signal", "USR1", "--batch", number)
    until(job, lambda: "continuing" in log("finetune"), "it did not go on")
    [saved] = re.findall(r"stopped by a signal at iteration (\d+): queued again", log("finetune"))
    assert f"continuing {run} at iteration {saved}" in log("finetune")
    assert "Restarts=1" in say(cluster, "scontrol", "show", "job", number)
    until(job, lambda: len(iterations(run)) > int(saved) + 2, "it did not train on")
    say(cluster, "scancel", number)
    assert job.wait(timeout=120) != 0
    assert "submit it again to continue" in log("finetune") and not say(cluster, "squeue", "--noheader")
    assert iterations(run) == list(range(1, len(iterations(run)) + 1))


def iterations(run: Path) -> list[int]:
    """Steps that were written down, without a line that is being written."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line)["iteration"] for line in lines if line.endswith("\n")]
