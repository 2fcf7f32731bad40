"""megatron-core's HybridModel: attention and MLP are layers of their own, and each pair of them is a transformer layer.

A pattern has one symbol per layer ("*-*-": two transformer layers), and "|" between pipeline stages. Elsewhere in this
package a layer is a transformer layer: number i is the hybrid layers 2i (attention) and 2i + 1 (MLP), so the capture of
layer i is the output of hybrid layer 2i + 1, and names are those of a GPTModel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_spec.config import UserError

PAIR = "*-"
KINDS = {
    "M": "Mamba",
    "G": "Gated DeltaNet",
    "*": "attention",
    "D": "sparse attention",
    "+": "latent attention",
    "-": "MLP",
    "E": "mixture-of-experts",
}
"""Symbols of megatron-core's patterns (hybrid_layer_allocation.Symbols) -> what they are called here."""

_STORED = {
    "mixer.": "M",
    "self_attention.in_proj.": "G",
    "self_attention.core_attention.indexer.": "D",
    "self_attention.linear_kv_down_proj.": "+",
    "self_attention.linear_qkv.": "*",
    "mlp.linear_fc1.": "-",
    "mlp.router.": "E",
}
"""Beginning of a parameter's name inside a layer -> symbol of the layer; the first that a layer has decides."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def transformer_layers(pattern: str, where: str) -> list[int]:
    """Number of transformer layers in each pipeline stage of a pattern: "*-*-|*-" has [2, 1].

    Raises:
        UserError: layers that are neither attention nor MLP, by name; layers or stages that do not pair up.
    """
    others: dict[str, list[int]] = {}
    for number, symbol in enumerate(pattern.replace("|", "")):
        if symbol not in PAIR:
            others.setdefault(symbol, []).append(number)
    if others:
        found = "; ".join(f"{KINDS.get(s, repr(s))} (layers {_few(numbers)})" for s, numbers in others.items())
        raise UserError(
            f"{where}: found {found} in the pattern {pattern}, expected attention (*) and MLP (-) layers only: others "
            "are not supported yet"
        )
    stages = pattern.split("|")
    if any(stage != PAIR * (len(stage) // 2) for stage in stages):
        raise UserError(
            f"{where}: found the pattern {pattern}, expected an attention layer (*) and an MLP layer (-) in turn, in "
            "whole pairs on every pipeline stage (|): each pair is read as one transformer layer"
        )
    return [len(stage) // 2 for stage in stages]


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def stored_pattern(names: Iterable[str]) -> str:
    """Pattern of the layers that have parameters of these names ("decoder.layers.3.mlp.linear_fc1.weight").

    A layer of unknown kind, or without parameters, is "?".
    """
    inside: dict[int, list[str]] = {}
    for name in names:
        if found := _LAYER.match(name):
            inside.setdefault(int(found[1]), []).append(name[found.end() :])
    layers = [inside.get(number, []) for number in range(max(inside, default=-1) + 1)]
    return "".join(
        next((s for start, s in _STORED.items() if any(n.startswith(start) for n in layer)), "?") for layer in layers
    )


def gpt_name(name: str) -> str:
    """Name in a GPTModel of a parameter of a HybridModel of such pairs, both from "decoder." on."""
    name = _LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) // 2}.", name)
    return name.replace("decoder.final_norm.", "decoder.final_layernorm.")
