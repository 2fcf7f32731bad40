"""A training step on a GPU waits for its own result, and not for what was queued meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.measure_training import build_trainer, supervised_batch
from benchmarks.random_models import random_base, random_draft
from benchmarks.shapes import base_shape
from megatron_spec.config import ObjectiveConfig
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.runtime import distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LONG = 3 * 10**9
"""Cycles of a GPU: over a second."""


def test_what_is_queued_meanwhile_runs_on_and_changes_nothing() -> None:
    world, found = distributed.initialize(), []
    for busy in (False, True):
        torch.manual_seed(0)
        base = random_base(base_shape("tiny"), world, torch.bfloat16)
        draft = random_draft(base.config, world, 128, torch.bfloat16)
        trainer = build_trainer(draft, base, world, ObjectiveConfig(ttt_steps=3))
        source, batch = OnlineFeatures(base), supervised_batch(base.config, 2, 64, world.device)
        done = torch.cuda.Event()

        def meanwhile(done: Any = done) -> None:
            torch.cuda._sleep(LONG)
            done.record()

        results = [trainer.step(source.features([batch])) for _ in range(2)]
        torch.cuda.synchronize()
        results.append(trainer.step(source.features([batch]), meanwhile=meanwhile if busy else lambda: None))
        assert not busy or not done.query(), "the step waited for later work"
        results.append(trainer.step(source.features([batch])))
        found.append([torch.stack([r.loss for r in results]), torch.tensor([r.grad_norm for r in results])])
    for idle, busy in zip(*found, strict=True):
        torch.testing.assert_close(busy, idle, rtol=1e-5, atol=0)
        assert len(set(idle.tolist())) == len(idle), "the weights move"
