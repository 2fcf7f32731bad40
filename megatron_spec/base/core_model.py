"""megatron-core's model classes as the frozen base reads them: GPTModel, and HybridModel of attention and MLP layers.

The differences of the classes end here: both give transformer layers with the same four modules, and names of a
GPTModel. Before megatron-core 0.18 HybridModel was called MambaModel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import nn

from megatron_spec.config import UserError
from megatron_spec.families.hybrid import PAIR, gpt_name, transformer_layers

_HYBRID = ("megatron.core.models.hybrid.hybrid_model.HybridModel", "megatron.core.models.mamba.mamba_model.MambaModel")
"""Compared by name, because importing them imports every module of a Mamba layer."""

_PARTS = {"*": ("input_layernorm", "self_attention"), "-": ("pre_mlp_layernorm", "mlp")}
"""Symbol of a layer -> its modules with parameters."""


class Pair(nn.Module):
    """An attention and an MLP layer of a HybridModel, with the names that they have in a TransformerLayer."""

    def __init__(self, attention: Any, mlp: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = attention.input_layernorm, attention.self_attention
        self.pre_mlp_layernorm, self.mlp = mlp.pre_mlp_layernorm, mlp.mlp


@dataclass(frozen=True)
class CoreModel:
    """One pipeline stage of a megatron-core model.

    Attributes:
        model: GPTModel or HybridModel.
        layers: its transformer layers.
        outputs: for each of them, the module that returns its output.
        final_norm: on the last stage.
    """

    model: Any
    layers: list[Any]
    outputs: list[Any]
    final_norm: Any

    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of a GPTModel; layers are counted inside the stage."""
        rename = str if isinstance(self.model, GPTModel) else gpt_name
        return {rename(name): parameter for name, parameter in self.model.named_parameters()}


def core_model(model: Any) -> CoreModel:
    """The stage in a GPTModel, or in a HybridModel that `stage_counts` accepts."""
    layers = list(model.decoder.layers)
    if isinstance(model, GPTModel):
        return CoreModel(model, layers, layers, getattr(model.decoder, "final_layernorm", None))
    pairs: list[Any] = [Pair(a, m) for a, m in zip(layers[::2], layers[1::2], strict=True)]
    return CoreModel(model, pairs, layers[1::2], getattr(model.decoder, "final_norm", None))


def unwrapped(model: Any) -> Any:
    """The GPTModel or HybridModel inside wrappers, or inside a list of one. Raises UserError for anything else."""
    chunks = model if isinstance(model, list) else [model]
    if len(chunks) != 1:
        raise UserError(
            f"found {len(chunks)} model chunks (interleaved pipeline), expected one: build the base without "
            "virtual pipeline stages"
        )
    found = chunks[0]
    while not _is_known(found) and hasattr(found, "module"):
        found = found.module
    if not _is_known(found):
        raise UserError(
            f"found {type(found).__name__}, expected megatron-core's GPTModel or HybridModel (before megatron-core "
            "0.18: MambaModel), or a list of one"
        )
    return found


def _is_known(model: Any) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    return isinstance(model, GPTModel) or not names.isdisjoint(_HYBRID)


def _pattern(model: Any) -> str:
    """Layers of this stage as `families.hybrid` writes them; a GPTModel's are pairs."""
    if isinstance(model, GPTModel):
        return PAIR * len(model.decoder.layers)
    return "".join(model.decoder.layer_type_list)


def _problem(model: Any) -> str | None:
    """What makes this stage of a HybridModel another function than that of its pairs; None if nothing does."""
    if isinstance(model, GPTModel):
        return None
    name = type(model).__name__
    if model.position_embedding_type != "rope":
        return f"found a {name} with position_embedding_type={model.position_embedding_type!r}, expected 'rope'"
    if model.post_process and not hasattr(model.decoder, "final_norm"):
        return f"found a {name} without a final norm (post_layer_norm=False), expected one"
    for number, (symbol, layer) in enumerate(zip(_pattern(model), model.decoder.layers, strict=True)):
        parts = _PARTS.get(symbol, ())
        extra = [
            part
            for part, module in layer.named_children()
            if part not in parts and next(module.parameters(), None) is not None
        ]
        if parts and extra:
            return f"found {', '.join(extra)} in layer {number} of a {name}, expected {' and '.join(parts)}"
    return None


def stage_counts(model: Any, num_layers: int, pp: dist.ProcessGroup) -> list[int]:
    """Transformer layers of every pipeline stage. Collective over `pp`, whose ranks refuse a model together.

    Raises:
        UserError: a HybridModel with layers that are neither attention nor MLP, or do not pair up; or another number
            of layers than `num_layers`.
    """
    found: list[Any] = [None] * pp.size()
    dist.all_gather_object(found, (_pattern(model), _problem(model)), group=pp)
    name = type(model).__name__
    counts = transformer_layers("|".join(pattern for pattern, _ in found), name)
    for _, problem in found:
        if problem is not None:
            raise UserError(f"{problem}: convert() cannot wrap it")
    if sum(counts) != num_layers:
        raise UserError(
            f"found {sum(counts)} transformer layers in the {name}, expected {num_layers} as in its base_path: give "
            "the folder of this model"
        )
    return counts
