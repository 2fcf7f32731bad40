"""Norms and MLP of the base's last layer, whole and on every rank: what a fresh draft may start from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base_models import name_rules
from megatron_spec.base_models.names import NameRule, hf_shapes, join_shards, to_hf
from megatron_spec.pipeline.model import FrozenBase


@torch.no_grad()
def last_layer_tensors(base: FrozenBase) -> dict[str, Tensor]:
    """Unsharded tensors by Hugging Face name inside the layer ("mlp.gate_proj.weight"), and "norm.weight". Collective.

    The last pipeline stage joins its tensor parallel shards and sends them to the other stages.
    """
    prefix = f"model.layers.{base.config.num_layers - 1}."
    ranks = dist.get_process_group_ranks(base.world.pp)
    found: dict[str, Tensor] = {}
    for rule in name_rules(base.config):
        wanted = rule.core.startswith("decoder.final_layernorm") or (
            rule.hf[0].startswith(prefix) and "self_attn" not in rule.hf[0]
        )
        if not wanted:
            continue
        tensors = _whole(base, rule) if base.world.is_last_stage else {}
        for name, shape in hf_shapes(rule, base.config).items():
            tensor = tensors.get(name, torch.empty(shape, dtype=base.dtype, device=base.world.device))
            if base.world.pp_size > 1:
                dist.broadcast(tensor, ranks[-1], group=base.world.pp)
            found[name.removeprefix(prefix).removeprefix("model.")] = tensor
    return found


def _whole(base: FrozenBase, rule: NameRule) -> dict[str, Tensor]:
    parameters: dict[str, Any] = dict(base.gpt.named_parameters())
    parts = rule.core.split(".")
    if parts[1] == "layers":
        parts[2] = str(len(base.gpt.decoder.layers) - 1)
    mine = parameters[".".join(parts)].detach()
    shards = [mine]
    if rule.kind != "replicated" and base.world.tp_size > 1:
        shards = [torch.empty_like(mine) for _ in range(base.world.tp_size)]
        dist.all_gather(shards, mine.contiguous(), group=base.world.tp)
    return to_hf(rule, join_shards(rule, shards), base.config)
