"""Ranks that were started with different flags, or see different files, say so at once: one error, no hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import DecodeConfig, ObjectiveConfig, ParallelConfig, TrainConfig, UserError
from tests.functional_tests.script_helpers import make_base, write_conversations
from tests.worlds import run_world


def commands(root: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Script -> (command, fields that all ranks have)."""
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.decode import generate, validate
    from megatron_spec.commands.export import export
    from megatron_spec.commands.features import extract_features
    from megatron_spec.commands.finetune import finetune
    from megatron_spec.commands.quantize import quantize

    draft, data = str(root / "draft"), str(root / "train.jsonl")
    return {
        "convert": (convert, dict(load=str(root / "base"), save=str(root / "o1"), eagle_config=str(root / "e.json"))),
        "finetune": (finetune, dict(load=draft, save=str(root / "o2"), data=data, seq_length=64)),
        "quantize": (quantize, dict(load=draft, save=str(root / "o3"), data=data, seq_length=64)),
        "export": (export, dict(load=draft, export_dir=str(root / "o4"), extra_modules=True)),
        "extract": (extract_features, dict(load=draft, output_dir=str(root / "o5"), data=data, seq_length=64)),
        "validate": (validate, dict(load=draft, data=data, output=str(root / "o6"))),
        "generate": (generate, dict(load=draft, data=data, output=str(root / "o7"))),
    }


STEPS = TrainConfig(train_iters=2)
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("convert", {"seed": 1}, {"seed": 2}, "--seed is 1 on rank 0 and 2 on rank 1"),
    ("finetune", {"train": STEPS}, {"train": STEPS.replace(train_iters=3)}, "--train-iters is 2 on rank 0 and 3"),
    ("finetune", {"train": STEPS}, {"train": STEPS.replace(save_interval=1)}, "--save-interval is 0 .* and 1"),
    ("finetune", {"train": STEPS}, {"train": STEPS.replace(lr=2e-4)}, "--lr is 0.0001 .* and 0.0002"),
    ("finetune", {"train": STEPS}, {"train": STEPS.replace(global_batch_size=4)}, "--global-batch-size is 8 .* and 4"),
    ("finetune", {"train": STEPS}, {"train": STEPS, "seq_length": 32}, "--seq-length is 64 .* and 32"),
    ("finetune", {"train": STEPS}, {"train": STEPS, "objective": ObjectiveConfig(ttt_steps=3)}, "--ttt-steps is 7"),
    ("finetune", {"train": STEPS}, {"train": STEPS, "data": "other.jsonl"}, "--data is .*train.jsonl .*other.jsonl"),
    ("finetune", {"train": STEPS, "data": "node0/x.jsonl"}, {"train": STEPS, "data": "node1/x.jsonl"}, "content"),
    ("finetune", {"train": STEPS}, {"train": STEPS, "parallel": ParallelConfig(2)}, "--tensor-model-parallel-size is"),
    ("quantize", {"samples": 2}, {"samples": 4}, "--calib-samples is 2 .* and 4"),
    ("export", {"with_base": True}, {}, "--export-base is True .* and False"),
    ("extract", {}, {"micro_batch_size": 2}, "--micro-batch-size is 4 .* and 2"),
    ("validate", {}, {"decode": DecodeConfig(batch_size=2)}, "--batch-size is 8 .* and 2"),
    ("generate", {}, {"decode": DecodeConfig(max_new_tokens=2)}, "--max-new-tokens is 128 .* and 2"),
]  # fmt: skip


def messages(root: Path) -> list[str]:
    import os

    rank, found = int(os.environ["RANK"]), []
    known = commands(root)
    for name, first, second, _ in CASES:
        command, common = known[name]
        fields = {**common, **(second if rank else first)}
        fields["data"] = str(root / fields["data"]) if "data" in fields else None
        try:
            command(**{k: v for k, v in fields.items() if v is not None})
            found.append("nothing was said")
        except UserError as e:
            found.append(str(e))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    from megatron_spec.commands.convert import convert

    root = tmp_path_factory.mktemp("agreement")
    make_base(root / "base")
    (root / "e.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    for i, name in enumerate(("train.jsonl", "other.jsonl", "node0/x.jsonl", "node1/x.jsonl")):
        (root / name).parent.mkdir(exist_ok=True)
        write_conversations(root / name, 4 + i)
    convert(str(root / "base"), str(root / "draft"), eagle_config=str(root / "e.json"))
    return run_world(2, messages, root)


@pytest.mark.parametrize("i", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}: {CASES[i][3].split()[0]}")
def test_ranks_with_different_settings_are_refused(found: list[list[str]], i: int) -> None:
    import re

    assert found[0][i] == found[1][i], "both ranks say the same"
    assert "the ranks were started differently" in found[0][i] and re.search(CASES[i][3], found[0][i]), found[0][i]
