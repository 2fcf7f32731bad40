"""An invalid step leaves parameters and optimizer unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_batch, save_llama
from tests.worlds import run_world


def snapshot(trainer: Any) -> dict[str, torch.Tensor]:
    """Parameters and every tensor of the optimizer's state."""
    found = {name: p.detach().clone() for name, p in trainer.ddp.named_parameters()}
    for i, part in enumerate(trainer.optimizer.chained_optimizers):
        for j, state in enumerate(part.optimizer.state.values()):
            found.update({f"{i}.{j}.{k}": v.clone() for k, v in state.items() if torch.is_tensor(v)})
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def attempt(trainer: Any, features: Any) -> str:
    from megatron_spec.training.step import NonFiniteLossError

    try:
        trainer.step(features, "iteration 7, samples [[1, 2]]")
    except NonFiniteLossError as e:
        return str(e)
    return "no error"


def cases(folder: str, train: dict[str, Any]) -> dict[str, Any]:
    """One good step, then a NaN loss, a NaN and an infinite gradient, an empty batch, and a good step again."""
    from megatron.core import parallel_state

    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.commands.convert import new_draft
    from megatron_spec.config import ObjectiveConfig, TrainConfig, presets
    from megatron_spec.drafts.vocab import DraftVocab
    from megatron_spec.features.online import OnlineFeatures
    from megatron_spec.runtime import distributed
    from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
    from megatron_spec.training.step import Trainer

    parallel_state.destroy_model_parallel()
    world = distributed.initialize()
    ref = inspect_base(folder)
    config = presets.eagle_config(ref.config, "eagle3", {"capture_layer_ids": [0, 3, 6]})
    base = load_base(ref, world, config.capture_layer_ids)
    draft = new_draft(base, config, DraftVocab.full(96), world, torch.float32, seed=5)
    settings = TrainConfig(train_iters=9, lr=1e-2, weight_decay=0.1, **train)
    ddp = wrap_ddp(draft, world, settings)
    trainer = Trainer(world, ddp, *build_optimizer(ddp, world, settings), base, ObjectiveConfig(ttt_steps=2))
    source = OnlineFeatures(base)
    good, empty = make_batch(2, 16, seed=1), make_batch(2, 16, seed=1)
    empty.turns_BS.zero_()
    start = snapshot(trainer)
    trainer.step(source.features([good]))
    before = snapshot(trainer)
    result: dict[str, Any] = {"moved": not equal(start, before)}

    poisoned = source.features([good])
    poisoned[0].captures_SBC.fill_(float("nan"))
    result["loss"] = attempt(trainer, poisoned)
    for value in ("nan", "inf"):
        parameter = next(iter(draft.parameters()))
        hook = parameter.register_hook(lambda g, v=value: torch.full_like(g, float(v)))
        result[value] = attempt(trainer, source.features([good]))
        hook.remove()
    result["kept"] = equal(before, snapshot(trainer))

    step = trainer.step(source.features([empty]), "iteration 8")
    result["empty"] = (step.grad_norm, float(step.loss), int(step.sums[3].sum()))
    result["kept by the empty step"] = equal(before, snapshot(trainer))
    seen: list[dict[str, torch.Tensor]] = []
    before = snapshot(trainer)
    after = trainer.step(source.features([good]), meanwhile=lambda: seen.append(snapshot(trainer)))
    result["meanwhile"] = [equal(x, before) for x in seen]
    result["goes on"] = bool(torch.isfinite(after.loss)) and not equal(before, snapshot(trainer))
    return result


def all_cases(folder: str, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cases(folder, s) for s in settings]


SETTINGS: list[dict[str, Any]] = [{}, {"clip_grad": 0.0}, {"use_distributed_optimizer": True}]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = save_llama(tmp_path_factory.mktemp("step") / "base")
    return run_world(1, all_cases, str(folder), SETTINGS)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=str)
def test_other_work_begins_before_the_update(results: list[dict[str, Any]], number: int) -> None:
    assert results[number]["meanwhile"] == [True]


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=str)
def test_nan_updates_nothing(results: list[dict[str, Any]], number: int) -> None:
    found = results[number]
    assert found["moved"] and found["goes on"]
    assert "the loss is nan at iteration 7, samples [[1, 2]]" in found["loss"]
    assert "the norm of the gradient is nan at iteration 7, samples [[1, 2]]" in found["nan"]
    assert "the norm of the gradient is" in found["inf"] and "samples [[1, 2]]" in found["inf"]
    assert found["kept"]


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=str)
def test_a_step_without_supervised_rows_changes_nothing(results: list[dict[str, Any]], number: int) -> None:
    assert results[number]["empty"] == (0.0, 0.0, 0)
    assert results[number]["kept by the empty step"]
