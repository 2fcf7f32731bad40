import logging
import re

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.data.loader import BatchLoader, ConversationDataset, Sample
from tests.unit_tests.data.chat_fixtures import CHATML, make_tokenizer, talk, write_lines


class Numbers:
    """Samples that identify themselves: sample i is the token i, repeated i + 1 times."""

    seq_length = 16

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        n = self.lengths[index]
        turns = torch.ones(n, dtype=torch.int32)
        turns[0] = 0
        return Sample(torch.full((n,), index), turns)


NUMBERS = Numbers([3, 9, 4, 7, 5, 2, 11, 6, 8, 3, 4])


def step_rows(loaders, consumed):
    """Rows (sample ids) of a step in the order of its global batch, whatever the layout."""
    per_rank = [loader.step(consumed) for loader in loaders]
    return [i for m in range(loaders[0].num_microbatches) for batches in per_rank for (i,) in batches[m].sample_ids]


def test_every_layout_reads_the_same_samples_at_one_length():
    reference = [step_rows([BatchLoader(NUMBERS, 8, 8)], consumed) for consumed in (0, 8, 16)]
    for micro, dp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 2)):
        loaders = [BatchLoader(NUMBERS, micro, 8, rank, dp) for rank in range(dp)]
        assert loaders[0].num_microbatches == 8 // micro // dp
        assert [step_rows(loaders, consumed) for consumed in (0, 8, 16)] == reference
        shapes = {b.tokens_BS.shape for loader in loaders for b in loader.step(8)}
        assert shapes == {(micro, max(NUMBERS.lengths[i] for i in reference[1]))}


def test_epochs_have_every_sample_once_and_differ():
    loader = BatchLoader(NUMBERS, 1, 1)
    order = [loader.step(i)[0].sample_ids[0][0] for i in range(33)]
    epochs = [order[:11], order[11:22], order[22:]]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [BatchLoader(NUMBERS, 1, 1, seed=5).step(i)[0].sample_ids[0][0] for i in range(11)] != epochs[0]
    plain = BatchLoader(NUMBERS, 4, 4, shuffle=False)
    assert [plain.step(i)[0].sample_ids for i in (0, 4, 8)] == [
        tuple((i,) for i in step) for step in ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 0))
    ]


def test_steps_are_independent_of_earlier_reads():
    used, fresh = BatchLoader(NUMBERS, 2, 4), BatchLoader(NUMBERS, 2, 4)
    for consumed in (0, 4, 40, 8):
        used.step(consumed)
    for consumed in (36, 8, 0):
        for a, b in zip(used.step(consumed), fresh.step(consumed), strict=True):
            assert a.sample_ids == b.sample_ids and torch.equal(a.tokens_BS, b.tokens_BS)


def test_rows_have_their_samples_and_padding():
    loader = BatchLoader(NUMBERS, 2, 4, shuffle=False, pad_multiple=8, pad_token_id=99)
    second = loader.step(0)[1]  # samples 2 (4 tokens) and 3 (7 tokens); the longest of the step is 9 -> 16
    assert second.sample_ids == ((2,), (3,)) and second.single_document
    assert second.tokens_BS.tolist() == [[2] * 4 + [99] * 12, [3] * 7 + [99] * 9]
    assert second.turns_BS.tolist() == [[0] + [1] * 3 + [0] * 12, [0] + [1] * 6 + [0] * 9]
    assert second.documents_BS.tolist() == [[0] * 4 + [-1] * 12, [0] * 7 + [-1] * 9]
    assert second.positions_BS.tolist() == [list(range(16))] * 2
    dtypes = [t.dtype for t in (second.tokens_BS, second.positions_BS, second.turns_BS, second.documents_BS)]
    assert dtypes == [torch.int64, torch.int64, torch.int32, torch.int32]


def test_packed_epoch_has_every_sample_once():
    loaders = [BatchLoader(NUMBERS, 1, 2, rank, 2, packing=True) for rank in range(2)]
    assert loaders[0].samples_per_epoch == 4  # 62 tokens in rows of 16
    seen = []
    for consumed in (0, 2):
        for loader in loaders:
            (batch,) = loader.step(consumed)
            assert batch.tokens_BS.shape[1] <= 16
            for document in range(int(batch.documents_BS.max()) + 1):
                tokens = batch.tokens_BS[batch.documents_BS == document].tolist()
                assert tokens == [tokens[0]] * NUMBERS.lengths[tokens[0]]
                assert tokens[0] == batch.sample_ids[0][document]
                seen.append(tokens[0])
    assert sorted(seen) == list(range(11))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((Numbers([]), 1, 1), "no samples"),
        ((NUMBERS, 3, 8), "not a multiple"),
        ((NUMBERS, 2, 8, 0, 3), "multiple of 6"),
        ((NUMBERS, 1, 8, 2, 2), "dp_rank 2"),
        ((NUMBERS, 0, 8), "not a multiple"),
    ],
)
def test_invalid_sizes_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        BatchLoader(*arguments)


SHORT = talk(("user", "hi"), ("assistant", "yo"))
LONG_QUESTION = talk(("user", "q" * 100), ("assistant", "yo"))
LONG_ANSWER = talk(("user", "hi"), ("assistant", "a" * 100))
BEGINS = 18 + 10 + 11  # tokens (bytes) of "<|start|>system\nBe kind.<|end|>\n", of the user's turn, of the header


def test_dataset_truncates_drops_and_reports(tmp_path, caplog):
    path = write_lines(tmp_path / "d.jsonl", [SHORT, LONG_QUESTION, LONG_ANSWER, LONG_QUESTION])
    with caplog.at_level(logging.INFO):
        data = ConversationDataset(path, make_tokenizer(CHATML), 60)
    assert len(data) == 2 and [len(data[i]) for i in range(2)] == [BEGINS + 4, 60]
    assert data.dropped == {"nothing supervised within seq_length": 2}
    assert data.statistics == {
        "conversations": 2, "dropped": 2, "truncated": 3, "turns": 2, "tokens": BEGINS + 4 + 60,
        "supervised": 3 + 60 - BEGINS, "supervised_share": 0.233, "longest": 60,
    }  # fmt: skip
    _, warning, figures = (record.getMessage() for record in caplog.records)
    assert "dropped 2 x nothing supervised" in warning and "line 2, whose first answer begins at token 137" in warning
    assert "supervised 24" in figures


def test_lengths_that_no_row_can_have_are_refused():
    for length, words in ((1, "at least 2"), (1 << 31, "below 2^31"), (2.5, "seq_length: found a float, expected int")):
        with pytest.raises(UserError, match=re.escape(words)):
            ConversationDataset("absent.jsonl", None, length)


def test_truncation_to_one_supervised_token_drops_the_conversation(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [SHORT, LONG_ANSWER])
    assert len(ConversationDataset(path, make_tokenizer(CHATML), BEGINS + 2)) == 2
    with pytest.raises(UserError, match=r"no supervised tokens .*line 1.*begins at token 39.*larger seq_length"):
        ConversationDataset(path, make_tokenizer(CHATML), BEGINS + 1)
