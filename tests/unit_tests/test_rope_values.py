"""Values of rope_scaling that are no numbers, wherever they come from."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.config.rope import read_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"factor": "x"}, "factor is 'x', expected a positive number"),
        ({"factor": True}, "factor is True"),
        ({"factor": -1}, "factor is -1"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"beta_fast": -1}, "beta_fast is -1, expected a non-negative number"),
        ({"attention_factor": [1]}, r"attention_factor is \[1\]"),
        ({"partial_rotary_factor": 1.5}, "expected at most 1"),
        ({"rope_type": ["yarn"]}, r"rope type \['yarn'\] is not supported"),
        ({"rope_type": "longrope", "short_factor": "ab", "long_factor": [1]}, "short_factor is ab"),
        ({"rope_type": "longrope", "short_factor": [1], "long_factor": [0]}, r"long_factor is \[0\]"),
    ],
)
def test_values_that_are_no_numbers(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        read_rope({"rope_theta": 1e4, "rope_scaling": {**YARN, **changed}}, "config.json")


def test_zero_counts_as_absent_where_files_have_it() -> None:
    read_rope({"rope_scaling": {**YARN, "mscale": 0, "mscale_all_dim": 0, "beta_fast": 0}}, "config.json")
