import json

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.data.loader import ConversationDataset
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.data.vocab_counts import count_supervised, coverage, coverage_curve, select_draft_ids, turn_end_ids
from tests.unit_tests.data.chat_fixtures import CHATML, make_tokenizer, talk, write_lines

TALKS = [
    talk(("user", "zz"), ("assistant", "aab")),
    talk(("user", "q"), ("assistant", "ac"), ("user", "q"), ("assistant", "cé")),
    talk(("user", "q"), ("assistant", "a" * 50)),
]


def test_counts_only_supervised_tokens_before_truncation(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    path = write_lines(tmp_path / "d.jsonl", TALKS)
    for seq_length in (25, 50, 80, 400):  # cuts everything away, in an answer, behind some, and nothing
        try:
            dataset = ConversationDataset(path, tokenizer, seq_length)
        except UserError:
            assert seq_length == 25
            continue
        expected = torch.zeros(len(tokenizer), dtype=torch.int64)
        for i in range(len(dataset)):
            expected += torch.bincount(dataset[i].tokens[dataset[i].turns > 0], minlength=len(tokenizer))
        assert torch.equal(count_supervised(dataset, len(tokenizer)), expected) and expected.sum() > 0
    a, end = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "<|end|>"))
    assert (int(expected[a]), int(expected[end])) == (53, 4)
    assert turn_end_ids(dataset, [*tokenizer.all_special_ids, end, a]) == [end]
    byte = tokenizer.convert_tokens_to_ids("Ã")  # the highest supervised id is a byte of é
    with pytest.raises(UserError, match=rf"d.jsonl line 2: found token id {byte}, the base has ids below {byte}"):
        count_supervised(dataset, byte)


def test_coverage_curve_ends_at_one_and_matches_coverage():
    counts_V = torch.arange(128).flip(0)
    curve = dict(coverage_curve(counts_V, always=[127]))
    assert curve[128] == 1.0 and list(curve) == sorted(curve) and list(curve.values()) == sorted(curve.values())
    assert curve[16] == coverage(counts_V, select_draft_ids(counts_V, 16, [127]))["coverage"]


def test_selection_takes_the_most_frequent_ties_by_id_and_the_ends():
    counts_V = torch.tensor([0, 5, 2, 0, 2, 9, 2, 0])
    assert select_draft_ids(counts_V, 3).tolist() == [1, 2, 5]
    assert select_draft_ids(counts_V, 3, always=[7]).tolist() == [1, 5, 7]
    assert select_draft_ids(counts_V, 2, always=[7, 0]).tolist() == [0, 7]
    assert select_draft_ids(counts_V, 6).tolist() == [0, 1, 2, 4, 5, 6]
    assert select_draft_ids(counts_V, 8, always=[7]).tolist() == list(range(8))
    for size, always in ((0, []), (9, []), (1, [0, 7])):
        with pytest.raises(UserError, match=f"found draft vocabulary size {size}"):
            select_draft_ids(counts_V, size, always)
    with pytest.raises(UserError, match=r"end-of-turn ids .8. are outside"):
        select_draft_ids(counts_V, 3, [8])


def test_coverage_is_the_share_of_supervised_tokens():
    report = coverage(torch.tensor([0, 5, 2, 0, 3]), torch.tensor([0, 1, 4]))
    assert (report["coverage"], report["covered_tokens"], report["supervised_tokens"]) == (0.8, 8, 10)
    assert (report["distinct_tokens"], report["draft_tokens_never_seen"], report["vocab_size"]) == (3, 1, 5)


def test_stop_ids_come_from_all_three_sources(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == CHATML and loaded.is_fast and len(loaded) == len(tokenizer)
    assert stop_token_ids(tmp_path) == () and stop_token_ids(tmp_path, loaded) == (1,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert stop_token_ids(tmp_path, loaded) == (1, 3, 4, 9)
    assert stop_token_ids(tmp_path / "elsewhere", loaded, tmp_path) == (1, 3, 4, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(UserError, match=r'config.json: eos_token_id is "</s>", expected an integer or a list'):
        stop_token_ids(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"found no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
