"""Supported parallel layouts: one table, checked before anything loads and shown in the docs.

Standard library only. `tools/support_table.py --write` renders it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_spec.config import BlockConfig, DraftConfig, EagleConfig, ParallelConfig, UserError
from megatron_spec.config.structure import share

AXES = {
    "TP": "--tensor-model-parallel-size",
    "SP": "--sequence-parallel",
    "PP": "--pipeline-model-parallel-size",
    "DP": "more processes than TP x PP x CP",
    "CP": "--context-parallel-size",
    "EP": "--expert-model-parallel-size",
}
"""Column of the table -> its flag."""


@dataclass(frozen=True)
class Row:
    """One use case and the layouts that it refuses.

    Attributes:
        title: title in the docs.
        refused: axis -> reason.
    """

    title: str
    refused: Mapping[str, str] = field(default_factory=dict)


_NO_SEQUENCE = "there are no activations to shard: leave it out"
_WHOLE_EXPERTS = "every replica of the base has all experts: shard them with TP or PP instead"
_OWN_PROMPTS = "replicas of the base decode different prompts, but expert parallelism needs lockstep: use TP or PP"
_ONE_TOKEN = "decoding reads few tokens at a time, so there is no sequence to shard: leave it out"

ROWS: dict[str, Row] = {
    "convert": Row("convert_model.py", {"CP": _NO_SEQUENCE}),
    "extract": Row(
        "offline_feature_extract.py, --feature-cache",
        {"EP": "data-parallel ranks process different samples, but expert parallelism needs lockstep: use TP or PP"},
    ),
    "finetune": Row("finetune.py, any draft, also packed and on a quantised checkpoint"),
    "offline": Row("finetune.py --offline-data"),
    "base_fp8": Row(
        "finetune.py --base-fp8",
        {"EP": "the fp8 layers of the base are dense"},
    ),
    "quantize": Row(
        "quantize.py",
        {
            "SP": "the draft computes more rows under it, so ranges would differ: leave it out",
            "CP": "calibration needs the full sequence; the quantised checkpoint trains under any layout",
            "EP": _WHOLE_EXPERTS,
        },
    ),
    "export": Row("export.py", {"CP": _NO_SEQUENCE, "EP": _WHOLE_EXPERTS}),
    "decode": Row("validate.py, generate.py", {"SP": _ONE_TOKEN, "CP": _ONE_TOKEN, "EP": _OWN_PROMPTS}),
    "wrap": Row(
        "library: convert() around a model of your own",
        {"CP": "its own attention does not know which rows of the sequence a rank has: load the base with load_base"},
    ),
}

INTERLEAVED = (
    "the interleaved (virtual) pipeline schedule is not supported: it overlaps forward and backward of several chunks, "
    "but a frozen base has no backward, so evenly split stages gain nothing from it. Checkpoints that were trained "
    "with it can be loaded: leave the flag out"
)


def _wanted(parallel: ParallelConfig) -> dict[str, bool]:
    return {
        "TP": parallel.tensor_model_parallel_size > 1,
        "SP": parallel.sequence_parallel,
        "PP": parallel.pipeline_model_parallel_size > 1,
        "CP": parallel.context_parallel_size > 1,
        "EP": parallel.expert_model_parallel_size > 1,
    }


def check(row: str, parallel: ParallelConfig, experts: int | None = None) -> None:
    """Raise UserError if the table refuses `parallel` for this use case.

    Args:
        row: a key of `ROWS`.
        experts: number of experts of the base, if known; 0 for a dense one.
    """
    entry = ROWS[row]
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        if getattr(parallel, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: {INTERLEAVED}")
    for axis, wanted in _wanted(parallel).items():
        if wanted and axis in entry.refused:
            raise UserError(f"{AXES[axis]} does not work with {entry.title}: {entry.refused[axis]}")
    size = parallel.expert_model_parallel_size
    if size > 1 and experts is not None and (experts == 0 or experts % size):
        found = f"{experts} experts" if experts else "no experts"
        raise UserError(f"--expert-model-parallel-size {size}: the base has {found}, expected a multiple of {size}")


def check_draft_parallel(config: DraftConfig, parallel: ParallelConfig) -> None:
    """Raise UserError unless the tensor parallel size divides the draft's shapes; a vocabulary needs a token a rank."""
    tp = parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "intermediate_size"):
        if not hasattr(config, name):  # Medusa heads only have a vocabulary
            continue
        if getattr(config, name) % tp:
            sizes = [str(n) for n in range(1, 17) if getattr(config, name) % n == 0]
            raise UserError(
                f"--tensor-model-parallel-size {tp} does not divide the draft's {name} {getattr(config, name)}: "
                f"use {' or '.join(sizes)} with more pipeline stages or data parallel replicas, or change it in "
                "--eagle-config"
            )
    if isinstance(config, (EagleConfig, BlockConfig)) and config.num_key_value_heads * config.head_dim % tp:
        raise UserError(
            f"--tensor-model-parallel-size {tp} does not divide the draft's keys: num_key_value_heads "
            f"{config.num_key_value_heads} x head_dim {config.head_dim}: choose another size or change them in "
            "--eagle-config"
        )
    if not share(config.draft_vocab_size, tp, tp - 1):
        raise UserError(
            f"--tensor-model-parallel-size {tp} leaves some ranks without a token of a vocabulary of "
            f"{config.draft_vocab_size}: use a smaller size, or a larger draft vocabulary"
        )


def table() -> str:
    """The table in Markdown, followed by the reasons."""
    lines = ["| | " + " | ".join(AXES) + " |", "|---|" + "---|" * len(AXES)]
    reasons: list[str] = []
    for row in ROWS.values():
        cells = []
        for axis in AXES:
            reason = row.refused.get(axis)
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    notes = [f"({i}) {reason}." for i, reason in enumerate(reasons, 1)]
    notes.append(
        "EP needs a base with experts; the experts of a draft (`--mtp-from-base`) are not sharded by it. Tested under "
        "EP: training against one process, and the base of every family with experts; not tested: conversion, "
        "extraction and your own models. " + INTERLEAVED[0].upper() + INTERLEAVED[1:] + "."
    )
    return "\n".join([*lines, "", *(f"{note}  " for note in notes)]).rstrip() + "\n"
