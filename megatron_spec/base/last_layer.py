"""Norms, attention and MLP of the base's last layer, unsharded on every rank, to initialise a new draft."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base.model import FrozenBase
from megatron_spec.families.names import NameRule, hf_shapes, join_shards, local_names, to_hf
from megatron_spec.families.rules import name_rules

_PARTS = ("final_layernorm", "input_layernorm", "pre_mlp_layernorm", "self_attention", "mlp")


@torch.no_grad()
def last_layer_tensors(base: FrozenBase) -> dict[str, Tensor]:
    """Unsharded tensors by Hugging Face name inside the layer ("mlp.gate_proj.weight"), and "norm.weight". Collective.

    The last pipeline stage gathers its tensor parallel shards and broadcasts them. The experts of a mixture-of-experts
    layer are left out: the draft's MLP is dense.
    """
    prefix = f"model.layers.{base.config.num_layers - 1}."
    ranks = dist.get_process_group_ranks(base.world.pp)
    found: dict[str, Tensor] = {}
    for rule in name_rules(base.config):
        part = rule.core.split(".")[3] if rule.layer == base.config.num_layers - 1 else rule.core.split(".")[1]
        experts = rule.layer is not None and base.config.has_experts(rule.layer)
        if part not in _PARTS or (part == "mlp" and experts):
            continue
        tensors = _whole(base, rule) if base.world.is_last_stage else {}
        for name, shape in hf_shapes(rule).items():
            tensor = tensors.get(name, torch.empty(shape, dtype=base.dtype, device=base.world.device))
            if base.world.pp_size > 1:
                dist.broadcast(tensor, ranks[-1], group=base.world.pp)
            found[name.removeprefix(prefix).removeprefix("model.")] = tensor
    fused = found.pop("mlp.gate_up_proj.weight", None)
    if fused is not None:
        found["mlp.gate_proj.weight"], found["mlp.up_proj.weight"] = fused.chunk(2)
    fused = found.pop("self_attn.qkv_proj.weight", None)
    if fused is not None:
        config = base.config
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        for x, part in zip("qkv", fused.split([n * config.head_dim for n in heads]), strict=True):
            found[f"self_attn.{x}_proj.weight"] = part
    return found


def _whole(base: FrozenBase, rule: NameRule) -> dict[str, Tensor]:
    mine = base.weights()[local_names(rule, base.stage.first, base.experts)[0]].detach()
    shards = [mine]
    if rule.kind != "replicated" and base.world.tp_size > 1:
        shards = [torch.empty_like(mine) for _ in range(base.world.tp_size)]
        dist.all_gather(shards, mine.contiguous(), group=base.world.tp)
    return to_hf(rule, join_shards(rule, shards), base.config)
