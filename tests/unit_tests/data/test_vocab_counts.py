import json

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.data.loader import Sample
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.data.vocab_counts import count_supervised, coverage, select_draft_ids
from tests.unit_tests.data.chat_fixtures import CHATML, make_tokenizer

SAMPLES = [
    Sample(torch.tensor([9, 9, 9, 4, 2, 2]), torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)),
    Sample(torch.tensor([9, 6, 4, 7]), torch.tensor([0, 1, 1, 2], dtype=torch.int32), "d.jsonl line 2"),
]


class Samples(list):
    seq_length = 8


def test_counts_only_supervised_tokens():
    assert count_supervised(Samples(SAMPLES), 10).tolist() == [0, 0, 2, 0, 2, 0, 1, 1, 0, 0]
    with pytest.raises(UserError, match=r"d.jsonl line 2: found token id 7, the base knows ids below 7"):
        count_supervised(Samples(SAMPLES), 7)


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


def test_stop_ids_come_from_all_three_places(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == CHATML and loaded.is_fast and len(loaded) == len(tokenizer)
    assert stop_token_ids(tmp_path) == () and stop_token_ids(tmp_path, loaded) == (1,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert stop_token_ids(tmp_path, loaded) == (1, 3, 4, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(UserError, match=r"config.json: found eos_token_id '</s>'"):
        stop_token_ids(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"found no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"the tokenizer does not load"):
        load_tokenizer(tmp_path)
