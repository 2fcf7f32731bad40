"""DFlash and DSpark folders of speculators, SpecForge and ModelOpt, in the form of z-lab and DeepSpec. No torch.

That form is what `formats.block` reads and engines load: keys of the layers at the top level of config.json, captured
layers by output from 0, options of DSpark's heads at the top level, their tensors under `markov_head` and
`confidence_head`.
"""

from __future__ import annotations

from typing import Any

from megatron_spec.config import UserError
from megatron_spec.export.block import ARCHITECTURES
from megatron_spec.export.formats.keys import CONTAINERS, flatten

_HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
"""Options of DSpark's heads, which SpecForge and ModelOpt write into `dflash_config`."""
_ONLY_THERE = ("speculators_model_type", "sliding_window_non_causal")
"""Keys of speculators that are read here."""
_RENAMED = {
    **{f"{x}.": f"markov_head.{x}." for x in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")},
    "confidence_proj.": "confidence_head.proj.",
    "logit_head.": "",
}
"""Names of tensors in ModelOpt and in old SpecForge -> DeepSpec's."""


def algorithm_of(raw: dict[str, Any]) -> str | None:
    """'dflash' or 'dspark' from a config.json of any form; None for other drafts."""
    kind, names, inside = raw.get("speculators_model_type"), raw.get("architectures"), raw.get("dflash_config")
    if kind is not None:
        return kind if kind in ARCHITECTURES else None
    if names == ["DSparkDraftModel"]:  # of another model_type, the head of a DeepSeek base (vLLM's rule, too)
        return "dspark" if raw.get("model_type") == "qwen3" else None
    if names == ARCHITECTURES["dflash"] and isinstance(inside, dict) and inside.get("projector_type") == "dspark":
        return "dspark"
    return next((name for name, found in ARCHITECTURES.items() if found == names), None)


def tensor_name(name: str) -> str:
    """DeepSpec's name of a tensor."""
    name = name.removeprefix("model.")
    for theirs, ours in _RENAMED.items():
        name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name


def plain_form(raw: dict[str, Any], base_layers: int | None = None) -> dict[str, Any]:
    """config.json of a block draft in z-lab's form; unchanged if it has this form.

    Args:
        base_layers: layers of the target, which a file of speculators does not tell.

    Raises UserError when a key that decides what the draft computes is missing or contradicts another one.
    """
    if raw.get("speculators_model_type") is not None:
        return _from_speculators(raw, base_layers)
    return _lift_heads(raw) if algorithm_of(raw) == "dspark" else raw


def _from_speculators(raw: dict[str, Any], base_layers: int | None) -> dict[str, Any]:
    """Captured layers are counted as 'state after k layers', as in vLLM."""
    flat = {key: value for key, value in flatten(raw).items() if key not in CONTAINERS}
    kind, states = raw["speculators_model_type"], flat.pop("aux_hidden_state_layer_ids", None)
    if not (isinstance(states, list) and states and all(type(k) is int and k >= 1 for k in states)):
        raise UserError(f"aux_hidden_state_layer_ids is {states!r}, expected 'state after k layers', from 1")
    if kind == "dspark" and flat.get("sample_from_anchor") is None:
        raise UserError(
            "sample_from_anchor is missing: speculators before 0.7.0 trained with false (a slot predicts its own "
            "token, speculative_tokens is block_size - 1), since then with true by default (the next token, "
            "block_size): write true if this draft was trained so; with false it is not supported"
        )
    ids = [k - 1 for k in states]
    flat |= {"architectures": ARCHITECTURES[kind], "target_layer_ids": ids}
    flat["dflash_config"] = {} if _causal(flat) else {"causal": False}  # by default, layers with a window are causal
    flat.setdefault("num_target_layers", max(ids) + 1 if base_layers is None else base_layers)
    return {key: value for key, value in flat.items() if key not in _ONLY_THERE}


def _causal(flat: dict[str, Any]) -> bool:
    """In full attention, speculators trains on the complete block; its key is about windows alone."""
    if "sliding_attention" not in (flat.get("layer_types") or ()):
        return False
    found = flat.get("sliding_window_non_causal")
    if not isinstance(found, bool):
        raise UserError(f"sliding_window_non_causal is {found!r}: write true or false, as in training")
    return not found


def _lift_heads(raw: dict[str, Any]) -> dict[str, Any]:
    inside = dict(raw.get("dflash_config") or {})
    if inside.pop("shift_label", True) is not True:
        raise UserError("dflash_config.shift_label is not true, but a slot of DSpark predicts the token after its own")
    if "use_confidence_head" in inside:  # ModelOpt's, which always reads W1
        inside["enable_confidence_head"] = inside.pop("use_confidence_head")
        if inside["enable_confidence_head"]:
            inside.setdefault("confidence_head_with_markov", True)
    lifted = {key: inside.pop(key) for key in _HEAD_KEYS if inside.get(key) is not None}
    for key, value in lifted.items():
        if raw.get(key, value) != value:
            raise UserError(f"{key} is {raw[key]!r} at the top level and {value!r} in dflash_config")
    nested = {"dflash_config": inside} if "dflash_config" in raw else {}
    return {**raw, **lifted, **nested, "architectures": ARCHITECTURES["dspark"]}
