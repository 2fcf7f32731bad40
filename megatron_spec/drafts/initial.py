"""First values of a draft's parameters, independent of how it is sharded.

Every parameter is drawn whole from a generator seeded by the seed and its name, then sliced.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_spec.config import UserError
from megatron_spec.config.structure import FINAL_NORM, TensorSpec, draft_tensors
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.linear import enter
from megatron_spec.drafts.teacher import restricted_head

if TYPE_CHECKING:
    from megatron_spec.drafts.recurrent import RecurrentDraft

FC_NOISE = 0.05
"""Size of the noise on `fc`, relative to the average it starts from."""

CHUNK_ROWS = 5040
"""Rows of an embedding at a time; sequence parallelism splits them over the ranks, so a number with many divisors."""


def draw_normal(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """fp32 normal(0, std) on the CPU, determined by (seed, name, shape)."""
    # torch's generator on the CPU reads the low 32 bits of its seed and drops the others
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def _captures_to_feature(hidden: int, captures: int, start: str, name: str, seed: int) -> Tensor:
    """K captures -> their average, or the last one (the nearest to what the base head reads), and little noise."""
    passed = torch.eye(hidden).repeat(1, captures) / captures
    if start == "last_capture":
        passed = torch.cat([torch.zeros(hidden, (captures - 1) * hidden), torch.eye(hidden)], dim=1)
    return passed + draw_normal(name, (hidden, captures * hidden), FC_NOISE / math.sqrt(captures * hidden), seed)


def _feature_alone(shape: tuple[int, ...], name: str, seed: int) -> Tensor:
    """[embedding ; feature] -> the feature, and little noise."""
    hidden = shape[0]
    passed = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    return passed + draw_normal(name, shape, FC_NOISE / math.sqrt(2 * hidden), seed)


@torch.no_grad()
def _embedding(draft: RecurrentDraft, ends: BaseEnds, name: str, rows: int, seed: int) -> Tensor:
    """[V / TP, H] this rank's rows of the base's embedding, at another width by a random projection. A collective.

    Such a projection keeps the angles between tokens nearly as they are (Johnson and Lindenstrauss).
    """
    config, first = draft.config, draft.tp_group.rank() * rows
    project: Tensor | None = None
    if config.hidden_size != config.target_hidden_size:
        project = draw_normal(name, (config.target_hidden_size, config.hidden_size), config.hidden_size**-0.5, seed)
    mine = []
    for start in range(0, config.vocab_size, CHUNK_ROWS):  # the same chunks in every layout: the same bits
        ids = torch.arange(start, min(start + CHUNK_ROWS, config.vocab_size), device=ends.head_weight.device)
        part = enter(ends.embed(ids[None]), draft.tp_group, draft.sequence_parallel)[:, 0].float()
        part = part if project is None else part @ project.to(part.device)
        mine.append(part[max(first - start, 0) : max(first + rows - start, 0)])
    return torch.cat(mine)


def _first_value(draft: RecurrentDraft, ends: BaseEnds, name: str, spec: TensorSpec, seed: int) -> Tensor:
    """The values of the table, whole; rows of a head or an embedding come as this rank's shard."""
    config, shape = draft.config, spec.shape
    if spec.first in ("ones", "zeros"):
        return torch.full(shape, 1.0 if spec.first == "ones" else 0.0)
    if spec.first == "head":
        return restricted_head(ends, draft.vocab, draft.tp_group)
    if spec.first == "embedding":
        return _embedding(draft, ends, name, shape[0] // draft.tp_group.size(), seed)
    if spec.first == "feature":
        return _feature_alone(shape, name, seed)
    if spec.first == "captures":
        return _captures_to_feature(shape[0], len(config.capture_layer_ids), config.fc_init, name, seed)
    return draw_normal(name, shape, config.initializer_range, seed)


def initial_values(draft: Any, ends: BaseEnds, base: Mapping[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of every parameter, by the table of `config.structure`. A collective.

    Args:
        draft: a `RecurrentDraft` or a `MedusaDraft`.
        base: see `RecurrentDraft.initialize`.
    """
    copied = getattr(draft.config, "init_from_base_layer", False)
    head: Tensor | None = None
    for name, spec in draft_tensors(draft.config).items():
        source = base.get(spec.base or "") if copied or spec.base == FINAL_NORM else None
        if source is not None and tuple(source.shape) == spec.shape:
            yield name, source
            continue
        value = head if spec.first == "head" and head is not None else _first_value(draft, ends, name, spec, seed)
        head = value if spec.first == "head" else head
        if source is not None and (source.shape[0], 2 * source.shape[-1]) == spec.shape:
            value[:, source.shape[-1] :] = source.to(value)
        yield name, value


@torch.no_grad()
def set_parameters(draft: nn.Module, values: Iterator[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Copy each value, whole or already this rank's shard, into the parameter of its name."""
    parameters = dict(draft.named_parameters())
    for name, value in values:
        parameter = parameters.pop(name)
        if value.shape != parameter.shape:
            dim = parameter.partition_dim  # type: ignore[attr-defined]
            value = value.chunk(group.size(), dim)[group.rank()]
        if value.shape != parameter.shape:
            raise UserError(f"initial value of {name}: found {list(value.shape)}, expected {list(parameter.shape)}")
        parameter.copy_(value.to(parameter.dtype))
    assert not parameters, f"left uninitialised: {sorted(parameters)}"
