"""A base's own prediction module (DeepSeek-V3), under the names of the base's files. No torch.

Its tensors are those of layer `num_hidden_layers`: model.layers.61.{enorm, hnorm, eh_proj, shared_head.norm}, a
complete decoder layer and, when the base is loaded, copies of its embedding and LM head, as in the base's own files.
config.json is the base's, because engines look for the module in a folder that describes the base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_spec.config import BlockConfig, EagleConfig, presets
from megatron_spec.config.structure import CHOICE_BIAS, draft_tensors
from megatron_spec.families import parse_base_config
from megatron_spec.runtime.files import read_object

Shapes = dict[str, tuple[int, ...]]

_ARCHITECTURES = ("DeepseekV3ForCausalLM",)


def prefix(config: EagleConfig | BlockConfig) -> str:
    """Prefix of every name in the file."""
    return f"model.layers.{config.layer_in_base}."


def file_name(config: EagleConfig | BlockConfig, name: str) -> str:
    """Name of a draft parameter in the file; unchanged for drafts of any other kind."""
    if not config.of_base:
        return name
    return prefix(config) + name.removeprefix("layers.0.")


def dtype_of(name: str, dtype: str) -> str:
    """dtype of a tensor in a file of this dtype: the router's expert bias stays in fp32."""
    return "float32" if name.endswith(CHOICE_BIAS) else dtype


def weight_shapes(config: EagleConfig) -> Shapes:
    """Every parameter, with its shape in the file."""
    return {file_name(config, name): spec.shape for name, spec in draft_tensors(config).items()}


def end_shapes(config: EagleConfig | BlockConfig) -> Shapes:
    """Shapes of the copies of the base's embedding and LM head."""
    shape = (config.vocab_size, config.target_hidden_size)
    return {f"{prefix(config)}{name}.weight": shape for name in ("embed_tokens", "shared_head.head")}


def is_own_module(raw: dict[str, Any]) -> bool:
    """True for the config.json of a folder with a base's own prediction module."""
    names = raw.get("architectures") or []
    return bool(names) and names[0] in _ARCHITECTURES and bool(raw.get("num_nextn_predict_layers"))


def config_json(base: Path | str, dtype: str) -> dict[str, Any]:
    """Content of config.json: the base's, for tensors in `dtype`."""
    values = {k: v for k, v in read_object(Path(base) / "config.json").items() if v is not None}
    values.pop("quantization_config", None)
    values["dtype" if "dtype" in values else "torch_dtype"] = dtype
    return {**values, "num_nextn_predict_layers": 1}


def read_config_json(raw: dict[str, Any]) -> EagleConfig:
    """The draft described by a config.json. Raises UserError on a missing key."""
    return presets.own_mtp_config(parse_base_config(raw, "config.json"))
