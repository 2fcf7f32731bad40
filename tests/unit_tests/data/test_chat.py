import json

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.data import chat
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.conversations import AnswerIds, Conversation, Rejections, parse_conversation, read_conversations
from megatron_spec.data.masking import masked
from megatron_spec.data.tokenizer import vocabulary_hash
from tests.unit_tests.data import chat_fixtures as chats
from tests.unit_tests.data.chat_fixtures import make_tokenizer, talk

ONE = talk(("user", "hi"), ("assistant", "yo"))
TWO = talk(("user", "hi"), ("assistant", "yo"), ("user", "ö?"), ("assistant", "né 12\n\nok "))
SYSTEM = [{"role": "system", "content": "S"}, *TWO]
THINK = talk(("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<think>y</think>d"))
QUOTES_END = talk(("user", "say <|end|>"), ("assistant", "it is <|end|> here"), ("user", "x"), ("assistant", "y"))

ASKS_END = talk(("user", "hi"), ("assistant", "yo"), ("user", "what is <|end|>?"), ("assistant", "y"))


def turn_texts(tokenizer, sample):
    """Decoded tokens of each turn; checks that a turn is one piece."""
    texts = []
    for n in range(1, int(sample.turns.max()) + 1):
        where = (sample.turns == n).nonzero().flatten()
        assert where[-1] - where[0] + 1 == len(where), "a turn is contiguous"
        texts.append(tokenizer.decode(sample.tokens[where], skip_special_tokens=False))
    return texts


def encode(template, messages, **options):
    tokenizer = make_tokenizer(template)
    sample = ChatEncoder(tokenizer, **options).encode(Conversation(messages, "here"))
    return tokenizer, sample


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (chats.CHATML, ONE, ["yo<|end|>"]),
        (chats.CHATML, TWO, ["yo<|end|>", "né 12\n\nok <|end|>"]),
        (chats.CHATML, SYSTEM, ["yo<|end|>", "né 12\n\nok <|end|>"]),
        (chats.CHATML, TWO[1:], ["yo<|end|>", "né 12\n\nok <|end|>"]),
        (chats.CHATML, [*ONE, ONE[1]], ["yo<|end|>", "yo<|end|>"]),
        (chats.CHATML, QUOTES_END, ["it is <|end|> here<|end|>", "y<|end|>"]),
        (chats.CHATML.replace("<|end|>", "[END]"), ASKS_END, ["yo[END]", "y[END]"]),
        (chats.CHATML_MARKED, SYSTEM, ["yo<|end|>", "né 12\n\nok <|end|>"]),
        (chats.CHATML_MARKED_WITHOUT_END, SYSTEM, ["yo<|end|>", "né 12\n\nok <|end|>"]),
        (chats.BRACKETS, TWO, [" yo<eos>", " né 12\n\nok<eos>"]),
        (chats.HEADER_ALWAYS, TWO, ["yo<eos>", "né 12\n\nok <eos>"]),
        (chats.TURN_AND_DOCUMENT_END, TWO, ["yo<|end|>", "né 12\n\nok <|end|>"]),
        (chats.FORGETS_THINKING, THINK, ["b<eos>", "<think>y</think>d<eos>"]),
        (chats.PLAIN_WORDS, TWO, ["yo", "né 12\n\nok"]),
        (chats.PLAIN_WORDS, TWO[1:], ["yo", "né 12\n\nok"]),
    ],
)
def test_supervised_text_is_the_answer_and_its_end_token(template, messages, expected):
    tokenizer, sample = encode(template, messages)
    assert turn_texts(tokenizer, sample) == expected
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(sample.tokens, skip_special_tokens=False) == whole


def test_golden_mask_of_one_short_conversation():
    _, sample = encode(chats.CHATML, [{"role": "system", "content": "S"}, *ONE])
    # <|start|> system \n S <|end|> \n   <|start|> user \n hi <|end|> \n   <|start|> assistant \n   yo <|end|>   \n
    assert sample.turns.tolist() == [0] * 11 + [0] * 10 + [0] * 11 + [1, 1, 1] + [0]
    assert sample.tokens.dtype.itemsize == 8 and sample.turns.dtype.itemsize == 4


@pytest.mark.parametrize("messages", [ONE, TWO, SYSTEM, TWO[1:], [*ONE, ONE[1]], QUOTES_END, THINK])
def test_generation_marks_and_incremental_rendering_agree(messages):
    tokenizer = make_tokenizer(chats.CHATML_MARKED)
    marked, plain = ChatEncoder(tokenizer), ChatEncoder(tokenizer)
    assert marked.uses_marks
    plain.uses_marks = False
    conversation = Conversation(messages, "here")
    one, other = marked.encode(conversation), plain.encode(conversation)
    assert one.turns.tolist() == other.turns.tolist() and one.tokens.tolist() == other.tokens.tolist()
    assert int(one.turns.max()) == sum(m["role"] == "assistant" for m in messages)


@pytest.mark.parametrize("template", [chats.CHATML, chats.CHATML_MARKED])
def test_an_answer_of_weight_0_is_read_but_not_supervised(template):
    """Also one that `rejected` names: indices count all answers."""
    whole = encode(template, SYSTEM)[1]
    messages = [{**m, "weight": 0} if m["content"] == "yo" else m for m in SYSTEM]
    rejected = Rejections(vocabulary_hash(make_tokenizer(template)), [[0], [1]])
    conversation = Conversation(messages, "here", rejected=rejected)
    sample = ChatEncoder(make_tokenizer(template)).encode(conversation)
    assert torch.equal(sample.tokens, whole.tokens) and sample.turns.dtype == whole.turns.dtype
    assert torch.equal(sample.turns, torch.where(whole.turns == 2, 2, 0))
    assert sample.rejected.tolist() == [(whole.turns == n).nonzero()[n - 1].item() for n in (1, 2)]


def test_a_template_that_marks_fewer_turns_than_answers_needs_no_weights():
    sample = encode(chats.CHATML_MARKED, TWO)[1]
    with pytest.raises(UserError, match="here: 3 answers, some with weight 0, but the chat template marks 2 turns"):
        masked(Conversation([*TWO, {**TWO[1], "weight": 0}], "here"), sample)
    with pytest.raises(UserError, match="here: no token of an answer that is trained on is left"):
        masked(Conversation([{**m, "weight": 0} for m in TWO], "here"), sample)


def test_prompt_ids_end_with_the_assistants_header():
    tokenizer = make_tokenizer(chats.CHATML)
    [(_, ids)] = ChatEncoder(tokenizer).prompts([Conversation(ONE[:1], "here")])
    expected = "<|start|>system\nBe kind.<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_other_formats_and_content_parts_are_read():
    record = {
        "id": 7,
        "messages": [
            {"from": "human", "value": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
            {"from": "observation", "value": "3", "name": "f"},
            {"from": "gpt", "value": "yo"},
        ],
    }
    conversation = parse_conversation(record, "here")
    assert [(m["role"], m["content"]) for m in conversation.messages] == [
        ("user", "hi"), ("assistant", "ab"), ("assistant", ""), ("tool", "3"), ("assistant", "yo"),
    ]  # fmt: skip
    assert conversation.messages[3]["name"] == "f" and conversation.identifier == "7"


def line(*messages, key="conversations"):
    return json.dumps({key: list(messages)})


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        ([line(USER, ANSWER), "{not json"], 2, "malformed JSON"),
        ([line(USER, ANSWER), "", line(USER, ANSWER)], 2, "empty line"),
        ([line(USER, ANSWER), '["a"]'], 2, "expected an object"),
        ([line(USER, ANSWER), '{"turns": []}'], 2, "conversations, messages"),
        ([line(USER, ANSWER), '{"conversations": [], "messages": []}'], 2, "exactly one"),
        ([line()], 1, "at least one message"),
        ([line(USER, ANSWER), line(USER)], 2, "no assistant turn"),
        ([line(USER, {"role": "assistent", "content": "x"})], 1, "did you mean 'assistant'"),
        ([line(USER, {"role": "assistant"})], 1, "message 1: found keys role"),
        ([line(USER, {"content": "x"})], 1, "expected role and content"),
        ([line(USER, {"role": "assistant", "content": " \n"})], 1, "empty content"),
        ([line(USER, {"role": "assistant", "content": 3})], 1, "expected text"),
        ([line({"role": "user", "content": [{"type": "image"}]}, ANSWER)], 1, "only text"),
        ([line("hi", ANSWER)], 1, "expected an object with role"),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(tmp_path, lines, number, words):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        list(read_conversations(path))
    assert f"data.jsonl line {number}" in str(error.value) and words in str(error.value)


def test_unreadable_files_are_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    with pytest.raises(UserError, match=r"does not exist"):
        list(read_conversations(path))
    path.write_text("\n\n")
    with pytest.raises(UserError, match=r"contains no conversations"):
        list(read_conversations(path))
    path.write_bytes(b'{"conversations": "\xff"}')
    with pytest.raises(UserError, match=r"line 1: not UTF-8"):
        list(read_conversations(path))


def test_byte_order_mark_and_trailing_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line(USER, ANSWER).encode() + b"\n\n\n")
    (only,) = read_conversations(path)
    assert only.messages == [USER, ANSWER] and only.where.endswith("line 1")


def test_unusable_tokenizers_and_templates_are_refused():
    with pytest.raises(UserError, match=r"no chat template"):
        ChatEncoder(make_tokenizer(None))
    with pytest.raises(UserError, match=r"here: the chat template refuses .*alternate"):
        encode(chats.BRACKETS, SYSTEM)
    everything = "{% generation %}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}{% endgeneration %}"
    with pytest.raises(UserError, match=r"here: every token counts"):
        encode(everything, ONE)
    nothing = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% generation %}{% endgeneration %}"
    with pytest.raises(UserError, match=r"here: the chat template marks no token"):
        encode(nothing, ONE)
    only_the_last = "{{ messages[-1]['role'] }}: {{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match=r"here, message 1: cannot find this assistant turn"):
        encode(only_the_last, TWO)


@pytest.mark.parametrize("template", [chats.CHATML, chats.CHATML_MARKED])
def test_long_lines_take_linear_time_and_too_many_turns_are_refused(template, monkeypatch):
    """Tokenising a 30 MB answer takes linear time: each character is read a fixed number of times."""
    encoder, seen = ChatEncoder(make_tokenizer(template)), []
    render, shared = encoder.template.render, chat._shared

    def rendering(*given, **options):
        found = render(*given, **options)
        seen.append(len(found if isinstance(found, str) else found["input_ids"]))
        return found

    monkeypatch.setattr(encoder.template, "render", rendering)
    monkeypatch.setattr(chat, "_shared", lambda one, other: seen.append(len(one)) or shared(one, other))
    for words in (1000, 4000):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "tell me " * words}]
        seen.clear()
        sample = encoder.encode(Conversation(messages, "d.jsonl line 3"))
        assert len(sample) > 8 * words > sum(seen) / 2
    many = [{"role": role, "content": "tell me " * 16} for _ in range(50) for role in ("user", "assistant")]
    assert int(encoder.encode(Conversation(many, "d.jsonl line 4")).turns.max()) == 50
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 50 * 12_000)
    said = r"d.jsonl line 4: 50 answers in 0.0 million characters: .* split it into several"
    with pytest.raises(UserError, match=said):
        encoder.encode(Conversation(many, "d.jsonl line 4"))


def test_shared_beginning():
    for one, other, expected in (
        ("", "abc", 0),
        ("ab", "abc", 2),
        ("abd", "abc", 2),
        ("xbc", "abc", 0),
        ("abc", "ab", 2),
    ):
        assert chat._shared(one, other) == expected


def test_recorded_ids_of_an_answer_of_weight_0_are_not_supervised():
    tokenizer = make_tokenizer(chats.CHATML)
    encoder, name = ChatEncoder(tokenizer), vocabulary_hash(tokenizer)
    ids = [[7, 8, 9], [10, 11]]
    first = [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]]
    for messages, answers in ((first, ids), (first, [ids[0], None])):
        found = Conversation(messages, "here", answer_ids=AnswerIds(name, answers))
        if answers[1] is None:
            with pytest.raises(UserError, match="here: answer_ids has no answer that is trained on"):
                encoder.encode_all([found])
            continue
        [samples] = encoder.encode_all([found])
        assert [s.tokens[s.turns > 0].tolist() for s in samples] == [ids[1]]
