"""One rule per parameter: its megatron-core name, its Hugging Face names, and how tensor parallel ranks share it.

The same rule serves both directions: `read_shard` (import: a rank reads only its rows or columns) and `join_shards` +
`to_hf` (export). Layouts of megatron-core's merged matrices:

- linear_qkv: one block per key/value head g, [q heads of g; k_g; v_g], rows cut evenly over the ranks (with fewer
  key/value heads than ranks a cut falls inside a block).
- linear_fc1: rank r holds [gate_r; up_r].
- vocabulary: rows padded with zeros to a multiple of the ranks.

V vocabulary, H hidden, N query heads, G key/value heads, D head size, F MLP width, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_spec.config import BaseConfig

Kind = Literal["replicated", "vocab", "qkv", "gate_up", "columns"]
ReadSlice = Callable[[str, int, int, int], Tensor]
"""(Hugging Face name, dim, start, stop) -> that slice of the tensor."""


@dataclass(frozen=True)
class NameRule:
    """One parameter of the base.

    Attributes:
        core: name in the whole megatron-core model (layers numbered over all pipeline stages).
        hf: the Hugging Face tensors it is made of, in order.
        kind: how it is cut over tensor parallel ranks.
    """

    core: str
    hf: tuple[str, ...]
    kind: Kind


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    """Smallest multiple of the tensor parallel size that holds the vocabulary."""
    return -(-vocab_size // tp_size) * tp_size


def hf_shapes(rule: NameRule, config: BaseConfig) -> dict[str, tuple[int, ...]]:
    """Expected shape of every Hugging Face tensor of the rule."""
    H, D = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    if rule.kind == "vocab":
        shapes: list[tuple[int, ...]] = [(config.vocab_size, H)]
    elif rule.kind == "qkv":
        shapes = [(queries, H), (keys, H), (keys, H)]
    elif rule.kind == "gate_up":
        shapes = [(config.intermediate_size, H)] * 2
    elif rule.kind == "columns":
        shapes = [(H, queries if "self_attention" in rule.core else config.intermediate_size)]
    else:
        shapes = [(H,)]
    return dict(zip(rule.hf, shapes, strict=True))


def merge_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Interleave q [N*D, H], k and v [G*D, H] per key/value head into linear_qkv [(N + 2G)*D, H].

    `groups` is the number of key/value heads in these tensors (a slice of the model's is fine).
    """
    parts = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(qkv: Tensor, config: BaseConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `merge_qkv` for the whole matrix [(N + 2G)*D, ...]."""
    D, G = config.head_dim, config.num_key_value_heads
    per_group = config.num_attention_heads // G
    q, k, v = qkv.unflatten(0, (G, -1)).split([per_group * D, D, D], dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def _read_qkv(rule: NameRule, config: BaseConfig, tp_rank: int, tp_size: int, read: ReadSlice) -> Tensor:
    """Read the key/value groups this rank's rows touch, merge them, and cut the rows out."""
    D, G = config.head_dim, config.num_key_value_heads
    q_rows = config.num_attention_heads // G * D
    block = q_rows + 2 * D
    rows = block * G // tp_size
    first, last = tp_rank * rows // block, -(-(tp_rank + 1) * rows // block)
    q_name, k_name, v_name = rule.hf
    merged = merge_qkv(
        read(q_name, 0, first * q_rows, last * q_rows),
        read(k_name, 0, first * D, last * D),
        read(v_name, 0, first * D, last * D),
        last - first,
    )
    return merged.narrow(0, tp_rank * rows - first * block, rows)


def _read_vocab(name: str, config: BaseConfig, rows: int, tp_rank: int, read: ReadSlice) -> Tensor:
    """This rank's rows of a vocabulary matrix; rows behind the true vocabulary are zero."""
    start = min(tp_rank * rows, config.vocab_size)
    stop = min(start + rows, config.vocab_size)
    part = read(name, 0, start, stop)
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def read_shard(
    rule: NameRule, config: BaseConfig, tp_rank: int, tp_size: int, read: ReadSlice, vocab_rows: int | None = None
) -> Tensor:
    """This rank's shard of the megatron-core parameter, reading no more of the files than it needs.

    `vocab_rows` is the number of vocabulary rows per rank when the model was built with more padding than needed.
    """
    if rule.kind == "qkv":
        return _read_qkv(rule, config, tp_rank, tp_size, read)
    if rule.kind == "vocab":
        rows = vocab_rows or padded_vocab(config.vocab_size, tp_size) // tp_size
        return _read_vocab(rule.hf[0], config, rows, tp_rank, read)
    dim = 1 if rule.kind == "columns" else 0
    parts = []
    for name, shape in hf_shapes(rule, config).items():
        size = shape[dim] if rule.kind == "replicated" else shape[dim] // tp_size
        start = 0 if rule.kind == "replicated" else tp_rank * size
        parts.append(read(name, dim, start, start + size))
    return torch.cat(parts)


def join_shards(rule: NameRule, shards: list[Tensor]) -> Tensor:
    """The whole megatron-core parameter from the shards of all tensor parallel ranks, in rank order.

    linear_fc1 comes out as [gate; up]; a vocabulary matrix keeps its padding.
    """
    if rule.kind == "replicated":
        return shards[0]
    if rule.kind == "columns":
        return torch.cat(shards, dim=1)
    if rule.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(shards)


def to_hf(rule: NameRule, whole: Tensor, config: BaseConfig) -> dict[str, Tensor]:
    """Hugging Face tensors (contiguous, vocabulary padding cut off) from the whole megatron-core parameter."""
    parts: tuple[Tensor, ...]
    if rule.kind == "qkv":
        parts = split_qkv(whole, config)
    elif rule.kind == "gate_up":
        parts = whole.chunk(2)
    elif rule.kind == "vocab":
        parts = (whole[: config.vocab_size],)
    else:
        parts = (whole,)
    return {name: part.contiguous() for name, part in zip(rule.hf, parts, strict=True)}
