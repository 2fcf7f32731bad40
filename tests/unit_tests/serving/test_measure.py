"""The server benchmark against a small test server: streamed answers, counters, comparison of two servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.serving.measure import Server, acceptance, percentiles, read_counters
from tools import bench_server, convert_questions

pytest.importorskip("openai")
WORDS = ["one ", "two ", "three "]


class Handler(BaseHTTPRequestHandler):
    """Answers every chat with three words, counts drafts like vLLM, and records how many were in flight."""

    server: Any

    def log_message(self, *args: Any) -> None:
        pass

    def _send(self, text: str, kind: str = "application/json", code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        s = self.server
        if self.path == "/v1/models":
            self._send(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))
        elif self.path == "/metrics" and s.text:
            self._send(s.text, "text/plain")
        elif self.path == "/metrics" and s.counts:
            name = "vllm:spec_decode_num"
            positions = "".join(
                f'{name}_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {s.asked * v}\n'
                for i, v in enumerate((2, 1))
            )
            self._send(
                f"# HELP x\n{name}_drafts_total{{engine=\"0\"}} {2.0 * s.asked}\n"
                f"{name}_draft_tokens_total {4 * s.asked}\n{name}_accepted_tokens_total {3 * s.asked}\n"
                f"{positions}", "text/plain",
            )  # fmt: skip
        else:
            self._send("{}", code=404)

    def do_POST(self) -> None:
        s = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["messages"][0]["content"] == "bad":
            self._send(json.dumps({"error": {"message": "too long"}}), code=400)
            return
        if request["messages"][0]["content"] == "whole":
            self._send(json.dumps({"id": "1", "choices": []}))
            return
        with s.lock:
            s.asked += 1
            s.requests.append({**request, "key": self.headers["Authorization"]})
            s.waiting += 1
            s.most = max(s.most, s.waiting)
        if s.barrier is not None:
            s.barrier.wait(timeout=30)  # all workers are here at once
        chunks = [{"choices": [{"index": 0, "delta": {s.field: s.prefix + word}}]} for word in WORDS[: s.words]]
        usage = {"completion_tokens": 7 if s.words else 0, "prompt_tokens": 1, "total_tokens": 8}
        chunks += [{"choices": [], "usage": usage}] if s.usage else []
        common = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        text = "".join(f"data: {json.dumps({**common, **chunk})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        with s.lock:
            s.waiting -= 1
        self._send(text, "text/event-stream")


@pytest.fixture
def servers() -> Iterator[list[Any]]:
    started = []
    for prefix in ("", "x"):
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.asked = server.waiting = server.most = 0
        server.requests, server.lock, server.prefix = [], threading.Lock(), prefix
        server.field, server.words, server.usage, server.text = "content", 3, True, ""
        server.counts, server.barrier = prefix == "", None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
    yield started
    for server in started:
        server.shutdown()


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def questions(path: Path, *turns: str) -> Path:
    lines = [{"question_id": i, "category": "a" if i else "b", "turns": [t, "and then?"]} for i, t in enumerate(turns)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: str) -> None:
    bench_server.main(bench_server.make_parser().parse_args(list(arguments)))


def test_compares_two_servers(
    servers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    data = questions(tmp_path / "q.jsonl", "p", "q", "r", "s")
    servers[0].barrier = threading.Barrier(2)
    run(
        "--url", url(servers[0]), "--compare", url(servers[1]) + "/v1", "--data", str(data), "--concurrency", "2",
        "--warm-up", "0", "--max-tokens", "9", "--output", str(tmp_path / "r.json"), "--ignore-eos",
    )  # fmt: skip
    report = json.loads((tmp_path / "r.json").read_text())
    a, b = report["levels"][0]["servers"]
    assert a["requests"] == b["requests"] == 4 and a["tokens"] == 28  # the server's count, not the chunks'
    assert a["tokens_per_second"] > 0 and set(a["latency_ms"]) == {"p50", "p90", "p99"}
    assert 0 < a["first_token_ms"]["p50"] <= a["latency_ms"]["p99"]
    assert a["acceptance"] == {
        "drafts": 8, "draft_tokens": 16, "accepted_tokens": 12, "acceptance_length": 2.5, "accepted_share": 0.75,
        "acceptance_per_position": [1.0, 0.5],
    }  # fmt: skip
    assert b["acceptance"] == {} and report["levels"][0]["equal_answers"] == 0.0
    assert servers[0].most == 2
    request = servers[0].requests[0]
    assert request["key"] == "Bearer secret" and "secret" not in (tmp_path / "r.json").read_text()
    assert request["max_tokens"] == 9 and request["ignore_eos"] is True and request["temperature"] == 0
    assert capsys.readouterr().out.count("\n| ") == 3


def test_bad_flags_are_refused_before_any_request(servers: list[Any], tmp_path: Path) -> None:
    data = questions(tmp_path / "q.jsonl", "p")
    for flags, words in (
        (["--output", str(data)], "is also the output"),
        (["--output", str(tmp_path)], "is a folder"),
        (["--output", str(data / "report.json")], "cannot be written"),
        (["--temperature", "-1"], "expected a number of at least 0"),
    ):
        with pytest.raises(UserError, match=words):
            run("--url", url(servers[0]), "--data", str(data), *flags)
    with pytest.raises(UserError, match="localhost:8000: expected the URL of a server"):
        run("--url", "localhost:8000", "--data", str(data))
    assert servers[0].requests == []


def test_the_system_text_is_sent(servers: list[Any], tmp_path: Path) -> None:
    line = {"question_id": 1, "system": "be brief", "turns": ["p", "q"]}
    data = tmp_path / "q.jsonl"
    data.write_text(json.dumps(line))
    run("--url", url(servers[0]), "--data", str(data), "--concurrency", "1", "--warm-up", "0")
    assert [m["content"] for m in servers[0].requests[0]["messages"]] == ["be brief", "p"]
    chat = {"messages": [{"role": "user", "content": "p"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    data.write_text(json.dumps(chat))
    with pytest.raises(UserError, match="tools and chat_template_kwargs are not sent"):
        run("--url", url(servers[0]), "--data", str(data))


def test_server_refusals_are_reported(servers: list[Any], tmp_path: Path) -> None:
    data = str(questions(tmp_path / "q.jsonl", "bad"))
    with pytest.raises(UserError, match="too long"):
        run("--url", url(servers[0]), "--data", data)
    with pytest.raises(UserError, match="did not stream"):
        run("--url", url(servers[0]), "--data", str(questions(tmp_path / "w.jsonl", "whole")))
    with pytest.raises(UserError, match="is the server up"):
        run("--url", "http://127.0.0.1:9", "--data", data)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_text_that_was_generated(servers: list[Any], field: str) -> None:
    """vLLM and SGLang stream it in a field of its own: its first token is the first token."""
    servers[0].field = field
    server = Server(url(servers[0]), "m", {})
    answer = asyncio.run(server.ask([{"role": "user", "content": "p"}]))
    assert answer.text == "one two three " and answer.tokens == 7


def test_a_server_without_usage(servers: list[Any], tmp_path: Path, caplog: Any, capsys: Any) -> None:
    """Chunks stand for tokens, with a warning; a server that writes nothing has no speed to compare with."""
    servers[0].usage, servers[1].words = False, 0
    data, output = questions(tmp_path / "q.jsonl", "p", "q"), tmp_path / "r.json"
    with caplog.at_level("WARNING"):
        run("--url", url(servers[0]), "--compare", url(servers[1]), "--data", str(data), "--output", str(output))
    assert caplog.text.count("reports no usage") == 1
    [level] = json.loads(output.read_text())["levels"]
    assert [s["tokens"] for s in level["servers"]] == [6, 0] and level["speedup"] is None
    assert "| A / B | 1 | - |" in capsys.readouterr().out


def test_percentiles_are_values() -> None:
    assert percentiles(i / 1000 for i in range(1, 101)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([0.5]) == {"p50": 500.0, "p90": 500.0, "p99": 500.0} and percentiles([]) == {}


def test_no_counters() -> None:
    assert read_counters("http://127.0.0.1:9") == {} == acceptance({}, {"vllm:spec_decode_num_drafts": 0.0})
    plain = {"sglang:generation_tokens": 9.0, "sglang:num_requests": 1.0}  # a server without a draft
    assert acceptance({}, plain) == {}


def test_acceptance_of_sglang(servers: list[Any]) -> None:
    """SGLang counts requests, tokens (by kind of request) and verifications, and has no counter of accepted tokens."""
    before = {"sglang:num_requests": 2.0, "sglang:generation_tokens": 10.0, "sglang:spec_verify_calls": 4.0}
    labels = 'model_name="m",is_streaming='
    servers[0].text = (
        f'sglang:generation_tokens_total{{{labels}"true"}} 40\nsglang:generation_tokens_total{{{labels}"false"}} 4\n'
        f'sglang:num_requests_total{{{labels}"true"}} 5\nsglang:spec_verify_calls_total{{model_name="m"}} 14\n'
    )
    after = read_counters(url(servers[0]))
    # 34 tokens: 3 by the prompts, 10 by as many verifications, 21 accepted
    assert acceptance(before, after) == {"drafts": 10, "accepted_tokens": 21, "acceptance_length": 3.1}


# ---- question files


def convert(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    convert_questions.main(convert_questions.make_parser().parse_args(list(arguments)))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_question_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = questions(tmp_path / "q.jsonl", "p")
    before = data.read_bytes()
    with pytest.raises(UserError, match="is also the question file"):
        convert(capsys, str(data), "--output", str(data))
    assert data.read_bytes() == before


def test_question_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(questions(tmp_path / "q.jsonl", "p", "ü"))
    assert convert(capsys, data) == [{"text_input": "p"}, {"text_input": "ü"}]
    assert convert(capsys, data, "--turns", "all", "--limit", "3", "--field", "text") == [
        {"text": "p"}, {"text": "and then?"}, {"text": "ü"}
    ]  # fmt: skip
    bench = convert(capsys, data, "--category", "a", "--format", "trtllm-bench", "--output-tokens", "5")
    assert bench == [{"task_id": 0, "prompt": "ü", "output_tokens": 5}]
    for wrong in (["--category", "c"], ["--format", "trtllm-bench", "--field", "text"], ["--output-tokens", "5"]):
        with pytest.raises(UserError):
            convert(capsys, data, *wrong)


def test_system_texts_are_rendered_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "q.jsonl"
    data.write_text(json.dumps({"question_id": 1, "system": "s", "turns": ["p", "q"]}))
    with pytest.raises(UserError, match="line 1: found messages of system, user, expected one question"):
        convert(capsys, str(data))
    monkeypatch.setattr(
        convert_questions, "renderer", lambda _: lambda messages, _: " | ".join(m["content"] for m in messages)
    )
    found = convert(capsys, str(data), "--turns", "all", "--chat-template", "x")
    assert found == [{"text_input": "s | p"}, {"text_input": "s | q"}]
