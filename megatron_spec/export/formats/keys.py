"""Known keys of a draft's config.json: read, or harmless for a stated reason. No unknown key is ignored silently.

An unknown key that looks like an option of the draft is refused: ignoring it would measure a different draft. Any other
unknown key is named in a warning. No torch.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Set
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.export.formats.reading import Problem, Source
from megatron_spec.families.types import check_config

log = logging.getLogger(__name__)

HARMLESS: dict[str, frozenset[str]] = {
    "describes the file or the program that wrote it": frozenset({
        "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "_diffusers_version",
        "architectures", "auto_map", "base_model_name_or_path", "base_model_type", "converted_from", "custom_pipelines",
        "dtype", "finetuning_task", "flex_attention_backend", "inference_model_type", "model_name", "model_type",
        "name_or_path", "producer", "quant_method", "run_name", "speculators_config", "speculators_model_type",
        "speculators_version", "target_model_name_or_path", "target_model_type", "task_specific_params", "torch_dtype",
        "torchscript", "transformers.js_config", "transformers_version", "unsloth_version", "unsloth_fixed", "verifier",
        "version",
    }),
    "an old setting of transformers that no draft reads": frozenset({
        "add_cross_attention", "chunk_size_feed_forward", "cross_attention_hidden_size", "id2label", "is_decoder",
        "is_encoder_decoder", "is_llama_config", "label2id", "num_labels", "output_attentions", "output_hidden_states",
        "output_scores", "problem_type", "pruned_heads", "return_dict", "return_dict_in_generate", "sub_configs",
        "text_config", "tf_legacy_loss", "tie_encoder_decoder", "use_bfloat16", "use_cache",
    }),
    "decoding, which has options of its own": frozenset({
        "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "max_paths", "medusa_choices", "min_length",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_lookahead_tokens", "num_return_sequences",
        "num_speculative_tokens", "remove_invalid_values", "repetition_penalty", "speculative_tokens",
        "suppress_tokens", "temperature", "top_k", "top_p", "topk", "typical_p",
    }),
    "a token of the tokenizer": frozenset({
        "bos_token_id", "eos_token_id", "pad_token_id", "prefix", "sep_token_id", "tokenizer_class", "unk_token_id",
    }),
    "training only": frozenset({
        "attention_dropout", "aux_loss_alpha", "confidence_head_alpha", "embd_pdrop", "embed_requires_grad",
        "gradient_checkpointing", "hidden_dropout", "init_method", "initializer_range", "loss_decay_gamma",
        "max_anchors", "num_anchors", "output_router_logits", "pretraining_tp", "recompile_limit", "resid_pdrop",
        "router_aux_loss_coef", "seq_aux",
    }),
    "determined by the tensors": frozenset({
        "bias", "eagle_fc_bias", "fc_bias", "fusion_bias", "has_own_embed_tokens", "has_own_lm_head", "medusa_fc_bias",
        "qk_norm", "qkv_bias", "quantization_config", "tie_word_embeddings", "use_qk_norm",
    }),
    "a mixture of experts or latent attention, recognised by its tensors": frozenset({
        "decoder_sparse_step", "ep_size", "first_k_dense_replace", "kv_lora_rank", "mlp_only_layers",
        "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
        "num_experts", "num_experts_per_tok", "num_local_experts", "q_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "routed_scaling_factor", "scoring_func", "shared_expert_intermediate_size", "topk_group",
        "topk_method", "v_head_dim",
    }),
    "counts layers of the base": frozenset({"max_window_layers", "num_target_layers"}),
}  # fmt: skip
"""Reason -> keys that never change what a draft computes here, whatever their value."""
ROPE = frozenset({
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
})  # fmt: skip
"""Keys read by `config.rope`."""
LAYER = ROPE | {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "num_hidden_layers", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias",
    "draft_vocab_size", "sliding_window", "use_sliding_window", "layer_types",
}  # fmt: skip
"""Keys of the transformer layers, which every format except Medusa's reads or refuses."""
CONTAINERS = ("transformer_layer_config", "model")
"""Objects whose keys `flatten` moves to the top level."""
_OPTION = re.compile(
    "act|alpha|anchor|atten|attn|aux|bias|block|cap|causal|clip|conv|d2t|dim|draft|eagle|embed|expert|fc|feature|flash|"
    "fus|gate|group|head|hidden|kernel|layer|logit|mask|markov|medusa|mix|mlp|mtp|multiplier|norm|num_|parallel|"
    "position|project|rank|residual|rope|rotary|scal|selector|share|shift|size|softmax|step|swa|target|theta|tie|"
    "token_id|vocab|width|window"
)
"""Part of the name of keys that may change what a draft computes."""


def flatten(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json with nested model descriptions (speculators' layer, vLLM's old `model`) moved to the top level."""
    layer = next((raw[key] for key in CONTAINERS if raw.get(key)), None)
    if not isinstance(layer, dict):
        return raw
    return {**{key: value for key, value in layer.items() if value is not None}, **raw}


def check_types(source: Source) -> None:
    """Raise DraftProblems for a key of the layers whose value has the wrong type or is out of range."""
    nested = [value for key in CONTAINERS if isinstance(value := source.raw.get(key), dict)]
    try:
        for raw in (source.raw, *nested):
            check_config({key: value for key, value in raw.items() if key in LAYER}, "config.json")
    except UserError as e:
        raise source.problem("config", str(e), "correct it") from None


def other_layers(raw: dict[str, Any]) -> list[Problem]:
    """Problems of `layer_types`: layers that are neither full nor sliding attention."""
    others = sorted({*(raw.get("layer_types") or ())} - {"full_attention", "sliding_attention"})
    why = 'expected "full_attention" or "sliding_attention"'
    return [Problem("option", f"config.json: layer_types has {', '.join(map(repr, others))}", why)] if others else []


def check_keys(source: Source, raw: dict[str, Any], used: Set[str], where: str = "") -> list[Problem]:
    """Problems of keys of `raw` unknown to the reader: refused if they look like options, else named in a warning.

    Args:
        used: keys that the format reads or checks.
        where: prefix of the keys when `raw` is a nested object with options of the draft, e.g. 'eagle_config.'.
    """
    unknown = sorted(raw.keys() - used - frozenset().union(*HARMLESS.values()))
    options = [key for key in unknown if where or _OPTION.search(key.lower())]  # nested objects hold only options
    given = [key for key in options if raw[key] not in (None, False, "", [], {})]
    passed = [f"{where}{key}" for key in unknown if key not in given]
    if passed:
        _warn_once(str(source.folder), ", ".join(passed))
    if not given:
        return []
    found = ", ".join(f"{where}{key} ({_short(raw[key])})" for key in given)
    fix = "remove what does not change the draft: if it were ignored, a different draft would be measured"
    return [Problem("option", f"config.json has {found}, which is not supported in a draft of this kind", fix)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@functools.cache
def _warn_once(folder: str, keys: str) -> None:
    log.warning(
        "%s: unknown keys in config.json are ignored: %s; make sure that the draft does not need them",
        folder, keys,
    )  # fmt: skip
