"""A run that a signal ends is saved, says so with exit code 3, and continues only as the run it was."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.commands.features import template_hash
from megatron_spec.config import UserError
from megatron_spec.runtime.lock import exclusive
from tests.functional_tests.script_helpers import run_script, succeed, write_conversations, write_inputs
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer
from tests.worlds import run_world

# finetune.py as it stands, over features (one micro-batch a step) that send a signal to their own process in step 2,
# where those of step 3 are computed
INTERRUPTED = """
import runpy, signal, sys
import megatron_spec.commands.finetune as chain

number = getattr(signal, sys.argv[1])

class Interrupting(chain.OnlineFeatures):
    calls = 0

    def features(self, batches, following=()):
        self.calls += 1
        if self.calls == 3:
            signal.raise_signal(number)  # os.kill may reach another thread, and be seen a step later
        return super().features(batches, following)

chain.OnlineFeatures = Interrupting
sys.argv[1:] = sys.argv[2:]
runpy.run_path("examples/post_training/finetune.py", run_name="__main__")
"""


def convert(root: str) -> None:
    from megatron_spec.commands.convert import convert as run

    run(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")


def flags(root: Path, save: str, iterations: int) -> list[str]:
    return [
        "--load", f"{root}/draft", "--save", f"{root}/{save}", "--data", f"{root}/train.jsonl", "--seq-length", "64",
        "--train-iters", str(iterations), "--global-batch-size", "2", "--micro-batch-size", "2", "--ttt-steps", "2",
    ]  # fmt: skip


def interrupt(
    root: Path, save: str, signal_name: str, *more: str, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    program = root / "finetune.py"
    program.write_text(INTERRUPTED)
    return run_script(str(program), signal_name, *flags(root, save, 4), *more, fresh=fresh)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft, and a run of 4 steps that SIGTERM ended in step 2."""
    root = write_inputs(tmp_path_factory.mktemp("interruption"))
    run_world(1, convert, str(root))
    done = interrupt(root, "run", "SIGTERM")
    assert done.returncode == 3, done.stderr
    assert "stopped by a signal at iteration 2" in done.stderr
    return root


def latest(run: Path) -> str:
    return (run / "latest_checkpointed_iteration.txt").read_text().strip()


def test_ctrl_c_saves_too(root: Path) -> None:
    done = interrupt(root, "ctrl_c", "SIGINT")
    assert done.returncode == 3, done.stderr
    assert latest(root / "ctrl_c") == "2" and "Traceback" not in done.stderr


def test_run_killed_before_its_first_save_starts_over(root: Path) -> None:
    assert interrupt(root, "killed", "SIGKILL").returncode == -9
    left = {p.name for p in (root / "killed").iterdir()}
    assert left == {"metrics.jsonl", ".lock"}
    assert again(root, save="killed") == (root / "draft" / "iter_0000000", False)
    (root / "killed" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="killed is not empty: it is not a run that could be continued"):
        again(root, save="killed")


def test_run_killed_after_a_save_resumes(root: Path) -> None:
    """Whoever reads its output sees the end, although megatron-core has started a process to save (here: a pipe)."""
    assert interrupt(root, "saved", "SIGKILL", "--save-interval", "1", fresh=True).returncode == -9
    assert latest(root / "saved") == "1" and (root / "saved" / ".lock").is_file()
    (root / "saved" / "latest_checkpointed_iteration.txt").unlink()  # killed before it was written
    assert again(root, save="saved") == (root / "saved" / "iter_0000001", True)
    with exclusive(root / "saved"):  # the lock of the killed run is none
        pass


def again(root: Path, **changes: Any) -> tuple[Path, bool]:
    """(folder to start from, whether the run is resumed)."""
    found = resolved(root, **changes)
    return found.folder, found.resumed


def resolved(root: Path, data: str = "train.jsonl", seq_length: int = 64, save: str = "run", **changes: Any) -> Any:
    """The inputs of a start of the run with other settings."""
    from megatron_spec.commands.finetune import FinetuneRun, resolve
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    goal = {name: changes.pop(name) for name in ("step_weights", "step_decay") if name in changes}
    objective = ObjectiveConfig(ttt_steps=changes.pop("ttt_steps", 2), **goal)
    options = {name: changes.pop(name) for name in list(changes) if name in FinetuneRun.__dataclass_fields__}
    train = TrainConfig(**{"train_iters": 4, "global_batch_size": 2, **changes})
    return resolve(
        FinetuneRun(
            load=options.pop("load", f"{root}/draft"), save=f"{root}/{save}", data=f"{root}/{data}", train=train,
            objective=objective,
            parallel=ParallelConfig(), seq_length=seq_length, **options,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seq_length": 32}, "--seq-length is 32, but the run in --save .* began with 64"),
        ({"global_batch_size": 4}, "--global-batch-size is 4, .* with 2"),
        ({"seed": 5}, "--seed is 5, .* with 1234"),
        ({"data": "other.jsonl"}, "--data has other content"),
    ],
)
def test_another_run_cannot_resume_it(root: Path, changes: dict[str, Any], expected: str) -> None:
    write_conversations(root / "other.jsonl", 5)
    with pytest.raises(UserError, match=expected):
        again(root, **changes)


def test_another_template_cannot_resume_it(root: Path) -> None:
    """Its text would be another one from there on."""
    for folder in ("moved words", "words"):
        make_tokenizer(CHATML_MARKED).save_pretrained(root / folder)
    template = root / "words" / "chat_template.jinja"
    template.write_text(template.read_text().replace("Be kind.", "Be brief."))
    before = template_hash(str(root / "base"))
    assert template_hash(str(root / "moved words")) == before != template_hash(str(root / "words"))
    assert again(root, tokenizer=str(root / "moved words"))[1]
    with pytest.raises(UserError, match=f"--tokenizer has other content .* began with {before}"):
        again(root, tokenizer=str(root / "words"))


def test_moved_data_and_more_steps_can_resume_it(root: Path) -> None:
    (root / "moved.jsonl").write_bytes((root / "train.jsonl").read_bytes())
    assert again(root, data="moved.jsonl", train_iters=6, lr_decay_iters=4)[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr": 1e-5}, "--lr is 1e-05, the checkpoint has 0.0001"),
        ({"min_lr": 1e-6}, "--min-lr is 1e-06, the checkpoint has 0.0"),
        ({"adam_beta2": 0.9, "adam_eps": 1e-7}, "--adam-beta2 is 0.9, .* 0.95; --adam-eps is 1e-07, .* 1e-08"),
        ({"weight_decay": 0.1}, "--weight-decay is 0.1"),
        ({"clip_grad": 0.5}, "--clip-grad is 0.5"),
        ({"train_iters": 6}, "--lr-decay-iters is 6, the checkpoint has 4"),
        ({"lr_decay_style": "linear"}, "--lr-decay-style is linear"),
    ],
)
def test_other_optimizer_settings_are_refused_unless_requested(
    root: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        again(root, **changes)
    assert again(root, **changes, override_opt_param_scheduler=True)[1]
    assert again(root, **changes, use_checkpoint_opt_param_scheduler=True)[1]


def test_epochs_resume_and_other_epochs_are_refused_before_weights_load(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number of steps, which the learning rate follows, is known with the data."""
    import megatron_spec.commands.finetune as chain
    from megatron_spec.config import ObjectiveConfig, TrainConfig

    def train(epochs: int, save: str = "epochs") -> bool:
        where = (f"{root}/draft", f"{root}/{save}", f"{root}/train.jsonl")
        goal = ObjectiveConfig(ttt_steps=2)
        return chain.finetune(*where, TrainConfig(global_batch_size=2), goal, seq_length=64, train_epochs=epochs)

    def losses(save: str) -> list[float]:
        return [json.loads(line)["loss"] for line in (root / save / "metrics.jsonl").read_text().splitlines()]

    assert train(2, "whole epochs")
    with monkeypatch.context() as patch:
        step = chain.Trainer.step
        patch.setattr(chain.Trainer, "step", lambda *args: signal.raise_signal(signal.SIGTERM) or step(*args))
        assert not train(2) and latest(root / "epochs") == "1"
    with monkeypatch.context() as patch:
        patch.setattr(chain, "load_models", lambda *_: pytest.fail("the weights were read"))
        with pytest.raises(UserError, match="--lr-decay-iters is 6, the checkpoint has 4"):
            train(3)
    assert train(2) and len(losses("epochs")) == 4 and losses("epochs") == losses("whole epochs")


@pytest.mark.parametrize(("name", "flag"), [("bf16", "--bf16"), ("use_distributed_optimizer", "--use-distributed-opt")])
def test_another_precision_or_kind_of_optimizer_is_refused(root: Path, name: str, flag: str) -> None:
    for how in ({}, {"override_opt_param_scheduler": True}):
        with pytest.raises(UserError, match=f"{flag}.* is True, the checkpoint has False. Its optimizer state has"):
            again(root, **{name: True}, **how)


def test_another_draft_to_start_from_is_refused(root: Path) -> None:
    shutil.copytree(root / "draft", root / "moved")
    assert again(root, load=str(root / "moved"))[1], "the same checkpoint in another folder"
    run_json = root / "moved" / "iter_0000000" / "run.json"
    run_json.write_text(run_json.read_text().replace('"seed": 1234', '"seed": 1235'))
    with pytest.raises(UserError, match=r"--load .*moved is another checkpoint than .*draft/iter_0000000, which"):
        again(root, load=str(root / "moved"))


def test_an_earlier_iteration_of_the_run_is_refused(root: Path) -> None:
    """It continues from its latest one, not from the one that is named."""
    for name in ("iter_0000001", "iter_0000002"):
        shutil.copytree(root / "run" / "iter_0000002", root / "back" / name)
    assert again(root, save="back", load=f"{root}/back")[1] and again(root, save="back", load=f"{root}/draft")[1]
    with pytest.raises(UserError, match=r"--load .*back/iter_0000001 is another checkpoint than .*draft/iter_0000000"):
        again(root, save="back", load=f"{root}/back/iter_0000001")


def test_another_objective_is_reported(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert again(root)[1] and not caplog.records
        again(root, ttt_steps=3)
    assert "continues with another objective: ttt_steps 2 -> 3" in caplog.text


def test_another_arithmetic_is_reported(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="--base-fp8 cannot run here"):
        again(root, base_fp8=True)
    assert "continues with different arithmetic: --base-fp8 False -> True" in caplog.text
    assert again(root, plain=True)[1] and "arithmetic: --plain False -> True" in caplog.text


def test_weights_of_steps_stay(root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on with its own unless a flag gives others; one of an older version has 0.8 ** k."""
    from megatron_spec.checkpoint import sharded

    known = sharded.read_extra(root / "run" / "iter_0000002")

    def weights(**given: Any) -> tuple[Any, Any]:
        goal = resolved(root, **given).objective
        return goal.step_weights, goal.step_decay

    def record(**changes: Any) -> None:
        """Let the checkpoint have another objective; None: not recorded."""
        goal = {k: v for k, v in {**known["objective"], **changes}.items() if k != "step_weights" or v is not None}
        monkeypatch.setattr(sharded, "read_extra", lambda _: {**known, "objective": goal})

    assert weights() == ("d-pace", None) and weights(step_weights="d-pace") == ("d-pace", None)
    record(step_decay=0.8)  # although it did nothing
    assert weights() == ("d-pace", None)
    record(step_weights=None, step_decay=0.8)
    assert weights() == ("decay", 0.8) and weights(step_decay=0.8) == ("decay", 0.8)
    record(step_weights=None, step_decay=0.6)
    assert weights() == ("decay", 0.6) and not caplog.records
    assert weights(step_weights="d-pace") == ("d-pace", None)
    assert "another objective: step_decay 0.6 -> None, step_weights decay -> d-pace" in caplog.text
    caplog.clear()
    assert weights(step_decay=0.7) == ("decay", 0.7) and "objective: step_decay 0.6 -> 0.7" in caplog.text
    assert weights(save="fresh") == ("d-pace", None) and weights(save="fresh", step_decay=0.8) == ("decay", 0.8)


def test_another_quantisation_cannot_resume_it(root: Path) -> None:
    path = root / "draft" / "iter_0000000" / "spec.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "quant": {"base": "none", "draft": "fp8"}}))
    try:
        with pytest.raises(UserError, match="quantised differently"):
            again(root)
    finally:
        path.write_text(text)


def test_run_resumes_to_its_end(root: Path) -> None:
    assert latest(root / "run") == "2"
    assert "continuing" in succeed("finetune", *flags(root, "run", 4))
    assert latest(root / "run") == "4"
    lines = [json.loads(line)["iteration"] for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4]
