"""The fused unroll under context parallelism, alone and with tensor and sequence parallelism, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import ObjectiveConfig, ParallelConfig
from megatron_spec.config.machine import Machine
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.linear import Placement
from megatron_spec.ops import attention
from megatron_spec.planning.paths import NO_PATHS, Paths, Setting
from megatron_spec.runtime import platform
from megatron_spec.runtime.context import ContextShard
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds, conversations, draft_vocab, eagle_config, features
from tests.unit_tests.drafts.test_eagle_parallel import close, fusing
from tests.worlds import run_world

LENGTH = 24
OBJECTIVE = ObjectiveConfig(ttt_steps=4)
PACED = OBJECTIVE.replace(step_weights="d-pace")
CASES: dict[str, dict[str, Any]] = {
    "cp2": dict(cp=2),
    "cp2, fewer rows": dict(cp=2, below=1.0),
    "cp2, packed": dict(cp=2, packed=True),
    "cp2, packed, fewer rows": dict(cp=2, packed=True, below=1.0),
    "cp4": dict(cp=4, below=1.0),
    "cp2 tp2": dict(cp=2, tp=2, below=1.0),
    "cp2 tp2 sp": dict(cp=2, tp=2, sp=True, packed=True),
    "cp2 tp2 sp, fewer rows": dict(cp=2, tp=2, sp=True, below=1.0),
    "cp2 tp2, one rank's rows": dict(cp=2, tp=2, below=1.0, middle=True),
    "cp2 tp2 sp, d-pace": dict(cp=2, tp=2, sp=True, packed=True, goal=PACED),
    "cp2 tp2, d-pace, one rank's rows": dict(cp=2, tp=2, middle=True, goal=PACED),
}


def batch_of(packed: bool, middle: bool) -> Batch:
    """Conversations whose turns cross the borders of chunks.

    Args:
        packed: row 1 has two documents.
        middle: the only turn is in the two chunks in the middle, those of the last of two ranks.
    """
    batch = conversations(LENGTH)
    if middle:
        turns = torch.zeros_like(batch.turns_BS)
        turns[:, LENGTH // 4 + 2 : 3 * LENGTH // 4] = 1
        batch = replace(batch, turns_BS=turns)
    if packed:
        return batch
    return replace(batch, positions_BS=torch.arange(LENGTH).repeat(2, 1), documents_BS=batch.documents_BS.clamp(max=0))


def part(whole: Features, context: ContextShard | None, tp: Any, sequence_parallel: bool) -> Features:
    """This rank's rows of the features."""
    tensors = [whole.captures_SBC, whole.state_SBH]
    if context is not None:
        tensors = [context.part(x, 0) for x in tensors]
    if sequence_parallel:
        tensors = [x.chunk(tp.size())[tp.rank()].contiguous() for x in tensors]
    return Features(replace(whole.batch, context=context), *tensors)


def outcome(
    batch: Batch, tp: Any, context: ContextShard | None, sp: bool, paths: Paths, objective: ObjectiveConfig
) -> dict[str, Tensor]:
    """Sums over the ranks of `context`: losses and this rank's shard of every gradient."""
    config = eagle_config()
    f = part(features(batch, config, torch.float64), context, tp, sp)
    ends = StandInEnds(config.target_hidden_size, torch.float64, tp, sp)
    draft = EagleDraft(config, draft_vocab(config), Placement(tp, sp)).double()
    draft.paths = paths
    draft.initialize(ends, seed=6)
    losses = draft(f, ends, objective)
    losses.total.backward()
    found = {"total": losses.total.detach().clone(), "loss": losses.loss_T.detach().clone(), "rows": losses.rows_T}
    for name, p in draft.named_parameters():
        assert p.grad is not None
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=tp)
        found[name] = p.grad
    if context is not None:
        own = losses.rows_T.clone()
        for x in found.values():
            dist.all_reduce(x, group=context.group)
        found["own rows"] = own
    return found


def ranks() -> dict[str, Any]:
    platform.activate()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(4)][rank]
    neighbours = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    found: dict[str, Any] = {"kernels": set()}
    for name, case in CASES.items():
        cp, tp, sp = case["cp"], case.get("tp", 1), case.get("sp", False)
        context = ContextShard(dist.group.WORLD if cp == 4 else across)
        group = neighbours if tp == 2 else alone
        layout = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=sp)
        paths = Paths(Setting(Machine(kernels="plain"), "float64", layout, draft=eagle_config()))
        goal = case.get("goal", OBJECTIVE)
        batch = batch_of(case.get("packed", False), case.get("middle", False))
        with fusing(case.get("below", 0.0)) as taken, pytest.MonkeyPatch.context() as patch:
            inner = attention.kernel_of
            patch.setattr(attention, "kernel_of", lambda c: found["kernels"].add(inner(c).name) or inner(c))
            found[name] = outcome(batch, group, context, sp, paths, goal)
        assert taken == [1], name
        found[name + " alone"] = outcome(batch, alone, None, False, NO_PATHS, goal)
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(4, ranks)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(world: list[dict[str, Any]], name: str) -> None:
    for pair in (world[:2], world[2:]):
        whole = pair[0][name + " alone"]
        assert float(whole["rows"].min()) > 0
        for key, expected in whole.items():
            shards = [rank[name][key] for rank in pair]
            if shards[0].shape == expected.shape:
                for shard in shards:
                    close(shard, expected, f"{name}: {key}", exact=False)
            else:
                split = next(d for d in range(expected.dim()) if shards[0].shape[d] != expected.shape[d])
                close(torch.cat(shards, split), expected, f"{name}: {key}", exact=False)


def test_a_rank_without_supervised_rows(world: list[dict[str, Any]]) -> None:
    """It takes part in every collective; its rows are keys of the others'."""
    own = [bool(rank["cp2 tp2, one rank's rows"]["own rows"].any()) for rank in world]
    assert own == [False, False, True, True]


def test_a_single_document_takes_the_dense_kernels(world: list[dict[str, Any]]) -> None:
    assert {"parts", "cpu"} <= world[0]["kernels"]
