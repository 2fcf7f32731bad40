"""Answers from a server: correct, complete and not repeated, whatever the server does."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_spec.config import UserError
from megatron_spec.data.conversations import read_conversations
from megatron_spec.generation.prompts import read_prompts
from megatron_spec.generation.server import ServerOptions, generate_from_server
from tests.held import held
from tests.unit_tests.data.chat_fixtures import disk_of
from tests.unit_tests.tools.misbehaving_server import Server, echo, says
from tools import server_generate

pytest.importorskip("openai")
ROOT = Path(__file__).parents[3]


class Pauses(list):
    async def __call__(self, seconds):
        self.append(seconds)
        await asyncio.sleep(0)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"conversation_id": f"c{i}", "turns": [f"q{i}", f"and {i}"][: 1 + i % 2]} for i in range(10)]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def ask(prompts, output, server, **options):
    options = {"retries": 6, "concurrency": 3, **options}
    urls = options.pop("urls", None) or (server.url,)
    pauses = Pauses()
    found = generate_from_server(read_prompts(prompts), output, ServerOptions(urls, **options), sleep=pauses)
    return found, pauses


def lines(path):
    return {r["conversation_id"]: r for r in map(json.loads, path.read_text().splitlines())} if path.exists() else {}


def expected(i):
    return [x for q in [f"q{i}", f"and {i}"][: 1 + i % 2] for x in (q, f"to {q}")]


def check(output, count=10):
    found = lines(output)
    assert {k: [m["content"] for m in r["conversations"]] for k, r in found.items()} == {
        f"c{i}": expected(i) for i in range(count)
    }
    assert len(output.read_text().splitlines()) == count, "each conversation once"


def test_a_second_run_into_a_file_is_refused(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    with Server() as server:
        with held(output, file=True) as other:
            with pytest.raises(UserError, match=f"out.jsonl is in use by process {other.pid}"):
                ask(prompts, output, server)
            assert not server.requests and not output.exists()
        assert ask(prompts, output, server)[0].written == 10


def test_turns_are_sent_in_order_with_settings(prompts, tmp_path):
    output = tmp_path / "deep" / "out.jsonl"
    with Server() as server:
        totals, _ = ask(
            prompts, output, server, system_prompt="Be brief.", sampling={"temperature": 0.5, "max_tokens": 9},
            extra_body={"top_k": 4}, seed=1,
        )  # fmt: skip
    assert (totals.written, totals.tokens, totals.rejected) == (10, 45, 0)
    assert totals.speed == 45 / totals.seconds > 0
    found = lines(output)
    assert [m["content"] for m in found["c3"]["conversations"]] == ["Be brief.", *expected(3)]
    assert found["c3"]["finish_reasons"] == ["stop", "stop"] and found["c3"]["truncated"] is False
    second = next(b for b in server.requests if b["messages"][-1]["content"] == "and 3")
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert (second["temperature"], second["max_tokens"], second["top_k"], second["model"]) == (0.5, 9, 4, "m")
    assert len({b["seed"] for b in server.requests}) == 15
    assert len(list(read_conversations(output))) == 10


def test_rerun_requests_only_missing_answers_and_refuses_other_settings(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    with Server() as server:
        ask(prompts, output, server)
        text = output.read_text()
        third = text.splitlines(keepends=True)[:3]
        output.write_text("".join(third) + '{"conversation_id": "c9", "conv')  # a kill in the middle of a line
        asked = len(server.requests)
        done = {json.loads(line)["conversation_id"] for line in third}
        totals, _ = ask(prompts, output, server)
        assert totals.written == 7
        check(output)
        again = {b["messages"][0]["content"] for b in server.requests[asked:]}
        assert again == {f"q{i}" for i in range(10) if f"c{i}" not in done}
        with pytest.raises(UserError, match=r"other settings \(system_prompt: found None, now 'x'\)"):
            ask(prompts, output, server, system_prompt="x")
    check(output)


@pytest.mark.parametrize("broken", ["nonsense", "[1]", '{"conversations": []}', '{"conversation_id": [1]}'])
def test_an_output_with_other_lines_is_refused(prompts, tmp_path, broken):
    output = tmp_path / "out.jsonl"
    output.write_text(json.dumps({"conversation_id": "c0"}) + f"\n{broken}\n")
    with pytest.raises(UserError, match=r"out.jsonl line 2 is not a conversation record: use another output file"):
        ask(prompts, output, None, urls=("http://nowhere",), model="m")


def test_a_file_of_one_line_without_an_end_is_not_cut(prompts, tmp_path):
    output = tmp_path / "thesis.tex"
    output.write_text("do not lose me")
    with pytest.raises(UserError, match=r"thesis.tex already exists, but thesis.tex.meta.json, .* is missing"):
        ask(prompts, output, None, urls=("http://nowhere",), model="m")
    assert output.read_text() == "do not lose me"


def test_other_questions_under_known_identifiers_are_refused(prompts, tmp_path):
    output, system = tmp_path / "out.jsonl", "Be brief."
    with Server() as server:
        ask(prompts, output, server, system_prompt=system)
        assert ask(prompts, output, server, system_prompt=system)[0].written == 0
        text = prompts.read_text()
        for old, new in (("q4", "another"), ("and 5", "another")):
            prompts.write_text(text.replace(old, new))
            with pytest.raises(UserError, match=f"conversation c{old[-1]} has other questions"):
                ask(prompts, output, server, system_prompt=system)
    assert len(lines(output)) == 10


def test_full_disk_is_a_user_error_and_a_rerun_goes_on(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    with Server() as server:
        with disk_of(700), pytest.raises(UserError, match=r"out.jsonl cannot be written: larger than a file may be"):
            ask(prompts, output, server)
        ask(prompts, output, server)
    check(output)


def test_failures_are_retried_with_backoff(prompts, tmp_path, caplog):
    failures = [500, (429, {"retry_after": "7"}), "half", "close", "garbage", 503, 500, "half"]
    with Server(lambda n, body: failures[n] if n < len(failures) else echo(n, body)) as server:
        totals, pauses = ask(prompts, tmp_path / "out.jsonl", server, concurrency=1, retries=8)
    assert caplog.text.count("trying again, up to 8 times") == 1
    check(tmp_path / "out.jsonl")
    assert totals.retries == len(failures) == len(pauses) and totals.unanswered == 0
    assert pauses[1] == 7.0  # what the server asked for
    rest = [p for i, p in enumerate(pauses) if i != 1]
    assert rest == sorted(rest) and rest[0] < 1 and rest[-1] > 20


def test_a_refused_connection_moves_to_the_other_endpoint(prompts, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    with Server() as one, Server() as two:
        totals, pauses = ask(prompts, tmp_path / "out.jsonl", None, urls=(dead, one.url, two.url))
        assert one.requests and two.requests and totals.unanswered == 0 and 1 <= len(pauses) <= 4
    check(tmp_path / "out.jsonl")
    with pytest.raises(UserError, match=r"no server named its model: .*APIConnectionError"):
        ask(prompts, tmp_path / "other.jsonl", None, urls=(dead,), retries=2)


def test_server_crash_ends_the_run_and_keeps_finished_conversations(prompts, tmp_path, monkeypatch):
    from megatron_spec.generation import server as library

    monkeypatch.setattr(library, "GIVE_UP_AFTER", 3)
    output = tmp_path / "out.jsonl"
    gone = pytest.raises(UserError, match=r"3 conversations in a row were not answered .*a rerun resumes")
    with Server(lambda n, body: echo(n, body) if n < 6 else 500) as server, gone:
        ask(prompts, output, server, concurrency=1, retries=1)
    assert set(lines(output)) == {"c0", "c1", "c2", "c3"}
    with Server() as server:
        assert ask(prompts, output, server)[0].written == 6
    check(output)


def test_one_bad_conversation_does_not_stop_the_others(prompts, tmp_path):
    def act(number, body):
        last = body["messages"][-1]["content"]
        odd = {"q2": 400, "q4": says(" "), "q5": says("cut", "length"), "q6": 500}
        return odd.get(last) or echo(number, body)

    output = tmp_path / "out.jsonl"
    rejected = tmp_path / "out.jsonl.rejected"
    with Server(act) as server:
        totals, _ = ask(prompts, output, server, retries=1)
        assert (totals.written, totals.rejected, totals.unanswered) == (6, 3, 1)
        assert set(lines(output)) == {f"c{i}" for i in (0, 1, 3, 7, 8, 9)}
        problems = {k: r["problem"] for k, r in lines(rejected).items()}
        assert set(problems) == {"c2", "c4", "c5"} and "BadRequestError" in problems["c2"]
        assert "empty answer" in problems["c4"] and "cut" in problems["c5"]
        assert lines(rejected)["c5"]["finish_reasons"] == ["length"]
        asked = len(server.requests)
        server.act = echo
        assert ask(prompts, output, server)[0].written == 1, "only the one nobody answered is asked again"
        assert len(server.requests) == asked + 1
    with Server(act) as server:
        ask(prompts, tmp_path / "kept.jsonl", server, retries=1, keep_truncated=True)
        kept = lines(tmp_path / "kept.jsonl")["c5"]
        assert kept["truncated"] and [m["content"] for m in kept["conversations"]] == ["q5", "cut"]


def test_explicit_model_needs_no_model_list(prompts, tmp_path):
    with Server(models=500) as server:
        with pytest.raises(UserError, match=r"no server named its model: .*InternalServerError.*--model NAME"):
            ask(prompts, tmp_path / "out.jsonl", server)
        ask(prompts, tmp_path / "out.jsonl", server, model="mine")
        assert {b["model"] for b in server.requests} == {"mine"}
    check(tmp_path / "out.jsonl")


def test_a_wrong_key_or_model_ends_the_run_at_once(prompts, tmp_path):
    for status in (401, 404):
        with Server(lambda n, body, status=status: status) as server:
            with pytest.raises(UserError, match=r"check --url, --model and the key"):
                ask(prompts, tmp_path / "out.jsonl", server)
            assert len(server.requests) <= 3
    assert lines(tmp_path / "out.jsonl") == {}


def test_killed_process_resumes(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    flags = ["--data-path", str(prompts), "--output-path", str(output), "--concurrency", "1"]
    process = None

    def act(number, body):
        if number == 8:  # between the two turns of c5
            process.send_signal(signal.SIGKILL)
            process.wait()
        return echo(number, body)

    with Server(act) as server:
        command = [sys.executable, "tools/server_generate.py", "--url", server.url, *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        assert process.wait(120) == -signal.SIGKILL
        assert set(lines(output)) == {f"c{i}" for i in range(5)}
        server_generate.generate(server_generate.make_parser().parse_args(["--url", server.url, *flags]))
    check(output)


def test_invalid_flags_are_refused_before_any_request(prompts, tmp_path):
    def run(*flags):
        given = ["--data-path", str(prompts), "--output-path", str(tmp_path / "out.jsonl"), *flags]
        server_generate.generate(server_generate.make_parser().parse_args(given))

    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with Server() as server:
        for flags, words in (
            (["--url", "localhost:8000"], "localhost:8000: expected the URL of a server"),
            (["--data-path", str(empty)], "contains no prompts"),
            (["--timeout", "0"], "expected a positive number of seconds"),
            (["--temperature", "-1"], "--temperature -1.0: expected a number of at least 0"),
            (["--top-p", "0"], "--top-p 0.0: expected a number above 0"),
            (["--extra-body", "[1]"], "expected a JSON object"),
            (["--extra-body", "{"], "is not JSON"),
            (["--temperature", "1", "--extra-body", '{"temperature": 0, "n": 2}'], "replaces n, temperature of every"),
            (["--temperature", "0", "--seed", "1"], "--seed needs a --temperature above 0"),
            (["--temperature", "0", "--top-k", "5"], "--top-k needs a --temperature above 0"),
            (["--data-path", str(tmp_path / "absent")], "no such file"),
            (["--output-path", str(prompts)], "is the file of the prompts"),
        ):
            with pytest.raises(UserError, match=words):
                run("--url", server.url, *flags)
        with pytest.raises(SystemExit):
            run("--retries", "-1")
        assert server.requests == []


VLLM = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.unit_tests.tools.misbehaving_server import Server
assert sys.argv[1:5] == ["serve", "MODEL", "--tensor-parallel-size", "2"], sys.argv
if {dies}:
    sys.exit("no such model")
Server(port=int(sys.argv[sys.argv.index("--port") + 1])).http.serve_forever()
"""


def test_job_array_task_starts_its_server_and_takes_its_shard(prompts, tmp_path):
    (tmp_path / "srun").write_text(
        "#!/usr/bin/env bash\nwhile true; do case $1 in --*=*) shift ;; --*) shift 2 ;; *) break ;; esac; done\n"
        'exec "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)

    def task(index, dies=False, **more):
        program = tmp_path / "vllm"
        program.write_text(VLLM.format(python=sys.executable, root=str(ROOT), dies=dies))
        program.chmod(0o755)
        job = {
            "MODEL": "MODEL", "DATA": str(prompts), "OUTPUT": str(tmp_path / "train.jsonl"), "TP": "2",
            "REPO": str(ROOT), "PYTHON": sys.executable, "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "1",
            "SLURM_ARRAY_TASK_ID": str(index), **more,
        }  # fmt: skip
        script = ROOT / "examples/post_training/slurm/server_generate.sbatch"
        return subprocess.run(
            ["bash", str(script), "--max-tokens", "9"], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, **job, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        )  # fmt: skip

    done = task(1, SLURM_ARRAY_TASK_COUNT="1", SHARDS="2")  # the second of two, alone
    assert done.returncode == 0, done.stderr
    assert set(lines(tmp_path / "train-00001-of-00002.jsonl")) == {f"c{i}" for i in range(1, 10, 2)}
    assert json.loads((tmp_path / "train-00001-of-00002.jsonl.meta.json").read_text())["sampling"] == {"max_tokens": 9}
    with Server(port=20000 + os.getpid() % 20000):  # of another job
        foreign = task(0)
    assert foreign.returncode == 1 and "belongs to another server" in foreign.stderr
    assert not (tmp_path / "train.jsonl").exists() and not list(tmp_path.glob("*-00000-*"))
    dead = task(0, dies=True)
    assert dead.returncode == 1 and "the server ended: see server-" in dead.stderr


def test_shards_cover_all_prompts(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    with Server() as server:
        flags = ["--url", server.url, "--data-path", str(prompts), "--output-path", str(output), "--top-k", "5"]
        for i in range(3):
            server_generate.generate(server_generate.make_parser().parse_args([*flags, "--shard", f"{i}/3"]))
        assert {b["top_k"] for b in server.requests} == {5}
        for wrong in ("3/3", "a/2", "1"):
            with pytest.raises(UserError, match=r"expected I/N"):
                server_generate.generate(server_generate.make_parser().parse_args([*flags, "--shard", wrong]))
    parts = sorted(tmp_path.glob("out-*.jsonl"))
    assert [p.name for p in parts] == [f"out-0000{i}-of-00003.jsonl" for i in range(3)]
    assert sorted(len(lines(p)) for p in parts) == [3, 3, 4]
    output.write_text("".join(p.read_text() for p in parts))
    check(output)


def message(finish="stop", tokens=3, **values):
    body = says("It is 25.", finish, tokens)
    body["choices"][0]["message"].update(values)
    return body


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_under_one_name(prompts, tmp_path, name, caplog):
    output = tmp_path / "out.jsonl"
    with Server(lambda n, body: message(tokens=40, **{name: "Five times five, so 25."})) as server:
        ask(prompts, output, server)
    said = lines(output)["c0"]["conversations"][-1]
    assert said == {"role": "assistant", "content": "It is 25.", "reasoning_content": "Five times five, so 25."}
    assert "far less text" not in caplog.text


def test_text_withheld_by_the_server_is_counted(prompts, tmp_path, caplog):
    with Server(lambda n, body: message(tokens=200)) as server:
        totals, _ = ask(prompts, tmp_path / "out.jsonl", server)
    assert totals.unreturned == 15 and "15 answers have far less text than the server counts" in caplog.text


@pytest.mark.parametrize("reason", ["tool_calls", "stop"])  # some servers say stop
def test_tools_and_template_arguments_reach_server_and_file(tmp_path, reason):
    path, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    record = {"conversation_id": "a", "turns": ["Bern?", "Rome?"], "tools": json.dumps(tools), "system": "Be brief."}
    path.write_text(json.dumps({**record, "chat_template_kwargs": {"thinking": True}}) + "\n")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    with Server(lambda n, body: message(reason, content=None, tool_calls=[call])) as server:
        totals, _ = ask(path, output, server, template_kwargs={"thinking": False, "lang": "de"})
    sent, line = server.requests[0], lines(output)["a"]
    assert sent["tools"] == line["tools"] == tools and totals.written == 1
    assert sent["chat_template_kwargs"] == line["chat_template_kwargs"] == {"thinking": True, "lang": "de"}
    assert line["conversations"][-1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert "round 0 called a tool, so 1 further rounds" in line["problem"] and line["truncated"] is False


def test_truncated_and_unwritable_answers_are_rejected_and_counted(prompts, tmp_path, caplog):
    output = tmp_path / "out.jsonl"
    answers = [message("length"), message(content="half \ud83d")]
    with Server(lambda n, body: answers[1 - n % 2]) as server:
        totals, _ = ask(prompts, output, server, concurrency=1)
    assert (totals.rejected, totals.cut) == (10, 5) and "5 conversations were cut" in caplog.text
    problems = [r["problem"] for r in lines(tmp_path / "out.jsonl.rejected").values()]
    assert any("found \\ud83d, a lone surrogate" in p for p in problems)
    assert any("was cut (finish reason length), so 1 further rounds" in p for p in problems)


def test_template_arguments_are_given_once():
    parse = server_generate.make_parser().parse_args
    flags = ["--data-path", "p", "--output-path", "o"]
    extra = {"chat_template_kwargs": {"a": 1}, "min_p": 0.1}
    assert server_generate.template_kwargs(parse(flags), extra) == {"a": 1} and extra == {"min_p": 0.1}
    both = parse([*flags, "--chat-template-kwargs", '{"a": 1}'])
    with pytest.raises(UserError, match=r"give one of them"):
        server_generate.template_kwargs(both, {"chat_template_kwargs": {}})
