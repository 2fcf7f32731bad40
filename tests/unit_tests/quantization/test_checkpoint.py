"""A draft through a checkpoint: ranges come back exactly; a checkpoint without them, or with infinity, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import BaseLink, CheckpointSpec
from megatron_spec.config import QuantConfig, UserError
from megatron_spec.quantization.attach import attach_quantizers, quantizers
from megatron_spec.quantization.calibrate import calibrate
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.quantization.tiny import OBJECTIVE, Tiny, make, vocabulary, world_of

QUANT = QuantConfig(base="none")


def save(tiny: Tiny, folder: Path) -> Path:
    link = BaseLink(tiny.reference.path, tiny.reference.kind, tiny.reference.fingerprint, tiny.reference.config)
    spec = CheckpointSpec(link, tiny.draft.config, QUANT)
    return sharded.save(folder, spec, tiny.draft, vocabulary(), tiny.world)


def test_ranges_survive(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", num_hidden_layers=8)
    tiny, other = (make(tmp_path / "base", world_of()) for _ in range(2))
    plain = save(tiny, tmp_path / "plain")
    calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, QUANT, tiny.world)
    quantised = save(tiny, tmp_path / "quantised")

    attach_quantizers(other.draft, QUANT, "draft")
    sharded.load(quantised, other.draft, other.world)
    assert {n: float(q.amax) for n, q in quantizers(other.draft).items()} == {
        n: float(q.amax) for n, q in quantizers(tiny.draft).items()
    }
    (features,) = tiny.source.features(tiny.batches[0])
    with torch.no_grad():
        losses = [d(features, tiny.base, OBJECTIVE).loss_T for d in (tiny.draft, other.draft)]
    assert torch.equal(*losses)

    with pytest.raises(UserError, match=r"missing draft\..*amax"):
        sharded.load(plain, other.draft, other.world)
    with pytest.raises(UserError, match=r"unexpected draft\..*amax"):
        sharded.load(quantised, make(tmp_path / "base", world_of()).draft, tiny.world)


def test_values_that_are_not_finite_do_not_load(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", num_hidden_layers=8)
    tiny = make(tmp_path / "base", world_of())
    with torch.no_grad():
        tiny.draft.norm.weight[3] = torch.inf
    saved = save(tiny, tmp_path / "diverged")
    with pytest.raises(UserError, match=r"holds values that are not finite in: norm\.weight"):
        sharded.load(saved, make(tmp_path / "base", world_of()).draft, tiny.world)
