"""Token ids outside the embedding. Under tensor parallelism: tests/unit_tests/base/test_model.py."""

from __future__ import annotations

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.ops.embedding import check_ids


@pytest.mark.parametrize("outside", [-1, 83, 1 << 40])
def test_out_of_range_ids_are_named(outside: int) -> None:
    with pytest.raises(UserError, match=f"found token id {outside}, expected ids from 0 to 82"):
        check_ids(torch.tensor([[0, 82, outside]]), 83)


def test_valid_and_empty_ids_pass() -> None:
    check_ids(torch.tensor([[0, 82]]), 83)
    check_ids(torch.zeros(0, 3, dtype=torch.int64), 83)
