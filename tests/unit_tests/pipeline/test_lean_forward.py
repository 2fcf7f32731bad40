"""The short forward against megatron-core's layers, and the fused one with stand-ins for its kernels."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec import distributed
from megatron_spec.batch import Batch
from megatron_spec.config import BaseConfig
from megatron_spec.ops.attention import AttentionPlan
from megatron_spec.ops.rope import apply_rotary
from megatron_spec.pipeline.fast_forward import FastForward
from megatron_spec.pipeline.model import FrozenBase
from megatron_spec.pipeline.schedule import run_base_everywhere

CONFIG = BaseConfig.from_dict(
    dict(
        family="llama", hidden_size=32, intermediate_size=48, num_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=40, max_position_embeddings=64,
    )
)  # fmt: skip


def make_base() -> FrozenBase:
    base = FrozenBase.build(CONFIG, distributed.initialize(), (0, 2, 3))
    generator = torch.Generator().manual_seed(3)
    for _, p in sorted(base.named_parameters()):
        p.data = torch.randn(p.shape, generator=generator) * 0.3 + (p.dim() == 1)
    return base


def decoded(base: FrozenBase) -> list[Tensor]:
    """Captures and states of a ragged prefill, of three tokens, and of a small tree."""
    cache, found = base.new_cache(2, 16), []
    tokens_BS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(5))

    def run(tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> None:
        zeros = torch.zeros_like(tokens, dtype=torch.int32)
        found.extend(run_base_everywhere(base, Batch(tokens, positions, zeros, zeros), plan))

    slots = torch.arange(6).repeat(2, 1)
    run(tokens_BS[:, :6], slots, AttentionPlan.prefill(cache, slots))
    slots = torch.tensor([[4], [6]]) + torch.arange(3)
    run(tokens_BS[:, 6:9], slots, AttentionPlan.cached(cache, slots, length=16))
    slots = torch.tensor([[7], [9]]) + torch.arange(3)
    visible = (torch.arange(16) < slots[:, :1, None]) | (torch.arange(16) == slots[:, :, None])
    run(tokens_BS[:, 9:], slots[:, :1] + torch.tensor([0, 1, 1]), AttentionPlan.cached(cache, slots, visible, 16))
    return found


def kernels() -> ModuleType:
    """What ops.kernels does on a GPU, in plain torch."""
    module: Any = ModuleType("megatron_spec.ops.kernels")

    def norm_forward(x: Tensor, eps: float, delta: Any, total: Any, *branches: tuple[Tensor, Tensor]) -> None:
        summed = x if delta is None else total.copy_(x + delta)
        for weight, out in branches:
            out.copy_(F.rms_norm(summed, weight.shape, weight, eps))

    def rotary_forward(x: Tensor, tables: Any, q: Tensor, k: Tensor, v: None, N: int, G: int, grouped: bool) -> None:
        split = x.view(len(x), G, N // G + 2, -1)
        cos, sin = (torch.cat([t, t], dim=1)[:, None, None] for t in tables)
        turned = apply_rotary(split[:, :, :-1], cos, sin)
        q.copy_(turned[:, :, :-1].reshape(q.shape))
        k.copy_(turned[:, :, -1].reshape(k.shape))

    def gated_forward(x: Tensor, out: Tensor) -> None:
        gate, up = x.chunk(2, dim=1)
        out.copy_(F.silu(gate) * up)

    module.norm_forward, module.rotary_forward, module.gated_forward = norm_forward, rotary_forward, gated_forward
    return module


def test_lean_and_fused_forward_give_what_the_layers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base()
    lean, base.lean = base.lean, None
    layers = decoded(base)
    assert lean is not None
    base.lean = lean
    short = decoded(base)
    for a, b in zip(short, layers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # a weight of its own is used
        base.gpt.decoder.layers[2].mlp.linear_fc2.weight.mul_(1.5)
    assert not torch.allclose(decoded(base)[-1], layers[-1], atol=1e-3)
    with torch.no_grad():
        base.gpt.decoder.layers[2].mlp.linear_fc2.weight.div_(1.5)
    from megatron_spec import ops

    monkeypatch.setitem(sys.modules, "megatron_spec.ops.kernels", kernels())
    monkeypatch.setattr(ops, "kernels", sys.modules["megatron_spec.ops.kernels"], raising=False)
    base.fast = FastForward(lean.config, lean.layers, lean.final_norm, lean.tp)
    for a, b in zip(decoded(base), layers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_hooks_are_not_bypassed() -> None:
    base, seen = make_base(), []
    linear = base.gpt.decoder.layers[1].mlp.linear_fc1
    handle = linear.register_forward_pre_hook(lambda module, args: seen.append(1))
    decoded(base)
    assert len(seen) == 3
    handle.remove()
    decoded(base)
    assert len(seen) == 3
