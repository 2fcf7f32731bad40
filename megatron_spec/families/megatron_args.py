"""Arguments stored in a Megatron-LM checkpoint -> BaseConfig; unsupported models are refused."""

from __future__ import annotations

from typing import Any

from megatron_spec.config import BaseConfig, RopeConfig, UserError
from megatron_spec.families.hybrid import transformer_layers

_LLAMA3_ORIGINAL_POSITIONS = 8192
"""Constants of Llama 3.1 that megatron-core's --use-rope-scaling hard-codes (RotaryEmbedding._apply_scaling)."""

HIDDEN: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": (False,),
    "window_size": (None,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0, 0.0),
}
"""What a base without sinks, windows and latent attention has, in arguments and in a TransformerConfig. No tensor would
show another value."""

# Values that a Llama must have. Arguments that older versions do not store count as matching.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False,),
    "qk_layernorm": (False,),
    "multi_latent_attention": (False,),
    "num_experts": (None, 0),
    "rotary_percent": (1.0,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "apply_layernorm_1p": (False,),
    "mtp_num_layers": (None, 0),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "openai_gelu": (False,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "use_mup": (False,),
    **HIDDEN,
}


def _rope(args: dict[str, Any]) -> RopeConfig:
    theta = float(args.get("rotary_base") or 10000.0)
    if not args.get("use_rope_scaling"):
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=float(args.get("rope_scaling_factor") or 8.0),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=_LLAMA3_ORIGINAL_POSITIONS,
    )


def _num_layers(args: dict[str, Any], where: str) -> int:
    """Transformer layers; a HybridModel counts attention and MLP layers one by one, in a pattern."""
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if not pattern:
        if args.get("is_hybrid_model"):
            raise UserError(
                f"{where}: a HybridModel without hybrid_layer_pattern; put the base's config.json beside it"
            )
        return int(args["num_layers"])
    main, _, prediction = pattern.partition("/")
    if prediction:
        raise UserError(f"{where}: found prediction layers in hybrid_layer_pattern={pattern!r}, expected none")
    return sum(transformer_layers(main.replace("|", ""), where))


def contradictions(args: dict[str, Any], config: BaseConfig) -> list[str]:
    """Stored arguments that contradict a configuration, in values that no tensor's shape shows."""
    rope = config.rope
    values: dict[str, Any] = {
        "norm_epsilon": config.rms_norm_eps,
        "rotary_base": rope.theta,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.head_dim,
        "use_rope_scaling": rope.type == "llama3",
    }
    if rope.type == "llama3" and args.get("use_rope_scaling"):
        values["rope_scaling_factor"] = rope.factor
    known = {name: value for name, value in values.items() if args.get(name) is not None}
    return [f"{name} is {args[name]} there and {value} here" for name, value in known.items() if args[name] != value]


def config_from_args(args: dict[str, Any], where: str) -> BaseConfig:
    """BaseConfig from Megatron-LM's arguments. Raises UserError naming every argument that does not match a Llama."""
    needed = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    missing = [name for name in needed if args.get(name) is None]
    if missing:
        raise UserError(
            f"{where}: the stored arguments lack {', '.join(missing)}: put the base's config.json beside the checkpoint"
        )
    wrong = [f"{name}={args[name]!r}" for name, fit in _EXPECTED.items() if name in args and args[name] not in fit]
    if wrong:
        raise UserError(
            f"{where}: not a Llama: {', '.join(wrong)}; for another family, put the base's config.json (Hugging Face "
            "format) beside the checkpoint"
        )
    if args.get("vocab_size") is None:
        raise UserError(
            f"{where}: the stored arguments have only the padded vocabulary size ({args.get('padded_vocab_size')}), "
            "not vocab_size: put the base's config.json beside the checkpoint"
        )
    heads = args["num_attention_heads"]
    groups = args.get("num_query_groups") if args.get("group_query_attention") else heads
    return BaseConfig(
        family="llama",
        hidden_size=args["hidden_size"],
        intermediate_size=args["ffn_hidden_size"],
        num_layers=_num_layers(args, where),
        num_attention_heads=heads,
        num_key_value_heads=groups or heads,
        head_dim=args.get("kv_channels") or args["hidden_size"] // heads,
        vocab_size=args["vocab_size"],
        max_position_embeddings=args["max_position_embeddings"],
        rms_norm_eps=float(args.get("norm_epsilon", 1e-5)),
        rope=_rope(args),
        tie_word_embeddings=not args.get("untie_embeddings_and_output_weights", False),
        torch_dtype="bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32",
    )
