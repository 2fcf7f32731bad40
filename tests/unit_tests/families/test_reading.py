"""Mismatched folders, for every family and kind of rule: each wrong tensor is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_spec.checkpoint.huggingface import HuggingFaceWeights
from megatron_spec.config import UserError
from megatron_spec.families import parse_base_config, read_base_config
from megatron_spec.families.names import Experts, NameRule, read_shard
from megatron_spec.families.rules import name_rules
from tests.unit_tests.families.families import MODELS, save

FAMILIES = [name for name in MODELS if " " not in name]


def one_of_each_kind(rules: list[NameRule]) -> dict[str, list[str]]:
    """{kind: two tensors of it, where there are two}."""
    found: dict[str, list[str]] = {}
    for rule in rules:
        names = found.setdefault(rule.kind, [])
        names += [rule.hf[-1]][: 2 - len(names)]
    return found


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save(request.param, path)
    return path


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_every_mismatch_is_named(folder: Path) -> None:
    config = read_base_config(folder)
    tensors, expected = load_file(folder / "model.safetensors"), {"unexpected model.layers.0.extra.weight"}
    for kind, names in one_of_each_kind(name_rules(config)).items():
        shape = list(tensors[names[0]].shape)
        expected.add(f"missing {names[-1]}")
        del tensors[names[-1]]
        if len(names) > 1:
            expected.add(f"{names[0]}: found shape [3], expected {shape}")
            tensors[names[0]] = torch.ones(3)
        else:
            assert kind in ("vocab", "qkv"), (
                kind
            )  # the others are there twice, these not with a tied head or few layers
    tensors["model.layers.0.extra.weight"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with HuggingFaceWeights(folder) as weights, pytest.raises(UserError) as error:
        weights.check(name_rules(config), config)
    text = str(error.value)
    assert f"{len(expected)} tensors do not fit" in text
    assert {problem for problem in expected if problem not in text} == set()


def test_experts_are_read_individually(tmp_path: Path) -> None:
    """gpt-oss keeps all experts in one tensor: a rank of EP 2 x TP 2 reads its columns of its own experts."""
    save("gpt_oss", tmp_path)
    config, seen = read_base_config(tmp_path), 0
    with HuggingFaceWeights(tmp_path) as weights:

        def read(*what: Any) -> torch.Tensor:
            nonlocal seen
            part = weights.read(*what)
            seen += part.numel()
            return part

        for rule in name_rules(config):
            if not rule.kind.startswith("stacked"):
                continue
            whole = read_shard(rule, config, 0, 1, weights.read, experts=Experts(0, 4))
            seen = 0
            mine = read_shard(rule, config, 1, 2, read, experts=Experts(2, 2))
            assert seen == mine.numel()
            if rule.kind == "stacked_down":
                assert torch.equal(mine, whole[2:].chunk(2, 2)[1])
            elif rule.kind == "stacked_down_bias":
                assert torch.equal(mine, whole[2:])
            else:  # [gate; up], each half cut
                gate, up = whole[2:].chunk(2, 1)
                assert torch.equal(mine, torch.cat([gate.chunk(2, 1)[1], up.chunk(2, 1)[1]], 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["hidden_size"]
    with pytest.raises(UserError, match="hidden_size"):
        parse_base_config(raw, "config.json")
