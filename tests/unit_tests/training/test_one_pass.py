"""The optimizer's step in one pass against megatron-core's, over the plain twin of its kernel, in fp32 under bf16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.config import TrainConfig
from megatron_spec.config.machine import Machine
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.planning.paths import NO_PATHS, Paths, Setting
from megatron_spec.runtime import distributed
from megatron_spec.training.one_pass import decoupled
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer
from tests.unit_tests.drafts.plain_eagle3 import eagle_config
from tests.unit_tests.drafts.test_eagle import make

ROWS = 37.0


PLAIN = Machine(kernels="plain")


def trainer(one_pass: bool, share: bool, clip: float = 0.5, machine: Machine = PLAIN) -> Trainer:
    draft, _ = make(eagle_config(), torch.bfloat16)
    draft.paths = Paths(Setting(machine, "bfloat16", draft=draft.config)) if one_pass else NO_PATHS
    train = TrainConfig(
        train_iters=9, lr=1e-2, weight_decay=0.1, clip_grad=clip, bf16=True, use_distributed_optimizer=share
    )
    world = distributed.initialize()
    ddp = wrap_ddp(draft, world, train)
    return Trainer(world, ddp, *build_optimizer(ddp, world, train), None, None)  # type: ignore[arg-type]


def update(t: Trainer, number: int) -> float:
    """A step on gradients that are sums over `ROWS` rows; returns the norm of their means."""
    t.ddp.zero_grad_buffer()
    t.optimizer.zero_grad()
    for i, p in enumerate(t.ddp.parameters()):
        p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i)) * 0.1 * ROWS)
    t.ddp.finish_grad_sync()
    t.optimizer.prepare_grads()
    norm = float(t.optimizer.get_grad_norm()) / ROWS
    t._update(norm, ROWS)
    t.scheduler.step(increment=1)
    return norm


def state(t: Trainer) -> dict[str, Tensor]:
    """Parameters, master weights, moments and counts."""
    found = {name: p.detach().clone() for name, p in t.ddp.named_parameters()}
    for part in t._parts:
        inner = part.optimizer.optimizer
        for i, p in enumerate(p for group in inner.param_groups for p in group["params"]):
            found[f"master {i}"] = p.detach().clone()
            found |= {f"{name} {i}": torch.as_tensor(x).clone() for name, x in inner.state[p].items()}
        found |= {f"steps {i}": torch.as_tensor(g["step"]) for i, g in enumerate(inner.param_groups) if "step" in g}
    return found


def passes(t: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each step in one pass returned."""
    taken: list[bool] = []
    for part in t._parts:
        inner = part.step
        monkeypatch.setattr(part, "step", lambda scale, inner=inner: taken.append(inner(scale)) or taken[-1])
    return taken


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("clip", [0.5, 0.0, 1e6])
def test_equals_megatron_core(share: bool, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(PLAIN, share, clip, monkeypatch)


def compare(machine: Machine, share: bool, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of both."""
    fast, usual = trainer(True, share, clip, machine), trainer(False, share, clip, machine)
    taken, not_taken = passes(fast, monkeypatch), passes(usual, monkeypatch)
    for number in range(4):
        assert update(fast, number) == update(usual, number) > 1
    assert taken == [False, True, True, True] and not any(not_taken)
    found, wanted = state(fast), state(usual)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        if x.dtype == torch.bfloat16:  # a last bit of the master weight may decide the rounding
            torch.testing.assert_close(found[name], x, rtol=8e-3, atol=1e-6, msg=name)
            assert float((found[name] != x).float().mean()) < 0.01, name
        else:
            torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("first", [True, False])
def test_either_continues_with_the_state_of_the_other(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps of one, its state is loaded into the other, which goes on as the first would have."""
    before, after = trainer(first, False), trainer(not first, False)
    for number in range(2):
        update(before, number)
    with torch.no_grad():
        for mine, theirs in zip(after.ddp.parameters(), before.ddp.parameters(), strict=True):
            mine.copy_(theirs)
    after.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    after.scheduler.step(increment=2)
    taken = passes(after, monkeypatch)
    for number in (2, 3):
        update(before, number)
        update(after, number)
    assert taken == [not first] * 2
    found, wanted = state(after), state(before)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name].float(), x.float(), rtol=8e-3, atol=1e-5, msg=name)


def test_other_optimizers_are_left_to_megatron_core() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert decoupled(torch.optim.AdamW([weight])) and not decoupled(torch.optim.AdamW([weight], amsgrad=True))
    assert not decoupled(torch.optim.Adam([weight])) and not decoupled(torch.optim.SGD([weight]))


def test_only_bf16_has_master_weights() -> None:
    draft, _ = make(eagle_config(), torch.float32)
    assert isinstance(draft, EagleDraft)
    draft.paths = Paths(Setting(Machine(kernels="plain"), draft=draft.config))
    world, train = distributed.initialize(), TrainConfig(train_iters=9)
    ddp = wrap_ddp(draft, world, train)
    t: Any = Trainer(world, ddp, *build_optimizer(ddp, world, train), None, None)  # type: ignore[arg-type]
    assert [part.step(1.0) for part in t._parts] == [False]
