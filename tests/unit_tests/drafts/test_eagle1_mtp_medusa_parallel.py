"""EAGLE-1, EAGLE-3.1, MTP and Medusa on two ranks equal one rank: initial values, losses, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.batch import Features
from megatron_spec.config import DraftConfig, MedusaConfig, ObjectiveConfig
from megatron_spec.drafts.linear import Placement
from megatron_spec.runtime import platform
from tests.unit_tests.drafts.plain_drafts import VOCAB
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds
from tests.unit_tests.drafts.test_eagle1_mtp_medusa import CASES, batch_features, goal_of, vocabulary
from tests.unit_tests.drafts.test_eagle_parallel import close, joined
from tests.worlds import run_world

NAMES = [n for n in CASES if n not in ("eagle1, one step", "3.1 fc_norm", "3.1 norm_output")]


def kind(config: DraftConfig) -> Any:
    from megatron_spec.drafts.eagle1 import Eagle1Draft
    from megatron_spec.drafts.eagle3 import EagleDraft
    from megatron_spec.drafts.medusa import MedusaDraft
    from megatron_spec.drafts.mtp import MtpDraft

    kinds = {"eagle1": Eagle1Draft, "eagle3.1": EagleDraft, "eagle-mtp": MtpDraft, "medusa": MedusaDraft}
    return kinds[config.algorithm]


def outcome(
    config: DraftConfig, goal: ObjectiveConfig, group: Any, sequence_parallel: bool, padding: int, engine: Any = None
) -> dict[str, Tensor]:
    """Initial values, losses, logits and gradients on this rank; partial gradients summed as the trainer does."""
    f = whole = batch_features(config, torch.float32)
    ends = StandInEnds(16, torch.float32, group, sequence_parallel, VOCAB, padding)
    if sequence_parallel:
        parts = [x.chunk(group.size())[group.rank()].contiguous() for x in (whole.captures_SBC, whole.state_SBH)]
        f = Features(whole.batch, *parts)
    draft = kind(config)(config, vocabulary(config), Placement(group, sequence_parallel, engine=engine))
    draft.initialize(ends, seed=5)
    values = {"value " + n: p.detach().clone() for n, p in draft.named_parameters()}
    if isinstance(config, MedusaConfig):  # away from zero, where blocks would be invisible
        for n, p in draft.named_parameters():
            if "linear" in n:
                p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))) * 0.2)
    losses = draft(f, ends, goal)
    losses.total.backward()
    out = {"total": losses.total.detach(), "loss": losses.loss_T, "correct": losses.correct_T, **values}
    out.update(overlap=losses.overlap_T, rows=losses.rows_T)
    for name, p in draft.named_parameters():
        assert p.grad is not None
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=group)
        out["grad " + name] = p.grad
    with torch.no_grad():
        if isinstance(config, MedusaConfig):
            out["logits"] = draft.logits(whole.state_SBH, 1, ends)
        else:
            out["logits"] = draft.logits(draft.start(f.captures_SBC, f.state_SBH), ends)
    return out


def ranks() -> dict[str, Any]:
    platform.activate()
    dist.init_process_group("gloo")
    torch.manual_seed(3)  # as the training loop does on every rank: the noise of EAGLE-1 depends on it
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    both = dist.new_group([0, 1])
    found: dict[str, Any] = {}
    for name in NAMES:
        config, goal = CASES[name][0], goal_of(*CASES[name])
        # 3 rows of padding: shards of the head are not those of the vocabulary (33); with one they are
        found[name + " alone"] = outcome(config, goal, alone, False, 3)
        for layout, scattered, padding in (("tp2", False, 3), ("tp2 sp", True, 3), ("tp2 sp, least padding", True, 1)):
            found[f"{name}: {layout}"] = outcome(config, goal, both, scattered, padding)
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(2, ranks)


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "tp2 sp, least padding"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_rank(world: list[dict[str, Any]], name: str, layout: str) -> None:
    whole = world[0][name + " alone"]
    assert float(whole["rows"].min()) > 0
    for key, expected in whole.items():
        shards = [world[r][f"{name}: {layout}"][key] for r in range(2)]
        where, exact = f"{name}, {layout}: {key}", key.startswith("value")
        if shards[0].shape == expected.shape:
            for shard in shards:
                close(shard, expected, where, exact)
        else:
            close(joined(shards, expected), expected, where, exact)
