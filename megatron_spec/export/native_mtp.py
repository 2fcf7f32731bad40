"""A prediction module that a base ships (DeepSeek-V3), in the names of the base's own files. No torch.

Its tensors are those of layer `num_hidden_layers` there: model.layers.61.{enorm, hnorm, eh_proj, shared_head.norm}, a
whole decoder layer, and with the base at hand copies of its embedding and head, as the base's own files have them.
config.json is the base's: engines look for the module in a folder that says how the base is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_spec.config import BlockConfig, EagleConfig, presets
from megatron_spec.config.structure import CHOICE_BIAS, draft_tensors
from megatron_spec.runtime.files import read_object

Shapes = dict[str, tuple[int, ...]]

_ARCHITECTURES = ("DeepseekV3ForCausalLM",)


def prefix(config: EagleConfig | BlockConfig) -> str:
    """Of every name in the file."""
    return f"model.layers.{config.layer_in_base}."


def file_name(config: EagleConfig | BlockConfig, name: str) -> str:
    """Name in the file of a parameter of the draft; for every other draft they are the same."""
    if not config.of_base:
        return name
    return prefix(config) + name.removeprefix("layers.0.")


def dtype_of(name: str, dtype: str) -> str:
    """dtype of a tensor in a file of this dtype: the bias of the router's choice stays in fp32."""
    return "float32" if name.endswith(CHOICE_BIAS) else dtype


def weight_shapes(config: EagleConfig) -> Shapes:
    """Every parameter, with its shape in the file."""
    return {file_name(config, name): spec.shape for name, spec in draft_tensors(config).items()}


def end_shapes(config: EagleConfig | BlockConfig) -> Shapes:
    """Copies of the base's embedding and head."""
    shape = (config.vocab_size, config.target_hidden_size)
    return {f"{prefix(config)}{name}.weight": shape for name in ("embed_tokens", "shared_head.head")}


def is_own_module(raw: dict[str, Any]) -> bool:
    """True for the config.json of such a folder."""
    names = raw.get("architectures") or []
    return bool(names) and names[0] in _ARCHITECTURES and bool(raw.get("num_nextn_predict_layers"))


def config_json(base: Path | str, dtype: str) -> dict[str, Any]:
    """Content of config.json: the base's own, for tensors in `dtype`."""
    values = {k: v for k, v in read_object(Path(base) / "config.json").items() if v is not None}
    values.pop("quantization_config", None)
    values["dtype" if "dtype" in values else "torch_dtype"] = dtype
    return {**values, "num_nextn_predict_layers": 1}


def read_config_json(raw: dict[str, Any]) -> EagleConfig:
    """The draft a config.json describes. Raises UserError on a missing key."""
    from megatron_spec.families import parse_base_config  # needs torch

    return presets.own_mtp_config(parse_base_config(raw, "config.json"))
