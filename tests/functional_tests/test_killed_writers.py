"""Every writer, killed at every rename: the same command then ends well, and nothing half-written is ever read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.script_helpers import make_base, run_here, write_conversations
from tests.worlds import run_world

SAVED, STEPS = 1, 2


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it changes a file."""


@contextlib.contextmanager
def killed_at(moment: int) -> Iterator[dict[str, int]]:
    """The process dies where it would rename for the `moment`-th time; then it can neither rename nor remove."""
    seen = {"renames": 0}

    def dying(call: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            seen["renames"] += counts
            if seen["renames"] >= moment:
                raise Killed
            return call(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", dying(os.replace, True))
        patch.setattr(os, "rename", dying(os.rename, True))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree, False))
        patch.setattr(Path, "unlink", dying(Path.unlink, False))
        yield seen


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_checkpoint(folder: Path) -> None:
    from megatron_spec.checkpoint.spec import read_spec, resolve
    from megatron_spec.drafts.vocab import DraftVocab

    found = resolve(folder)
    read_spec(found)
    DraftVocab.load(found / "vocab.safetensors")


def commands(root: Path, out: Path) -> dict[str, tuple[tuple[Any, ...], Callable[[], Any]]]:
    """Writer -> (its command line, what must hold when it has ended well)."""
    data = ("--data", root / "train.jsonl")
    draft, short = ("--load", root / "draft"), ("--seq-length", 64, "--micro-batch-size", 1)
    return {
        "convert_model": (
            ("--load", root / "base", "--save", out, "--eagle-config", root / "eagle.json"),
            lambda: check_checkpoint(out),
        ),
        "quantize": ((*draft, "--save", out, *data, *short, "--calib-samples", 1), lambda: check_checkpoint(out)),
        "offline_feature_extract": (
            (*draft, *data, *short, "--output-dir", out), lambda: read_store(out),
        ),
        "export": (
            (*draft, "--export-dir", out, "--export-extra-modules"), lambda: check_export(out / "draft"),
        ),
        "finetune": (
            (*draft, "--save", out, *data, *short, "--train-iters", STEPS, "--save-interval", 1, "--ckpt-keep", 1,
             "--global-batch-size", 1, "--ttt-steps", 1),
            lambda: losses(out) == losses(root / "whole") or pytest.fail(f"{losses(out)}"),
        ),
    }  # fmt: skip


def read_store(folder: Path) -> None:
    from megatron_spec.features.store import FeatureStore

    store = FeatureStore(folder)
    assert [len(store.features_of(i).tokens) for i in range(len(store))] == store.lengths.tolist()


def check_export(folder: Path) -> None:
    from megatron_spec.export.check import check_folder

    assert [f for f in check_folder(folder) if not f.warning] == []


def run(name: str, arguments: tuple[Any, ...]) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    run_here(name, *arguments)


def again(name: str, arguments: tuple[Any, ...]) -> None:
    """The same command: it ends well, or says that what it writes is there already."""
    from megatron_spec.config import UserError

    try:
        run(name, arguments)
    except UserError as error:
        assert name in ("convert_model", "quantize") and "is not empty: give another --save folder" in str(error), error


def sweep(place: str) -> dict[str, int]:
    """Renames of every writer, all of which were survived."""
    from matplotlib.figure import Figure

    Figure.savefig = lambda self, path, **_: Path(path).write_bytes(b"a plot")  # drawn in no time
    root, found = Path(place), {}
    run("convert_model", ("--load", root / "base", "--save", root / "draft", "--eagle-config", root / "eagle.json"))
    run("finetune", commands(root, root / "whole")["finetune"][0])
    for name in commands(root, root):
        moment = 0
        while True:
            moment += 1
            out = root / name / str(moment)
            arguments, check = commands(root, out)[name]
            try:
                with killed_at(moment):
                    run(name, arguments)
                check()
                break
            except Killed:
                again(name, arguments)
                check()
                assert not [p for p in out.rglob(".*") if ".tmp" in p.name and name == "finetune"], moment
        found[name] = moment - 1
    return found


def test_every_writer_at_every_rename(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    write_conversations(tmp_path / "train.jsonl", 2)
    (tmp_path / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    renames = run_world(1, sweep, str(tmp_path))[0]
    least = {"convert_model": 5, "quantize": 7, "offline_feature_extract": 2, "export": 5, "finetune": 12}
    assert all(renames[name] >= number for name, number in least.items()), renames
