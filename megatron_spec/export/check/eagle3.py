"""Rules of an EAGLE-3 folder. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_spec.config import EagleConfig, UserError
from megatron_spec.config.presets import default_capture_ids
from megatron_spec.config.rope import rope_values
from megatron_spec.export import layout
from megatron_spec.export.bases import sglang_delivers_last_layer
from megatron_spec.export.check.finding import ALL, Engine, Finding, Folder
from megatron_spec.export.check.shared import check_biases, check_embedding, check_fp8, check_rope, check_target
from megatron_spec.export.formats.eagle import CAPTURE_KEY
from megatron_spec.export.formats.keys import flatten
from megatron_spec.export.formats.options import PARALLEL_KEYS, draft_window

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", *layout.QK_NORM_ARCHITECTURES)
PARALLEL = ("PEagleDraftModel", "PeagleLlamaForCausalLM")
"""vLLM's other names for a draft that proposes in parallel."""
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip


def check(folder: Folder) -> Iterator[Finding]:
    """All rules."""
    findings = list(_config_keys(folder))
    yield from findings
    if not any(f.rule == "config" for f in findings):
        for rule in (
            _names, _later_layers, _mask_token, check_biases, _vocab_map, _qk_norm, _option_places, served_by_some,
            _capture_ids, check_rope, check_fp8, check_target, check_embedding,
        ):  # fmt: skip
            yield from rule(folder)


# ---- config.json


def _config_keys(folder: Folder) -> Iterator[Finding]:
    config = folder.config
    missing = [key for key in _SIZES if key not in config]
    if missing:
        yield Finding("config", f"config.json lacks {', '.join(missing)}", "copy them from the trained configuration")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & {*ARCHITECTURES, *PARALLEL}:
        yield Finding(
            "architectures", f"architectures is {architectures!r}", f'write "architectures": ["{ARCHITECTURES[0]}"]'
        )
    for key in ("target_hidden_size", "eagle_config"):
        if key in config and config[key] is None:
            yield Finding("null", f"{key} is null, which engines read as a value", f"remove {key} from config.json")
    if config.get("draft_vocab_size") is None:
        yield Finding(
            "draft_vocab_size", "draft_vocab_size is missing or null: SGLang uses the target's LM head",
            'write "draft_vocab_size": the number of rows of lm_head.weight, even for the full vocabulary',
        )  # fmt: skip
    if "head_dim" not in config and config.get("hidden_size", 0) % max(config.get("num_attention_heads", 1), 1):
        yield Finding(
            "head_dim", "head_dim is missing and hidden_size / num_attention_heads is no integer", "write head_dim"
        )


# ---- tensors


def _names(folder: Folder) -> Iterator[Finding]:
    if folder.prefix:
        yield Finding(
            "prefix", "tensor names begin with 'model.', which vLLM refuses", "remove 'model.' from the names",
            ("vllm", "trtllm"),
        )  # fmt: skip
    if folder.config["num_hidden_layers"] == 1 and folder.layers == ["layers.0"]:
        yield Finding(
            "midlayer", "the layer is called layers.0, which the reference code of EAGLE does not load",
            "rename layers.0.* to midlayer.*", warning=True,
        )  # fmt: skip


def _later_layers(folder: Folder) -> Iterator[Finding]:
    """Layers after the first: engines name their single input norm differently, and none numbers `midlayer`."""
    if any(name.startswith("midlayer.") and name.split(".")[1].isdigit() for name in folder.tensors):
        yield Finding("midlayer", "layers are called midlayer.N, which no engine loads", "rename them to layers.N")
        return
    engines: dict[str, tuple[Engine, ...]] = {"input_layernorm": ("vllm",), "hidden_norm": ("sglang", "trtllm")}
    count = getattr(folder.reading.config, "num_hidden_layers", 1) if folder.reading is not None else 1
    for i in range(1, count):
        for norm, readers in engines.items():
            if f"layers.{i}.{norm}.weight" not in folder.tensors:
                found = f"layers.{i} has no {norm}, {' and '.join(readers)}'s name for its input norm"
                yield Finding("norm", found, "write the same vector under both names", readers)


def _mask_token(folder: Folder) -> Iterator[Finding]:
    """P-EAGLE: vLLM reads the id under the keys of its own configuration."""
    config = folder.reading.config if folder.reading is not None else None
    if not isinstance(config, EagleConfig) or not config.parallel_drafting:
        return
    if not any(folder.config.get(key) is not None for key in ("ptd_token_id", "pard_token")):
        yield Finding(
            "mask_token", "the mask token is given only as mask_token_id, which vLLM does not read for EAGLE-3",
            f'also write "ptd_token_id": {config.mask_token_id}', ("vllm",),
        )  # fmt: skip


def _vocab_map(folder: Folder) -> Iterator[Finding]:
    d2t, full = folder.tensors.get("d2t"), folder.draft_vocab == folder.config["vocab_size"]
    if full and d2t is not None:
        yield Finding("d2t", "d2t is present although the draft predicts the full vocabulary: vLLM raises",
                      "remove d2t and t2d", ("vllm",))  # fmt: skip
    if not full and d2t is not None and "t2d" not in folder.tensors:
        yield Finding("t2d", "t2d is missing", "write it, bool [vocab_size]: the target ids in d2t", warning=True)


def _options(folder: Folder) -> list[str]:
    """Options of `layout.SERVED_BY` that the draft has: of its configuration if it was read, else of config.json."""
    if folder.reading is not None:
        return [name for name in layout.SERVED_BY if getattr(folder.reading.config, name, False)]
    raw = flatten(folder.config)
    names, nested = set(raw.get("architectures") or []), raw.get("eagle_config") or {}
    found = {name for name in layout.SERVED_BY if raw.get(name) or nested.get(name)} - {"sliding_window"}
    found |= {"sliding_window"} if draft_window(raw) else set()
    found |= {"qk_norm"} if names & set(layout.QK_NORM_ARCHITECTURES) else set()
    parallel = names & set(PARALLEL) or any(raw.get(key) not in (None, False) for key in PARALLEL_KEYS)
    found |= {"parallel_drafting"} if parallel or raw.get("speculators_model_type") == "peagle" else set()
    ids = nested.get(CAPTURE_KEY) or raw.get(CAPTURE_KEY) or ()
    width = len(ids) * (raw.get("target_hidden_size") or raw.get("hidden_size") or 0)
    equal = width == raw.get("hidden_size")
    found |= {"fc_of_equal_widths"} if ids and equal else {"fc_of_one_capture"} if len(ids) == 1 else set()
    found |= {"partial_rotation"} if rope_values(raw).get("partial_rotary_factor", 1) != 1 else set()
    both = all(raw.get(name) or nested.get(name) for name in ("norm_before_fc", "fc_norm"))
    found |= {"norm_before_fc_and_fc_norm"} if both else set()
    return [name for name in layout.SERVED_BY if name in found]


def served_by_some(folder: Folder) -> Iterator[Finding]:
    """Options that only some engines compute; the others drop their tensors silently. Needs no tensors."""
    for name in _options(folder):
        served = layout.SERVED_BY[name]
        lost = tuple(e for e in ALL if e not in served)
        what = "P-EAGLE" if name == "parallel_drafting" else name
        found = f"the draft has {what}, which {', '.join(lost)} do not compute: they silently drop it"
        yield Finding(name, found, f"serve it with {' or '.join(served)}, or train without it", lost)


def _qk_norm(folder: Folder) -> Iterator[Finding]:
    config = folder.reading.config if folder.reading is not None else None
    if not isinstance(config, EagleConfig):
        return
    if config.qk_norm and not set(folder.config.get("architectures") or []) & set(layout.QK_NORM_ARCHITECTURES):
        yield Finding(
            "architectures", "norms over query and key heads under an architecture for which vLLM has none",
            f'write "architectures": {layout.QK_NORM_ARCHITECTURES} and "model_type": "qwen3"', ("vllm",),
        )  # fmt: skip


def _option_places(folder: Folder) -> Iterator[Finding]:
    """Options in the one of their two places where an engine does not look; it silently drops their tensors."""
    top, nested = folder.config, folder.config.get("eagle_config") or {}
    if top.get("norm_before_fc") and not nested.get("norm_before_fc"):
        yield Finding(
            "norm_before_fc", "norm_before_fc is only at the top level, TensorRT-LLM reads it in eagle_config",
            "also write it in eagle_config (tools/check_export.py --fix does)", ("trtllm",),
        )  # fmt: skip
    readers: dict[str, tuple[Engine, ...]] = {"fc_norm": ALL, "norm_output": ALL, "norm_before_residual": ("vllm",)}
    for name, engines in readers.items():
        if nested.get(name) and not top.get(name):
            yield Finding(
                name, f"{name} is only in eagle_config, engines read it at the top level",
                "also write it at the top level (tools/check_export.py --fix does)", engines,
            )  # fmt: skip


def _capture_ids(folder: Folder) -> Iterator[Finding]:
    top = folder.config.get("eagle_aux_hidden_state_layer_ids")
    nested = (folder.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not top and not nested:
        return
    if top is None:
        yield Finding("capture_ids", "layer ids are only in eagle_config (output of layer j)",
                      "also write j + 1 as top-level eagle_aux_hidden_state_layer_ids", ("vllm",))  # fmt: skip
    if nested is None:
        yield Finding(
            "capture_ids", "layer ids are only at the top level (state after k layers)",
            "also write k - 1 as eagle_config.eagle_aux_hidden_state_layer_ids", ("vllm", "sglang"),
        )  # fmt: skip
    ids = nested if nested is not None else [k - 1 for k in top or []]
    yield from _off_by_one(folder, top, nested)
    layers = _base_layers(folder)
    if layers is not None and layers - 1 in ids and not sglang_delivers_last_layer(folder.target_architecture):
        yield Finding(
            "capture_ids", f"the target's last layer ({layers - 1}) is captured, whose output SGLang never delivers",
            "train on layers before the last one, or serve with vLLM or TensorRT-LLM", ("sglang",),
        )  # fmt: skip
    yield Finding(
        "capture_ids", f"layers other than the defaults are captured: {ids}",
        f"TensorRT-LLM reads them only from its YAML: eagle3_layers_to_capture: {ids} (tools/make_serving_config.py)",
        ("trtllm",), warning=True,
    )  # fmt: skip


def _base_layers(folder: Folder) -> int | None:
    found = (folder.base or {}).get("num_hidden_layers")
    return int(found) if found is not None else None


def _off_by_one(folder: Folder, top: list[int] | None, nested: list[int] | None) -> Iterator[Finding]:
    """Default layers written in the wrong convention, which makes every engine read one layer too early or too late."""
    layers = _base_layers(folder)
    try:
        outputs = list(default_capture_ids(layers)) if layers is not None else None
    except UserError:  # a small base has no defaults
        outputs = None
    if outputs is None:
        return
    states = [j + 1 for j in outputs]
    place = "top-level eagle_aux_hidden_state_layer_ids"
    if top is not None and list(top) == outputs:
        yield Finding(
            "capture_ids", f"{place} is {outputs}: these are the default layers counted by output, one off",
            f"if the draft was trained on the default layers, write {states} (or no ids at all)", warning=True,
        )  # fmt: skip
    if nested is not None and list(nested) == states:
        yield Finding(
            "capture_ids", f"eagle_config's ids are {states}: these are the default layers counted by state, one off",
            f"if the draft was trained on the default layers, write {outputs} there (or no ids at all)", warning=True,
        )  # fmt: skip
