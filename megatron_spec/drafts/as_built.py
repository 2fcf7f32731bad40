"""Which modules a hand-written pass may stand in for: those of this package, unchanged. Others are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from megatron_spec.config import UserError
from megatron_spec.drafts.layer import DraftLayer, GatedMLP, HeadNorm, SelfAttention
from megatron_spec.drafts.linear import (
    ColumnLinear,
    Linear,
    RMSNorm,
    RowLinear,
    VocabLinear,
    attached_quantizers,
    hooked,
)

_KNOWN = {SelfAttention, GatedMLP, HeadNorm, Linear, ColumnLinear, RowLinear, RMSNorm}
"""Modules whose computation the passes repeat. Exact types: a subclass or a parametrised module may compute another."""


def as_built(layers: Iterable[Any], *others: nn.Module) -> bool:
    """True if decoder layers and other modules of a draft compute what this package's do, and no hook watches them."""
    parts = list(others)
    for layer in layers:
        if getattr(type(layer), "forward", None) is not DraftLayer.forward or hooked(layer):
            return False
        norms = [layer.input_layernorm, layer.post_attention_layernorm, getattr(layer, "hidden_norm", None)]
        parts += [norm for norm in norms if norm is not None]
        parts += [*layer.self_attn.modules(), *layer.mlp.modules()]
    known = {inner for quantizer in attached_quantizers(parts) for inner in quantizer.modules()}  # the caller's matter
    return all((type(part) in _KNOWN or part in known) and not hooked(part) for part in parts)


def head_weight(head: Any) -> Tensor:
    """The weight of an LM head, fake-quantised if the head is, for losses that take rows and a weight.

    Raises UserError for a head that computes something else, or that has hooks: it is not called.
    """
    if type(head) is not VocabLinear or hooked(head):
        found = f"a {type(head).__name__} as lm_head" if type(head) is not VocabLinear else "hooks on lm_head"
        raise UserError(
            f"the draft's LM head: found {found}, expected this package's VocabLinear without hooks, because training "
            "takes its weight and does not call it: override the draft's forward"
        )
    return head.quantized_weight()
