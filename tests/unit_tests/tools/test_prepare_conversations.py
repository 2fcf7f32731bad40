import json

import pytest

from megatron_spec.config import UserError
from megatron_spec.data.chat import read_conversations
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
    assert "3 conversations in" in said and "8 read, 5 dropped" in said
    for reason in ("2 x seen before", "1 x no assistant turn", "1 x empty content", "1 x found keys text"):
        assert reason in said


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


def test_prompts_only_and_length_limit(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    records = [open_ai("a", "b", "c", "d"), open_ai("a", "other"), open_ai("x" * 50, "y"), open_ai("q")]
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    run(source, "--output", out, "--prompts-only", "--max-characters", 20)
    assert [[m["content"] for m in r["conversations"]] for r in lines(out)] == [["a"], ["q"]]


def test_unreadable_input_is_refused(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    for text, words in (
        ('{"messages": []}\n{oops', "line 2: malformed"),
        ("[{", "a.jsonl: malformed JSON"),
        ('{"text": "x"}', "nothing usable among 1 conversations:\n  1 x found keys text"),
    ):
        source.write_text(text)
        with pytest.raises(UserError, match=words):
            run(source, "--output", out)
    with pytest.raises(UserError, match=r"does not exist"):
        run(tmp_path / "absent", "--output", out)
    with pytest.raises(UserError, match=r"--held-out-share 1.5"):
        run(source, "--output", out, "--held-out-share", 1.5)
    assert not out.exists()
