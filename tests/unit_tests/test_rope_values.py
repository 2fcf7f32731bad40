"""Values of rope_scaling that are no numbers, wherever they come from; fields that contradict one another."""

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


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "default", "full_attention": {"rope_theta": 1e6}}, "rope type 'default' has no full_attention:"),
        ({**YARN, "llama_4_scaling_beta": 0.1}, "rope type 'yarn' has no llama_4_scaling_beta"),
        ({**YARN, "beta_fst": 16}, r"has no beta_fst \(did you mean 'beta_fast'\?\)"),
        ({"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.7}, "rope type 'linear' has no mscale_all_dim"),
        ({"mrope_sections": [2, 1, 1]}, "has no mrope_sections"),
    ],
)
def test_keys_that_no_code_reads_are_refused(scaling: dict[str, Any], message: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UserError, match=f"config.json: .*{message}.*remove what has no effect"):
            read_rope({"rope_theta": 1e4, key: scaling}, "config.json")


@pytest.mark.parametrize(
    "key",
    [{"finetuned": True}, {"mrope_section": [2, 1, 1]}, {"mrope_interleaved": True}, {"llama_4_scaling_beta": None}],
)
def test_keys_without_effect_on_text_are_accepted(key: dict[str, Any]) -> None:
    assert read_rope({"rope_scaling": {**YARN, **key}}, "") == read_rope({"rope_scaling": YARN}, "")


def test_zero_counts_as_absent_where_files_have_it() -> None:
    zeros = {"mscale": 0, "mscale_all_dim": 0, "beta_fast": 0}
    absent = {key: value for key, value in YARN.items() if key not in zeros}
    assert read_rope({"rope_scaling": {**YARN, **zeros}}, "") == read_rope({"rope_scaling": absent}, "")


def linear(factor: float, **more: float) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor, **more}


@pytest.mark.parametrize(
    ("raw", "ignored"),
    [
        ({"rope_scaling": linear(2.0), "rope_parameters": linear(4.0, rope_theta=5e5)}, "'factor': 4.0"),
        ({"rope_scaling": linear(2.0), "rope_parameters": linear(4.0), "rope_theta": 7e5}, "'factor': 4.0"),
        ({"rope_parameters": linear(4.0, rope_theta=5e5), "rope_theta": 7e5}, "'rope_theta': 700000.0"),
        ({"rope_parameters": linear(4.0), "rope_theta": 7e5}, ""),
    ],
)
def test_the_field_that_transformers_reads_is_used(
    raw: dict[str, Any], ignored: str, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import LlamaConfig

    expected = LlamaConfig(**raw).rope_parameters
    found = read_rope(raw, f"config.json of {raw}")  # a warning is given once a place
    assert (found.type, found.factor, found.theta) == tuple(expected[n] for n in ("rope_type", "factor", "rope_theta"))
    assert bool(caplog.messages) == bool(ignored) and all(
        ignored in line.partition(", not ")[2] for line in caplog.messages
    )
