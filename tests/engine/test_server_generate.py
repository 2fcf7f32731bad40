"""server_generate.py against real servers: started before them, killed in the middle, right in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engine.conftest import ROOT, engine_python, free_port, started, vllm_server, wait_for
from tools import get_smollm2

pytestmark = pytest.mark.engine
TOKENS = 24
QUESTIONS = [
    ["What is the capital of France?", "And of Italy?"],
    ["Say hello."],
    ["Name a colour."],
    ["Count to five."],
]


def command(engine: str, base: Path, port: int) -> list[str]:
    """Of a server for `base`."""
    if engine == "vllm":
        return vllm_server([str(base)], port)
    serve = str(Path(engine_python("vllm")).with_name("transformers"))  # vLLM brings transformers and what it needs
    return [serve, "serve", str(base), "--device", "cpu", "--dtype", "float32", "--port", str(port)]


def greedy(base: Path, dialogue: list[dict[str, str]]) -> str:
    """What the base says next, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_run_that_is_killed_gives_the_answers_of_the_base(engine: str, tmp_path: Path) -> None:
    base, port = ROOT / get_smollm2.DEFAULT_OUTPUT, free_port()
    get_smollm2.get_model(base)
    data, output, log = (tmp_path / name for name in ("q.jsonl", "out.jsonl", "log"))
    data.write_text("".join(json.dumps({"conversation_id": q[0], "turns": q}) + "\n" for q in QUESTIONS))
    tool = [
        sys.executable, "tools/server_generate.py", "--url", f"http://127.0.0.1:{port}/v1", "--data-path", str(data),
        "--output-path", str(output), "--max-tokens", str(TOKENS), "--temperature", "0", "--concurrency", "2",
        "--keep-truncated", "--retries", "12", "--system-prompt", "Be brief.",
    ]  # fmt: skip
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    if engine == "transformers":
        tool += ["--model", str(base)]  # its list holds what the hub's cache holds
    with started(command(engine, base, port), log) as server:
        first = subprocess.Popen(tool, cwd=ROOT, env=own)  # nobody listens yet
        try:
            wait_for(server, log, port)
            while first.poll() is None and not (output.exists() and output.read_text().count("\n")):
                with suppress(subprocess.TimeoutExpired):
                    first.wait(timeout=0.2)
        finally:
            first.kill()
            first.wait()
        before = output.read_text().splitlines()
        assert before, "it answered before it was killed"
        again = subprocess.run(tool, cwd=ROOT, env=own, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr + log.read_text()[-3000:]
        lines = output.read_text().splitlines()
        assert lines[: len(before)] == before and len(lines) == len(QUESTIONS)
    found = {r["conversation_id"]: r for r in map(json.loads, lines)}
    for asked in QUESTIONS:
        record = found[asked[0]]
        talk = record["conversations"]
        assert [m["role"] for m in talk] == ["system", *["user", "assistant"] * (len(talk) // 2)]
        assert set(record["finish_reasons"]) <= {"stop", "length"}
        assert record["truncated"] == (record["finish_reasons"][-1] == "length")
        for i, message in enumerate(talk):
            if message["role"] == "assistant":
                assert message["content"].strip() == greedy(base, talk[:i]).strip()
