"""Training on a base of Transformer Engine's modules (by a stand-in), against local layers: QAT, acceptance, resuming.

test_te_matrix.py has every script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.commands.runs import EvalRequest
from megatron_spec.config import ENGINE, LOCAL, BaseLayers, ObjectiveConfig, TrainConfig, UserError
from tests import te_stand_in
from tests.functional_tests.script_helpers import conversation, make_base, write_conversations

KINDS = {"local": LOCAL, "engine": ENGINE}


def train(here: Path, load: str, save: str, iterations: int, layers: BaseLayers, **options: Any) -> bool:
    from megatron_spec.commands.finetune import FinetuneRun, finetune

    evaluation = options.pop("evaluation", None) or EvalRequest(str(here / "held_out.jsonl"), 2, 3, 2, 6)
    return finetune(FinetuneRun(
        load=str(here / load), save=str(here / save), data=str(here / "train.jsonl"), layers=layers,
        seq_length=options.pop("seq_length", 64),
        train=TrainConfig(
            train_iters=iterations, micro_batch_size=2, global_batch_size=4, lr=5e-3, lr_decay_style="constant"
        ),
        objective=ObjectiveConfig(ttt_steps=2), evaluation=evaluation, **options,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts trained, quantised and trained again, with either."""
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.quantize import quantize

    here = Path(tmp_path_factory.mktemp("engine"))
    torch.set_num_threads(1)
    make_base(here / "base")
    write_conversations(here / "train.jsonl", 16)
    questions = [{"question_id": i, "turns": [conversation(i)["conversations"][0]["content"]]} for i in range(20, 23)]  # type: ignore[index]
    (here / "held_out.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    data = str(here / "train.jsonl")
    with te_stand_in.installed():
        for name, layers in KINDS.items():
            at = {step: str(here / f"{step} {name}") for step in ("draft", "run", "fp8", "qat")}
            convert(str(here / "base"), at["draft"], layers=layers)
            assert train(here, at["draft"], at["run"], 4, layers)
            quantize(at["run"], at["fp8"], data, samples=8, seq_length=64, layers=layers)
            assert train(here, at["fp8"], at["qat"], 2, layers)
    return here


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [x["loss"] for x in lines(folder / "metrics.jsonl")]


def test_training_quantised_training_and_acceptance(here: Path) -> None:
    for run in ("run", "qat"):
        found, expected = (losses(here / f"{run} {name}") for name in ("engine", "local"))
        assert found == pytest.approx(expected, rel=2e-3 if run == "qat" else 1e-4) and len(found) > 1
    a, b = (lines(here / f"run {name}" / "acceptance.jsonl") for name in ("engine", "local"))
    assert [x["acceptance_length"] for x in a] == [x["acceptance_length"] for x in b] and len(a) == 2


@pytest.mark.parametrize("first", KINDS)
def test_a_run_continues_on_the_other_modules(here: Path, tmp_path: Path, first: str) -> None:
    second = next(name for name in KINDS if name != first)
    with te_stand_in.installed():
        for iterations, name in ((2, first), (4, second)):
            assert train(here, "draft local", str(tmp_path / "run"), iterations, KINDS[name])
    assert losses(tmp_path / "run") == pytest.approx(losses(here / "run local"), rel=1e-4)


def test_fp8_pads_rows_and_changes_no_sample(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in does not round, so the losses are those of local layers."""
    from megatron_spec.base.te import FP8_ROWS
    from megatron_spec.planning import te_paths

    rows, product = set(), te_stand_in.TELinear.product

    def counted(self: Any, x: torch.Tensor) -> Any:
        rows.add(x.shape[:-1].numel())
        return product(self, x)

    monkeypatch.setattr(te_paths, "fp8_products", lambda _: {})
    monkeypatch.setattr(te_paths, "linear_sizes", lambda *_: ())
    monkeypatch.setattr(te_stand_in._Linear, "product", counted)
    layers = ENGINE.replace(fp8_format="hybrid", fp8_recipe="tensorwise")
    with te_stand_in.installed():
        assert train(here, "draft local", "padded", 2, layers, evaluation=EvalRequest(), seq_length=73)
    assert rows and all(count % FP8_ROWS == 0 for count in rows)
    assert train(here, "draft local", "not padded", 2, LOCAL, evaluation=EvalRequest(), seq_length=73)
    assert losses(here / "padded") == pytest.approx(losses(here / "not padded"), rel=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs")
def test_every_script_refuses_it_without_a_gpu(here: Path, tmp_path: Path) -> None:
    """Before weights load: nothing is written, and the base's weights need not be there."""
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.decode import generate, validate
    from megatron_spec.commands.export import export
    from megatron_spec.commands.features import extract_features
    from megatron_spec.commands.quantize import quantize

    data, draft, out = str(here / "train.jsonl"), str(here / "draft local"), str(tmp_path / "out")
    calls: dict[str, Any] = {
        "convert": lambda: convert(str(here / "base"), out, layers=ENGINE),
        "finetune": lambda: train(here, draft, out, 2, ENGINE),
        "quantize": lambda: quantize(draft, out, data, layers=ENGINE),
        "extract": lambda: extract_features(draft, out, data, layers=ENGINE),
        "validate": lambda: validate(data, load=draft, output=out, layers=ENGINE),
        "generate": lambda: generate(data, out, load=draft, layers=ENGINE),
        "export": lambda: export(draft, out, extra_modules=True, layers=ENGINE),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_spec.checkpoint.huggingface.load_huggingface", None)
        for name, call in calls.items():
            with pytest.raises(UserError, match=r"not installed|needs a GPU"):
                call()
            assert not Path(out).exists(), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_cache": "c"}, "--fp8-format is for features computed as training goes"),
        ({}, "which --fp8-format leaves out"),
    ],
)
def test_fp8_is_refused(here: Path, options: dict[str, str], message: str) -> None:
    from megatron_spec.planning import te_paths

    layers = ENGINE.replace(fp8_format="hybrid")
    with te_stand_in.installed(), pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=message):
        patch.setattr(te_paths, "fp8_products", lambda _: {})
        patch.setattr(te_paths, "linear_sizes", lambda *_: ())
        train(here, "draft local", "refused", 2, layers, **options)
    assert not (here / "refused").exists()
