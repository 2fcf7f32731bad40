"""Drafts from Transformer Engine's modules where a rank or a micro-batch has no rows, against the local draft.

Transformer Engine's modules refuse zero rows, and so do their stand-ins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_spec.batch import Batch, Features
from megatron_spec.config import ObjectiveConfig, ParallelConfig, QuantConfig, TrainConfig
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.engine import TransformerEngine
from megatron_spec.drafts.linear import Placement, RMSNorm
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.runtime import distributed, platform
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer
from tests import te_stand_in
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds, draft_vocab, eagle_config, features
from tests.unit_tests.drafts.test_eagle_parallel import close, joined
from tests.unit_tests.drafts.test_fused_context import batch_of, part
from tests.worlds import run_world

CONFIG = eagle_config(attention_bias=True, mlp_bias=True, fc_bias=True, qk_norm=True)
WIDE = eagle_config(hidden_size=32, intermediate_size=48, head_dim=8, num_attention_heads=4, num_key_value_heads=2)
GOAL = ObjectiveConfig(ttt_steps=3)
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP": {"tensor_model_parallel_size": 2},
    "TP SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "DP": {},
    "CP": {"context_parallel_size": 2},
}


def first_step_only() -> Batch:
    """Rows are supervised at step 0, and none at later steps."""
    batch = batch_of(False, False)
    turns = torch.zeros_like(batch.turns_BS)
    turns[:, 5:7] = 1
    return replace(batch, turns_BS=turns)


def unsupervised() -> Batch:
    batch = batch_of(False, False)
    return replace(batch, turns_BS=torch.zeros_like(batch.turns_BS))


def micro_batches(layout: str) -> list[list[Batch]]:
    """Those of each data parallel rank. Only the second of two CP ranks has supervised rows in the first one."""
    if layout == "DP":
        return [[batch_of(False, False), batch_of(True, False)], [first_step_only(), unsupervised()]]
    return [[batch_of(False, layout == "CP"), first_step_only(), unsupervised()]]


Outcome = tuple[dict[str, torch.Tensor], dict[str, int]]


def outcome(batches: list[Batch], world: Any, goal: ObjectiveConfig, engine: Any, config: Any = CONFIG) -> Outcome:
    """Loss sums, gradients and how often each gradient's hook fired, by the trainer."""
    sp = world.parallel.sequence_parallel
    draft = EagleDraft(config, draft_vocab(config), Placement(world.tp, sp, engine=engine))
    draft.engine = engine
    hidden = config.target_hidden_size
    ends: Any = StandInEnds(hidden, torch.float32, world.tp, sp, config.vocab_size, -config.vocab_size % 12)
    draft.initialize(ends, seed=6)
    settings = TrainConfig(1)
    ddp = wrap_ddp(draft, world, settings)
    fired: list[str] = []
    for name, p in draft.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))  # type: ignore[misc]
    trainer = Trainer(world, ddp, *build_optimizer(ddp, world, settings), ends, goal)
    made = [part(features(b, config, torch.float32), world.context, world.tp, sp) for b in batches]
    sums, _ = trainer.backward(made)
    found = {name: p.main_grad.clone() for name, p in draft.named_parameters()}
    return {"sums": sums, **found}, {name: fired.count(name) for name in found}


NORMS = {"TP": [20, 20], "TP SP": [36, 36], "DP": [24, 8], "CP": [12, 20]}
"""Norms that the modules compute on each rank, of 4 in a step and 36 in three micro-batches of 3 steps (DP: 24 in two):
those with rows. Under sequence parallelism every step computes all rows."""


def in_layout(layout: str, whole: bool = False) -> dict[str, Any]:
    """Outcomes with local modules and with the engine; with `whole` of the local ones, in one process, on all
    micro-batches of a layout."""
    platform.activate()
    world = distributed.initialize(ParallelConfig(**({} if whole else LAYOUTS[layout])))
    if whole:
        return {"local": outcome([b for mine in micro_batches(layout) for b in mine], world, GOAL, None)}
    mine = micro_batches(layout)[world.dp_rank]
    found: dict[str, Any] = {"local": outcome(mine, world, GOAL, None)}
    with te_stand_in.installed():
        found["engine"] = outcome(mine, world, GOAL, TransformerEngine())
        found["norms"] = sum(1 for kind, _, _ in te_stand_in.calls if kind == "norm")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_rows(layout: str) -> None:
    expected = run_world(1, in_layout, layout, True)[0]["local"][0]
    ranks = run_world(2, in_layout, layout)
    assert [rank["norms"] for rank in ranks] == NORMS[layout]
    assert float(expected["sums"][3].min()) > 0, "every step has a supervised row on some rank"
    for key, value in expected.items():
        for kind in ("local", "engine"):
            shards = [rank[kind][0][key] for rank in ranks]
            for shard in shards if shards[0].shape == value.shape else [joined(shards, value)]:
                close(shard, value, f"{layout} {kind}: {key}", exact=False)
    for rank in ranks:
        found, local = rank["engine"][1], rank["local"][1]
        assert found == local, "hooks of gradients fire as often as with local modules"
        assert set(found.values()) == {len(micro_batches(layout)[0])}, "once in every micro-batch"


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_steps_without_rows_change_nothing(recipe: Any) -> None:
    """Loss and gradients of three steps of which two have no rows are those of the first, in fp8 too."""
    batches, world = [first_step_only(), unsupervised()], distributed.initialize()
    with te_stand_in.installed():
        engine = TransformerEngine(recipe)
        found, fired = outcome(batches, world, GOAL, engine, WIDE)
        assert any(eight for _, _, eight in te_stand_in.calls) == (recipe is not None)
        expected, _ = outcome(batches, world, GOAL.replace(ttt_steps=1), engine, WIDE)
    assert set(fired.values()) == {2} and not found["sums"][:, 1:].any()
    assert float(found["sums"][3, 0]) > 0 and torch.equal(found.pop("sums")[:, :1], expected.pop("sums"))
    for name, value in expected.items():
        assert value.any() and torch.equal(found[name], value), name


@pytest.mark.parametrize("engine", [False, True])
def test_calibration_on_steps_without_rows(engine: bool) -> None:
    """Inputs that have no rows leave the ranges as they are."""
    world, quant, found = distributed.initialize(), QuantConfig(base="none"), []
    ends: Any = StandInEnds(CONFIG.target_hidden_size, torch.float32)

    class Source:
        def features(self, batches: list[Batch]) -> list[Features]:
            return [features(batch, CONFIG, torch.float32) for batch in batches]

    for steps in (3, 1):
        with te_stand_in.installed():
            own = TransformerEngine() if engine else None
            draft = EagleDraft(CONFIG, draft_vocab(CONFIG), Placement(world.tp, engine=own))
            draft.engine = own
            draft.initialize(ends, seed=6)
            batches, goal = [[first_step_only(), unsupervised()]], GOAL.replace(ttt_steps=steps)
            found.append(calibrate(None, draft, Source(), batches, goal, quant, world, ends))
    assert found[0] == found[1] and all(line.amax_input > 0 for line in found[0])


@pytest.mark.parametrize("shape", [(0, 32), (0, 1, 32), (3, 0, 32)])
@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("what", ["norm", "linear", "linear with a bias", "linear of another weight"])
def test_modules_without_rows(what: str, recipe: Any, shape: tuple[int, ...]) -> None:
    """Of the right shape and dtype, with gradients of zeros."""
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    with te_stand_in.installed():
        engine = TransformerEngine(recipe)
        place = Placement(distributed.initialize().tp, dtype=torch.bfloat16, engine=engine)
        bias = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True) if "bias" in what else None
        with engine.fp8():
            if what == "norm":
                norm = RMSNorm(32, 1e-6, place)
                weight, out = norm.weight, norm(x)
            else:
                weight, product = place.matrix(16, 32)
                weight = weight.detach().clone().requires_grad_() if "another" in what else weight  # type: ignore[assignment]
                out = product(x, weight, bias)
        out.sum().backward()
        assert not te_stand_in.calls
    assert out.shape == (shape if what == "norm" else (*shape[:-1], 16)) and out.dtype == torch.bfloat16
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape and not tensor.grad.any()


def test_the_stand_ins_refuse_zero_rows() -> None:
    x, options = torch.zeros(0, 32), {"bias": False, "params_dtype": torch.float32, "device": "cpu"}
    modules: list[Any] = [
        te_stand_in.RMSNorm(32, 1e-6, torch.float32, "cpu"),
        te_stand_in.Linear(32, 16, init_method=torch.nn.init.zeros_, **options),  # type: ignore[arg-type]
    ]
    for module in modules:
        with pytest.raises(RuntimeError, match="Output is not allocated"):
            module(x)
