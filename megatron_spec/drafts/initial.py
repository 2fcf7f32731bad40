"""Initial values of a draft's parameters, independent of sharding.

Every parameter is drawn unsharded from a generator seeded with the seed and its name, then sliced.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.config import UserError
from megatron_spec.config.structure import FINAL_NORM, TensorSpec, draft_tensors, share
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.linear import enter
from megatron_spec.drafts.teacher import restricted_head

if TYPE_CHECKING:
    from megatron_spec.drafts.recurrent import RecurrentDraft

log = logging.getLogger(__name__)

FC_NOISE = 0.05
"""Scale of the noise on `fc`, relative to its noise-free initial value."""

CHUNK_ROWS = 5040
"""Rows of an embedding per chunk."""

CONSTANT_TOKENS = 8192
"""Tokens of the draft vocabulary over whose embeddings a constant is fitted: the first, which are the most frequent
ones of a byte-pair vocabulary."""
RIDGE = 1e-3
"""Added to the mean squares of the embedding's dimensions in that fit."""


def draw_normal(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """fp32 normal(0, std) on the CPU, determined by (seed, name, shape)."""
    # torch's CPU generator uses only the low 32 bits of its seed
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def _captures_to_feature(hidden: int, captures: int, start: str, name: str, seed: int) -> Tensor:
    """Maps K captures to their mean, or to the last one (closest to the base's final state), plus small noise."""
    passed = torch.eye(hidden).repeat(1, captures) / captures
    if start == "last_capture":
        passed = torch.cat([torch.zeros(hidden, (captures - 1) * hidden), torch.eye(hidden)], dim=1)
    return passed + draw_normal(name, (hidden, captures * hidden), FC_NOISE / math.sqrt(captures * hidden), seed)


def _feature_alone(shape: tuple[int, ...], name: str, seed: int) -> Tensor:
    """Maps [embedding ; feature] to the feature, plus small noise."""
    hidden = shape[0]
    passed = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    return passed + draw_normal(name, shape, FC_NOISE / math.sqrt(2 * hidden), seed)


@torch.no_grad()
def _embedding(draft: RecurrentDraft, ends: BaseEnds, name: str, seed: int) -> Tensor:
    """[V / TP, H] this rank's rows of the base's embedding, projected at random to the draft's width. Collective.

    Such a projection nearly preserves the angles between tokens (Johnson and Lindenstrauss).
    """
    config, ranks = draft.config, draft.tp_group.size()
    mine = share(config.vocab_size, ranks, draft.tp_group.rank())
    project: Tensor | None = None
    if config.hidden_size != config.target_hidden_size:
        project = draw_normal(name, (config.target_hidden_size, config.hidden_size), config.hidden_size**-0.5, seed)
    found = []
    for start in range(0, config.vocab_size, CHUNK_ROWS):  # equal chunks in every layout, so equal bits
        ids = torch.arange(start, min(start + CHUNK_ROWS, config.vocab_size), device=ends.head_weight.device)
        even = F.pad(ids, (0, -len(ids) % ranks))  # sequence parallelism splits them
        part = enter(ends.embed(even[None]), draft.tp_group, draft.sequence_parallel)[: len(ids), 0].float()
        part = part if project is None else part @ project.to(part.device)
        found.append(part[max(mine.start - start, 0) : max(mine.stop - start, 0)])
    return torch.cat(found)


@torch.no_grad()
def constant_of_embeddings(draft: RecurrentDraft, ends: BaseEnds) -> Tensor:
    """[H] u with u . e near 1 for the normed embedding e of every frequent token, by ridge regression. Collective.

    A matrix b u^T then adds the bias b to a projection that reads the embedding and has no bias of its own.
    """
    config, ranks = draft.config, draft.tp_group.size()
    ids = draft.vocab.target_ids[:CONSTANT_TOKENS].to(ends.head_weight.device)
    even = F.pad(ids, (0, -len(ids) % ranks))  # sequence parallelism splits them
    rows = enter(ends.embed(even[None]), draft.tp_group, draft.sequence_parallel)[: len(ids), 0].double()
    rows = F.rms_norm(rows, rows.shape[-1:], eps=config.rms_norm_eps)
    squares = rows.t() @ rows / len(rows)
    squares.diagonal().add_(RIDGE)
    return torch.linalg.solve(squares, rows.mean(0)).float()


def _scaled_heads(weight: Tensor, inputs: Tensor, norm: Tensor) -> Tensor:
    """A projection [heads * D, H] whose outputs the base norms per head, scaled as the norm does on average.

    Args:
        inputs: [H] weight of the norm before the projection.
        norm: [D] weight of the norm of the heads.
    """
    heads = weight.unflatten(0, (-1, norm.shape[0])).float()
    rms = (heads * inputs).pow(2).sum((1, 2), keepdim=True).div(norm.shape[0]).sqrt()
    return (heads / rms * norm[:, None]).flatten(0, 1)


class _BaseLayer:
    """What a draft's first layer takes from the base's last one.

    Args:
        base: see `RecurrentDraft.initialize`.
    """

    def __init__(self, draft: Any, ends: BaseEnds, base: Mapping[str, Tensor]) -> None:
        self.draft, self.ends, self.base = draft, ends, base
        self.copied = getattr(draft.config, "init_from_base_layer", False)
        self._constant: Tensor | None = None

    def source(self, spec: TensorSpec) -> Tensor | None:
        """The base's tensor for a parameter, if there is one."""
        if spec.base is None or spec.base not in self.base or not (self.copied or spec.base == FINAL_NORM):
            return None
        found, norm = self.base[spec.base], self.base.get(spec.base.replace("_proj.weight", "_norm.weight"))
        if spec.base.endswith("_proj.weight") and norm is not None and not self.draft.config.qk_norm:
            return _scaled_heads(found, self.base["input_layernorm.weight"], norm)
        return found

    def report(self, table: Mapping[str, TensorSpec]) -> None:
        """Warn about what was to be copied from the base's last layer and is not. Args: table: of the draft."""
        wanted = {name: spec for name, spec in table.items() if spec.base not in (None, FINAL_NORM)}
        if not self.copied or not self.base:
            return
        if lacking := [name for name, spec in wanted.items() if spec.linear and spec.base not in self.base]:
            log.warning(
                "init_from_base_layer: not copied, because the base's last layer has no such tensor (its MLP has "
                "experts, or its attention is another kind): %s", ", ".join(lacking),
            )  # fmt: skip
        biases = [str(spec.base).replace(".weight", ".bias") for spec in wanted.values()]
        lost = [name for name in biases if name in self.base and name not in {s.base for s in wanted.values()}]
        if lost and not self.draft.config.reads_captures:  # EAGLE-3 puts them into the half that reads the embedding
            log.warning(
                "init_attention: the draft has no biases, so those of the base's attention are left out (%s): give "
                '"attention_bias": true, or train long enough to learn without them', ", ".join(lost),
            )  # fmt: skip

    def enter_half(self, value: Tensor, spec: TensorSpec, source: Tensor) -> None:
        """Put a projection of the feature, [R, H], and its bias into one of [embedding ; feature], [R, 2 * H]."""
        value[:, source.shape[-1] :] = source.to(value)
        bias = self.base.get((spec.base or "").replace(".weight", ".bias"))
        if bias is None or self.draft.config.attention_bias:
            return
        if self._constant is None:
            self._constant = constant_of_embeddings(self.draft, self.ends)
        value[:, : source.shape[-1]] += (bias.float()[:, None] * self._constant).to(value)


def _first_value(draft: RecurrentDraft, ends: BaseEnds, name: str, spec: TensorSpec, seed: int) -> Tensor:
    """Initial value by `spec`, unsharded; of an LM head or an embedding, this rank's shard."""
    config, shape = draft.config, spec.shape
    if spec.first in ("ones", "zeros"):
        return torch.full(shape, 1.0 if spec.first == "ones" else 0.0)
    if spec.first == "head":
        return restricted_head(ends, draft.vocab, draft.tp_group)
    if spec.first == "embedding":
        return _embedding(draft, ends, name, seed)
    if spec.first == "feature":
        return _feature_alone(shape, name, seed)
    if spec.first == "captures":
        return _captures_to_feature(shape[0], len(config.capture_layer_ids), config.fc_init, name, seed)
    return draw_normal(name, shape, config.initializer_range, seed)


def initial_values(draft: Any, ends: BaseEnds, base: Mapping[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of every parameter, by the table in `config.structure`. Collective.

    Args:
        draft: a `RecurrentDraft` or a `MedusaDraft`.
        base: see `RecurrentDraft.initialize`.
    """
    last, unlike = _BaseLayer(draft, ends, base), list[str]()
    head: Tensor | None = None
    for name, spec in draft_tensors(draft.config).items():
        source = last.source(spec)
        if source is not None and tuple(source.shape) == spec.shape:
            yield name, source
            continue
        value = head if spec.first == "head" and head is not None else _first_value(draft, ends, name, spec, seed)
        head = value if spec.first == "head" else head
        if source is not None and (source.shape[0], 2 * source.shape[-1]) == spec.shape:
            last.enter_half(value, spec, source)
        elif source is not None:
            unlike.append(name)
        yield name, value
    if unlike:
        log.info("initialised at random, because the base's last layer has other shapes: %s", ", ".join(unlike))
    last.report(draft_tensors(draft.config))


@torch.no_grad()
def set_parameters(draft: nn.Module, values: Iterator[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Copy each value, unsharded or this rank's shard, to the parameter of that name, if there is one."""
    parameters = dict(draft.named_parameters())
    for name, value in values:
        parameter = parameters.get(name)
        if parameter is None:  # a class of the user's has another module there
            continue
        if value.shape != parameter.shape:
            dim = parameter.partition_dim  # type: ignore[attr-defined]
            value = value.chunk(group.size(), dim)[group.rank()]
        if value.shape != parameter.shape:
            raise UserError(f"initial value of {name}: found {list(value.shape)}, expected {list(parameter.shape)}")
        parameter.copy_(value.to(parameter.dtype))
