"""Tensor and sequence parallel drafts equal the draft on one rank: initial values, losses, every gradient, logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.batch import Features
from megatron_spec.config import EagleConfig, ObjectiveConfig, ParallelConfig, UserError
from megatron_spec.config.machine import Machine
from megatron_spec.drafts import eagle3, fused_unroll
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.layer import local_kv_heads
from megatron_spec.drafts.linear import Placement
from megatron_spec.ops import head
from megatron_spec.ops.attention import attend
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import NO_PATHS, Paths, Setting
from megatron_spec.runtime import platform
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds, V, conversations, draft_vocab, eagle_config, features
from tests.worlds import run_world

HEADS_9_3 = {"hidden_size": 18, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 2}
NARROW = {"hidden_size": 8, "vocab_size": 33}  # with an embedding of its own, whose rows are split unevenly
WHOLE = {"draft_vocab_size": V}  # 31: no number of ranks divides it
OPTIONS = {
    "attention_bias": True, "mlp_bias": True, "fc_bias": True, "qk_norm": True, "own_embed_tokens": True,
    "norm_before_residual": True, "vocab_size": 33, "sliding_window": 4,
}  # fmt: skip
CASES: dict[str, tuple[int, bool, dict[str, Any], dict[str, Any]]] = {
    "tp2": (2, False, {}, {}),
    "tp2 sp": (2, True, {}, {}),
    "tp2 one kv head": (2, False, {"num_key_value_heads": 1}, {}),
    "tp2 sp one kv head": (2, True, {"num_key_value_heads": 1}, {"detach": True}),
    "tp2 uneven kv heads": (2, False, {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 2}, {}),
    "tp2 two layers": (2, True, {"num_hidden_layers": 2, **WHOLE}, {"loss": "lk", "in_vocab_only": False}),
    "tp2 reverse_kl": (2, False, {}, {"loss": "reverse_kl", "temperature": 0.7}),
    "tp2 sp replay": (2, True, {}, {"replay_weight": 3.0}),
    "tp2 d-pace": (2, False, WHOLE, {"step_weights": "d-pace", "pace_alpha": 0.2}),
    "tp2 sp d-pace": (2, True, {}, {"step_weights": "d-pace", "replay_weight": 3.0}),
    "tp2 d-pace, in chunks": (2, False, WHOLE, {"step_weights": "d-pace"}),
    "tp2 lk_hybrid": (2, False, {}, {"loss": "lk_hybrid", "temperature": 0.7}),
    "tp2 tv": (2, False, {}, {"loss": "tv"}),
    "tp2 hard_ce": (2, False, WHOLE, {"loss": "hard_ce", "in_vocab_only": False}),
    "tp2 narrow": (2, False, {**NARROW, "num_hidden_layers": 2}, {}),
    "tp2 sp narrow": (2, True, NARROW, {}),
    "tp2 options": (2, False, OPTIONS, {}),
    "tp2 sp options": (2, True, {**OPTIONS, "num_key_value_heads": 1, "num_hidden_layers": 2}, {}),
    "tp3": (3, False, {**HEADS_9_3, **WHOLE}, {}),
    "tp3 sp": (3, True, HEADS_9_3, {}),
    "tp3 one kv head": (3, True, {**HEADS_9_3, "num_key_value_heads": 1, "head_dim": 6}, {}),
}

FUSED: dict[str, tuple[int, bool, dict[str, Any], dict[str, Any]]] = {
    # the hand-written backward; with and without dropping the rows that no later step supervises
    "tp2 fused": (2, False, {}, {}),
    "tp2 fused, fewer rows": (2, False, {}, {"loss": "kl", "temperature": 0.7}),
    "tp2 fused, d-pace": (2, False, {}, {"step_weights": "d-pace", "loss": "lk_hybrid"}),
    "tp2 fused, d-pace in the kernel's logits": (2, False, {}, {"step_weights": "d-pace"}),
    "tp2 fused, d-pace, in chunks": (2, False, WHOLE, {"step_weights": "d-pace", "loss": "tv"}),
    "tp2 sp fused": (2, True, {}, {"replay_weight": 3.0}),
    "tp2 sp fused, fewer rows": (2, True, {"num_attention_heads": 8}, {"alignment": "paper"}),
}


@contextmanager
def fusing(rows_below: float) -> Iterator[list[int]]:
    """Counts fused unrolls: the list grows by one each time."""
    taken: list[int] = []
    inner = fused_unroll.fused_unroll
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_unroll, "COMPACT_BELOW", rows_below)
        patch.setattr(eagle3, "fused_unroll", lambda *a: taken.append(1) or inner(*a))
        yield taken


@contextmanager
def chunks(name: str) -> Iterator[None]:
    """Chunks of few rows, if the name asks for them; by its own shard of 16 or 15 columns one rank would take 7 rows at
    a time and the other 8."""
    with pytest.MonkeyPatch.context() as patch:
        if "chunks" in name:
            patch.setattr(head, "CHUNK_BYTES", {"cpu": 4 * 15 * 8})
        yield


def decoded(draft: EagleDraft, ends: StandInEnds, captures_SBC: Tensor, full_length: int) -> Tensor:
    """Logits of one forward over the cache; under tensor parallelism this rank's shard."""
    cache = draft.new_cache(2, full_length)
    slots = torch.arange(full_length).repeat(2, 1)
    visibility = Visibility.cached(cache, slots)
    tokens = torch.arange(2 * full_length).view(2, -1) % V
    with torch.no_grad():
        _, normed = draft.layer_step(
            draft.project(captures_SBC),
            draft.embed(tokens, ends),
            slots,
            lambda i, q, k, v: attend(q, k, v, visibility, i),
        )
        return draft.logits(normed)


def outcome(
    config: EagleConfig,
    objective: ObjectiveConfig,
    group: Any,
    sequence_parallel: bool,
    paths: Paths = NO_PATHS,
    engine: Any = None,
) -> dict[str, Tensor]:
    """Initial values, losses, logits and gradients on this rank; replicated gradients summed as the trainer does."""
    whole = features(conversations(), config, torch.float32)
    ends = StandInEnds(
        config.target_hidden_size, torch.float32, group, sequence_parallel, config.vocab_size, -config.vocab_size % 12
    )
    f = whole
    if sequence_parallel:
        parts = [x.chunk(group.size())[group.rank()].contiguous() for x in (whole.captures_SBC, whole.state_SBH)]
        f = Features(whole.batch, *parts)
    draft = EagleDraft(config, draft_vocab(config), Placement(group, sequence_parallel, engine=engine))
    draft.paths = paths
    draft.initialize(ends, seed=6)
    found = draft(f, ends, objective)
    found.total.backward()
    out = {"total": found.total.detach(), "loss": found.loss_T, "correct": found.correct_T}
    out.update(overlap=found.overlap_T, rows=found.rows_T, logits=decoded(draft, ends, f.captures_SBC, 18))
    for name, p in draft.named_parameters():
        assert p.grad is not None
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=group)
        out["value " + name], out["grad " + name] = p.detach(), p.grad
    return out


def ranks() -> dict[str, Any]:
    platform.activate()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(3)][rank]
    groups = {2: dist.new_group([0, 1]), 3: dist.new_group([0, 1, 2])}
    found: dict[str, Any] = {}
    for name, (size, sequence_parallel, sizes, objective) in CASES.items():
        if rank < size:
            # D = 12 of V = 31: draft and target shards do not line up, and V is padded to 36
            changes = {"target_hidden_size": 18 if size == 3 else 16, **sizes}
            config, goal = eagle_config(**changes), ObjectiveConfig(ttt_steps=3, **objective)
            with chunks(name):
                found[name] = outcome(config, goal, groups[size], sequence_parallel)
            if rank == 0:
                found[name + " alone"] = outcome(config, goal, alone, False)
    for name, (size, sequence_parallel, sizes, objective) in FUSED.items():
        if rank < size:
            config, goal = eagle_config(**sizes), ObjectiveConfig(ttt_steps=3, **objective)
            layout = ParallelConfig(tensor_model_parallel_size=size, sequence_parallel=sequence_parallel)
            paths = Paths(Setting(Machine(kernels="plain"), parallel=layout, draft=config))
            with fusing(1.0 if "fewer" in name else 0.0) as taken, chunks(name):
                found[name] = outcome(config, goal, groups[size], sequence_parallel, paths)
            assert taken == [1], name
            if rank == 0:
                found[name + " alone"] = outcome(config, goal, alone, False)
    if rank < 2:
        try:
            config = eagle_config(num_attention_heads=3, num_key_value_heads=3)
            EagleDraft(config, draft_vocab(config), Placement(groups[2]))
        except UserError as error:
            found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(3, ranks)


@pytest.mark.parametrize("name", [*CASES, *FUSED])
def test_equals_one_rank(world: list[dict[str, Any]], name: str) -> None:
    size = (CASES | FUSED)[name][0]
    whole = world[0][name + " alone"]
    assert all(float(whole["rows"][k]) > 0 for k in range(3))
    for key, expected in whole.items():
        shards = [world[r][name][key] for r in range(size)]
        if shards[0].shape == expected.shape:
            for shard in shards:
                close(shard, expected, f"{name}: {key}", exact=key.startswith("value"))
        else:
            close(joined(shards, expected), expected, f"{name}: {key}", exact=key.startswith("value"))


def joined(shards: list[Tensor], expected: Tensor) -> Tensor:
    """The unsharded tensor; logits past the vocabulary are -inf."""
    split = next(d for d in range(expected.dim()) if shards[0].shape[d] != expected.shape[d])
    whole, size = torch.cat(shards, split), expected.shape[split]
    padding = whole.narrow(split, size, whole.shape[split] - size)
    assert bool((padding == -torch.inf).all())
    return whole.narrow(split, 0, size)


def close(found: Tensor, expected: Tensor, what: str, exact: bool) -> None:
    assert found.shape == expected.shape, what
    error = float((found - expected).norm() / expected.norm().clamp_min(1e-12))
    assert error <= (0 if exact else 1e-5), f"{what}: relative error {error}"


def test_refuses_heads_that_cannot_be_split(world: list[dict[str, Any]]) -> None:
    assert "num_attention_heads 3" in world[0]["refused"]


def test_local_kv_heads() -> None:
    assert [local_kv_heads(9, 3, 9, r) for r in range(9)] == [[r // 3] for r in range(9)]
    assert [local_kv_heads(4, 1, 2, r) for r in range(2)] == [[0], [0]]
    assert [local_kv_heads(6, 2, 3, r) for r in range(3)] == [[0], [0, 1], [1]]
    assert local_kv_heads(12, 3, 2, 0) == [0, 0, 0, 0, 1, 1]
