"""Fused layers of block drafts against the plain ones, on the CPU, over the plain twins of the kernels: losses, every
gradient, weight gradients that go to `main_grad`, and every layout of two ranks. (Kernels: tests/gpu/test_kernels.py.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import ObjectiveConfig, QuantConfig, presets
from megatron_spec.config.machine import Machine
from megatron_spec.drafts.layer import DraftLayer
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.quantization.attach import attach_quantizers
from megatron_spec.runtime import platform
from megatron_spec.runtime.context import ContextShard
from tests.unit_tests.drafts.test_blocks import alone, block_config, features, made
from tests.worlds import run_world

__all__ = ["alone"]

CASES: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "dflash": ({}, torch.float64, 1e-11),
    "dspark": ({"algorithm": "dspark"}, torch.float64, 1e-11),
    "fp32, window": (
        {"sliding_window": 5, "causal": True, "num_hidden_layers": 3, "full_attention_layers": (2,)},
        torch.float32,
        2e-5,
    ),
    "other heads": ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4}, torch.float64, 1e-11),
    "one key/value head": ({"num_key_value_heads": 1, "block_size": 5}, torch.float64, 1e-11),
}


def fuse(draft: Any) -> None:
    """Let a draft take fused layers, over plain twins, and no other fast path."""
    others = ("loss_kernel", "teacher_kernel")
    draft.paths = Paths(Setting(Machine(kernels="plain"), draft=draft.config, off=others))


def run(draft: Any, ends: Any, dtype: torch.dtype, f: Features | None = None) -> Tensor:
    torch.manual_seed(11)
    losses = draft(f or features(dtype), ends, presets.objective_for(draft.config, ObjectiveConfig()))
    losses.total.backward()
    total: Tensor = losses.total.detach()
    return total


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every fused layer."""
    inner, found = DraftLayer.fused, []
    monkeypatch.setattr(DraftLayer, "fused", lambda *a: found.append(1) or inner(*a))
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_losses_and_gradients(name: str, alone: Any, taken: list[int]) -> None:
    changes, dtype, tolerance = CASES[name]
    draft, ends = made(block_config(**changes), alone, dtype)
    expected = run(draft, ends, dtype)
    gradients = {n: p.grad.clone() for n, p in draft.named_parameters()}
    assert not taken
    fuse(draft)
    draft.zero_grad()
    torch.testing.assert_close(run(draft, ends, dtype), expected, rtol=tolerance, atol=tolerance)
    assert len(taken) == draft.config.num_hidden_layers
    for n, p in draft.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], rtol=tolerance * 10, atol=tolerance, msg=lambda m: f"{n}: {m}")


def test_weight_gradients_are_added_to_main_grad(alone: Any) -> None:
    """As under megatron-core's data-parallel wrapper, also for weights that a layer uses twice."""
    draft, ends = made(block_config(), alone, torch.float64)
    run(draft, ends, torch.float64)
    expected = {n: p.grad.clone() for n, p in draft.named_parameters()}
    fuse(draft)
    draft.zero_grad()
    for p in draft.parameters():
        p.main_grad = torch.ones_like(p)
    run(draft, ends, torch.float64)
    assert all(p.grad is None for p in draft.parameters())
    for n, p in draft.named_parameters():
        torch.testing.assert_close(p.main_grad, expected[n] + 1, rtol=1e-9, atol=1e-11, msg=lambda m: f"{n}: {m}")


def test_what_takes_the_plain_layers(alone: Any, taken: list[int]) -> None:
    """Fake quantisers, hooks, modules and methods of a subclass, and inference."""
    draft, ends = made(block_config(), alone)
    fuse(draft)
    goal = presets.objective_for(draft.config, ObjectiveConfig())
    with torch.no_grad():
        draft(features(), ends, goal)
    seen = []
    hook = draft.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    draft(features(), ends, goal)
    assert seen == [1]
    hook.remove()
    for part, name in ((draft.layers[1].mlp, "forward"), (draft, "run_layers")):
        kind = type(part)
        inner = getattr(kind, name)
        part.__class__ = type("Other", (kind,), {name: lambda *a, inner=inner: seen.append(2) or inner(*a)})
        draft(features(), ends, goal)
        part.__class__ = kind
    assert seen == [1, 2, 2]
    attach_quantizers(draft, QuantConfig(base="none"), "draft")
    for module in draft.modules():
        if getattr(module, "input_quantizer", None) is not None:
            module.input_quantizer.set_amax(2.0)
            module.weight_quantizer.set_amax(2.0)
    draft(features(), ends, goal)
    assert not taken


def test_a_batch_without_any_block(alone: Any, taken: list[int]) -> None:
    draft, ends = made(block_config(algorithm="dspark"), alone)
    fuse(draft)
    f = features()
    f.batch.turns_BS.zero_()
    assert run(draft, ends, torch.float64, f) == 0 and taken
    assert not any(p.grad is not None and p.grad.any() for p in draft.parameters())


def test_a_second_backward_is_refused(alone: Any) -> None:
    """It would read the gradients that the first one left in the place of gate and up."""
    draft, _ = made(block_config(), alone)
    fuse(draft)
    fused, x = draft.fused_layer(torch.arange(3)[None]), torch.randn(1, 3, 16, dtype=torch.float64)
    total = draft.layers[0].mlp.fused(x, fused).sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="the first backward overwrote gate and up"):
        total.backward()


def split(group: Any, layout: str) -> Features:
    """This rank's part of the features, two rows of padding longer: 24 rows are a multiple of the context chunks."""
    whole = features()
    batch = whole.batch
    fields = [batch.tokens_BS, batch.positions_BS, batch.turns_BS, batch.documents_BS]
    fields = [torch.nn.functional.pad(x, (0, 2), value=v) for x, v in zip(fields, (0, 0, 0, -1), strict=True)]
    longer = Batch(*fields)
    tensors = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2)) for x in (whole.captures_SBC, whole.state_SBH)]
    if layout == "tp2 sp":
        tensors = [x.chunk(2)[group.rank()].contiguous() for x in tensors]
    if layout == "cp2":
        shard = ContextShard(group)
        longer, tensors = replace(longer, context=shard), [x[shard.rows(24, "cpu")] for x in tensors]
    return Features(longer, *tensors)


def two_ranks() -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """{layout: {name: (plain, fused)}} of this rank."""
    platform.activate()
    dist.init_process_group("gloo")
    alone, both = [dist.new_group([r]) for r in range(2)][dist.get_rank()], dist.new_group([0, 1])
    found: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for layout in LAYOUTS:
        draft, ends = made(block_config(), alone if layout == "cp2" else both, sequence_parallel=layout == "tp2 sp")
        f, values = split(both, layout), []
        for fused in (False, True):
            if fused:
                fuse(draft)
            draft.zero_grad()
            total = run(draft, ends, torch.float64, f)
            values.append({"loss": total, **{n: p.grad.clone() for n, p in draft.named_parameters()}})
        found[layout] = {n: (values[0][n], values[1][n]) for n in values[0]}
    return found


LAYOUTS = ("tp2", "tp2 sp", "cp2")


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(2, two_ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(world: list[dict[str, Any]], layout: str) -> None:
    """Each rank's share of every gradient is that of the plain layers."""
    for rank in world:
        for n, (plain, fused) in rank[layout].items():
            assert plain.any(), n
            torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-11, msg=lambda m: f"{n}: {m}")
