"""Load the prediction module that a base ships (DeepSeek-V3's MTP) from the base's folder into a draft."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_spec.checkpoint.huggingface import HuggingFaceWeights
from megatron_spec.config import EagleConfig, UserError
from megatron_spec.drafts.contract import Draft
from megatron_spec.runtime.distributed import World

_ENDS = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensors of the module that must be copies of the base's: the draft uses these."""


def check_own_module(folder: Path, config: EagleConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that the base's folder has the module of `presets.own_mtp_config`. Reads names, shapes and its ends.

    Args:
        shapes: shapes of the module's tensors, by their names in the base's files.

    Raises UserError naming every missing, unexpected or misshapen tensor, and for a module with an embedding or a head
    of its own.
    """
    prefix = f"model.layers.{config.layer_in_base}."
    with HuggingFaceWeights(folder) as weights:
        if not any(name.startswith(prefix) for name in weights.names):
            raise UserError(
                f"{folder}: config.json says that the base ships a prediction module, but its files hold no {prefix}* "
                "(transformers drops it on saving): take the base's original files"
            )
        ends_here = {prefix + own: base for own, base in _ENDS.items() if prefix + own in weights.names}
        weights.check_names(shapes, lambda name: not name.startswith(prefix) or name in ends_here)
        for own, base in ends_here.items():
            if base in weights.names and not weights.same(own, base, config.vocab_size):
                raise UserError(
                    f"{folder}: {own} is not a copy of {base}: a prediction module with an embedding or a head of its "
                    "own is not supported; leave --mtp-from-base out"
                )


@torch.no_grad()
def load_own_module(draft: Draft, folder: Path, world: World) -> None:
    """Load the module into a draft of the base's kind, from a folder that `check_own_module` has accepted.

    Each rank reads only the rows or columns it keeps.
    """
    config: EagleConfig = draft.config  # type: ignore[assignment]
    prefix = f"model.layers.{config.layer_in_base}."
    with HuggingFaceWeights(folder) as weights:
        for own, parameter in draft.named_parameters():
            name = prefix + own.removeprefix("layers.0.")
            sharded = getattr(parameter, "tensor_model_parallel", False)
            dim: int = parameter.partition_dim if sharded else 0  # type: ignore[attr-defined]
            size = parameter.shape[dim]
            start = world.tp_rank * size if sharded else 0
            parameter.copy_(weights.read(name, dim, start, start + size))
