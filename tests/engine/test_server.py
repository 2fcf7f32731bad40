"""Two real servers of vLLM, with and without a draft, started by our commands and compared by our benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from megatron_spec.export.draft import export_draft
from megatron_spec.serving.draft import exported
from megatron_spec.serving.vllm import vllm_command
from tests.engine.conftest import ROOT, free_port, started, vllm_server, wait_for
from tests.engine.drafts import setting, train
from tools import bench_server, get_smollm2

pytestmark = pytest.mark.engine


@contextmanager
def server(command: list[str], log: Path, port: int) -> Iterator[str]:
    """The server of a `vllm serve ...` command, up and answering."""
    with started(vllm_server(command[2:], port), log) as process:
        wait_for(process, log, port)
        yield f"http://127.0.0.1:{port}"


def test_a_draft_served_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ROOT / get_smollm2.DEFAULT_OUTPUT
    get_smollm2.get_model(base)
    words = (ROOT / "examples/post_training/data/heldout_prompts.jsonl").read_text().splitlines()[:8]
    questions = [json.loads(line) for line in words]
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in questions))
    made = setting(base, [[1, 2, 3, 4, 5, 6, 7, 8]], 24, "eagle3")
    draft = train(made, "eagle3", 20, 1e-3)
    folder = export_draft(draft, made.reference, tmp_path / "draft", None, made.world, dtype="float32", ends=made.base)
    with ExitStack() as stack:
        ports = free_port(), free_port()
        command = vllm_command(exported(folder), str(base), ports[0])
        alone = ["vllm", "serve", str(base), "--port", str(ports[1])]
        urls = [
            stack.enter_context(server(c, tmp_path / f"{p}.log", p))
            for c, p in zip((command, alone), ports, strict=True)
        ]
        arguments = ["--url", urls[0], "--compare", urls[1], "--data", str(data), "--concurrency", "1,2"]
        arguments += ["--max-tokens", "24", "--warm-up", "1", "--output", str(tmp_path / "report.json")]
        bench_server.main(bench_server.make_parser().parse_args(arguments))
    report = json.loads((tmp_path / "report.json").read_text())
    for level in report["levels"]:
        with_draft, without = level["servers"]
        assert level["equal_answers"] == 1.0
        assert with_draft["tokens"] == without["tokens"] > 0
        assert with_draft["acceptance"]["acceptance_length"] >= 1.0 and without["acceptance"] == {}
        assert len(with_draft["acceptance"]["acceptance_per_position"]) == 3
    print(capsys.readouterr().out)
