"""Calibration: determine the range of every quantised tensor of base and draft, and enable fake quantisation.

Order matters. The base's weights are rounded first, then its inputs are calibrated; only then does the draft run, on
features of the *quantised* base and through all draft steps, because from the second step on it reads its own output.
A range is the maximum over all ranks with a shard or a replica of the tensor, including replicated linears.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from megatron_spec.batch import Batch, Features
from megatron_spec.config import ObjectiveConfig, QuantConfig, UserError
from megatron_spec.drafts.contract import BaseEnds, Draft
from megatron_spec.quantization.attach import (
    attach_quantizers,
    measure_weight_errors,
    quantised_linears,
    quantizers,
    shared_scale_groups,
)
from megatron_spec.quantization.quantizer import Mode, TensorQuantizer
from megatron_spec.quantization.report import LayerReport, lines_of
from megatron_spec.runtime.distributed import World

log = logging.getLogger(__name__)


class Source(Protocol):
    """Source of features; the online source runs the base."""

    def features(self, batches: list[Batch]) -> list[Features]:
        """Features of this rank's micro-batches of one step."""
        ...


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
        source: source of the base's features; must run `base` when quant.base is 'fp8'.
        batches: per calibration step, the micro-batches passed to `source`; those without a document are not observed.
        objective: its ttt_steps sets how often the draft reads its own output.
        ends: embedding and LM head, when `base` is None.

    Returns:
        One entry per quantised linear of the base (all stages) and of the draft.

    Raises:
        UserError: no batches; a draft that trains in fp8; a quantiser saw no data (features that were not made by this
            base), NaN or infinity.
    """
    if not batches:
        raise UserError("calibration needs at least one step of data, found none")
    if quant.draft != "none" and draft.engine is not None and draft.engine.recipe is not None:
        raise UserError(
            "the draft trains in Transformer Engine's fp8, and would be rounded twice: build it without "
            "draft_fp8_recipe"
        )
    ends = ends if ends is not None else base  # type: ignore[assignment]
    assert ends is not None
    with torch.no_grad():
        if base is not None and attach_quantizers(base, quant, "base"):
            _calibrate_base(base, source, batches, quant, world)
        if attach_quantizers(draft, quant, "draft"):
            _calibrate_draft(draft, ends, source, batches, objective, quant, world)
    return _report(base, draft, world)


def _progress(batches: Sequence[list[Batch]], what: str, world: World) -> Iterable[list[Batch]]:
    quiet = world.rank != 0 or not log.isEnabledFor(logging.INFO)
    return tqdm(batches, f"calibrating the {what}", unit="step", disable=quiet, mininterval=1.0)


def _has_documents(batch: Batch) -> bool:
    return bool(((batch.host or batch).documents_BS >= 0).any())


def _calibrate_base(
    base: nn.Module, source: Source, batches: Sequence[list[Batch]], quant: QuantConfig, world: World
) -> None:
    inputs = [q for q in quantizers(base).values() if q.mode is not Mode.DISABLED]
    for quantizer in inputs:
        quantizer.start_calibration(with_histogram=True)

    def choose(_module: nn.Module, args: tuple[Any, ...]) -> None:
        """Observe only micro-batches with documents."""
        for quantizer in inputs:
            quantizer.observing = _has_documents(args[0])

    hook = base.register_forward_pre_hook(choose)
    for step in _progress(batches, "base", world):
        source.features(step)
    hook.remove()
    choose_ranges(inputs, [world.dp, world.tp], quant)
    for quantizer in inputs:
        quantizer.enable()


def _calibrate_draft(
    draft: Draft,
    ends: BaseEnds,
    source: Source,
    batches: Sequence[list[Batch]],
    objective: ObjectiveConfig,
    quant: QuantConfig,
    world: World,
) -> None:
    linears = quantised_linears(draft)
    groups = [world.draft_dp, world.tp]
    weights = [m.weight_quantizer for m in linears.values()]
    inputs = [m.input_quantizer for m in linears.values() if m.input_quantizer is not None]
    for linear in linears.values():
        linear.weight_quantizer.start_calibration()
        linear.weight_quantizer.observe(linear.weight)
    for quantizer in inputs:
        quantizer.start_calibration(with_histogram=True)
    synchronize(weights, groups)
    _share_scales(linears, "weight_quantizer")
    for quantizer in weights:
        quantizer.enable()
    if inputs:  # nvfp4 rounds only weights
        for step in _progress(batches, "draft", world):
            for features in source.features(step):
                if _has_documents(features.batch):
                    draft(features, ends, objective)
        choose_ranges(inputs, groups, quant)  # fused linears read the same input, so their ranges are already equal
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
    """Set every range to its maximum over the ranks of `groups`. NaN becomes infinity, which every rank rejects."""
    if not found:
        return
    amax = torch.stack([q.amax for q in found])
    amax = torch.where(amax.isnan(), torch.full_like(amax, torch.inf), amax)  # MAX over NaN is undefined
    for group in groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    for quantizer, value in zip(found, amax, strict=True):
        quantizer.set_amax(value)


def choose_ranges(found: Sequence[TensorQuantizer], groups: Sequence[dist.ProcessGroup], quant: QuantConfig) -> None:
    """Sum the observations of all ranks of `groups`, and set the ranges from them."""
    synchronize(found, groups)
    if not found:
        return
    seen = [q.histogram for q in found if q.histogram is not None]
    counts = torch.stack(seen)
    for group in groups:
        dist.all_reduce(counts, group=group)
    percent = quant.percentile if quant.calibration == "percentile" else None
    for quantizer, histogram in zip(found, counts, strict=True):
        quantizer.histogram = histogram
        quantizer.choose_range(percent)


def _report(base: Any, draft: Draft, world: World) -> list[LayerReport]:
    """Report lines of the base's linears, gathered over the PP ranks, then those of the draft."""
    mine: list[LayerReport] = []
    if base is not None:
        mine = lines_of("base", dict(base.linears()), quantizers(base))
    stages: list[Any] = [None] * world.pp_size
    dist.all_gather_object(stages, mine, group=world.pp)
    lines = sorted(itertools.chain.from_iterable(stages), key=lambda line: line.amax_weight is None)  # as of one stage
    return lines + lines_of("draft", quantised_linears(draft), {})
