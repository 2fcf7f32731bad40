"""This package's modules in the frozen base's layers: norm, core attention, replicated linear.

S sequence, B micro-batch, N query heads and G key/value heads of this rank, D head size, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_spec.ops.attention import PLAIN, Variant, attend
from megatron_spec.ops.visibility import Visibility


class RMSNorm(nn.Module):
    """Root mean square norm. megatron-core's torch version refuses sequence parallelism; this one marks its weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[..., H] -> [..., H], computed internally in fp32."""
        return F.rms_norm(x_SBH, self.weight.shape, self.weight, self.eps)


class ReplicatedLinear(nn.Module):
    """A linear whose weight is replicated on every tensor parallel rank."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> ([..., outputs], no bias), as megatron-core's linears."""
        return F.linear(x, self.weight), None


@dataclass(frozen=True)
class LayerModules:
    """What a layer is built from: megatron-core's linears with this package's norm, or Transformer Engine's modules.

    Attributes:
        column, row: linears with sharded outputs or inputs.
        norm: a norm of its own.
        normed_column: a column linear after a norm.
        norm_before: the norm before a `normed_column`; the identity if that includes it.
        replicated: (config, inputs, outputs) -> a linear with the whole weight on every tensor parallel rank.
    """

    column: Any = ColumnParallelLinear
    row: Any = RowParallelLinear
    norm: Any = RMSNorm
    normed_column: Any = ColumnParallelLinear
    norm_before: Any = RMSNorm
    replicated: Callable[[TransformerConfig, int, int], Any] = ReplicatedLinear


LOCAL_MODULES = LayerModules()


class CoreAttention(nn.Module):
    """Core attention under the current `Visibility`, which `FrozenBase` sets before each forward.

    Attributes:
        engine: Transformer Engine's attention, for plain causal batches, in a tuple: it is no submodule with parameters
            of its own. Empty: `ops.attention` computes all.

    Args:
        window: sliding window of this layer.
        sinks: heads have a sink (`softmax_offset`, this rank's heads).
        scale: scale of the scores; None: 1/sqrt(D).
        rotary_size: number of rotary dimensions of a head, the first ones or (`rotary_last`) the last.
        rotary_factor: factor applied to the rotary dimensions.
        tp_group: ranks that share the heads, if not given by `pg_collection`.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: Any, window: int | None = None, sinks: bool = False,
        scale: float | None = None, rotary_size: int = 0, rotary_factor: float = 1.0, rotary_last: bool = False,
        pg_collection: Any = None, tp_group: Any = None, **__: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.visibility: Visibility | None = None
        self.engine: tuple[Any, ...] = ()
        self.cache_layer = 0
        """Index of this layer in the stage's KVCache."""
        self.window, self.scale = window, scale
        self.rotary_size, self.rotary_factor, self.rotary_last = rotary_size, rotary_factor, rotary_last
        self.softmax_offset: nn.Parameter | None = None
        if sinks:
            group = tp_group if pg_collection is None else pg_collection.tp
            heads = config.num_attention_heads // group.size()
            device = torch.cuda.current_device()
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
        if rotary_factor != 1.0:  # before other hooks, so a quantiser of keys sees what the cache holds
            self.register_forward_pre_hook(_scale_rotary)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """query [S, B, N, D], key and value [S, B, G, D], rotated -> [S, B, N*D]. The mask argument is not used."""
        assert self.visibility is not None, "FrozenBase must set the attention visibility before a forward"
        if self.engine and self.visibility.is_plain:
            out: Tensor = self.engine[0](query, key, value, None, AttnMaskType.causal)
            return out
        variant = PLAIN
        if self.window is not None or self.softmax_offset is not None or self.scale is not None:
            variant = Variant(self.window, self.softmax_offset, self.scale)
        return attend(query, key, value, self.visibility, self.cache_layer, variant)


def _scale_rotary(core: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Scale the rotary dimensions of queries and keys, where yarn and longrope scale cosines and sines."""
    query, key, *rest = args
    plain = query.shape[-1] - core.rotary_size
    factor = query.new_full((core.rotary_size,), core.rotary_factor)
    parts = [query.new_ones(plain), factor] if core.rotary_last else [factor, query.new_ones(plain)]
    factor_D = torch.cat(parts)
    return (query * factor_D, key * factor_D, *rest)
