"""Random numbers of the running sequences: one for every token of an answer, whatever comes before it."""

from __future__ import annotations

import torch

from megatron_spec.config import DecodeConfig
from megatron_spec.decoding.rows import Rows


def test_a_token_of_an_answer_has_the_random_number_of_its_place() -> None:
    config = DecodeConfig(temperature=1.0, max_new_tokens=6)
    rows = Rows(3, 32, config, set(), torch.device("cpu"), drafted=False)
    short, long, continued = [1, 2], list(range(1, 18)), [1, 2, 3, 4]  # the last one has two tokens of its answer
    rows.place(0, [short, long, continued], [2, 17, 2], [8, 23, 8], [5, 5, 5])
    numbers = rows.uniform_BN3[0]
    assert torch.equal(rows.uniform_BN3, numbers.expand(3, -1, -1)) and len(numbers.unique()) == 18
    first_short, first_long, third = rows.draws(3, 2)
    assert torch.equal(first_short, numbers[:2]) and torch.equal(first_long, numbers[:2])
    assert torch.equal(third, numbers[2:4])
    rows.advance(0, torch.full((3, 3), 9), torch.tensor([2, 1, 0]), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(rows.draws(3, 1)[:, 0], numbers[[3, 2, 3]])
