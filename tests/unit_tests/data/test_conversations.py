"""Every key beside the messages of a line is used, or refused with the line."""

import gzip
import json

import pytest

from megatron_spec.config import UserError
from megatron_spec.data import conversations, lines
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.cleaning import CleanOptions, clean
from megatron_spec.data.conversations import is_trained, parse_conversation, parse_line
from megatron_spec.data.lines import numbered_lines
from megatron_spec.data.loader import ConversationDataset
from megatron_spec.generation.prompts import read_prompts
from tests.unit_tests.data import chat_fixtures as chats
from tests.unit_tests.data.chat_fixtures import make_tokenizer, talk, write_lines

TALK = talk(("user", "hi"), ("assistant", "yo"))
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}


def encoded(template, record, **options):
    tokenizer = make_tokenizer(template)
    sample = ChatEncoder(tokenizer, **options).encode(parse_conversation(record, "here"))
    return tokenizer.decode(sample.tokens, skip_special_tokens=False)


def test_system_key_is_used_everywhere(tmp_path):
    record = {"id": "a", "system": "Answer like a pirate.", "conversations": TALK}
    assert "<|start|>system\nAnswer like a pirate.<|end|>" in encoded(chats.CHATML, record)
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(record) + "\n")
    told = {"role": "system", "content": "Answer like a pirate."}
    assert read_prompts(path)[0].rounds == ((told, {"role": "user", "content": "hi"}),)
    assert clean(record, CleanOptions()).line["conversations"][0] == told
    same = {**record, "conversations": [told, *TALK]}
    assert parse_conversation(same, "here").messages == [told, *TALK]
    for system in ("", " ", None):
        assert parse_conversation({**record, "system": system}, "here").messages == TALK


TOJSON = chats.CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'] }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
)
ITEMS = TOJSON.replace(
    "{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
CONCATENATES = TOJSON.replace("c.function.arguments | tojson", "'' + c.function.arguments")
AS_IT_IS = TOJSON.replace("c.function.arguments | tojson", "c.function.arguments")
EITHER = TOJSON.replace(
    "c.function.arguments | tojson",
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson",
)


@pytest.mark.parametrize("template", [TOJSON, ITEMS, CONCATENATES, AS_IT_IS, EITHER])
@pytest.mark.parametrize("as_text", [False, True])
def test_tool_call_arguments_in_the_form_of_the_base(template, as_text):
    call = json.loads(json.dumps(CALL))
    if as_text:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [TALK[0], said, {"role": "tool", "content": "sunny"}, TALK[1]]}
    expected = "city=Bern" if template == ITEMS else '{"city": "Bern"}'
    assert f"assistant\n{expected}<|end|>" in encoded(template, record)
    cleaned = clean(record, CleanOptions()).line
    assert f"assistant\n{expected}<|end|>" in encoded(template, cleaned)


def test_tools_and_template_arguments_may_be_json_text():
    template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% if loud %}LOUD{% endif %}" + chats.CHATML
    record = {"messages": TALK, "tools": '[{"name": "sum"}]', "chat_template_kwargs": '{"loud": true}'}
    assert encoded(template, record).startswith("sumLOUD")
    assert encoded(template, clean(record, CleanOptions()).line).startswith("sumLOUD")
    assert encoded(template, {"messages": TALK}, template_kwargs={"loud": True}).startswith("LOUD")
    with pytest.raises(UserError, match=r"the chat template does not read loudd \(did you mean 'loud'\?\)"):
        encoded(template, {"messages": TALK}, template_kwargs={"loudd": True})


@pytest.mark.parametrize("name", conversations.REASONING)
@pytest.mark.parametrize("read", conversations.REASONING)
def test_reasoning_reaches_the_template_under_the_name_that_it_reads(name, read):
    template = chats.CHATML.replace("{{ m['content'] }}", f"{{{{ m.{read} or '' }}}}{{{{ m['content'] }}}}")
    text = encoded(template, {"messages": [TALK[0], {**TALK[1], name: "thought "}]})
    assert "assistant\nthought yo<|end|>" in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"system": "A", "messages": [{"role": "system", "content": "B"}, *TALK]}, "differs from the system message"),
        ({"system": ["A"], "messages": TALK}, "system: content part"),
        ({"tools": "{", "messages": TALK}, "expected a JSON list"),
        ({"tools": {"name": "x"}, "messages": TALK}, "expected a JSON list"),
        ({"chat_template_kwargs": [1], "messages": TALK}, "expected a JSON object"),
        ({"chat_template_kwargs": {"tokenize": True}, "messages": TALK}, "tokenize, which is not an argument of the t"),
        ({"messages": [{**TALK[1], "tool_calls": [{"function": {"arguments": "{"}}]}]}, "message 0: found arguments"),
        ({"messages": [{**TALK[1], "reasoning": "a", "thinking": "b"}]}, "reasoning and thinking that differ"),
        ({"messages": [{**TALK[1], "reasoning": ["a"]}]}, "reasoning that is not text"),
        ({"messages": [TALK[0], {**TALK[1], "content": "a\ud83d"}]}, r"message 1: found \\ud83d, a lone surrogate"),
        ({"messages": [{**TALK[1], "reasoning": "\udc00"}]}, "message 0: found .*a lone surrogate"),
        ({"system": "\ud83d", "messages": TALK}, "system: found .*a lone surrogate"),
        ({"tools": [{"name": "\ud83d"}], "messages": TALK}, "found .*a lone surrogate"),
    ],
)
def test_invalid_lines_are_refused_in_training_and_dropped_in_preparation(record, words):
    with pytest.raises(UserError, match=rf"line 3.*{words}"):
        parse_conversation(record, "line 3")
    found = clean(record, CleanOptions())
    assert found.line is None and found.reason


def test_lines_of_another_kind_name_the_script_that_reads_them():
    for record, script in (({"turns": ["a"]}, "generate.py"), ({"instruction": "a"}, "prepare_conversations.py")):
        with pytest.raises(UserError, match=f"line 3: found keys .*, expected exactly one of .*{script}"):
            parse_conversation(record, "line 3")


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": 0.0}, {"weight": 0, "train": False}])
def test_answers_that_are_not_trained_on(mark):
    record = {"messages": [*TALK, {**TALK[0], "weight": 0}, {**TALK[1], **mark}]}
    read = parse_line(json.dumps(record).encode(), "line 3")
    assert [is_trained(message) for message in read.messages] == [False, True, False, False]
    line = clean(record, CleanOptions()).line
    assert [is_trained(message) for message in line["conversations"]] == [False, True, False, False]
    assert clean(record, CleanOptions(make_prompts=True)).line["turns"] == ["hi", "hi"], "the base answers anyway"
    assert all(is_trained({**TALK[1], **kept}) for kept in ({}, {"weight": 1, "loss": None}, {"train": True}))


@pytest.mark.parametrize(
    ("user", "answer", "words"),
    [
        ({}, {"weight": 0.5}, "message 1: found weight '0.5', expected 0 or 1"),
        ({}, {"train": "no"}, "message 1: found train 'no', expected 0 or 1"),
        ({"weight": 1}, {}, "message 0: found weight 1 or true on a user message, expected it on answers alone"),
        ({}, {"weight": 1, "train": False}, "message 1: found weight and train that differ, expected one of them"),
        ({}, {"weight": 0}, "no answer that is trained on: all have weight 0: remove the line"),
    ],
)
def test_weights_that_are_refused(user, answer, words):
    record = {"messages": [{**TALK[0], **user}, {**TALK[1], **answer}]}
    with pytest.raises(UserError, match=f"line 3.*{words}"):
        parse_line(json.dumps(record).encode(), "line 3")
    assert clean(record, CleanOptions()).reason
    assert clean(record, CleanOptions(make_prompts=True)).line


def test_an_answer_removed_with_its_place_may_leave_none_to_train_on():
    record = {"messages": [TALK[1], TALK[0], {**TALK[1], "weight": 0}]}
    assert clean(record, CleanOptions()).reason == "no answer that is trained on: all have weight 0"


def test_lone_surrogates_of_prompts_are_refused_with_the_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["a"]}) + "\n" + json.dumps({"turns": ["a", "\ud83d"]}) + "\n")
    with pytest.raises(UserError, match=r"p.jsonl line 2: found \\ud83d, a lone surrogate"):
        read_prompts(path)


def test_files_that_prepare_conversations_reads_name_it(tmp_path):
    line = json.dumps({"messages": TALK})
    contents = {
        "a.json": f"[{line},\n{line}]".encode(), "b.json": b"\xef\xbb\xbf [\n " + line.encode() + b"\n]",
        "c.jsonl.gz": gzip.compress(line.encode()), "d.parquet": b"PAR1....PAR1",
        "e.arrow": b"\xff\xff\xff\xff....",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        for read in (lambda p: list(numbered_lines(p)), read_prompts):
            with pytest.raises(UserError, match=rf"python tools/prepare_conversations.py \S*{name} --output"):
                read(tmp_path / name)
    with pytest.raises(UserError, match="is a folder, expected a file of conversations in JSON lines: python tools"):
        list(numbered_lines(tmp_path))


def test_plain_text_corpus_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    path = write_lines(tmp_path / "d.jsonl", [TALK, talk(("user", "x" * 2000), ("assistant", "y"))])
    for read in (lambda p: list(numbered_lines(p)), read_prompts):
        with pytest.raises(UserError, match=r"d.jsonl line 2: longer than 0 MiB, expected one"):
            read(path)


def test_token_ids_beyond_the_base_are_refused_with_line_and_token(tmp_path):
    tokenizer = make_tokenizer(chats.CHATML)
    tokenizer.add_tokens(["zebra"])
    path = write_lines(tmp_path / "d.jsonl", [TALK, talk(("user", "a zebra"), ("assistant", "yo")), TALK])
    assert len(ConversationDataset(path, tokenizer, 99, vocab_size=len(tokenizer))) == 3
    beyond = len(tokenizer) - 1
    with pytest.raises(UserError, match=rf"d.jsonl line 2: found token id {beyond} \('zebra'\), .*ids below {beyond}:"):
        ConversationDataset(path, tokenizer, 99, vocab_size=beyond)
    encoder = ChatEncoder(tokenizer, vocab_size=beyond)
    with pytest.raises(UserError, match=rf"here: found token id {beyond} \('zebra'\)"):
        encoder.prompts([parse_conversation({"messages": talk(("user", "zebra"))}, "here")])


def test_answers_whose_beginning_the_template_leaves_out_are_counted_and_named(tmp_path, caplog):
    think = talk(("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "why"))
    path = write_lines(tmp_path / "d.jsonl", [TALK, think, think])
    for template in (chats.FORGETS_THINKING, chats.CHATML_MARKED.replace("m['content'] }}<", "m['content'][9:] }}<")):
        caplog.clear()
        data = ConversationDataset(path, make_tokenizer(template), 200)
        count = 2 if template == chats.FORGETS_THINKING else 5
        assert data.statistics["answers shortened"] == count
        assert f"{count} of 5 answers have a beginning that the chat template leaves out" in caplog.text
        assert f"the first: line {2 if count == 2 else 1}" in caplog.text
    caplog.clear()
    ConversationDataset(path, make_tokenizer(chats.CHATML), 200)
    assert "answers" not in caplog.text
    opened = chats.CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    data = ConversationDataset(path, make_tokenizer(opened), 200)
    assert data.statistics["answers prompted differently"] == 3  # the others begin with <think>
    assert "answers shortened" not in data.statistics


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, ["Add.\n\n1 and 2", "3"]),
        ({"instruction": "Add.", "input": "", "output": "3", "system": "S"}, ["S", "Add.", "3"]),
        ({"instruction": "Add.", "context": "1 and 2", "response": "3"}, ["Add.\n\n1 and 2", "3"]),
        ({"instruction": "c", "output": "d", "history": [["a", "b"]]}, ["a", "b", "c", "d"]),
        ({"prompt": "a", "response": "b"}, ["a", "b"]),
        ({"prompt": "a", "completion": "b"}, ["a", "b"]),
        ({"question": "a", "answer": "b", "system_prompt": "S"}, ["S", "a", "b"]),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, ["hi", "yo"]),
        ({"prompt": TALK[:1], "messages": TALK}, ["hi", "yo"]),
        ({"prompt": [*TALK, *TALK[:1]], "completion": "yo"}, ["hi", "yo", "hi", "yo"]),
        ({"input": TALK[:1], "output": "yo", "system_prompt": "S"}, ["S", "hi", "yo"]),
        ({"prompt": "hi", "chosen": TALK, "rejected": [*TALK[:1], TALK[0]]}, ["hi", "yo"]),
        ({"prompt": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:]}, ["hi", "yo"]),
        ({"prompt": "hi", "chosen": "yo", "rejected": "ho"}, ["hi", "yo"]),
    ],
)
def test_columns_of_questions_and_answers_are_prepared(record, said):
    line = clean(record, CleanOptions()).line
    assert [m["content"] for m in line["conversations"]] == said
    roles = [m["role"] for m in line["conversations"] if m["role"] != "system"]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    asked = clean(record, CleanOptions(make_prompts=True)).line
    assert asked["turns"] == [m["content"] for m in line["conversations"] if m["role"] == "user"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"instruction": "a", "output": 3}, "content that is not text"),
        ({"prompt": "a", "response": None}, "no assistant turn (--make-prompts keeps the questions)"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history that is not a list of questions and answers"),
        ({"text": "a"}, "no messages or conversations, only the keys text"),
        ({"messages": [{"role": "system", "content": ""}]}, "no messages"),
    ],
)
def test_unusable_columns_have_a_reason(record, reason):
    assert clean(record, CleanOptions()).reason == reason


def test_answer_ids_are_kept_with_their_messages():
    ids = {"tokenizer": "a", "turns": [[1]]}
    assert clean({"messages": TALK, "answer_ids": ids}, CleanOptions()).line["answer_ids"] == ids
    found = clean({"messages": [*TALK, TALK[0]], "answer_ids": ids}, CleanOptions())
    assert "answer_ids" not in found.line and found.repairs["answer_ids removed with a message"] == 1


def test_old_function_calls_are_tool_calls():
    """Templates do not read `function_call`: beside a text, the call was lost."""
    call = {"name": "look", "arguments": '{"at": "it"}'}
    messages = [
        TALK[0],
        {"role": "assistant", "content": "so", "function_call": call},
        {"role": "function", "content": "x"},
    ]
    found = parse_conversation({"messages": [*messages, TALK[1]], "functions": [{"name": "look"}]}, "here")
    expected = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    assert found.messages[1] == {"role": "assistant", "content": "so", "tool_calls": [expected]}
    assert found.messages[2]["role"] == "tool"
    assert found.tools == [{"type": "function", "function": {"name": "look"}}]
    silent = {**messages[1], "content": None}
    assert parse_conversation({"messages": [TALK[0], silent]}, "here").messages[1]["content"] == ""
    for wrong in ({"function_call": "look"}, {"tool_calls": [expected]}):
        with pytest.raises(UserError, match="message 1: found function_call"):
            parse_conversation({"messages": [TALK[0], {**messages[1], **wrong}]}, "here")
    line = clean({"messages": [*messages, TALK[1]], "functions": [{"name": "look"}]}, CleanOptions()).line
    assert line["tools"] == found.tools and line["conversations"][1] == found.messages[1]
