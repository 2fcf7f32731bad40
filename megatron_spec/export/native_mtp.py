"""A prediction module that a base ships (DeepSeek-V3), in the names of the base's own files. No torch.

Its tensors are those of layer `num_hidden_layers` there: model.layers.61.{enorm, hnorm, eh_proj, shared_head.norm}, a
whole decoder layer, and with the base at hand copies of its embedding and head, as the base's own files have them.
config.json is the base's: engines look for the module in a folder that says how the base is built.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megatron_spec.config import BlockConfig, EagleConfig, MlaConfig, MoeConfig, presets
from megatron_spec.export.tensor_files import read_entries
from megatron_spec.runtime.files import read_json, write_json

Shapes = dict[str, tuple[int, ...]]

_ARCHITECTURES = ("DeepseekV3ForCausalLM",)
_FILE = "model-mtp.safetensors"
_FLOAT32 = "e_score_correction_bias"


def prefix(config: EagleConfig) -> str:
    """Of every name in the file."""
    return f"model.layers.{config.layer_in_base}."


def file_name(config: EagleConfig | BlockConfig, name: str) -> str:
    """Name in the file of a parameter of the draft; for every other draft they are the same."""
    if isinstance(config, BlockConfig) or not config.of_base:
        return name
    return prefix(config) + name.removeprefix("layers.0.")


def dtype_of(name: str, dtype: str) -> str:
    """dtype of a tensor in a file of this dtype: the bias of the router's choice stays in fp32."""
    return "float32" if name.endswith(_FLOAT32) else dtype


def _attention(config: EagleConfig, mla: MlaConfig) -> Shapes:
    H, N = config.hidden_size, config.num_attention_heads
    queries = N * (mla.nope_head_dim + mla.rope_head_dim)
    shapes: Shapes = {
        "kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.rope_head_dim, H),
        "kv_a_layernorm": (mla.kv_lora_rank,),
        "kv_b_proj": (N * (mla.nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj": (H, N * mla.v_head_dim),
    }
    if mla.q_lora_rank is None:
        return {**shapes, "q_proj": (queries, H)}
    low = mla.q_lora_rank
    return {**shapes, "q_a_proj": (low, H), "q_a_layernorm": (low,), "q_b_proj": (queries, low)}


def _experts(moe: MoeConfig, H: int) -> Shapes:
    widths = {f"experts.{e}": moe.intermediate_size for e in range(moe.num_experts)}
    if moe.shared_intermediate_size:
        widths["shared_experts"] = moe.shared_intermediate_size
    shapes: Shapes = {"gate": (moe.num_experts, H)}
    for expert, width in widths.items():
        shapes |= {
            f"{expert}.gate_proj": (width, H),
            f"{expert}.up_proj": (width, H),
            f"{expert}.down_proj": (H, width),
        }
    return shapes


def weight_shapes(config: EagleConfig) -> Shapes:
    """Every parameter, with its shape in the file."""
    assert config.mla is not None and config.moe is not None
    H, start = config.hidden_size, prefix(config)
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes: Shapes = {"eh_proj": (H, 2 * H), **dict.fromkeys(norms, (H,))}
    shapes |= {f"self_attn.{name}": shape for name, shape in _attention(config, config.mla).items()}
    shapes |= {f"mlp.{name}": shape for name, shape in _experts(config.moe, H).items()}
    found = {f"{start}{name}.weight": shape for name, shape in shapes.items()}
    if config.moe.choice_bias:
        found[f"{start}mlp.gate.{_FLOAT32}"] = (config.moe.num_experts,)
    return found


def end_shapes(config: EagleConfig) -> Shapes:
    """Copies of the base's embedding and head."""
    shape = (config.vocab_size, config.target_hidden_size)
    return {f"{prefix(config)}{name}.weight": shape for name in ("embed_tokens", "shared_head.head")}


def is_own_module(raw: dict[str, Any]) -> bool:
    """True for the config.json of such a folder."""
    names = raw.get("architectures") or []
    return bool(names) and names[0] in _ARCHITECTURES and bool(raw.get("num_nextn_predict_layers"))


def config_json(base: Path | str, dtype: str) -> dict[str, Any]:
    """Content of config.json: the base's own, for tensors in `dtype`."""
    values = {k: v for k, v in read_json(Path(base) / "config.json").items() if v is not None}
    values.pop("quantization_config", None)
    values["dtype" if "dtype" in values else "torch_dtype"] = dtype
    return {**values, "num_nextn_predict_layers": 1}


def read_config_json(raw: dict[str, Any]) -> EagleConfig:
    """The draft a config.json describes. Raises UserError on a missing key."""
    from megatron_spec.families import parse_base_config  # needs torch

    return presets.own_mtp_config(parse_base_config(raw, "config.json"))


def add_to_base(base: Path, draft: Path) -> None:
    """Make the module a part of an exported base: engines find it where the base ships it, behind its last layer."""
    index, config = base / "model.safetensors.index.json", read_json(base / "config.json")
    if index.is_file():
        found = read_json(index)
    else:
        names = read_entries(base)
        found = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    shutil.copyfile(draft / "model.safetensors", base / _FILE)
    found["weight_map"] |= dict.fromkeys(read_entries(draft), _FILE)
    write_json(index, found)
    write_json(base / "config.json", {**config, "num_nextn_predict_layers": 1})
