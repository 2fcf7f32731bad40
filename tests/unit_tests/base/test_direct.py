"""The direct forward against megatron-core's layers: plain operators, and the plain twins of its kernels.

In fp32, for bases with biases and norms of heads too, on one rank and on two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_spec.base import decode_layers
from megatron_spec.base.direct import DirectForward, run_in_fp8
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch
from megatron_spec.config import BaseConfig, MoeConfig, ParallelConfig, UserError
from megatron_spec.config.machine import Machine
from megatron_spec.ops import overlap
from megatron_spec.ops.overlap import RankSums
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from megatron_spec.runtime.context import ContextShard
from tests.tiny import llama
from tests.worlds import run_world

CONFIG = llama(num_layers=4, vocab_size=40, max_position_embeddings=64)
BASES = {
    "Llama": CONFIG,
    "Qwen2": CONFIG.replace(family="qwen2", qkv_bias=True),
    "Qwen3": CONFIG.replace(family="qwen3", qk_norm=True, head_dim=12, rms_norm_eps=0.1),
    "Qwen3 MoE": CONFIG.replace(
        family="qwen3_moe", qk_norm=True, moe=MoeConfig(num_experts=3, experts_per_token=2, intermediate_size=16)
    ),
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

    def run(tokens: Tensor, positions: Tensor, visibility: Visibility) -> None:
        zeros = torch.zeros_like(tokens, dtype=torch.int32)
        found.extend(run_base_everywhere(base, Batch(tokens, positions, zeros, zeros), visibility))

    slots = torch.arange(6).repeat(2, 1)
    run(tokens_BS[:, :6], slots, Visibility.prefill(cache, slots))
    slots = torch.tensor([[4], [6]]) + torch.arange(3)
    run(tokens_BS[:, 6:9], slots, Visibility.cached(cache, slots, length=16))
    slots = torch.tensor([[7], [9]]) + torch.arange(3)
    visible = (torch.arange(16) < slots[:, :1, None]) | (torch.arange(16) == slots[:, :, None])
    positions = slots[:, :1] + torch.tensor([0, 1, 1])
    run(tokens_BS[:, 9:], positions, Visibility.cached(cache, slots, visible, 16))
    above = torch.tensor([[True, True, False, False], [True, False, True, False], [True, False, True, True]])
    above = above.expand(2, -1, -1)  # the first of four nodes is in the cache
    run(tokens_BS[:, 9:], positions, Visibility.cached(cache, slots, length=16, above_BSM=above))
    return found


def batch_of(base: FrozenBase) -> list[Tensor]:
    """Captures and state of a training batch."""
    tokens_BS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(5))
    zeros = torch.zeros_like(tokens_BS, dtype=torch.int32)
    batch = Batch(tokens_BS, torch.arange(12).repeat(2, 1), zeros + 1, zeros, context=base.world.context)
    return list(run_base_everywhere(base, batch, Visibility.of(batch)))


def compare(config: BaseConfig, parallel: ParallelConfig = ONE) -> None:
    """Both sets of operators, and the layers of decoding for few and many rows, against megatron-core's layers."""
    monkeypatch = pytest.MonkeyPatch()
    base = make_base(config, parallel)
    direct, base.direct = base.direct, None
    assert direct is not None
    layers, trained = decoded(base), batch_of(base)
    base.direct = direct
    for a, b in zip(decoded(base), layers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for name, p in base.model.decoder.layers[2].named_parameters():  # every weight is used
        before = p.data
        p.data = before * 1.5 if p.dim() > 1 else before.flip(0)
        assert not torch.allclose(decoded(base)[-1], layers[-1], atol=1e-3), name
        p.data = before
    paths = Paths(Setting(Machine(kernels="plain"), parallel=parallel, base=config))
    fewer = [paths.without(name) for name in ("decode_kernels", "product_epilogues")]
    for wanted, rows in ((paths, 16), (paths, 2), (fewer[0], 16), (fewer[1], 16)):
        monkeypatch.setattr(decode_layers, "FEW_ROWS", rows)
        base.direct = DirectForward(config, direct.layers, direct.final_norm, direct.tp, wanted)
        assert base.direct.can_run(Visibility.causal()) and not direct.can_run(Visibility.causal())
        assert (base.direct.decode is None) == (wanted is fewer[0])
        for a, b in zip(decoded(base) + batch_of(base), layers + trained, strict=True):
            torch.testing.assert_close(a, b, rtol=5e-5, atol=5e-5)
    monkeypatch.undo()


@pytest.mark.parametrize("name", BASES)
def test_equals_the_layers(name: str) -> None:
    compare(BASES[name])


def test_the_input_stays_as_it_is() -> None:
    """Residual sums inside products are computed in place, but not in the caller's tensor."""
    base = make_base(BASES["Qwen3"], ONE)
    assert base.direct is not None
    paths = Paths(Setting(Machine(kernels="plain"), base=base.config))
    direct = DirectForward(base.config, base.direct.layers, base.direct.final_norm, base.direct.tp, paths)
    hidden, positions = torch.randn(6, 2, base.config.hidden_size), torch.arange(6).expand(2, 6)
    before, inv_freq = hidden.clone(), torch.rand(base.config.head_dim // 2)
    assert direct.operators.includes(direct.layers[0].mlp.linear_fc2, training=True)
    direct(hidden, positions, inv_freq, ())
    assert torch.equal(hidden, before)


def compare_all_on_two_ranks() -> None:
    for config in BASES.values():
        compare(config, ParallelConfig(tensor_model_parallel_size=2))


def test_the_same_on_two_ranks() -> None:
    run_world(2, compare_all_on_two_ranks)


def compare_pieces() -> list[str]:
    """Training batches in two pieces, with complete and with sharded sequences, against the layers."""
    seen, inner = [], RankSums.pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SMALLEST_PIECE", 5)
        patch.setattr(RankSums, "pieces", lambda *a: seen.append(f"{len(inner(*a))} pieces") or inner(*a))
        for scattered in (False, True):
            parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=scattered)
            for name, config in BASES.items():
                parallel_state.destroy_model_parallel()
                base = make_base(config, parallel)
                direct, base.direct = base.direct, None
                expected = batch_of(base)
                paths = Paths(Setting(Machine(kernels="plain"), parallel=parallel, base=config))
                if scattered and config.moe is not None:
                    seen.append(paths.blocked["base_direct"])
                    continue
                norm = base.core.final_norm.weight
                base.direct = DirectForward(config, base.core.layers, norm, base.world.tp, paths)
                assert base.direct.can_run(Visibility.causal()) and (direct is None) == (
                    not base.paths.on("base_direct")
                )
                for a, b in zip(batch_of(base), expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    return seen


def test_pieces_and_sharded_sequences_on_two_ranks() -> None:
    seen = run_world(2, compare_pieces)[0]
    assert seen.count("2 pieces") == 8 and "its experts shard the sequence (--sequence-parallel)" in seen


@pytest.mark.parametrize("name", ["mlp.linear_fc1", "self_attention.k_layernorm"])
def test_hooks_are_not_bypassed(name: str) -> None:
    base, seen = make_base(BASES["Qwen3"]), []
    module = base.model.decoder.layers[1].get_submodule(name)
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(1))
    decoded(base)
    assert len(seen) == 4
    handle.remove()
    decoded(base)
    assert len(seen) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_a_cpu_refuses_fp8() -> None:
    with pytest.raises(UserError, match="--base-fp8 cannot run here: there is no GPU"):
        run_in_fp8(make_base())


def fp8_results(**sizes: Any) -> list[Tensor]:
    """A training batch through a base in fp8, over plain twins."""
    parallel_state.destroy_model_parallel()
    parallel = ParallelConfig(**sizes)
    base = make_base(CONFIG, parallel)
    base.paths = Paths(Setting(Machine(kernels="plain"), parallel=parallel, base=base.config))
    base.direct = base._direct_forward()
    run_in_fp8(base)
    return batch_of(base)


def compare_fp8() -> None:
    """Sequences that are sharded over tensor or context parallel ranks against complete ones."""
    sharded = fp8_results(tensor_model_parallel_size=2, sequence_parallel=True)
    for part, whole in zip(sharded, fp8_results(tensor_model_parallel_size=2), strict=True):
        assert torch.equal(part, whole.chunk(2)[torch.distributed.get_rank()])
    parts, wholes = fp8_results(context_parallel_size=2), fp8_results()
    context = ContextShard(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    for part, whole in zip(parts, wholes, strict=True):
        expected = context.part(whole, 0)
        torch.testing.assert_close(part, expected, rtol=0.0, atol=2e-2 * float(expected.abs().max()))


def test_fp8_with_sharded_sequences() -> None:
    run_world(2, compare_fp8)


def nearest_e4m3(x: Tensor) -> Tensor:
    """Every row, scaled so that its largest magnitude is 448, at values of three mantissa bits."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    scaled = x / scale
    step = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / step).round() * step * scale


@pytest.mark.parametrize("name", ["Llama", "biases everywhere"])
def test_fp8_equals_an_emulation(name: str) -> None:
    """Over plain twins: megatron-core's layers with rounded weights and hooks that round the inputs of linears."""
    base = make_base(BASES[name])
    base.paths = Paths(Setting(Machine(kernels="plain"), base=base.config))
    exact = batch_of(base)
    base.direct, linears = None, []
    for layer in base.model.decoder.layers:
        linears += [layer.self_attention.linear_qkv, layer.self_attention.linear_proj]
        linears += [layer.mlp.linear_fc1, layer.mlp.linear_fc2]
    kept = [m.weight.data for m in linears]
    hooks = [m.register_forward_pre_hook(lambda _, args: (nearest_e4m3(args[0]), *args[1:])) for m in linears]
    for module in linears:
        module.weight.data = nearest_e4m3(module.weight.data)
    emulated = batch_of(base)
    for module, weight, hook in zip(linears, kept, hooks, strict=True):
        module.weight.data = weight
        hook.remove()
    base.direct = base._direct_forward()
    run_in_fp8(base)
    found = batch_of(base)
    for a, b, c in zip(found, emulated, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=2e-2 * float(b.abs().max()))  # a value may round the other way
        assert float((a - b).norm()) < 0.2 * float((a - c).norm())
    head = base.head_fp8
    assert head is not None and len(head.values) == 48 and not head.values[40:].float().any()
    torch.testing.assert_close(head.dequantized()[:40], nearest_e4m3(base.head_weight[:40]))
