"""Pipeline placement: which stage holds which layers, and which captures a stage receives and sends on.

Pure functions over integers. Layers and captures are counted from 0 over the whole model; capture j is the output
of layer j.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_spec.config import BaseConfig, ParallelConfig, UserError


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    Attributes:
        first: global number of its first layer.
        count: number of its layers.
        captures_in: captured layers of earlier stages, ascending: they arrive with the hidden state.
        captures_own: captured layers of this stage, ascending.
    """

    first: int
    count: int
    captures_in: tuple[int, ...]
    captures_own: tuple[int, ...]

    @property
    def captures_out(self) -> tuple[int, ...]:
        """Captured layers that leave this stage, ascending."""
        return self.captures_in + self.captures_own


def layers_per_stage(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers per stage: the given counts for the first and last stage, the rest split evenly, remainder first.

    Raises UserError when a stage would have no layer or the given counts do not fit.
    """
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if stages == 1:
        given = [n for n in (first, last) if n not in (None, num_layers)]
        if given:
            raise UserError(
                f"decoder_first/last_pipeline_num_layers is {given[0]} with one pipeline stage: leave it out, or set "
                f"pipeline_model_parallel_size greater than 1"
            )
        return [num_layers]
    if stages > num_layers:
        raise UserError(
            f"pipeline_model_parallel_size {stages} is greater than the base's {num_layers} layers: use at most "
            f"{num_layers}"
        )
    middle = stages - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    fits = all(n is None or n >= 1 for n in (first, last)) and (rest >= middle if middle else rest == 0)
    if not fits:
        raise UserError(
            f"found decoder_first_pipeline_num_layers={first}, decoder_last_pipeline_num_layers={last}, expected "
            f"counts that leave at least one of {num_layers} layers to each of {middle} other stages"
            + ("" if middle else f" (together exactly {num_layers})")
        )
    counts = [rest // middle + (i < rest % middle) for i in range(middle)] if middle else []
    return [*([first] if first is not None else []), *counts, *([last] if last is not None else [])]


def check_captures(num_layers: int, capture_layer_ids: Sequence[int]) -> None:
    """Raise UserError unless the ids are ascending, distinct, and inside the model."""
    ids = list(capture_layer_ids)
    outside = [i for i in ids if not 0 <= i < num_layers]
    if outside:
        raise UserError(
            f"capture_layer_ids {ids}: {outside} outside the base's layers 0..{num_layers - 1}; give ids in this range"
            + (" (the default {1, L//2-1, L-4} needs a base with more layers)" if num_layers < 8 else "")
        )
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise UserError(f"capture_layer_ids {ids}: expected distinct ids in ascending order")


def place(num_layers: int, parallel: ParallelConfig, capture_layer_ids: Sequence[int]) -> list[Stage]:
    """All stages of the pipeline, in order. Raises UserError as `layers_per_stage` and `check_captures` do."""
    check_captures(num_layers, capture_layer_ids)
    return stages_from_counts(layers_per_stage(num_layers, parallel), capture_layer_ids)


def stages_from_counts(counts: Sequence[int], capture_layer_ids: Sequence[int]) -> list[Stage]:
    """Stages that hold `counts` layers each."""
    stages, first = [], 0
    for count in counts:
        stages.append(
            Stage(
                first=first,
                count=count,
                captures_in=tuple(i for i in capture_layer_ids if i < first),
                captures_own=tuple(i for i in capture_layer_ids if first <= i < first + count),
            )
        )
        first += count
    return stages


def check_parallel(base: BaseConfig, parallel: ParallelConfig) -> None:
    """Raise UserError when the base cannot be sharded by `parallel`. Needs no weights and no process groups."""
    tp = parallel.tensor_model_parallel_size
    sizes = {"num_attention_heads": base.num_attention_heads}
    if base.moe is None or base.moe.dense_layers:
        sizes["intermediate_size"] = base.intermediate_size
    if base.moe is not None:
        sizes["width of an expert"] = base.moe.intermediate_size
        sizes["width of the shared expert"] = base.moe.shared_intermediate_size
    for name, value in sizes.items():
        if value % tp:
            raise UserError(
                f"tensor_model_parallel_size {tp} does not divide the base's {name} {value}: use a divisor of it"
            )
    ep = parallel.expert_model_parallel_size
    if ep > 1 and (base.moe is None or base.num_experts % ep):
        found = f"{base.num_experts} experts" if base.moe else "no experts"
        raise UserError(f"--expert-model-parallel-size {ep}: the base has {found}, expected a multiple of {ep}")
    groups = base.num_key_value_heads
    if groups % tp and tp % groups:
        raise UserError(
            f"tensor_model_parallel_size {tp} and the base's num_key_value_heads {groups}: one must divide the other"
        )
    layers_per_stage(base.num_layers, parallel)
