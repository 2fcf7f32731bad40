"""JSON of a base with one wrong value: it is read, or refused with file and key; other errors never occur."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_spec.checkpoint.huggingface import weight_files
from megatron_spec.config import UserError
from megatron_spec.data.tokenizer import stop_token_ids
from megatron_spec.families import parse_base_config
from tests.unit_tests.families.families import MODELS, SHAPE

WRONG: list[Any] = [None, "x", "", -1, 0, 1.5, True, [], [None], ["x"], [[1]], {}, {"a": 1}, 10**30]


def config_json(name: str) -> dict[str, Any]:
    """What transformers writes."""
    stem, extra = MODELS[name]
    values = {k: v for k, v in {**SHAPE, **extra}.items() if v is not None}
    raw = json.loads(getattr(transformers, f"{stem}Config")(**values).to_json_string(use_diff=False))
    return {**raw, "architectures": [f"{stem}ForCausalLM"], "num_nextn_predict_layers": 1}


def mutations(raw: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(key, its wrong value, the file) for every key, also inside rope_parameters, and in its older spelling."""
    old = {k: v for k, v in raw.items() if k != "rope_parameters"}
    old["rope_scaling"] = raw.get("rope_parameters")
    for file in (raw, old):
        for key in [k for k in file if k not in ("architectures", "model_type")]:
            yield from ((key, value, {**file, key: value}) for value in WRONG)
        for outer in ("rope_parameters", "rope_scaling"):
            inner = file.get(outer) or {}
            yield from ((k, v, {**file, outer: {**inner, k: v}}) for k in inner for v in WRONG)


@pytest.mark.parametrize("name", MODELS)
def test_any_value_of_a_config_json(name: str) -> None:
    raw = config_json(name)
    parse_base_config(raw, "config.json")
    refused = set()
    for key, value, file in mutations(raw):
        try:
            parse_base_config(file, "config.json")
        except UserError as error:
            assert "config.json" in str(error) or key in str(error), (key, value, error)
            refused.add(key)
        except Exception as error:
            pytest.fail(f"{key} = {value!r}: {type(error).__name__}: {error}")
    assert {"hidden_size", "vocab_size", "rope_parameters", "rope_scaling", "eos_token_id"} <= refused


@pytest.mark.parametrize("value", [[], ["x"], 7, {"a": []}, {"weight_map": []}, {"weight_map": {}},
                                   {"weight_map": {"a": 1}}, {"weight_map": {"a": None}}, {"weight_map": {"a": "../b"}},
                                   {"weight_map": {"a": "b"}}])  # fmt: skip
def test_any_index(value: Any, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"index\.json"):
        weight_files(tmp_path)


@pytest.mark.parametrize("value", [["x"], {"eos_token_id": "x"}, {"eos_token_id": [True]}, {"eos_token_id": {}}])
def test_any_generation_config(value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"generation_config\.json"):
        stop_token_ids(tmp_path)
