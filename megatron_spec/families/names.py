"""One rule per parameter: its megatron-core name, its Hugging Face names, and its sharding.

A rule serves both directions: `read_shard` (import: a rank reads only its rows or columns) and `join_shards` + `to_hf`
(export). Layouts in megatron-core:

- linear_qkv: one block per key/value head g, [q heads of g; k_g; v_g], rows split evenly over the ranks (with fewer
  key/value heads than ranks, inside a block).
- linear_fc1: rank r has [gate_r; up_r].
- embedding and LM head: rows split evenly over the ranks, zero rows appended to the vocabulary to make that possible
  (more for a Megatron checkpoint with more padding). Export drops them. A draft's are not padded (`structure.share`).
- experts: each is a module of its own on one expert parallel rank, its matrices sharded over tensor parallel ranks.

V vocabulary, H hidden, N query heads, G key/value heads, D head size, F MLP width, E experts, R rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_spec.config import BaseConfig

Kind = Literal[
    "replicated", "vocab", "rows", "columns", "qkv", "gate_up", "fused_qkv", "fused_gate_up",
    "stacked_gate_up", "stacked_gate_up_bias", "stacked_down", "stacked_down_bias",
]  # fmt: skip
EVERYTHING = slice(None)


class ReadSlice(Protocol):
    """Reads a slice of a Hugging Face tensor."""

    def __call__(self, name: str, dim: int, start: int, stop: int, outer: slice = EVERYTHING, /) -> Tensor:
        """The slice [start, stop) of dimension `dim`, and `outer` of dimension 0 if `dim` is not 0."""
        ...


ALL_EXPERTS = "*"
"""Placeholder for the expert's index in rules whose Hugging Face tensor has all experts."""
_EXPERT = re.compile(r"(?<=\.local_experts\.)(\d+|\*)(?=\.)")


@dataclass(frozen=True)
class NameRule:
    """One parameter of the base (for `stacked_*`, of all experts of a layer).

    Attributes:
        core: name in the unsharded megatron-core model (layers numbered over all pipeline stages, experts over all
            ranks).
        hf: names of its Hugging Face tensors, in order.
        kind: how it is sharded over tensor parallel ranks.
        shapes: shapes of the tensors in `hf`.
        float32: kept in fp32 for any dtype of the model.
    """

    core: str
    hf: tuple[str, ...]
    kind: Kind
    shapes: tuple[tuple[int, ...], ...]
    float32: bool = False

    @property
    def layer(self) -> int | None:
        """Index of its layer; None for embedding, final norm and LM head."""
        parts = self.core.split(".")
        return int(parts[2]) if parts[1] == "layers" else None

    @property
    def module(self) -> str:
        """Name of its module inside the decoder: "layers.3.mlp.linear_fc1"."""
        return self.core.removeprefix("decoder.").rpartition(".")[0]

    @property
    def expert(self) -> str | None:
        """Index of its expert, '*' for all experts in one tensor, None outside experts."""
        found = _EXPERT.search(self.core)
        return found[0] if found else None


@dataclass(frozen=True)
class Experts:
    """Experts of a layer on this rank: first .. first + count - 1."""

    first: int = 0
    count: int = 0

    @staticmethod
    def of(config: BaseConfig, ep_rank: int, ep_size: int) -> Experts:
        """Equal shares in rank order."""
        count = config.num_experts // ep_size
        return Experts(ep_rank * count, count)


def local_names(rule: NameRule, first_layer: int, experts: Experts) -> list[str]:
    """Names of the rule's parameters in the stage that starts at `first_layer`; it may end before their layer.

    Empty for a layer of an earlier stage and for an expert of another rank; one per local expert for `stacked_*`.
    """
    name = rule.core
    if rule.layer is not None:
        if rule.layer < first_layer:
            return []
        name = name.replace(f"decoder.layers.{rule.layer}.", f"decoder.layers.{rule.layer - first_layer}.", 1)
    if rule.expert is None:
        return [name]
    if rule.expert == ALL_EXPERTS:
        return [_EXPERT.sub(str(i), name) for i in range(experts.count)]
    index = int(rule.expert) - experts.first
    return [_EXPERT.sub(str(index), name)] if 0 <= index < experts.count else []


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    """The vocabulary size rounded up to a multiple of the tensor parallel size."""
    return -(-vocab_size // tp_size) * tp_size


def hf_shapes(rule: NameRule) -> dict[str, tuple[int, ...]]:
    """Shapes of the rule's Hugging Face tensors by name."""
    return dict(zip(rule.hf, rule.shapes, strict=True))


def merge_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Interleave q [N*D, ...], k and v [G*D, ...] per key/value head into linear_qkv [(N + 2G)*D, ...].

    Args:
        groups: number of key/value heads in these tensors, which may be a slice of the model's.
    """
    parts = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(qkv: Tensor, config: BaseConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `merge_qkv` for the unsharded matrix [(N + 2G)*D, ...]."""
    D, G = config.head_dim, config.num_key_value_heads
    per_group = config.num_attention_heads // G
    q, k, v = qkv.unflatten(0, (G, -1)).split([per_group * D, D, D], dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def _read_qkv(rule: NameRule, config: BaseConfig, tp_rank: int, tp_size: int, read: ReadSlice) -> Tensor:
    """Read and merge the key/value groups that overlap this rank's rows, and select the rows."""
    D, N, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    q_rows = N // G * D
    block = q_rows + 2 * D
    rows = block * G // tp_size
    first, last = tp_rank * rows // block, -(-(tp_rank + 1) * rows // block)
    # A fused matrix is [q; k; v], so k and v have offsets.
    names, begins = (rule.hf * 3, (0, N * D, (N + G) * D)) if rule.kind == "fused_qkv" else (rule.hf, (0, 0, 0))
    q, k, v = (
        read(name, 0, begin + first * size, begin + last * size)
        for name, begin, size in zip(names, begins, (q_rows, D, D), strict=True)
    )
    return merge_qkv(q, k, v, last - first).narrow(0, tp_rank * rows - first * block, rows)


def _read_vocab(name: str, config: BaseConfig, rows: int, tp_rank: int, read: ReadSlice) -> Tensor:
    """This rank's rows of an embedding or LM head; rows past the vocabulary are zero."""
    start = min(tp_rank * rows, config.vocab_size)
    stop = min(start + rows, config.vocab_size)
    part = read(name, 0, start, stop)
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def _read_stacked(rule: NameRule, tp_rank: int, tp_size: int, read: ReadSlice, experts: Experts) -> Tensor:
    """gpt-oss: [local experts, ...] in megatron-core's layout. Gate and up columns are interleaved in the file."""
    name, shape = rule.hf[0], rule.shapes[0]
    here = slice(experts.first, experts.first + experts.count)
    if rule.kind == "stacked_down_bias":
        return read(name, 0, here.start, here.stop)
    dim = 1 if rule.kind == "stacked_down" else len(shape) - 1
    size = shape[dim] // tp_size
    part = read(name, dim, tp_rank * size, (tp_rank + 1) * size, here)
    if rule.kind == "stacked_down":
        return part.transpose(1, 2)
    return torch.cat([part[..., ::2], part[..., 1::2]], dim=-1).transpose(1, -1)


def read_shard(
    rule: NameRule, config: BaseConfig, tp_rank: int, tp_size: int, read: ReadSlice, vocab_rows: int | None = None,
    experts: Experts | None = None,
) -> Tensor:  # fmt: skip
    """This rank's shard of the megatron-core parameter; reads only the slices that it needs.

    Args:
        vocab_rows: vocabulary rows per rank; default: those of `padded_vocab`.
        experts: this rank's experts, for `stacked_*` rules, whose shard is [local experts, ...].
    """
    if rule.kind in ("qkv", "fused_qkv"):
        return _read_qkv(rule, config, tp_rank, tp_size, read)
    if rule.kind == "vocab":
        rows = vocab_rows or padded_vocab(config.vocab_size, tp_size) // tp_size
        return _read_vocab(rule.hf[0], config, rows, tp_rank, read)
    if rule.kind.startswith("stacked"):
        return _read_stacked(rule, tp_rank, tp_size, read, experts or Experts(0, config.num_experts))
    if rule.kind == "fused_gate_up":  # [gate; up]
        width = rule.shapes[0][0] // 2
        size = width // tp_size
        starts = (tp_rank * size, width + tp_rank * size)
        return torch.cat([read(rule.hf[0], 0, start, start + size) for start in starts])
    dim = 1 if rule.kind == "columns" else 0
    parts = []
    for name, shape in hf_shapes(rule).items():
        size = shape[dim] if rule.kind == "replicated" else shape[dim] // tp_size
        start = 0 if rule.kind == "replicated" else tp_rank * size
        parts.append(read(name, dim, start, start + size))
    return torch.cat(parts)


def join_shards(rule: NameRule, shards: list[Tensor]) -> Tensor:
    """The unsharded megatron-core parameter from the shards of all tensor parallel ranks, in rank order.

    linear_fc1 becomes [gate; up]; embedding and LM head keep their padding.
    """
    if rule.kind in ("replicated", "stacked_down_bias"):
        return shards[0]
    if rule.kind == "columns":
        return torch.cat(shards, dim=1)
    if rule.kind == "stacked_down":
        return torch.cat(shards, dim=2)
    dim = 1 if rule.kind.startswith("stacked_gate_up") else 0
    if "gate_up" in rule.kind:
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim)
    return torch.cat(shards)


def to_hf(rule: NameRule, whole: Tensor, config: BaseConfig) -> dict[str, Tensor]:
    """Hugging Face tensors (contiguous, without vocabulary padding) from the unsharded megatron-core parameter."""
    parts: tuple[Tensor, ...]
    if rule.kind == "qkv":
        parts = split_qkv(whole, config)
    elif rule.kind == "fused_qkv":
        parts = (torch.cat(split_qkv(whole, config)),)
    elif rule.kind == "gate_up":
        parts = whole.chunk(2)
    elif rule.kind == "vocab":
        parts = (whole[: config.vocab_size],)
    elif rule.kind.startswith("stacked_gate_up"):
        parts = (torch.stack(whole.chunk(2, dim=1), dim=2).flatten(1, 2),)
        parts = (parts[0].transpose(1, -1),)
    elif rule.kind == "stacked_down":
        parts = (whole.transpose(1, 2),)
    else:
        parts = (whole,)
    return {name: part.contiguous() for name, part in zip(rule.hf, parts, strict=True)}
