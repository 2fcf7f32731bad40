"""Metadata of fp8 folders: hf_quant_config.json and the equivalent entry in config.json. No torch here."""

from __future__ import annotations

from typing import Any

from megatron_spec import __version__

PRODUCER = {"name": "megatron_spec", "version": __version__}
DRAFT_EXCLUDES = ["lm_head", "fc", "model.fc", "*fc*", "*embed_tokens*"]
"""Modules of a draft that stay in high precision, under the names different engines give them."""
BASE_EXCLUDES = ["lm_head", "*embed_tokens*"]

_FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}


NVFP4 = "W4A16_NVFP4"
"""NVFP4 weights, inputs in high precision."""


def hf_quant_config(exclude: list[str], kv_cache: bool = False, form: str = "fp8") -> dict[str, Any]:
    """Content of hf_quant_config.json for per-tensor static fp8, or NVFP4 weights."""
    algo = {"quant_algo": "FP8"} if form == "fp8" else {"quant_algo": NVFP4, "group_size": 16}
    return {
        "producer": dict(PRODUCER),
        "quantization": {
            **algo,
            "kv_cache_quant_algo": "FP8" if kv_cache else None,
            "exclude_modules": list(exclude),
        },
    }


def quantization_config(exclude: list[str], kv_cache: bool = False, form: str = "fp8") -> dict[str, Any]:
    """Value of `quantization_config` in config.json; the same content as `hf_quant_config`."""
    if form == "nvfp4":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        return {
            "quant_method": "modelopt",
            "quant_algo": NVFP4,
            "group_size": 16,
            "ignore": list(exclude),
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "producer": dict(PRODUCER),
        }
    values: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": list(exclude),
        "config_groups": {
            "group_0": {"input_activations": dict(_FLOAT8), "weights": dict(_FLOAT8), "targets": ["Linear"]}
        },
        "producer": dict(PRODUCER),
    }
    if kv_cache:
        values["kv_cache_scheme"] = dict(_FLOAT8)
    return values
