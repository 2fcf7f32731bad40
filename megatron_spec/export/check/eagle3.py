"""Rules of an EAGLE-3 folder. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_spec.config import UserError
from megatron_spec.config.presets import default_capture_ids
from megatron_spec.export.check.finding import Finding, Folder
from megatron_spec.export.check.shared import check_embedding, check_fp8, check_rope, check_target
from megatron_spec.export.layout import LINEARS
from megatron_spec.export.tensor_files import Entry

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip


def check(folder: Folder) -> Iterator[Finding]:
    """All rules."""
    findings = list(_config_keys(folder))
    yield from findings
    if not any(f.rule == "config" for f in findings):
        for rule in (_names, _shapes, _vocab_map, _capture_ids, check_rope, check_fp8, check_target, check_embedding):
            yield from rule(folder)


# ---- config.json


def _config_keys(folder: Folder) -> Iterator[Finding]:
    config = folder.config
    missing = [key for key in _SIZES if key not in config]
    if missing:
        yield Finding("config", f"config.json lacks {', '.join(missing)}", "copy them from the trained configuration")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        yield Finding(
            "architectures", f"architectures is {architectures!r}", f'write "architectures": ["{ARCHITECTURES[0]}"]'
        )
    for key in ("target_hidden_size", "eagle_config"):
        if key in config and config[key] is None:
            yield Finding("null", f"{key} is null, which engines read as a value", f"remove {key} from config.json")
    if "draft_vocab_size" not in config:
        yield Finding(
            "draft_vocab_size", "config.json lacks draft_vocab_size",
            'write "draft_vocab_size": the number of rows of lm_head.weight, also when it is the whole vocabulary',
        )  # fmt: skip
    if config.get("norm_before_residual"):
        yield Finding(
            "norm_before_residual", "norm_before_residual is true, which only vLLM implements",
            "retrain without it: other engines compute something else without a word", ("trtllm", "sglang"),
        )  # fmt: skip
    if "head_dim" not in config and config.get("hidden_size", 0) % max(config.get("num_attention_heads", 1), 1):
        yield Finding(
            "head_dim", "head_dim is missing and hidden_size / num_attention_heads is no whole number", "write head_dim"
        )


# ---- tensors


def _layer_tensors(folder: Folder) -> list[str]:
    kinds = ("input_layernorm", "hidden_norm", "post_attention_layernorm", *LINEARS)
    return [f"{layer}.{kind}.weight" for layer in folder.layers for kind in kinds]


def _option_norms(folder: Folder) -> list[str]:
    """Norms before `fc` that EAGLE-3.1's options in config.json announce."""
    inside = folder.config.get("eagle_config") or {}
    fc = folder.tensors.get("fc.weight")
    captures = fc.shape[1] // folder.target_hidden if fc is not None and len(fc.shape) == 2 else 3
    norms = ["input_norm.weight"] if folder.config.get("norm_before_fc") or inside.get("norm_before_fc") else []
    return norms + [f"fc_norm.{i}.weight" for i in range(captures) if folder.config.get("fc_norm")]


def _expected_names(folder: Folder) -> list[str]:
    names = ["fc.weight", *_option_norms(folder), *_layer_tensors(folder), "norm.weight", "lm_head.weight"]
    return names + (["d2t", "t2d"] if folder.draft_vocab < folder.config["vocab_size"] else [])


def _names(folder: Folder) -> Iterator[Finding]:
    found = folder.tensors.keys()
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
    missing = [n for n in _expected_names(folder) if n not in found and n not in ("d2t", "t2d")]
    if missing:
        yield Finding(
            "missing", f"missing {', '.join(missing)}; vLLM and SGLang leave them random or at one, silently",
            "write them: they are parameters of the draft",
        )  # fmt: skip
    extra = [n for n in found if not _is_known(n, folder)]
    biases = [n for n in extra if n.endswith(".bias")]
    if biases:
        yield Finding("bias", f"found {', '.join(biases)}, which engines drop silently", "train without biases")
    if others := sorted(set(extra) - set(biases)):
        yield Finding("unknown", f"found unknown {', '.join(others[:8])}", "remove them", ("vllm",))


def _is_known(name: str, folder: Folder) -> bool:
    stem, _, last = name.rpartition(".")
    if last in ("weight_scale", "input_scale", "weight_scale_2", "k_scale", "v_scale"):
        return f"{stem}.weight" in folder.tensors
    return name in _layer_tensors(folder) + _option_norms(folder) or name in {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "embed_tokens.weight",
    }  # fmt: skip


def _expected_shapes(folder: Folder) -> dict[str, tuple[int, ...]]:
    c = folder.config
    H, F, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    d = c.get("head_dim") or H // heads
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (H,), "lm_head.weight": (folder.draft_vocab, H)}
    for i, layer in enumerate(folder.layers):
        width = 2 * H if i == 0 else H
        shapes[f"{layer}.self_attn.q_proj.weight"] = (heads * d, width)
        for which in "kv":
            shapes[f"{layer}.self_attn.{which}_proj.weight"] = (c["num_key_value_heads"] * d, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (H, heads * d)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (F, H)
        shapes[f"{layer}.mlp.down_proj.weight"] = (H, F)
    return shapes


def _shapes(folder: Folder) -> Iterator[Finding]:
    for name, shape in _expected_shapes(folder).items():
        entry = folder.tensors.get(name)
        found = shape if entry is None else entry.shape
        if entry is not None and entry.dtype == "U8":  # two weights a byte
            found = (*found[:-1], 2 * found[-1])
        if found == shape:
            continue
        mend = "make config.json and the tensor agree"
        if name == "lm_head.weight" and found[1:] == shape[1:]:
            mend = "draft_vocab_size must be its number of rows; cut off rows that only pad the vocabulary"
        yield Finding("shape", f"{name} is {list(found)}, config.json says {list(shape)}", mend)
    fc = folder.tensors.get("fc.weight")
    if fc is not None and (len(fc.shape) != 2 or fc.shape[1] % folder.target_hidden):
        yield Finding(
            "shape", f"fc.weight is {list(fc.shape)}: its width is no multiple of the target's hidden size "
            f"{folder.target_hidden}", "write target_hidden_size when the target's hidden size is not the draft's",
        )  # fmt: skip


def _vocab_map(folder: Folder) -> Iterator[Finding]:
    V, D = folder.config["vocab_size"], folder.draft_vocab
    d2t, t2d = folder.tensors.get("d2t"), folder.tensors.get("t2d")
    if D == V:
        if d2t is not None:
            yield Finding("d2t", "d2t is there although the draft speaks the whole vocabulary: vLLM raises",
                          "remove d2t and t2d", ("vllm",))  # fmt: skip
        return
    if d2t is None:
        yield Finding(
            "d2t", f"draft_vocab_size {D} < vocab_size {V}, but d2t is missing: every drafted token is a wrong one",
            "write d2t, int64 [draft_vocab_size]: target id - draft id",
        )  # fmt: skip
        return
    if t2d is None:
        yield Finding("t2d", "t2d is missing", "write it, bool [vocab_size]: the target ids in d2t", warning=True)
    if d2t.shape != (D,) or d2t.dtype not in ("I64", "I32"):
        yield Finding("d2t", f"d2t is {d2t.dtype} {list(d2t.shape)}", f"write it as int64 [{D}]")
        return
    yield from _map_values(d2t.integers(), t2d, V)


def _map_values(offsets: list[int], t2d: Entry | None, V: int) -> Iterator[Finding]:
    targets = [i + offset for i, offset in enumerate(offsets)]
    if not any(offsets):
        yield Finding("d2t", "d2t is all zeros: it was never calibrated", "write the map of the training")
    elif min(targets) < 0 or max(targets) >= V or len(set(targets)) < len(targets):
        absolute = min(offsets) >= 0 and max(offsets) < V and len(set(offsets)) == len(offsets)
        hint = ": it seems to hold target ids instead of offsets" if absolute else ""
        yield Finding(
            "d2t", f"i + d2t[i] is not distinct and within 0..{V - 1}{hint}",
            "store offsets: d2t[i] = target id - i" if absolute else "write the map of the training",
        )  # fmt: skip
    elif t2d is not None and t2d.dtype == "BOOL":
        marked = {i for i, inside in enumerate(t2d.integers()) if inside}
        if t2d.shape != (V,) or marked != set(targets):
            yield Finding("t2d", "t2d marks other tokens than d2t lists", "write it from d2t")


def _capture_ids(folder: Folder) -> Iterator[Finding]:
    top = folder.config.get("eagle_aux_hidden_state_layer_ids")
    nested = (folder.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    fc = folder.tensors.get("fc.weight")
    count = fc.shape[1] // folder.target_hidden if fc is not None and len(fc.shape) == 2 else None
    if top is None and nested is None:
        if count not in (None, 3):
            yield Finding("capture_ids", f"fc reads {count} captures, but no layer ids are given", "write them (below)")
        return
    if top is not None and nested is not None and list(top) != [j + 1 for j in nested]:
        yield Finding(
            "capture_ids", f"top-level ids {top} must be the nested ids {nested} plus one",
            "top level: 'state after k layers'; eagle_config: 'output of layer j, from 0', k = j + 1",
        )  # fmt: skip
    if top is None:
        yield Finding("capture_ids", "layer ids are only in eagle_config (output of layer j)",
                      "write j + 1 as top-level eagle_aux_hidden_state_layer_ids too", ("vllm",))  # fmt: skip
    if nested is None:
        yield Finding(
            "capture_ids", "layer ids are only at the top level (state after k layers)",
            "write k - 1 as eagle_config.eagle_aux_hidden_state_layer_ids too", ("vllm", "sglang"),
        )  # fmt: skip
    ids = nested if nested is not None else [k - 1 for k in top or []]
    yield from _off_by_one(folder, top, nested)
    if count is not None and len(ids) != count:
        yield Finding("capture_ids", f"{len(ids)} layer ids, but fc reads {count} captures", "make them agree")
    layers = _base_layers(folder)
    if layers is not None and any(not 0 <= j < layers for j in ids):
        yield Finding("capture_ids", f"layer outputs {ids} do not all exist: the target has {layers}", "correct them")
    yield Finding(
        "capture_ids", f"layers other than the defaults are captured: {ids}",
        f"TensorRT-LLM reads them from its YAML alone: eagle3_layers_to_capture: {ids} (tools/make_serving_config.py)",
        ("trtllm",), warning=True,
    )  # fmt: skip


def _base_layers(folder: Folder) -> int | None:
    found = (folder.base or {}).get("num_hidden_layers")
    return int(found) if found is not None else None


def _off_by_one(folder: Folder, top: list[int] | None, nested: list[int] | None) -> Iterator[Finding]:
    """The default layers written in the other convention: every engine then reads a layer too early or too late."""
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
