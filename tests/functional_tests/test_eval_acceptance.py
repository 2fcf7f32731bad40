"""finetune.py --eval-acceptance-interval: measured on the way, the best kept, training untouched by it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig, UserError
from tests.functional_tests.script_helpers import conversation, make_base, write_conversations
from tests.tiny import llama
from tests.worlds import run_world

EVERY = 2


def prepare(here: Path) -> None:
    make_base(here / "base")
    write_conversations(here / "train.jsonl", 16)
    questions = [{"question_id": i, "turns": [conversation(i)["conversations"][0]["content"]]} for i in range(20, 25)]  # type: ignore[index]
    (here / "held_out.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))


def train(here: Path, save: str, iterations: int, evaluated: bool = True, **options: Any) -> bool:
    from megatron_spec.commands.evaluate import EvalRequest
    from megatron_spec.commands.finetune import FinetuneRun, finetune

    evaluation = EvalRequest(str(here / "held_out.jsonl"), EVERY, 4, 2, 6) if evaluated else EvalRequest()
    return finetune(FinetuneRun(
        load=str(here / options.pop("load", "draft")), save=str(here / save), data=str(here / "train.jsonl"),
        seq_length=96,
        train=TrainConfig(
            train_iters=iterations, micro_batch_size=2, global_batch_size=4, lr=5e-3, lr_decay_style="constant",
            **options.pop("train_changes", {}),
        ),
        objective=ObjectiveConfig(ttt_steps=2), evaluation=options.pop("evaluation", evaluation),
        parallel=options.pop("parallel", ParallelConfig()), **options,
    ))  # fmt: skip


def read(here: Path, save: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (here / save / "acceptance.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_spec.commands.convert import convert

    folder = Path(tmp_path_factory.mktemp("evaluated"))
    torch.set_num_threads(1)
    prepare(folder)
    convert(str(folder / "base"), str(folder / "draft"))
    assert train(folder, "run", 5)
    return folder


def test_acceptance_is_measured_at_intervals_and_at_the_end(here: Path) -> None:
    lines = read(here, "run")
    assert [x["iteration"] for x in lines] == [2, 4, 5]
    assert all(1 <= x["acceptance_length"] <= 3 and x["prompts"] == 4 for x in lines)
    best = json.loads((here / "run" / "best" / "acceptance.json").read_text())
    assert best == max(lines, key=lambda x: x["acceptance_length"])


def test_best_is_a_checkpoint_with_the_logged_acceptance(here: Path, tmp_path: Path) -> None:
    from megatron_spec.checkpoint.spec import read_spec, resolve
    from megatron_spec.commands.decode import validate
    from megatron_spec.config import DecodeConfig

    best = json.loads((here / "run" / "best" / "acceptance.json").read_text())
    assert read_spec(resolve(here / "run" / "best")).iteration == best["iteration"]
    report = validate(
        str(here / "held_out.jsonl"), load=str(here / "run" / "best"), num_prompts=4, output=str(tmp_path / "r.json"),
        decode=DecodeConfig(max_draft_len=2, max_new_tokens=6, batch_size=2),
    )  # fmt: skip
    assert report.first.acceptance.acceptance_length == best["acceptance_length"] and report.first.text_identical


def test_evaluation_does_not_change_training(here: Path) -> None:
    from megatron_spec import api

    train(here, "unwatched", 5, evaluated=False)
    watched, unwatched = (api.load(here / name).draft.state_dict() for name in ("run", "unwatched"))
    assert all(torch.equal(watched[n], unwatched[n]) for n in watched)


def test_resumed_run_continues_its_measurements(here: Path) -> None:
    train(here, "resumed", 2)
    with (here / "resumed" / "acceptance.jsonl").open("a") as file:
        file.write('{"iteration": 3, "acceptance_length": 9.0}\n')  # of a run that died before it saved
    best = here / "resumed" / "best" / "acceptance.json"
    best.write_text(json.dumps({**json.loads(best.read_text()), "acceptance_length": 2.9}))
    train(here, "resumed", 5)
    assert [x["acceptance_length"] for x in read(here, "resumed")] == [
        x["acceptance_length"] for x in read(here, "run")
    ]
    assert json.loads(best.read_text())["iteration"] == 2  # nothing was better than what was known


def test_a_best_that_was_measured_otherwise_is_not_compared(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megatron_spec.commands.evaluate import EvalRequest

    train(here, "changed", 2)
    best = here / "changed" / "best" / "acceptance.json"
    best.write_text(json.dumps({**json.loads(best.read_text()), "acceptance_length": 2.9}))
    train(here, "changed", 4, evaluation=EvalRequest(str(here / "held_out.jsonl"), EVERY, 4, 1, 6))
    assert "was measured differently (eval_draft_len 2 -> 1): the next measurement replaces it" in caplog.text
    assert json.loads(best.read_text())["iteration"] == 4


def test_a_best_before_quantisation_is_not_compared(here: Path) -> None:
    """One folder for the whole chain: its best draft is then of the run that trains what is served."""
    from megatron_spec.checkpoint.spec import read_spec, resolve
    from megatron_spec.commands.quantize import quantize

    train(here, "qat", 2)
    best = here / "qat" / "best" / "acceptance.json"
    best.write_text(json.dumps({**json.loads(best.read_text()), "acceptance_length": 2.9}))
    quantize(
        str(here / "qat"), str(here / "qat"), data=str(here / "train.jsonl"), samples=2, seq_length=96,
        objective=ObjectiveConfig(ttt_steps=2),
    )  # fmt: skip
    train(here, "qat", 2, load="qat")
    assert read_spec(resolve(best.parent)).quant is not None


def in_parallel(here: str, layout: dict[str, int]) -> None:
    train(Path(here), f"run-{next(iter(layout))}", 5, parallel=ParallelConfig(**layout))


@pytest.mark.parametrize("layout", [{"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 1}], ids=str)
def test_measurements_are_equal_on_several_ranks(here: Path, layout: dict[str, int]) -> None:
    run_world(2, in_parallel, str(here), layout)
    found = read(here, f"run-{next(iter(layout))}")
    for name in ("acceptance_per_position", "ci95"):
        assert [x[name] for x in found] == [x[name] for x in read(here, "run")]


def test_a_signal_ends_an_evaluation_at_once_and_after_the_save(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run then begins with it when it continues."""
    from megatron_spec.checkpoint.spec import latest_iteration
    from megatron_spec.decoding.engine import _Engine

    steps: list[int | None] = []
    verify = _Engine._verify

    def interrupted(engine: _Engine) -> Any:
        steps.append(latest_iteration(here / "stopped"))
        signal.raise_signal(signal.SIGTERM)
        return verify(engine)

    monkeypatch.setattr(_Engine, "_verify", interrupted)
    assert not train(here, "stopped", 5, train_changes={"save_interval": 2})
    assert steps == [2], "one step of decoding, with the checkpoint of its iteration on disk"
    assert not (here / "stopped" / "acceptance.jsonl").exists() and latest_iteration(here / "stopped") == 2
    assert not train(here, "stopped", 5) and latest_iteration(here / "stopped") == 2
    monkeypatch.undo()
    assert train(here, "stopped", 5)
    assert read(here, "stopped") == read(here, "run")


@pytest.mark.parametrize("moment", ["step", "evaluation"])
def test_a_signal_at_the_end_leaves_the_last_measurement_to_the_next_start(
    here: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    from megatron_spec.commands.evaluate import AcceptanceEvaluator
    from megatron_spec.training.step import Trainer

    name = f"ended in {moment}"
    call, step = AcceptanceEvaluator._answers, Trainer.step

    def answers(evaluator: Any, interrupted: Any) -> Any:
        if moment == "evaluation":
            signal.raise_signal(signal.SIGTERM)
        return call(evaluator, interrupted)

    def last_step(trainer: Any, *args: Any) -> Any:
        if moment == "step":
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, *args)

    monkeypatch.setattr(AcceptanceEvaluator, "_answers", answers)
    monkeypatch.setattr(Trainer, "step", last_step)
    assert not train(here, name, 1) and not (here / name / "acceptance.jsonl").exists()
    monkeypatch.undo()
    assert train(here, name, 1) and train(here, name, 1)
    assert [x["iteration"] for x in read(here, name)] == [1]
    assert json.loads((here / name / "best" / "acceptance.json").read_text())["iteration"] == 1


def test_a_run_killed_while_it_keeps_its_best_measures_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_spec.commands.evaluate import AcceptanceEvaluator

    class Killed(BaseException):
        """Stands for SIGKILL."""

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(AcceptanceEvaluator, "_keep", killed)
    with pytest.raises(Killed):
        train(here, "killed", 2)
    monkeypatch.undo()
    assert train(here, "killed", 2)
    assert read(here, "killed") == read(here, "run")[:1]
    assert json.loads((here / "killed" / "best" / "acceptance.json").read_text()) == read(here, "run")[0]


def test_evaluation_options_without_evaluation_are_refused() -> None:
    from megatron_spec.commands.evaluate import EvalRequest

    for fields, message in (
        ({"data": "x"}, "belong together"), ({"interval": 2}, "belong together"),
        ({"num_prompts": 4}, "--eval-prompts does nothing without"),
        ({"max_draft_len": 4}, "--eval-draft-len does nothing without"),
        ({"max_new_tokens": 4}, "--eval-tokens does nothing without"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            EvalRequest(**fields)  # type: ignore[arg-type]


def test_prompts_that_do_not_fit_are_named(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megatron_spec.commands.evaluate import EvalRequest

    data = here / "long.jsonl"
    questions = ["red sky", "blue sea " * 20_000]
    data.write_text("".join(json.dumps({"question_id": i, "turns": [q]}) + "\n" for i, q in enumerate(questions)))
    assert train(here, "long", 1, evaluation=EvalRequest(str(data), EVERY, 2, 2, 6))
    assert "1 of 2 prompts are longer than" in caplog.text
    assert read(here, "long")[-1]["prompts"] == 1


def test_impossible_evaluations_are_refused(here: Path) -> None:
    from megatron_spec.commands.evaluate import EvalRequest

    data = str(here / "held_out.jsonl")
    for evaluation, options, message in (
        (EvalRequest(str(here / "no.jsonl"), 2), {}, "--eval-data .*no such file"),
        (EvalRequest(data, 2), {"base_fp8": True}, "--base-fp8 leaves out"),
        (EvalRequest(data, 2), {"parallel": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)},
         "sequence-parallel"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            train(here, "refused", 2, evaluation=evaluation, **options)


def test_more_tokens_than_a_draft_proposes_are_refused_before_training() -> None:
    from megatron_spec.commands.checks import check_training, eval_length
    from megatron_spec.commands.runs import EvalRequest, FinetuneRun
    from megatron_spec.config import presets

    base = llama()
    block = presets.block_config(base, "dflash", {"mask_token_id": 3, "block_size": 4})
    deep = presets.eagle_config(base, "p-eagle", {"mask_token_id": 3})
    for draft, given in ((block, ObjectiveConfig()), (deep, ObjectiveConfig(ttt_steps=3))):
        objective = presets.objective_for(draft, given)
        runs = {n: FinetuneRun(load="", evaluation=EvalRequest("f", 2, max_draft_len=n), dry_run=True) for n in (3, 4)}
        check_training(runs[3], base, draft, None, objective, 64)
        with pytest.raises(UserError, match="--eval-draft-len 4"):
            check_training(runs[4], base, draft, None, objective, 64)
    heads, objective = presets.medusa_config(base, num_heads=2), ObjectiveConfig()
    assert eval_length(EvalRequest("f", 2), base, heads, objective) == 2  # --eval-draft-len is not given
    assert eval_length(EvalRequest("f", 2, max_draft_len=4), base, heads, objective) == 4
    assert eval_length(EvalRequest("f", 2), base, presets.eagle_config(base), ObjectiveConfig(ttt_steps=1)) == 3
