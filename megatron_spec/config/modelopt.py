"""ModelOpt's eagle_config.json: keys are translated, or refused with this package's equivalent.

The file nests the architecture (`eagle_architecture_config`, in exports `eagle_config`), numbers captured layers as
here (outputs, from 0) and writes null for the base's value.
"""

from __future__ import annotations

from typing import Any

from megatron_spec.config.core import UserError
from megatron_spec.config.draft import READS_CAPTURES

_NESTED = ("eagle_architecture_config", "eagle_config")
_RENAMED = {"eagle_aux_hidden_state_layer_ids": "capture_layer_ids"}
_WITHOUT_MEANING = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "eagle_use_torch_compile", "eagle_report_acc", "eagle_enable_nvtx",
})  # fmt: skip
"""Keys that describe a file or a program, not a draft."""

_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_mtp_layernorm": ((False,), "multi-token prediction is --export-eagle-algorithm eagle-mtp"),
    "next_layer_regular": ((True,), "all layers are regular ones"),
    "parallel_draft_step": (
        (1,),
        "several tokens in one step are --export-eagle-algorithm p-eagle or --export-algorithm medusa",
    ),
    "parallel_draft_heads_num_layers": ((0, 1), "see parallel_draft_step"),
    "attention_dropout": ((0, 0.0), "a draft is trained without dropout"),
    "pretraining_tp": ((1,), "a draft has one set of weights"),
    "position_embedding_type": (("rope",), "a draft has a rotary embedding"),
    "tie_word_embeddings": ((False,), "a draft has a head of its own"),
    "eagle_decoder_type": (("llama",), "a draft has Llama-style layers"),
    "eagle_mix_hidden_states": ((False,), "every draft step reads its own states"),
    "eagle_freeze_base_model": ((True,), "the base is frozen"),
    "eagle_reuse_base_decoder": ((False,), 'give "init_from_base_layer": true to begin with values of the base'),
    "eagle_hidden_state_distillation": ((False,), "features are regressed in eagle1: finetune.py --feature-weight"),
    "eagle_base_lora": ((False,), "the base is frozen"),
    "eagle_export_rope_scaling": (({},), 'give "rope_scaling", which is trained and exported'),
}
"""Key -> (values that match this package's behaviour, message for other values)."""

_BY_ALGORITHM = {
    "use_aux_hidden_state": "EAGLE-3 and P-EAGLE read captured layers, eagle1 and eagle-mtp the final state",
    "use_input_layernorm_in_first_layer": "EAGLE-3 and P-EAGLE have that norm, eagle1 has not",
    "use_last_layernorm": "EAGLE-3 and P-EAGLE have that norm, eagle1 has not",
    "has_lm_head": "EAGLE-3 and P-EAGLE have a head of their own, the others use the base's",
}
"""Key -> message; it must be true for EAGLE-3 and P-EAGLE, false for the others."""

_ELSEWHERE = {
    "eagle_ttt_steps": "finetune.py --ttt-steps",
    "eagle_loss_decay_factor": "finetune.py --step-decay",
    "eagle_self_logit_distillation": "finetune.py --loss (soft_ce is distillation, hard_ce is not)",
    "eagle_offline": "finetune.py --offline-data",
}
"""Key -> the flag that sets it here."""


def from_modelopt(overrides: dict[str, Any], algorithm: str) -> dict[str, Any]:
    """Overrides for `presets.eagle_config` from a file that may have ModelOpt's names.

    Args:
        algorithm: value of --export-eagle-algorithm.

    Raises UserError naming every key that is not supported here.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in _flat(overrides).items():
        if (value is None and key != "rope_scaling") or key in _WITHOUT_MEANING:
            continue  # null: the base's value
        if key == "algorithm":
            if value != algorithm:
                problems.append(f"algorithm is {value!r}, but --export-eagle-algorithm is {algorithm}")
        elif key in _FIXED:
            allowed, text = _FIXED[key]
            if value not in allowed:
                problems.append(f"{key} is {value!r}: {text}")
        elif key in _BY_ALGORITHM:
            if bool(value) != (algorithm in READS_CAPTURES):
                problems.append(f"{key} is {value!r} with {algorithm}: {_BY_ALGORITHM[key]}")
        elif key in _ELSEWHERE:
            problems.append(f"{key} is {value!r}: set it with {_ELSEWHERE[key]}")
        elif not (key in _RENAMED and value == []):
            found[_RENAMED.get(key, key)] = value
    if problems:
        raise UserError(f"--eagle-config: {'; '.join(problems)}")
    return found


def _flat(overrides: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in overrides.items() if key not in _NESTED}
    for name in _NESTED:
        inner = overrides.get(name) or {}
        if not isinstance(inner, dict):
            raise UserError(f"--eagle-config: {name} is {inner!r}, expected an object")
        twice = sorted(key for key in inner if key in found and found[key] != inner[key])
        if twice:
            raise UserError(f"--eagle-config: {', '.join(twice)} is given twice, with different values")
        found.update(inner)
    return found
