"""First values of a draft's parameters, independent of how it is sharded.

Every parameter is drawn whole from a generator seeded by the seed and its name, then sliced.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_spec.config import UserError
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.linear import enter
from megatron_spec.drafts.teacher import restricted_head

if TYPE_CHECKING:
    from megatron_spec.drafts.recurrent import RecurrentDraft

FC_NOISE = 0.05
"""Size of the noise on `fc`, relative to the average it starts from."""

CHUNK_ROWS = 5040
"""Rows of an embedding at a time; sequence parallelism splits them over the ranks, so a number with many divisors."""

_LAYER_NORMS = {
    "hidden_norm.weight": "input_layernorm.weight",  # of the first draft layer: the norm of the residual stream
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
}
_FINAL_NORMS = ("norm.weight", "layers.0.shared_head.norm.weight")


def whole_shape(parameter: nn.Parameter, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Shape of the parameter before it was split."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= group.size()  # type: ignore[attr-defined]
    return tuple(shape)


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
def _projected_embedding(draft: RecurrentDraft, ends: BaseEnds, name: str, rows: int, seed: int) -> Tensor:
    """[V / TP, H] this rank's rows of the base's embedding, brought to the draft's width by a random projection.

    Such a projection keeps the angles between tokens nearly as they are (Johnson and Lindenstrauss). A collective.
    """
    config, first = draft.config, draft.tp_group.rank() * rows
    project = draw_normal(name, (config.target_hidden_size, config.hidden_size), config.hidden_size**-0.5, seed)
    mine = []
    for start in range(0, config.vocab_size, CHUNK_ROWS):  # the same chunks in every layout: the same bits
        ids = torch.arange(start, min(start + CHUNK_ROWS, config.vocab_size), device=ends.head_weight.device)
        whole = enter(ends.embed(ids[None]), draft.tp_group, draft.sequence_parallel)[:, 0].float()
        part = whole @ project.to(whole.device)
        mine.append(part[max(first - start, 0) : max(first + rows - start, 0)])
    return torch.cat(mine)


def initial_values(
    draft: RecurrentDraft, ends: BaseEnds, base: Mapping[str, Tensor], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter but the head, which comes as (name, this rank's shard)."""
    config, group = draft.config, draft.tp_group
    for name, parameter in draft.named_parameters():
        shape = whole_shape(parameter, group)
        leaf = name.split(".", 1 if name.startswith("midlayer.") else 2)[-1]
        first_layer = name.startswith(("midlayer.", "layers.0."))
        same = leaf.startswith("mlp.") or (config.algorithm == "eagle-mtp" and leaf == "input_layernorm.weight")
        source = base.get(_LAYER_NORMS.get(leaf, leaf if same else ""))
        if name == "embed_tokens.weight":
            yield name, _projected_embedding(draft, ends, name, parameter.shape[0], seed)
        elif name == "lm_head.weight" and config.hidden_size == config.target_hidden_size:
            yield name, restricted_head(ends, draft.vocab, group)
        elif name.endswith("eh_proj.weight") or (name == "fc.weight" and config.algorithm == "eagle1"):
            yield name, _feature_alone(shape, name, seed)
        elif name == "fc.weight" and config.hidden_size == config.target_hidden_size:
            yield (
                name,
                _captures_to_feature(config.hidden_size, len(config.capture_layer_ids), config.fc_init, name, seed),
            )
        elif name in _FINAL_NORMS and "norm.weight" in base and tuple(base["norm.weight"].shape) == shape:
            yield name, base["norm.weight"]
        elif config.init_from_base_layer and first_layer and source is not None and tuple(source.shape) == shape:
            yield name, source
        elif len(shape) == 1:
            yield name, torch.ones(shape)
        else:
            yield name, draw_normal(name, shape, config.initializer_range, seed)


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
