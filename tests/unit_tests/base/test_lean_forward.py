"""The short forward against megatron-core's layers, and the fused one with stand-ins for its kernels.

In fp32, for bases with biases and norms of heads too, on one rank and on two.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.base.fast_forward import FastForward
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch
from megatron_spec.config import BaseConfig, ParallelConfig
from megatron_spec.ops.attention import AttentionPlan
from megatron_spec.ops.rope import apply_rotary
from megatron_spec.runtime import distributed
from tests.worlds import run_world

CONFIG = BaseConfig.from_dict(
    dict(
        family="llama", hidden_size=32, intermediate_size=48, num_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=40, max_position_embeddings=64,
    )
)  # fmt: skip
BASES = {
    "Llama": CONFIG,
    "Qwen2": CONFIG.replace(family="qwen2", qkv_bias=True),
    "Qwen3": CONFIG.replace(family="qwen3", qk_norm=True, head_dim=12, rms_norm_eps=0.1),
    "biases everywhere": CONFIG.replace(attention_bias=True, num_key_value_heads=4, qk_norm=True),
}
ONE = ParallelConfig()


def make_base(config: BaseConfig = CONFIG, parallel: ParallelConfig = ONE) -> FrozenBase:
    base = FrozenBase.build(config, distributed.initialize(parallel), (0, 2, 3))
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


def batch_of(base: FrozenBase) -> list[Tensor]:
    """Captures and state of a training batch."""
    tokens_BS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(5))
    zeros = torch.zeros_like(tokens_BS, dtype=torch.int32)
    batch = Batch(tokens_BS, torch.arange(12).repeat(2, 1), zeros + 1, zeros)
    return list(run_base_everywhere(base, batch, AttentionPlan.causal()))


def kernels() -> ModuleType:
    """What ops.kernels does on a GPU, in plain torch."""
    module: Any = ModuleType("megatron_spec.ops.kernels.rows")

    def norm_forward(x: Tensor, eps: float, delta: Any, total: Any, *branches: tuple[Tensor, Tensor]) -> None:
        summed = x if delta is None else total.copy_(x + delta)
        for weight, out in branches:
            out.copy_(F.rms_norm(summed, weight.shape, weight, eps))

    def rotary_forward(
        x: Tensor, tables: Any, q: Tensor, k: Tensor, v: None, N: int, G: int, grouped: bool, norms: Any, eps: float
    ) -> None:
        split = x.view(len(x), G, N // G + 2, -1)
        cos, sin = (torch.cat([t, t], dim=1)[:, None, None] for t in tables)
        heads, weights = (split[:, :, :-2], split[:, :, -2:-1]), norms or (None, None)
        for out, head, weight in zip((q, k), heads, weights, strict=True):
            if weight is not None:
                head = head * (head.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
            out.copy_(apply_rotary(head, cos, sin).reshape(out.shape))

    def gated_forward(x: Tensor, out: Tensor) -> None:
        gate, up = x.chunk(2, dim=1)
        out.copy_(F.silu(gate) * up)

    module.norm_forward, module.rotary_forward, module.gated_forward = norm_forward, rotary_forward, gated_forward
    return module


def compare(config: BaseConfig, parallel: ParallelConfig = ONE) -> None:
    """Both short forwards against the layers, decoding and on a training batch."""
    base = make_base(config, parallel)
    lean, base.lean = base.lean, None
    assert lean is not None and base.fast is None
    layers, trained = decoded(base), batch_of(base)
    base.lean = lean
    short = decoded(base)
    for a, b in zip(short, layers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for name, p in base.gpt.decoder.layers[2].named_parameters():  # every weight is used
        before = p.data
        p.data = before * 1.5 if p.dim() > 1 else before.flip(0)
        assert not torch.allclose(decoded(base)[-1], layers[-1], atol=1e-3), name
        p.data = before
    import megatron_spec.ops.kernels as package

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron_spec.ops.kernels.rows", kernels())
        patch.setattr(package, "rows", sys.modules["megatron_spec.ops.kernels.rows"], raising=False)
        base.fast = FastForward(lean.config, lean.layers, lean.final_norm, lean.tp)
        for a, b in zip(decoded(base) + batch_of(base), layers + trained, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BASES)
def test_lean_and_fused_forward_give_what_the_layers_give(name: str) -> None:
    compare(BASES[name])


def compare_all_on_two_ranks() -> None:
    for config in BASES.values():
        compare(config, ParallelConfig(tensor_model_parallel_size=2))


def test_the_same_on_two_ranks() -> None:
    run_world(2, compare_all_on_two_ranks)


@pytest.mark.parametrize("name", ["mlp.linear_fc1", "self_attention.k_layernorm"])
def test_hooks_are_not_bypassed(name: str) -> None:
    base, seen = make_base(BASES["Qwen3"]), []
    module = base.gpt.decoder.layers[1].get_submodule(name)
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(1))
    decoded(base)
    assert len(seen) == 3
    handle.remove()
    decoded(base)
    assert len(seen) == 3
