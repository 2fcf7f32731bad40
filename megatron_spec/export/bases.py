"""Bases that an engine serves without a draft only, or whose layers it counts in another way. No torch.

Read in vLLM 0.33.0 (`SupportsEagle3`), SGLang 0.5.23 (`set_eagle3_layers_to_capture`, `set_dflash_layers_to_capture`,
`get_embed_and_head`) and TensorRT-LLM from 1.3 on, where only classes derived from SpecDecOneEngineForCausalLM have a
drafter inside (it ignores `eagle3_one_model: false`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Drafting = Literal["eagle3", "eagle1", "block", "other"]
"""What a draft takes of its base: captured layers, the final state, captured layers of block drafts, tokens alone."""
_INSIDE: tuple[Drafting, ...] = ("eagle3", "block", "other")
_LOST: Mapping[str, Mapping[str, tuple[Drafting, ...]]] = {
    "MistralForCausalLM": {"trtllm": _INSIDE},
    "Phi3ForCausalLM": {"trtllm": _INSIDE},
    "Qwen2ForCausalLM": {"sglang": ("block",), "trtllm": _INSIDE},
    "MixtralForCausalLM": {"vllm": ("eagle3", "block"), "sglang": ("eagle3", "eagle1", "block"), "trtllm": _INSIDE},
}
"""Architecture of a base -> engine -> drafts that it does not serve with it."""
_WHY = {
    "vllm": "its class has no interface for captured layers",
    "sglang": "its class gives a draft neither layers nor embedding",
    "trtllm": "its class has no drafter inside",
}


def sglang_delivers_last_layer(architecture: str | None) -> bool:
    """Whether a draft can capture the base's last layer: SGLang captures a layer's output where the next one begins,
    and only its class of gpt-oss also where the final norm does."""
    return architecture == "GptOssForCausalLM"


def lost(architecture: str | None, drafting: Drafting, captures: Sequence[int] | None = None) -> dict[str, str]:
    """Engine -> why it does not serve such a draft with a base of this architecture.

    Args:
        architecture: first of `architectures` in the base's config.json.
        captures: layers (from 0) that an EAGLE-3 draft's config.json names; None: the defaults.
    """
    found = {
        engine: f"it serves {architecture} only without it: {_WHY[engine]}"
        for engine, kinds in _LOST.get(architecture or "", {}).items()
        if drafting in kinds
    }
    if architecture == "DeepseekV3ForCausalLM" and drafting == "eagle3" and captures and captures[0] != 1:
        found["sglang"] = (
            f"it reads the layers {list(captures)} of {architecture} one too early, unless the first of them is 1"
        )
    return found
