"""What an exported EAGLE or MTP folder contains, derived from its configuration alone: names, shapes, config.json.

No torch here: the exporter writes by this layout, the verifier and `tools/check_export.py` read by it.

Another MTP draft than a base's own (`own_module.py`) has no format that engines share: tensors are named as inside a
layer of DeepSeek-V3, the layer counted from 0 here, and the architecture has a name of its own, so that no engine takes
it for something else.

H draft hidden, Ht target hidden, K captured layers, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_spec.config import BaseConfig, BlockConfig, EagleConfig, RopeConfig, UserError
from megatron_spec.config.presets import default_capture_ids
from megatron_spec.export import block, native_mtp

Exported = EagleConfig | BlockConfig
"""Drafts whose folder is described here."""

ARCHITECTURES: dict[str, list[str]] = {
    "eagle1": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
    "eagle3": ["LlamaForCausalLMEagle3"],
    "eagle3.1": ["LlamaForCausalLMEagle3"],
    "eagle-mtp": ["LlamaForCausalLMMTP"],
}
OPTIONS = ("norm_before_fc", "fc_norm", "norm_output")
"""Keys of config.json that make EAGLE-3.1 of EAGLE-3; the last one is also an option of MTP."""
WEIGHTS = "model.safetensors"
LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
SHARED_SCALE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Linears that engines fuse: one scale each."""


def layer_names(config: Exported) -> list[str]:
    """Prefix of every decoder layer: 'midlayer' loads everywhere; more layers need the numbered form."""
    if isinstance(config, BlockConfig):
        return block.layer_names(config)
    if config.algorithm.startswith("eagle3") and config.num_hidden_layers == 1:
        return ["midlayer"]
    return [f"layers.{i}" for i in range(config.num_hidden_layers)]


def linear_names(config: Exported) -> list[str]:
    """Every linear that may be fp8."""
    return [f"{layer}.{linear}" for layer in layer_names(config) for linear in LINEARS]


def _layer_shapes(config: EagleConfig, first: bool) -> dict[str, tuple[int, ...]]:
    H, F = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    is_eagle3 = config.algorithm.startswith("eagle3")
    width = 2 * H if is_eagle3 and first else H
    norms = {
        "input_layernorm.weight": not (config.algorithm == "eagle1" and first),
        "hidden_norm.weight": is_eagle3,  # in later layers a copy of input_layernorm: engines differ in what they read
    }
    return {
        **{name: (H,) for name, there in norms.items() if there},
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (H, queries),
        "post_attention_layernorm.weight": (H,),
        "mlp.gate_proj.weight": (F, H),
        "mlp.up_proj.weight": (F, H),
        "mlp.down_proj.weight": (H, F),
    }


def _outer_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Everything that is not in a decoder layer."""
    H, captures = config.hidden_size, len(config.capture_layer_ids)
    if config.algorithm == "eagle1":
        return {"fc.weight": (H, 2 * H)}
    if config.algorithm == "eagle-mtp":
        norms = {f"layers.0.{n}.weight": (H,) for n in ("enorm", "hnorm", "shared_head.norm")}
        return {"layers.0.eh_proj.weight": (H, 2 * H), **norms}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, captures * config.target_hidden_size)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (captures * config.target_hidden_size,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(captures)}
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, H)
    return {**shapes, "norm.weight": (H,), "lm_head.weight": (config.draft_vocab_size, H)}


def weight_shapes(config: Exported) -> dict[str, tuple[int, ...]]:
    """Every floating point tensor that is a parameter of the draft, with its shape in the file."""
    if isinstance(config, BlockConfig):
        return block.weight_shapes(config)
    if config.of_base:
        return native_mtp.weight_shapes(config)
    shapes = _outer_shapes(config)
    for i, layer in enumerate(layer_names(config)):
        shapes |= {f"{layer}.{name}": shape for name, shape in _layer_shapes(config, i == 0).items()}
    return shapes


def zero_shapes(config: Exported) -> dict[str, tuple[int, ...]]:
    """Tensors of zeros that only loaders want: one leaves EAGLE-1's bias random when it is missing."""
    return {"fc.bias": (config.hidden_size,)} if config.algorithm == "eagle1" else {}


def expected_tensors(
    config: Exported, dtype: str, fp8: set[str] | None = None, embeddings: bool = False, form: str = "fp8"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) of every tensor of the file; dtypes in torch's spelling.

    Args:
        dtype: of everything that is not quantised.
        fp8: names of the linears that are.
        form: 'fp8', or 'nvfp4': two weights a byte, and a scale per block of 16.
        embeddings: the file carries the target's embedding.
    """
    fp8 = fp8 or set()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in weight_shapes(config).items():
        linear = name.removesuffix(".weight")
        if linear in fp8 and form == "nvfp4":
            tensors[name] = ("uint8", (shape[0], shape[1] // 2))
            tensors[f"{linear}.weight_scale"] = ("float8_e4m3fn", (shape[0], shape[1] // 16))
            tensors[f"{linear}.weight_scale_2"] = ("float32", ())
            continue
        tensors[name] = ("float8_e4m3fn" if linear in fp8 else native_mtp.dtype_of(name, dtype), shape)
        if linear in fp8:
            tensors[f"{linear}.weight_scale"] = ("float32", ())
            tensors[f"{linear}.input_scale"] = ("float32", ())
    tensors |= {name: (dtype, shape) for name, shape in zero_shapes(config).items()}
    if config.draft_vocab_size < config.vocab_size:  # vLLM raises when they are there without need
        tensors["d2t"] = ("int64", (config.draft_vocab_size,))
        tensors["t2d"] = ("bool", (config.vocab_size,))
    if embeddings:
        tensors |= {name: (dtype, shape) for name, shape in end_shapes(config).items()}
    return tensors


def end_shapes(config: Exported) -> dict[str, tuple[int, ...]]:
    """Tensors of the base that may be written too: its embedding, and beside its own prediction module its head."""
    if isinstance(config, BlockConfig):
        return {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    if config.of_base:
        return native_mtp.end_shapes(config)
    return {} if config.own_embedding else {"embed_tokens.weight": (config.vocab_size, config.target_hidden_size)}


def is_default_captures(config: EagleConfig, num_base_layers: int) -> bool:
    """True when engines choose the same layers without being told."""
    try:
        return tuple(config.capture_layer_ids) == default_capture_ids(num_base_layers)
    except UserError:  # a small base has no defaults
        return False


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """Top-level rope_theta and rope_scaling: a file with only `rope_parameters` is read as theta 10000 by many."""
    keys: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.type == "linear":
        keys["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    if rope.type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        keys["rope_scaling"] = {"rope_type": "llama3", **{name: getattr(rope, name) for name in names}}
    return keys


def _capture_keys(config: EagleConfig, num_base_layers: int) -> dict[str, Any]:
    """Capture ids in both conventions: top-level 'state after k layers', nested 'output of layer j', k = j + 1.

    Options of EAGLE-3.1 stand in both places too; where something is nested, the ids always are.
    """
    options = {name: True for name in OPTIONS if getattr(config, name)}
    if not config.algorithm.startswith("eagle3") or (not options and is_default_captures(config, num_base_layers)):
        return options
    ids = list(config.capture_layer_ids)
    return {
        "eagle_aux_hidden_state_layer_ids": [j + 1 for j in ids],
        **options,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, **options},
    }


def config_json(config: Exported, base: BaseConfig, dtype: str) -> dict[str, Any]:
    """Content of config.json, without a `quantization_config`. Holds no null."""
    if isinstance(config, BlockConfig):
        return block.config_json(config, base, dtype, _rope_keys(config.rope))
    eos = list(base.eos_token_ids)
    values: dict[str, Any] = {
        "architectures": ARCHITECTURES[config.algorithm],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        **({"target_hidden_size": config.target_hidden_size} if config.own_embedding else {}),
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        **_rope_keys(config.rope),
        # Engines size their rotary table and their longest context by it: a draft may not be shorter than its target.
        "max_position_embeddings": max(config.max_position_embeddings, base.max_position_embeddings),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": base.pad_token_id,
        **({"num_nextn_predict_layers": 1} if config.algorithm == "eagle-mtp" else {}),
        **_capture_keys(config, base.num_layers),
    }
    return {key: value for key, value in values.items() if value is not None}


def _read_rope(raw: dict[str, Any]) -> RopeConfig:
    scaling = dict(raw.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return RopeConfig.from_dict({"theta": float(raw["rope_theta"]), "type": kind, **scaling})


def _algorithm(raw: dict[str, Any], has_options: bool) -> str:
    found = raw.get("architectures")
    for algorithm, architectures in ARCHITECTURES.items():
        if found == architectures:
            return "eagle3.1" if algorithm == "eagle3" and has_options else algorithm
    others = {names[0] for names in block.ARCHITECTURES.values()}
    expected = sorted({names[0] for names in ARCHITECTURES.values()} | others | {"MedusaModel"})
    raise UserError(f"config.json: architectures {found!r}, expected a draft: one of {', '.join(expected)}")


def read_config_json(raw: dict[str, Any], num_base_layers: int) -> Exported:
    """The configuration an engine would build from an exported config.json. Raises UserError on a missing key.

    Fields that only matter before training (initialisation) keep their defaults.
    """
    if block.is_block_draft(raw):
        if "rope_theta" not in raw:
            raise UserError("config.json: missing rope_theta")
        return block.read_config_json(raw, _read_rope(raw))
    return read_eagle_config(raw, num_base_layers)


def read_eagle_config(raw: dict[str, Any], num_base_layers: int) -> EagleConfig:
    """`read_config_json` of an EAGLE or MTP draft."""
    if native_mtp.is_own_module(raw):
        return native_mtp.read_config_json(raw)
    options = {name: bool(raw.get(name, False)) for name in OPTIONS}
    algorithm = _algorithm(raw, any(options.values()))
    same = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "draft_vocab_size", "max_position_embeddings", "num_hidden_layers", "rms_norm_eps", "hidden_act",
    )  # fmt: skip
    missing = [key for key in (*same, "rope_theta") if key not in raw]
    if missing:
        raise UserError(f"config.json: missing {', '.join(missing)}")
    inside = raw.get("eagle_config") or {}
    differing = [name for name in OPTIONS if name in inside and bool(inside[name]) != options[name]]
    if differing:
        raise UserError(f"config.json: top level and eagle_config disagree about {', '.join(differing)}")
    nested = inside.get("eagle_aux_hidden_state_layer_ids")
    top = raw.get("eagle_aux_hidden_state_layer_ids")
    if top is not None and nested is not None and [j + 1 for j in nested] != list(top):
        raise UserError(f"config.json: capture ids disagree: top level {top} (state after k layers), nested {nested}")
    if nested is None and top is not None:
        nested = [k - 1 for k in top]
    values = {key: raw[key] for key in same}
    values |= {"algorithm": algorithm, **options}
    values["target_hidden_size"] = raw.get("target_hidden_size", raw["hidden_size"])
    if algorithm.startswith("eagle3"):
        values["capture_layer_ids"] = list(nested if nested is not None else default_capture_ids(num_base_layers))
    values["rope"] = _read_rope(raw)
    return EagleConfig.from_dict(values)


def has_layer_number(pattern: str) -> bool:
    """True for patterns such as '*layers.3*': engines name the draft's layers differently, so they match nowhere."""
    return re.search(r"\d", pattern) is not None
