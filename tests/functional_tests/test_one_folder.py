"""One folder for convert, finetune, quantize and finetune, and the optimizer settings of a run that continues."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import ObjectiveConfig, TrainConfig, UserError
from tests.functional_tests.script_helpers import write_inputs
from tests.worlds import run_world

CONTINUED: dict[str, dict[str, Any]] = {
    "override": {"override_opt_param_scheduler": True},
    "checkpoint": {"use_checkpoint_opt_param_scheduler": True},
    "same": {"lr": 3e-3},
}


def train(root: Path, load: str, save: str, iterations: int, **changes: Any) -> None:
    from megatron_spec.commands.finetune import finetune

    run = {name: changes.pop(name) for name in list(changes) if name.endswith("scheduler")}
    settings = {"lr": 3e-3, "lr_decay_style": "constant", "ckpt_keep": 1, "save_interval": 1, **changes}
    assert finetune(
        load=str(root / load), save=str(root / save), data=str(root / "train.jsonl"), seq_length=64,
        train=TrainConfig(train_iters=iterations, global_batch_size=2, **settings),
        objective=ObjectiveConfig(ttt_steps=2), **run,
    )  # fmt: skip


def everything(root: Path) -> None:
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.quantize import quantize

    convert(str(root / "base"), str(root / "one"), eagle_config=str(root / "eagle.json"))
    shutil.copytree(root / "one", root / "draft")
    train(root, "one", "one", 1)
    train(root, "one", "one", 3)
    train(root, "draft", "tuned", 3)
    about: dict[str, Any] = dict(data=str(root / "train.jsonl"), samples=2, seq_length=64, micro_batch_size=2)
    quantize(str(root / "one"), str(root / "one"), objective=ObjectiveConfig(ttt_steps=2), **about)
    quantize(str(root / "tuned"), str(root / "quantised"), objective=ObjectiveConfig(ttt_steps=2), **about)
    train(root, "one", "one", 1)
    train(root, "one", "one", 2)
    train(root, "quantised", "qat", 2)
    for name, how in CONTINUED.items():
        shutil.copytree(root / "tuned", root / name)
        train(root, "draft", name, 4, **{"lr": 0.5, **how})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_inputs(tmp_path_factory.mktemp("one_folder"))
    run_world(1, everything, root)
    return root


def metrics(root: Path, save: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / save / "metrics.jsonl").read_text().splitlines()]


def test_one_folder_trains_like_separate_folders(root: Path) -> None:
    one = metrics(root, "one")
    assert [x["iteration"] for x in one] == [1, 2, 3, 5, 6]
    assert [x["loss"] for x in one] == [x["loss"] for x in metrics(root, "tuned") + metrics(root, "qat")]
    assert [x["consumed_samples"] for x in one] == [2, 4, 6, 2, 4]


def test_latest_iteration_is_the_last_and_earlier_ones_are_kept(root: Path) -> None:
    assert (root / "one" / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    kept = sorted(p.name for p in (root / "one").glob("iter_*"))
    assert kept == ["iter_0000000", "iter_0000003", "iter_0000004", "iter_0000006"]


def test_folder_without_optimizer_state_cannot_be_resumed(root: Path) -> None:
    with pytest.raises(UserError, match=r"--save .*quantised holds a checkpoint without optimizer state"):
        train(root, "draft", "quantised", 2)


def test_effective_learning_rate(root: Path) -> None:
    last = {name: metrics(root, name)[-1] for name in ("override", "checkpoint", "same")}
    assert [last[n]["lr"] for n in last] == [0.5, 3e-3, 3e-3]
    assert last["checkpoint"]["loss"] == last["same"]["loss"] == last["override"]["loss"], "the step before is the same"
    from megatron.core.dist_checkpointing import load_common_state_dict

    from megatron_spec.checkpoint.sharded import read_extra

    for name, rate in (("override", 0.5), ("checkpoint", 3e-3), ("same", 3e-3)):
        folder = root / name / "iter_0000004"
        saved = load_common_state_dict(str(folder / "dist"))["optimizer"]
        assert saved["param_groups"][0]["max_lr"] == rate
        assert read_extra(folder)["optimizer_settings"]["lr"] == rate
