"""A run that is stopped continues exactly: bit for bit in the same layout, to rounding in another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.config import UserError
from tests.functional_tests.script_helpers import conversation, make_base, write_conversations
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer
from tests.worlds import run_world

TOTAL, HALF = 6, 3


def convert(root: str) -> None:
    from megatron_spec.commands.convert import convert as run

    run(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")


def tune(
    root: str, save: str, iterations: int, tp: int = 1, pp: int = 1, cp: int = 1, talk: Any = None, **options: Any
) -> bool:
    """One finetune run of `iterations` out of TOTAL, in this process's world.

    Args:
        talk: with data and tokenizer of `write_talk`: arguments of the chat template.
    """
    from megatron.core import parallel_state

    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    parallel_state.destroy_model_parallel()
    # constant learning rate: a shorter run must not decay sooner
    train = TrainConfig(
        train_iters=iterations, global_batch_size=4, micro_batch_size=1, lr=3e-3, lr_decay_style="constant",
        weight_decay=0.1, **options,
    )  # fmt: skip
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp)
    return finetune(
        FinetuneRun(
            load=f"{root}/draft",
            save=f"{root}/{save}",
            data=f"{root}/{'train' if talk is None else 'talk'}.jsonl",
            tokenizer=None if talk is None else f"{root}/talk",
            chat_template_kwargs=talk,
            train=train,
            objective=ObjectiveConfig(ttt_steps=2, replay_weight=3.0 if talk is None else 1.0),
            parallel=parallel,
            seq_length=64,
        )
    )


def one_rank(root: str) -> dict[str, Any]:
    """The draft, the uninterrupted run, and a run in two halves."""
    convert(root)
    tune(root, "whole", TOTAL)
    tune(root, "halves", HALF)
    shutil.copytree(f"{root}/halves", f"{root}/elsewhere")
    shutil.copytree(f"{root}/halves", f"{root}/killed")
    leftover = Path(root, "killed", ".iter_0000004.tmp", "dist")  # what a kill in the middle of a save leaves behind
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    tune(root, "halves", TOTAL)
    tune(root, "killed", TOTAL)
    tune(root, "beside", HALF, async_save=True, save_interval=1, ckpt_keep=1, features_ahead=3)
    tune(root, "beside", TOTAL, async_save=True, save_interval=1, ckpt_keep=3, features_ahead=2)
    tune(root, "slow", 4, talk={"mood": "slow"})
    tune(root, "slow halves", 2, talk={"mood": "slow"})
    with pytest.raises(
        UserError, match=r"--chat-template-kwargs is \{'mood': 'fast'\}, but the run .* \{'mood': 'slow'\}"
    ):
        tune(root, "slow halves", 4, talk={"mood": "fast"})
    tune(root, "slow halves", 4, talk={"mood": "slow"})
    tune(root, "kind", 1, talk={})
    return {name: parameters(f"{root}/{name}") for name in ("whole", "halves", "killed", "beside")}


def write_talk(root: Path) -> None:
    """A tokenizer whose template has an argument, and conversations of which every other one sets it."""
    template = CHATML_MARKED.replace("Be kind.", "Be {{ mood | default('kind') }}.")
    make_tokenizer(template).save_pretrained(root / "talk")
    lines = [{**conversation(i), **({"chat_template_kwargs": {"mood": "loud"}} if i % 2 else {})} for i in range(10)]
    (root / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def four_ranks(root: str) -> dict[str, Any]:
    """The second half in another layout; a run begun in that layout with the distributed optimizer, halved too."""
    tune(root, "elsewhere", TOTAL, tp=2, pp=2)
    tune(root, "distributed", HALF, tp=2, use_distributed_optimizer=True, async_save=True)
    tune(root, "distributed", TOTAL, cp=2, pp=2, use_distributed_optimizer=True, async_save=True, save_interval=1)
    return {}


def parameters(checkpoint: str) -> dict[str, torch.Tensor]:
    """The draft of the latest iteration, in one process."""
    from megatron.core import parallel_state

    from megatron_spec.build import load_checkpoint
    from megatron_spec.runtime import distributed

    parallel_state.destroy_model_parallel()
    draft = load_checkpoint(checkpoint, distributed.initialize()).draft
    return {name: p.detach().clone() for name, p in draft.named_parameters()}


def read_back(root: str) -> dict[str, Any]:
    return {name: parameters(f"{root}/{name}") for name in ("elsewhere", "distributed")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("resume")
    make_base(root / "base")
    write_conversations(root / "train.jsonl", 10, rejected=True)
    write_talk(root)
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    found = run_world(1, one_rank, str(root))[0]
    run_world(4, four_ranks, str(root))
    return root, {**found, **run_world(1, read_back, str(root))[0]}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["halves", "killed", "beside"])
def test_resume_is_exact(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    root, found = runs
    assert losses(root / name) == losses(root / "whole")
    for parameter, value in found["whole"].items():
        assert torch.equal(found[name][parameter], value), parameter


def test_resume_with_arguments_of_the_template_is_exact(runs: tuple[Path, dict[str, Any]]) -> None:
    """Those of the run and those of single lines; a run without them trains on another text."""
    root, _ = runs
    whole = losses(root / "slow")
    assert len(whole) == 4 and losses(root / "slow halves") == whole
    assert losses(root / "kind")[0] != whole[0]


DRAWING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle1": ({"eagle_algorithm": "eagle1"}, {"ttt_steps": 2}),
    "p-eagle": ({"eagle_algorithm": "p-eagle", "eagle_config": "p-eagle.json"}, {"ttt_steps": 3}),
    "dspark": (
        {"algorithm": "dspark", "draft_config": "dspark.json"},
        {"anchors": 2, "backbone_weight": 0.5, "backbone_iters": 5},
    ),
}
"""Request and objective of drafts that draw noise, rows or anchors; one objective changes with the iteration, too."""


def drawing(root: str) -> dict[str, bool]:
    """Whether a run that continues from its middle, with a schedule, ends as the uninterrupted one; also in fp8."""
    from megatron.core import parallel_state

    from megatron_spec.commands.convert import convert as run_convert
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.commands.quantize import quantize
    from megatron_spec.config import ObjectiveConfig, TrainConfig

    Path(root, "p-eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6], "mask_token_id": 3}))
    Path(root, "dspark.json").write_text(json.dumps({"mask_token_id": 3, "block_size": 2, "markov_rank": 8}))
    found = {}
    for name, (request, values) in DRAWING.items():
        here, data, goal = Path(root, name), f"{root}/train.jsonl", ObjectiveConfig(**values)
        places = {k: f"{root}/{v}" if v.endswith(".json") else v for k, v in request.items()}
        run_convert(f"{root}/base", f"{here}/draft", **places)
        quantize(f"{here}/draft", f"{here}/fp8", data, samples=2, seq_length=64, objective=goal)
        train = TrainConfig(4, global_batch_size=4, lr=3e-3, lr_warmup_iters=1, save_interval=2)
        for start in ("draft", "fp8"):
            whole, halves = here / f"{start} whole", here / f"{start} halves"
            for save in (whole, halves):
                parallel_state.destroy_model_parallel()
                assert finetune(FinetuneRun(f"{here}/{start}", str(save), data, train, goal, seq_length=64))
                if save == whole:
                    shutil.copytree(whole, halves)
                    shutil.rmtree(halves / "iter_0000004")
            a, b = parameters(str(whole)), parameters(str(halves))
            same = all(torch.equal(value, b[parameter]) for parameter, value in a.items())
            found[f"{name} {start}"] = same and losses(whole) == losses(halves)
    return found


def test_what_a_draft_draws_resumes_exactly(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    write_conversations(tmp_path / "train.jsonl", 10)
    found = run_world(1, drawing, str(tmp_path))[0]
    assert len(found) == 2 * len(DRAWING) and all(found.values()), found


def test_number_of_kept_checkpoints(runs: tuple[Path, dict[str, Any]]) -> None:
    root, _ = runs
    assert sorted(p.name for p in (root / "beside").glob("*iter_*")) == [f"iter_000000{i}" for i in (4, 5, 6)]
    assert not list((root / "killed").glob(".iter_*")), "what a killed run left is removed"


@pytest.mark.parametrize("name", ["elsewhere", "distributed"])
def test_resume_in_another_layout_is_equal(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    root, found = runs
    assert losses(root / name) == pytest.approx(losses(root / "whole"), rel=1e-5)
    for parameter, value in found["whole"].items():
        error = float((found[name][parameter] - value).norm() / value.norm())
        assert error < 1e-4, f"{parameter}: {error}"


def test_training_moved_the_parameters(runs: tuple[Path, dict[str, Any]]) -> None:
    root, _ = runs
    lines = [json.loads(line) for line in (root / "whole" / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0]["loss_per_step"], lines[-1]["loss_per_step"]
    assert last < first
