"""Calibration: finds the range of every quantised tensor of base and draft, and switches fake quantisation on.

Order matters. The base's weights are rounded first, then its inputs are calibrated; only then does the draft run, on
features of the *quantised* base and through all draft steps, because from the second step on it reads its own output.
Ranges are the maximum over every rank that holds a shard or a copy of the place, replicated linears included.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron_spec.batch import Batch, Features
from megatron_spec.config import ObjectiveConfig, QuantConfig, UserError
from megatron_spec.distributed import World
from megatron_spec.drafts.base import BaseEnds, Draft
from megatron_spec.quantization.attach import (
    attach_quantizers,
    base_linears,
    draft_linears,
    measure_weight_errors,
    quantizers,
    shared_scale_groups,
)
from megatron_spec.quantization.quantizer import Mode, TensorQuantizer

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where the features come from; the online one runs the base."""

    def features(self, batches: list[Batch]) -> list[Features]:
        """Features of the micro-batches of one step that this rank owns."""
        ...


@dataclass(frozen=True)
class LayerReport:
    """What calibration found for one linear."""

    name: str
    amax_input: float
    amax_weight: float
    weight_error: float
    """|w - q(w)| / |w| over the whole weight; about 0.02-0.04 for a bell-shaped one."""


def calibrate(
    base: nn.Module | None,
    draft: Draft,
    source: Source,
    batches: Sequence[list[Batch]],
    objective: ObjectiveConfig,
    quant: QuantConfig,
    world: World,
    ends: BaseEnds | None = None,
) -> list[LayerReport]:
    """Attach quantisers to base and draft where `quant` says so, calibrate them, and leave them enabled.

    Collective over all ranks.

    Args:
        base: the frozen base; may be None when quant.base is 'none'.
        source: its features; must run `base` when quant.base is 'fp8'.
        batches: per calibration step, the micro-batches given to `source`.
        objective: its ttt_steps is how often the draft reads its own output.
        ends: embedding and head, when `base` is None.

    Returns:
        One entry per quantised linear of the whole base and of the draft.

    Raises:
        UserError: no batches; a quantiser saw no data (features that were not made by this base), NaN or infinity.
    """
    if not batches:
        raise UserError("calibration needs at least one step of data, found none")
    ends = ends if ends is not None else base  # type: ignore[assignment]
    assert ends is not None
    with torch.no_grad():
        if base is not None and attach_quantizers(base, quant, "base"):
            _calibrate_base(base, source, batches, world)
        if attach_quantizers(draft, quant, "draft"):
            _calibrate_draft(draft, ends, source, batches, objective, world)
    report = _report(base, draft, world)
    for line in report:
        log.info("%-48s amax input %10.4g  weight %10.4g  weight error %.4f", *vars(line).values())
    return report


def _calibrate_base(base: nn.Module, source: Source, batches: Sequence[list[Batch]], world: World) -> None:
    inputs = [q for q in quantizers(base).values() if q.mode is not Mode.DISABLED]
    for quantizer in inputs:
        quantizer.start_calibration()
    for i, step in enumerate(batches):
        source.features(step)
        log.info("calibrating the base: step %d/%d", i + 1, len(batches))
    synchronize(inputs, [world.dp, world.tp])
    for quantizer in inputs:
        quantizer.enable()


def _calibrate_draft(
    draft: Draft,
    ends: BaseEnds,
    source: Source,
    batches: Sequence[list[Batch]],
    objective: ObjectiveConfig,
    world: World,
) -> None:
    linears: dict[str, Any] = {n: m for n, m in draft_linears(draft).items() if m.weight_quantizer is not None}
    groups = [world.draft_dp, world.tp]
    weights = [m.weight_quantizer for m in linears.values()]
    inputs = [m.input_quantizer for m in linears.values()]
    for linear in linears.values():
        linear.weight_quantizer.start_calibration()
        linear.weight_quantizer.observe(linear.weight)
        linear.input_quantizer.start_calibration()
    synchronize(weights, groups)
    _share_scales(linears, "weight_quantizer")
    for quantizer in weights:
        quantizer.enable()
    for i, step in enumerate(batches):
        for features in source.features(step):
            draft(features, ends, objective)
        log.info("calibrating the draft: step %d/%d", i + 1, len(batches))
    synchronize(inputs, groups)
    _share_scales(linears, "input_quantizer")
    for quantizer in inputs:
        quantizer.enable()
    measure_weight_errors(list(linears.items()), world.tp)


def _share_scales(linears: dict[str, Any], which: str) -> None:
    for group in shared_scale_groups(linears):
        members = [getattr(linears[n], which) for n in group]
        largest = torch.stack([m.amax for m in members]).amax()
        for member in members:
            member.set_amax(largest)


def synchronize(found: Sequence[TensorQuantizer], groups: Sequence[dist.ProcessGroup]) -> None:
    """Set every range to its maximum over the ranks of `groups`. NaN becomes infinity, which every rank refuses."""
    if not found:
        return
    amax = torch.stack([q.amax for q in found])
    amax = torch.where(amax.isnan(), torch.full_like(amax, torch.inf), amax)  # MAX over NaN is undefined
    for group in groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    for quantizer, value in zip(found, amax, strict=True):
        quantizer.set_amax(value)


def _report(base: nn.Module | None, draft: Draft, world: World) -> list[LayerReport]:
    """Lines of the base's linears, gathered over the pipeline ranks, then those of the draft."""
    mine = _lines("base", {n: m for n, _, m in base_linears(base)}) if base is not None else []
    stages: list[Any] = [None] * world.pp_size
    dist.all_gather_object(stages, mine, group=world.pp)
    return [line for stage in stages for line in stage] + _lines("draft", draft_linears(draft))


def _lines(owner: str, linears: dict[str, Any]) -> list[LayerReport]:
    return [
        LayerReport(
            f"{owner}.{name}",
            float(m.input_quantizer.amax),
            float(m.weight_quantizer.amax),
            m.weight_quantizer.relative_error,
        )
        for name, m in linears.items()
        if getattr(m, "weight_quantizer", None) is not None
    ]
