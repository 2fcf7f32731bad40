import gzip
import json
import os
import subprocess
import sys

import pytest

from megatron_spec.config import UserError
from megatron_spec.data import prepare as prepare_library
from megatron_spec.data import sources
from megatron_spec.data.conversations import read_conversations
from megatron_spec.generation.prompts import read_prompts
from tests.functional_tests.script_helpers import ROOT, environment
from tests.unit_tests.data.chat_fixtures import disk_of
from tools import prepare_conversations


def run(*flags):
    prepare_conversations.prepare(prepare_conversations.make_parser().parse_args([str(flag) for flag in flags]))


def share_gpt(*texts):
    names = ("human", "gpt")
    return {"id": "x", "conversations": [{"from": names[i % 2], "value": t} for i, t in enumerate(texts)]}


def open_ai(*texts):
    names = ("user", "assistant")
    return {"messages": [{"role": names[i % 2], "content": t} for i, t in enumerate(texts)]}


def lines(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_names_are_mapped_and_the_rest_counted_by_reason(tmp_path, capsys):
    one, two, out = tmp_path / "a.json", tmp_path / "b.jsonl", tmp_path / "out.jsonl"
    empty_system = open_ai("c", "d")
    empty_system["messages"].insert(0, {"role": "system", "content": ""})
    one.write_text(json.dumps([share_gpt("a", "b"), {"text": "x"}, open_ai("e", " ")]))
    records = [open_ai("a", "b"), empty_system, open_ai("a", "b", "c"), open_ai("lonely"), open_ai("é\u2028", "b")]
    two.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n")
    run(one, two, "--output", out)
    assert [[m["content"] for m in r["conversations"]] for r in lines(out)[:2]] == [["a", "b"], ["c", "d"]]
    assert lines(out)[0]["conversations"][0] == {"role": "user", "content": "a"}
    assert len(list(read_conversations(out))) == 3
    said = capsys.readouterr().out
    assert "3 conversations in" in said and "8 read" in said and "5 dropped:" in said
    for reason in (
        "2 x seen before\n", f"1 x no assistant turn (--make-prompts keeps the questions) (first: {two} line 4)",
        f"1 x empty content (first: {one} entry 2)",
        f"1 x no messages or conversations, only the keys text (first: {one} entry 1)",
    ):  # fmt: skip
        assert reason in said


def test_full_disk_is_a_user_error_and_a_rerun_goes_on(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(open_ai(f"question {i}", "answer")) + "\n" for i in range(20)))
    with disk_of(500), pytest.raises(UserError, match=r"out.jsonl.work cannot be written: larger than a file may be"):
        run(source, "--output", out)
    assert not out.exists()
    run(source, "--output", out)
    assert len(lines(out)) == 20 and sorted(tmp_path.iterdir()) == [source, out]


def test_ids_and_split_depend_on_the_content_only(tmp_path):
    data = [open_ai(f"question {i}", "answer") for i in range(200)]
    sides = []
    for name, order in (("a", data), ("b", data[::-1])):
        source, out, held = (tmp_path / f"{name}{end}" for end in (".jsonl", "-train.jsonl", "-held.jsonl"))
        source.write_text("".join(json.dumps(r) + "\n" for r in order))
        run(source, "--output", out, "--held-out", held, "--held-out-share", 0.3)
        sides.append([{r["conversation_id"]: r["conversations"] for r in lines(path)} for path in (out, held)])
    assert sides[0] == sides[1]
    train, held = sides[0]
    assert len(train) + len(held) == 200 and not train.keys() & held.keys() and 40 <= len(held) <= 80


def test_prompts_and_length_limit(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    records = [open_ai("a", "b", "c", "d"), open_ai("a", "other"), open_ai("x" * 50, "y"), open_ai("q")]
    records += [{"prompt": ["one", "two"], "prompt_id": 7, "category": "maths"}, {**open_ai("a", "b"), "system": "S"}]
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    run(source, "--output", out, "--make-prompts", "--max-characters", 20)
    assert [r["turns"] for r in lines(out)] == [["a", "c"], ["a"], ["q"], ["one", "two"], ["a"]]
    prompts = read_prompts(out)
    assert [len(p.rounds) for p in prompts] == [2, 1, 1, 2, 1] and prompts[3].category == "maths"
    assert [m["role"] for m in prompts[4].rounds[0]] == ["system", "user"]
    assert prompts[0].identifier == lines(out)[0]["conversation_id"]


def test_turns_are_corrected_or_counted_by_reason(tmp_path, capsys):
    def talk(*pairs, **more):
        return {"conversations": [{"from": role, "value": text} for role, text in pairs], **more}

    good = [
        talk(("gpt", "hello"), ("human", "a"), ("gpt", "b"), ("human", "c")),
        talk(("User", "d"), ("Assistant", "e"), system="Be kind."),
        talk(("system", "S"), ("user", "f"), ("chatgpt", "g")),
        {"messages": [
            {"role": "user", "content": "h"}, {"role": "assistant", "content": None, "tool_calls": [{"x": 1}]},
            {"role": "tool", "content": "3"}, {"role": "assistant", "content": "i"},
        ]},
    ]  # fmt: skip
    bad = [
        talk(("human", "a"), ("human", "b"), ("gpt", "c")),
        talk(("human", "a"), ("gpt", "b"), ("gpt", "c")),
        talk(("human", "a"), ("system", "b"), ("gpt", "c")),
        talk(("human", "a"), ("gpt", "")),
        talk(("gpt", "a")),
        talk(("gpt", "a"), ("human", "b")),
        talk(("human", "a"), ("judge", "c")),
        {"conversations": []},
        "text",
        talk(("human", "a"), ("gpt", 7)),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": ["hello"]},
        {"messages": [{"role": "user"}]},
    ]
    source, out = tmp_path / "a.json", tmp_path / "out.jsonl"
    source.write_text(json.dumps([*good, *bad], indent=1))
    run(source, "--output", out)
    roles = [[m["role"] for m in r["conversations"]] for r in lines(out)]
    assert roles == [
        ["user", "assistant"], ["system", "user", "assistant"], ["system", "user", "assistant"],
        ["user", "assistant", "tool", "assistant"],
    ]  # fmt: skip
    assert len(list(read_conversations(out))) == 4
    said = capsys.readouterr().out
    for reason in (
        "13 dropped", "1 x broken alternation: user after user", "1 x broken alternation: assistant after assistant",
        "1 x broken alternation: system after user", "1 x empty content", "1 x no user turn",
        "1 x no question with an answer", "1 x unknown role 'judge'", "1 x no messages (first",
        "1 x a JSON str instead", "3 x content that is not text", "1 x message without role and content",
        "2 corrected", "1 x answer without a question removed at the start",
        "1 x question without an answer removed at the end",
    ):  # fmt: skip
        assert reason in said, reason


def test_formats_give_the_same_lines(tmp_path, monkeypatch):
    data = [open_ai(f"question {i} é" + "x" * (i % 50), "answer \u2028") for i in range(120)]
    folder = tmp_path / "in"
    folder.mkdir()
    text = "".join(json.dumps(r, ensure_ascii=bool(i % 2)) + "\n" for i, r in enumerate(data))
    (folder / "a.jsonl").write_text(text, encoding="utf-8")
    (folder / "b.json").write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8-sig")
    with gzip.open(folder / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.Table.from_pylist(data)
    parquet.write_table(table, folder / "d.parquet", row_group_size=17)
    with pyarrow.OSFile(str(folder / "e.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 17)
    with pyarrow.OSFile(str(folder / "f.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table)
    monkeypatch.setattr(sources, "PIECE_BYTES", 400)
    monkeypatch.setattr(sources, "PIECE_RECORDS", 7)
    for path in sorted(folder.iterdir()):
        run(path, "--output", tmp_path / f"{path.name}.out")
    outputs = [(tmp_path / f"{p.name}.out").read_bytes() for p in sorted(folder.iterdir())]
    assert len(outputs) == 6 and len(set(outputs)) == 1 and outputs[0].count(b"\n") == 120
    run(folder, "--output", tmp_path / "all.out")
    assert (tmp_path / "all.out").read_bytes() == outputs[0]
    # a chunk of the array may end anywhere, and a run may go on from any record
    for chunk in (1, 7, 100):
        assert list(sources._array_records(folder / "b.json", chunk)) == data
    for path in sorted(folder.iterdir()):
        (source,) = sources.find_sources(str(path))
        pieces = list(source.pieces())
        rest = [r for _, records in source.pieces(pieces[3][0]) for r in records]
        assert len(pieces) > 5 and rest == [r for _, records in pieces[4:] for r in records]


def test_folders_of_save_to_disk(tmp_path):
    datasets, out = pytest.importorskip("datasets"), tmp_path / "out.jsonl"
    data = datasets.Dataset.from_list([open_ai(f"q{i}", f"a{i}") for i in range(9)])
    data.select(range(8, 2, -1)).save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict({"train": data, "test": data.select([4])}).save_to_disk(str(tmp_path / "parts"))
    for place, flags, expected in (
        ("one", [], range(8, 2, -1)), ("parts", [], range(9)), ("parts", ["--split", "test"], [4]),
    ):  # fmt: skip
        run(tmp_path / place, "--output", out, *flags)
        assert [m["content"] for r in lines(out) for m in r["conversations"][:1]] == [f"q{i}" for i in expected]
    with pytest.raises(UserError, match=r"parts: no split 'dev', choose one of train, test with --split"):
        run(tmp_path / "parts", "--output", out, "--split", "dev")
    with pytest.raises(UserError, match="--split is for datasets on the hub or of save_to_disk"):
        run(tmp_path / "one", "--output", out, "--split", "train")
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(UserError, match=r"one: state.json names .* save the dataset again"):
        run(tmp_path / "one", "--output", out)


def test_padding_of_columns_of_objects_is_no_argument(tmp_path):
    """A table gives every tool call the arguments of all calls, null where it has none."""
    parquet, out = pytest.importorskip("pyarrow.parquet"), tmp_path / "out.jsonl"
    import pyarrow

    calls = [{"type": "function", "function": {"name": n, "arguments": {n: 1}}} for n in ("a", "b")]
    said = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    asked = [{"role": "user", "content": "q"}, {"role": "tool", "content": "x"}]
    end = {"role": "assistant", "content": "end"}
    record = {"messages": [asked[0], said[0], asked[1], said[1], asked[1], end]}
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "d.parquet")
    run(tmp_path / "d.parquet", "--output", out)
    found = [m["tool_calls"] for m in lines(out)[0]["conversations"] if "tool_calls" in m]
    assert found == [[call] for call in calls]


def test_files_that_are_not_read_are_named(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(open_ai("q", "a")) + "\n")
    (folder / "README.md").write_text("about")
    assert len(sources.find_sources(str(folder))) == 1
    (folder / "b.csv").write_text("question,answer\n")
    with pytest.raises(UserError, match=r"data: found b.csv, expected files that end with .jsonl"):
        sources.find_sources(str(folder))
    with pytest.raises(UserError, match=r"b.csv: expected a file that ends with .jsonl"):
        sources.find_sources(str(folder / "b.csv"))


def test_a_dataset_of_the_hub_is_streamed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(open_ai(f"q{i}", "a")) + "\n" for i in range(9)))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    known = sources.HubDataset(str(folder))
    monkeypatch.setitem(sources.HUB, "magpie", known)
    run("magpie", "--output", tmp_path / "out.jsonl")
    assert [r["conversations"][0]["content"] for r in lines(tmp_path / "out.jsonl")] == [f"q{i}" for i in range(9)]
    assert [r["messages"][0]["content"] for r in sources._hub_records(known, 6)] == ["q6", "q7", "q8"]
    with pytest.raises(UserError, match=r"split nope: cannot be read"):
        run("magpie", "--output", tmp_path / "out.jsonl", "--split", "nope")
    with pytest.raises(UserError, match=r"did you mean 'ultrachat'"):
        run("ultrachta", "--output", tmp_path / "out.jsonl")
    assert sources.find_sources("owner/other", "test")[0].hub == sources.HubDataset("owner/other", "test")


def test_a_json_array_of_the_hub_is_downloaded_and_streamed(tmp_path, monkeypatch):
    import huggingface_hub

    array, asked = tmp_path / "array.json", []
    array.write_text(json.dumps([share_gpt(f"q{i}", "a") for i in range(9)]))

    def download(*args, **options):
        asked.append((*args, options))
        return str(array)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    run("sharegpt", "--output", tmp_path / "out.jsonl")
    known = sources.HUB["sharegpt"]
    assert len(lines(tmp_path / "out.jsonl")) == 9
    assert asked == [(known.repository, known.array_file, {"repo_type": "dataset"})]
    monkeypatch.setattr(sources, "PIECE_RECORDS", 2)
    (source,) = sources.find_sources("sharegpt")
    assert [len(records) for _, records in source.pieces(4)] == [2, 2, 1]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **o: 1 / 0)
    with pytest.raises(UserError, match=r"split.json: cannot be downloaded .*ZeroDivision.*give a local file"):
        run("sharegpt", "--output", tmp_path / "out.jsonl")
    with pytest.raises(UserError, match=r"--split test: sharegpt is one file"):
        run("sharegpt", "--output", tmp_path / "out.jsonl", "--split", "test")


def test_killed_run_resumes_with_the_same_result(tmp_path, monkeypatch):
    data = [open_ai(f"question {i % 70}", "answer") for i in range(100)] + [{"text": "x"}] * 5
    one, two = tmp_path / "a.jsonl", tmp_path / "b.json"
    one.write_text("".join(json.dumps(r) + "\n" for r in data))
    two.write_text(json.dumps([open_ai(f"other {i}", "answer") for i in range(30)]))
    monkeypatch.setattr(sources, "PIECE_BYTES", 700)
    monkeypatch.setattr(sources, "PIECE_RECORDS", 7)
    flags = ["--held-out-share", 0.3, "--output"]
    run(one, two, *flags, tmp_path / "w.jsonl", "--held-out", tmp_path / "w2.jsonl")
    expected = (tmp_path / "w.jsonl").read_bytes(), (tmp_path / "w2.jsonl").read_bytes()
    assert min(map(len, expected)) > 0 and sum(e.count(b"\n") for e in expected) == 100
    out, held = tmp_path / "out.jsonl", tmp_path / "held.jsonl"
    real, read = prepare_library._Work.save, []

    def dies(work):
        if len(read) % 4 == 3:
            read.append(None)
            with (work.folder / "lines.jsonl").open("ab") as file:
                file.write(b'{"half' * 10_000)
            raise KeyboardInterrupt
        real(work)
        read.append(work.state["read"])

    monkeypatch.setattr(prepare_library._Work, "save", dies)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(one, two, *flags, out, "--held-out", held)
        assert not out.exists()
    monkeypatch.setattr(prepare_library._Work, "save", real)
    with pytest.raises(UserError, match=r"unfinished run over other sources"):
        run(one, *flags, out, "--held-out", held)
    run(one, two, *flags, out, "--held-out", held)
    assert (out.read_bytes(), held.read_bytes()) == expected
    known = [r for r in read if r is not None]
    assert known == sorted(known) and known[-1] > 50, "what was read is not read again"
    assert not out.with_name("out.jsonl.work").exists()


def test_one_run_at_a_time_writes_an_output(tmp_path, monkeypatch):
    """Both would continue OUTPUT.work, and the first to end removes it."""
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(open_ai("question", "answer")) + "\n")
    real, others = prepare_library._Work.save, []

    def second_starts(work):
        words = [sys.executable, prepare_conversations.__file__, str(source), "--output", str(out)]
        others.append(subprocess.run(words, capture_output=True, text=True, env=environment(PYTHONPATH=str(ROOT))))
        real(work)

    monkeypatch.setattr(prepare_library._Work, "save", second_starts)
    run(source, "--output", out)
    assert others and {o.returncode for o in others} == {2}
    assert f"{out} is in use by process {os.getpid()} on" in others[0].stderr
    assert len(lines(out)) == 1 and sorted(tmp_path.iterdir()) == [source, out]


def test_result_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 500)
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(open_ai(f"question {i}", "answer")) + "\n" for i in range(60)))
    for workers in (1, 2):
        run(source, "--output", tmp_path / f"{workers}.jsonl", "--num-workers", workers)
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


def test_unreadable_input_is_refused(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    for text, words in (
        ('{"messages": []}\n{oops', "line 2: malformed"),
        ("[{", "a.jsonl entry 0: malformed JSON"),
        (
            '{"text": "x"}',
            "nothing usable among 1 conversations:\n  1 x no messages or conversations, only the keys text",
        ),
        ("\n", "a.jsonl: empty, no record"),
    ):
        source.write_text(text)
        with pytest.raises(UserError, match=words):
            run(source, "--output", out)
    source.write_bytes('{"messages": []}\n'.encode("utf-16"))
    with pytest.raises(UserError, match=r"line 1: not UTF-8 .*: convert the file"):
        run(source, "--output", out)
    with pytest.raises(UserError, match=r"does not exist"):
        run(tmp_path / "absent", "--output", out)
    cut = tmp_path / "b.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"messages": []}\n' * 1000)[:40])
    with pytest.raises(UserError, match=r"b.jsonl.gz: compressed data that is damaged or truncated"):
        run(cut, "--output", out)
    (tmp_path / "c.arrow").write_bytes(b"ARROW1\0\0 cut")
    with pytest.raises(UserError, match=r"c.arrow: not a readable arrow file"):
        run(tmp_path / "c.arrow", "--output", out)
    assert not out.exists()


def test_flags_that_lose_data_or_have_no_effect_are_refused(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    text = "".join(json.dumps(open_ai(f"q{i}", "a")) + "\n" for i in range(20))
    source.write_text(text)
    (tmp_path / "folder").mkdir()
    for flags, words in (
        (["--output", source], "is one of the sources"),
        (["--output", out, "--held-out", source], "is one of the sources"),
        (["--output", out, "--held-out", tmp_path / "." / "out.jsonl"], "both parts would be written to it"),
        (["--output", tmp_path / "folder"], "is a folder"),
        (["--output", out, "--held-out-share", 0.3], "nothing is held out without"),
        (["--output", out, "--held-out", tmp_path / "h", "--held-out-share", 1.5], "--held-out-share 1.5"),
        (["--output", out, "--split", "test"], "--split is for datasets on the hub"),
    ):
        with pytest.raises(UserError, match=words):
            run(source, *flags)
    with pytest.raises(UserError, match=r"is one of the sources"):
        run(tmp_path, "--output", source)
    assert source.read_text() == text and not out.exists()


def test_memory_does_not_grow_with_the_number_of_reasons(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    played = [{"messages": [{"role": f"knight {i}", "content": "x"}]} for i in range(300)]
    source.write_text("".join(json.dumps(r) + "\n" for r in [*played, open_ai("q", "a"), open_ai("b", " ")]))
    run(source, "--output", tmp_path / "out.jsonl")
    said = capsys.readouterr().out
    assert "301 dropped" in said and "201 x other reasons\n" in said and "unknown role 'knight 99'" in said
