"""`--plain` of every script that computes with a model: no model that it builds takes a fast path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.planning.paths import PATHS, Paths
from tests.functional_tests.script_helpers import make_base, run_here, write_conversations
from tests.worlds import run_world

SHORT = ("--seq-length", 64, "--micro-batch-size", 1)


def scripts(root: Path, out: Path) -> dict[str, tuple[Any, ...]]:
    load, data = ("--load", root / "draft"), ("--data", root / "train.jsonl")
    few = ("--num-prompts", 1, "--max-new-tokens", 4)
    return {
        "finetune": (*load, *data, *SHORT, "--save", out / "tuned", "--train-iters", 1, "--global-batch-size", 1),
        "quantize": (*load, *data, *SHORT, "--save", out / "quantized", "--calib-samples", 1),
        "offline_feature_extract": (*load, *data, *SHORT, "--output-dir", out / "features"),
        "export": (*load, "--export-dir", out / "export", "--export-extra-modules"),
        "validate": (*load, *data, *few, "--output", out / "validate.json"),
        "generate": ("--base", root / "base", *data, *few, "--output", out / "answers.jsonl"),
        "validate of a folder": (
            "--base", root / "base", "--speculative-model", out / "export/draft", *data, *few, "--output", out / "a",
        ),
        "generate with a model": (
            "--base", root / "base", "--decoding-type", "DraftTarget", "--speculative-model", root / "base", *data,
            *few, "--output", out / "b",
        ),
    }  # fmt: skip


def paths_taken(place: str) -> dict[str, list[set[str]]]:
    """Of every script, without and with --plain: the paths that its models may take."""
    from megatron.core import parallel_state

    from megatron_spec.base.model import FrozenBase
    from megatron_spec.drafts.contract import Draft

    root, found = Path(place), {}
    run_here("convert_model", "--load", root / "base", "--save", root / "draft", "--eagle-config", root / "eagle.json")
    built: list[Paths] = []

    def watch(cls: Any) -> None:
        """Note the paths that instances are given."""
        cls.__setattr__ = lambda self, name, value: (
            built.append(value) if name == "paths" else None, super(cls, self).__setattr__(name, value)
        )[1]  # fmt: skip

    for cls in (FrozenBase, Draft):
        watch(cls)
    for flags in ((), ("--plain",)):
        for name, words in scripts(root, root / f"out{len(flags)}").items():
            parallel_state.destroy_model_parallel()
            built.clear()
            run_here(name.split()[0], *words, *flags)
            found.setdefault(name, []).append({path for paths in built for path in PATHS if paths.on(path)})
    return found


def test_plain_turns_off_fast_paths_in_every_script(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    write_conversations(tmp_path / "train.jsonl", 2)
    (tmp_path / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    found = run_world(1, paths_taken, str(tmp_path))[0]
    assert found == {name: [{"base_direct", "common_prompt"}, set()] for name in scripts(tmp_path, tmp_path)}


@pytest.mark.parametrize("script", ["convert_model"])
def test_scripts_without_a_model_have_no_plain_flag(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_here(script, "--load", "base", "--save", "draft", "--plain")
    assert "unknown argument --plain" in capsys.readouterr().err
