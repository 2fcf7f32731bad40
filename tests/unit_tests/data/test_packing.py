import random

import pytest
import torch

from megatron_spec.data.chat import Sample
from megatron_spec.data.packing import build_batch, pack


def sample(tokens, turns):
    return Sample(torch.tensor(tokens), torch.tensor(turns, dtype=torch.int32))


def test_rows_have_every_sample_once_and_cannot_be_merged():
    numbers = random.Random(0)
    for _ in range(30):
        lengths = [numbers.randint(1, 40) for _ in range(numbers.randint(0, 60))]
        rows = list(pack(lengths, 40))
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
        filled = sorted(sum(lengths[i] for i in row) for row in rows)
        assert not filled or filled[-1] <= 40
        assert len(filled) < 2 or filled[0] + filled[1] > 40
        assert rows == list(pack(lengths, 40))


def test_best_fit_decreasing():
    # 9 | 7 3 | 5 4 | 2: the 2 fits nowhere, since the rows before it are full to 9, 10 and 9
    assert list(pack([3, 9, 4, 7, 5, 2], 10)) == [[0, 3], [1], [2, 4], [5]]
    assert list(pack([6, 5, 4, 5], 10)) == [[0, 2], [1, 3]]
    # 8 | 7: the 2 goes where it leaves no room, not where it fits first
    assert list(pack([7, 8, 2, 3], 10)) == [[0, 3], [1, 2]]
    rows = pack([7, 8, 2, 3], 10)
    assert rows.lengths.tolist() == [10, 10] and len(pack([], 10)) == 0
    with pytest.raises(ValueError, match=r"11 tokens does not fit a row of 10"):
        pack([3, 11], 10)


def test_packed_row_restarts_positions_and_keeps_turns_apart():
    rows = [[sample([5, 6, 7], [0, 1, 1]), sample([8, 9, 8, 9], [1, 0, 2, 2])], [sample([4], [1])]]
    batch = build_batch(rows, 9, "cpu", pad_token_id=3)
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 8, 9, 8, 9, 3, 3], [4] + [3] * 8]
    assert batch.documents_BS.tolist() == [[0, 0, 0, 1, 1, 1, 1, -1, -1], [0] + [-1] * 8]
    assert batch.turns_BS.tolist() == [[0, 1, 1, 2, 0, 3, 3, 0, 0], [1] + [0] * 8]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5], list(range(9))]
    assert not batch.single_document
    with pytest.raises(ValueError, match=r"row 0 holds more than 6 tokens"):
        build_batch(rows, 6, "cpu")


def test_rejections_move_with_their_samples():
    marked = [
        Sample(torch.arange(4), torch.ones(4, dtype=torch.int32), rejected=torch.tensor(at)) for at in ([1, 3], [0])
    ]
    batch = build_batch([[sample([5, 6], [0, 1]), *marked], [sample([4], [1])]], 11, "cpu")
    assert batch.rejected_BS[0].nonzero()[:, 0].tolist() == [2 + 1, 2 + 3, 6] and not batch.rejected_BS[1].any()
    assert build_batch([[sample([4], [1])]], 3, "cpu").rejected_BS is None
