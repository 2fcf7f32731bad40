"""Layouts that scale.py measures: their names, what each means, and what a base and a number of GPUs allow.

No torch here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.shapes import base_shape
from megatron_spec.base import placement
from megatron_spec.config import BaseConfig, ParallelConfig, UserError, presets
from megatron_spec.planning import layouts

MODELS = {"8b": "llama-3.1-8b", "70b": "llama-3.1-70b", "qwen3-30b-a3b": "qwen3-30b-a3b"}
"""--model -> shape of the base in the throughput test."""
TOO_LARGE = ("70b",)
"""Models that one GPU does not hold."""


@dataclass(frozen=True)
class Layout:
    """What a name means.

    Attributes:
        engine: Transformer Engine's layers in base and draft.
        replicas: the number after dp; None: as many as the other sizes leave.
        rows: sequence length and micro-batch size of the throughput test; None: those of the command line.
    """

    parallel: ParallelConfig
    engine: bool
    replicas: int | None
    rows: tuple[int, int] | None


def parse(text: str) -> Layout:
    """'tp2pp2sp', 'ep2' or 'cp2@16384x1' -> layout. Raises UserError for anything else."""
    name, at, rows = text.partition("@")
    known = re.fullmatch(r"one(te)?|((tp|pp|cp|dp|ep)[1-9]\d*|sp|te)+", name)
    if not known or (at and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", rows)):
        raise UserError(f"layout {text!r}: expected for example tp4, tp2pp2, cp2@16384x1, tp2sp, dp4, ep2 or one")
    parts = re.findall(r"(tp|pp|cp|dp|ep|sp|te)(\d*)", name)
    size = {kind: int(number or 1) for kind, number in parts}
    if len(size) < len(parts):
        raise UserError(f"layout {text!r}: found a size twice, expected each once")
    parallel = ParallelConfig(
        tensor_model_parallel_size=size.get("tp", 1), pipeline_model_parallel_size=size.get("pp", 1),
        context_parallel_size=size.get("cp", 1), expert_model_parallel_size=size.get("ep", 1),
        sequence_parallel="sp" in size,
    )  # fmt: skip
    replicas = 1 if name.startswith("one") else size.get("dp")
    S, _, B = rows.partition("x")
    return Layout(parallel, "te" in size, replicas, (int(S), int(B)) if at else None)


def check(text: str, base: BaseConfig, gpus: int) -> None:
    """Raise UserError unless this many processes can run the layout with this base and its draft."""
    try:
        found = parse(text)
        parallel = found.parallel
        layouts.check("finetune", parallel, base.num_experts)
        placement.check_parallel(base, parallel)
        layouts.check_draft_parallel(presets.eagle_config(base), parallel)
        needed = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        needed *= parallel.context_parallel_size * (found.replicas or 1)
        if found.replicas is not None and needed != gpus:
            raise UserError(f"found {gpus} processes, expected {needed} (torchrun --nproc-per-node {needed})")
        parallel.check_world_size(gpus)
    except UserError as e:
        raise UserError(str(e) if str(e).startswith("layout ") else f"layout {text!r}: {e}") from None


def has_experts(model: str) -> bool:
    """Whether the base of a model of `MODELS` is a mixture of experts."""
    return base_shape(MODELS[model]).moe is not None


def speed_shape(model: str, tiny: bool) -> tuple[str, BaseConfig]:
    """(name, configuration) of the base in the throughput test: a model of `MODELS`, or its miniature."""
    if not tiny:
        return model, base_shape(MODELS[model])
    name = "tiny-moe" if has_experts(model) else "tiny"
    return name, base_shape(name)


def every(gpus: int, engine: bool, experts: bool) -> tuple[list[str], list[str]]:
    """(layouts for equality, for throughput) on `gpus` GPUs.

    Args:
        engine: with Transformer Engine's layers, too.
        experts: the base has experts.
    """
    n = gpus
    equal = [f"tp{n}", f"tp{n}sp", f"pp{n}", f"dp{n}", f"cp{n}"]
    fast = [f"dp{n}", f"pp{n}", f"tp{n}", f"tp{n}sp", f"cp{n}@16384x1"]
    if n >= 4:
        equal += ["tp2pp2", "cp2", "tp2cp2sp"]
    if experts:
        equal += [f"ep{n}", *(["ep2", "tp2ep2", "pp2ep2"] if n >= 4 else [])]
        fast += [f"ep{n}", *(["ep2"] if n >= 4 else [])]
    with_engine = [f"tp{n}te", f"tp{n}spte", f"pp{n}te", f"cp{n}te", *([f"ep{n}te"] if experts else [])]
    return equal + (with_engine if engine else []), fast
