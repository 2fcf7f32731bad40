"""Rules of the other kinds of folder: EAGLE-1, Medusa, MTP, speculators, TensorRT-LLM's legacy checkpoint, a target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_spec.config import EagleConfig, UserError
from megatron_spec.export import layout, native_mtp
from megatron_spec.export.check.finding import Engine, Finding, Folder
from megatron_spec.export.check.shared import check_fp8, check_rope, check_target
from megatron_spec.export.tensor_files import Entry, read_entries

Shapes = dict[str, tuple[int, ...]]


def _compare(expected: Shapes, tensors: dict[str, Entry], silent: str) -> Iterator[Finding]:
    """Missing and wrongly shaped tensors; `silent` says what engines do about a missing one."""
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        yield Finding("missing", f"missing {', '.join(missing[:8])} ({len(missing)}); {silent}", "write them")
    for name in sorted(expected.keys() & tensors.keys()):
        found = tensors[name].shape
        if tensors[name].dtype == "U8" and found:  # two weights a byte
            found = (*found[:-1], 2 * found[-1])
        if found != expected[name]:
            mend = "make config.json and the tensor agree"
            yield Finding("shape", f"{name} is {list(found)}, config.json says {list(expected[name])}", mend)


def _extra(expected: Shapes, tensors: dict[str, Entry], engines: tuple[Engine, ...]) -> Iterator[Finding]:
    scales = {
        f"{n.removesuffix('.weight')}.{s}" for n in expected for s in ("weight_scale", "input_scale", "weight_scale_2")
    }
    extra = sorted(tensors.keys() - expected.keys() - scales)
    if extra:
        yield Finding("unknown", f"found unknown {', '.join(extra[:8])} ({len(extra)})", "remove them", engines)


def _require(config: dict[str, Any], keys: tuple[str, ...]) -> Iterator[Finding]:
    missing = [k for k in keys if k not in config]
    if missing:
        yield Finding("config", f"config.json lacks {', '.join(missing)}", "copy them from the trained configuration")


def _draft_config(folder: Folder, algorithm: str) -> EagleConfig | Finding:
    """The configuration an engine would build; what older files leave out is what engines assume."""
    found = folder.config
    assumed: dict[str, Any] = {"draft_vocab_size": found.get("vocab_size"), "rope_theta": 10000.0, "hidden_act": "silu"}
    assumed["max_position_embeddings"] = 2048
    if found.get("hidden_size") and found.get("num_attention_heads"):
        assumed["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    if native_mtp.is_own_module(found):
        return native_mtp.read_config_json(found)
    try:
        return layout.read_eagle_config({**assumed, **found, "architectures": layout.ARCHITECTURES[algorithm]}, 8)
    except UserError as e:
        return Finding("config", str(e), "copy what is missing from the trained configuration")


# ---- EAGLE-1


def check_eagle1(folder: Folder) -> Iterator[Finding]:
    """EAGLE-1 as vLLM and SGLang load it: no norm before the first layer, no final one, no head, zeros as fc.bias."""
    config = _draft_config(folder, "eagle1")
    if folder.config.get("architectures") != layout.ARCHITECTURES["eagle1"]:
        yield Finding(
            "architectures", f"architectures is {folder.config.get('architectures')!r}",
            f"write {layout.ARCHITECTURES['eagle1']}: vLLM looks for the first, SGLang for the second",
            ("vllm", "sglang"),
        )  # fmt: skip
    if isinstance(config, Finding):
        yield config
        return
    expected = layout.weight_shapes(config)
    yield from _compare(expected, folder.tensors, "vLLM and SGLang leave them random, silently")
    bias = folder.tensors.get("fc.bias")
    if bias is None:
        yield Finding(
            "fc.bias", "fc.bias is missing: SGLang leaves it random, TensorRT-LLM's converter raises",
            "write zeros, [hidden_size]", ("sglang", "trtllm"),
        )  # fmt: skip
    elif any(bias.raw()):
        yield Finding("fc.bias", "fc.bias is not zero: vLLM drops it silently", "train without it", ("vllm",))
    spare = {"layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"} & folder.tensors.keys()
    if spare:
        yield Finding(
            "unknown", f"found {', '.join(sorted(spare))}: an EAGLE-1 draft has no such tensor",
            "remove them; if they were trained, this is another architecture", ("vllm", "sglang"),
        )  # fmt: skip
    known = {**expected, "fc.bias": (), "embed_tokens.weight": ()} | dict.fromkeys(spare, ())
    yield from _extra(known, folder.tensors, ("vllm",))
    for rule in (check_rope, check_fp8, check_target):
        yield from rule(folder)


# ---- MTP


def _bare(shapes: Shapes) -> Shapes:
    """Under the names of `Folder.tensors`."""
    return {name.removeprefix("model."): shape for name, shape in shapes.items()}


def check_mtp(folder: Folder) -> Iterator[Finding]:
    """An MTP module in the format of this package, or a base's own in the names of its base."""
    config = _draft_config(folder, "eagle-mtp")
    if isinstance(config, Finding):
        yield config
        return
    expected = _bare(layout.weight_shapes(config))
    yield from _compare(expected, folder.tensors, "the draft cannot be rebuilt")
    known = {**expected, **_bare(layout.end_shapes(config)), "embed_tokens.weight": ()}
    yield from _extra(known, folder.tensors, ("vllm",))
    rules = (check_fp8,) if config.of_base else (check_rope, check_fp8, check_target)
    for rule in rules:
        yield from rule(folder)


# ---- Medusa


def check_medusa(folder: Folder) -> Iterator[Finding]:
    """Medusa heads as vLLM and the reference code load them."""
    config = folder.config
    lacking = list(_require(config, ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")))
    yield from lacking
    if config.get("model_type") != "medusa":
        yield Finding(
            "model_type", f"model_type is {config.get('model_type')!r}: vLLM takes the folder for something else",
            'write "model_type": "medusa"', ("vllm",),
        )  # fmt: skip
    if not config.get("medusa_fc_bias"):
        yield Finding(
            "medusa_fc_bias", "medusa_fc_bias is not true: vLLM drops the biases silently",
            'write "medusa_fc_bias": true', ("vllm",),
        )  # fmt: skip
    if lacking:
        return
    heads, layers, H = config["medusa_num_heads"], config["medusa_num_layers"], config["hidden_size"]
    expected: Shapes = {}
    for h in range(heads):
        for i in range(layers):
            expected |= {f"{h}.{i}.linear.weight": (H, H), f"{h}.{i}.linear.bias": (H,)}
        expected[f"{h}.{layers}.weight"] = (config["vocab_size"], H)
    yield from _compare(expected, folder.tensors, "vLLM leaves them random, silently")
    yield from _extra(expected, folder.tensors, ("vllm",))
    yield from check_target(folder, with_context=False)


# ---- speculators


def check_speculators(folder: Folder) -> Iterator[Finding]:
    """EAGLE-3 in the format of the speculators library."""
    config = folder.config
    yield from _require(config, ("draft_vocab_size", "transformer_layer_config", "speculators_config", "architectures"))
    if config.get("speculators_model_type") != "eagle3":
        kind = config.get("speculators_model_type")
        yield Finding("kind", f"speculators_model_type is {kind!r}: only eagle3 is checked here", "-", warning=True)
        return
    if config.get("norm_before_residual", True):
        yield Finding(
            "norm_before_residual", "norm_before_residual is true (the default of this format where it is missing)",
            "write false for a draft whose residual stream is the un-normed feature", warning=True,
        )  # fmt: skip
    needed = {"fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "layers.0.hidden_norm.weight"}
    missing = sorted(needed - folder.tensors.keys())
    if missing:
        yield Finding("missing", f"missing {', '.join(missing)}", "write them")
    if any(n.startswith("midlayer.") for n in folder.tensors):
        yield Finding("midlayer", "the first layer is called midlayer", "rename midlayer.* to layers.0.*")
    V = (config.get("transformer_layer_config") or {}).get("vocab_size")
    D = config.get("draft_vocab_size")
    if V and D and D < V and "d2t" not in folder.tensors:
        yield Finding("d2t", f"draft_vocab_size {D} < vocab_size {V}, but d2t is missing", "write d2t and t2d")


# ---- TensorRT-LLM, legacy


def check_legacy(folder: Folder) -> Iterator[Finding]:
    """A checkpoint of TensorRT-LLM's own: one file per rank, all with the same names."""
    config = folder.config
    keys = ("num_hidden_layers", "vocab_size", "quantization", "mapping", "max_draft_len")
    yield from _require(config, keys)
    ranks = (config.get("mapping") or {}).get("world_size", 1)
    files = [folder.path / f"rank{r}.safetensors" for r in range(ranks)]
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        yield Finding("ranks", f"mapping says {ranks} ranks, but {', '.join(absent)} is missing", "convert again")
        return
    names = [set(read_entries(folder.path, file.name)) for file in files]
    if any(n != names[0] for n in names):
        yield Finding("ranks", "the files of the ranks hold different tensors", "convert again")
    for h in range(config.get("num_medusa_heads", 0)):
        if f"medusa_heads.{h}.lm_head.weight" not in names[0]:
            yield Finding("missing", f"medusa_heads.{h} is missing", "convert again with the heads")
    fp8 = {n for n, e in folder.tensors.items() if e.dtype.startswith("F8")}
    for name in sorted(fp8):
        lost = [s for s in ("weights", "activation") if f"{name[:-7]}.{s}_scaling_factor" not in names[0]]
        if lost:
            yield Finding("fp8", f"{name} is fp8 without {' and '.join(lost)}_scaling_factor", "convert again")
    declared = (config.get("quantization") or {}).get("quant_algo")
    if bool(fp8) != (declared == "FP8"):
        yield Finding("fp8", f"quant_algo is {declared!r}, {len(fp8)} tensors are fp8", "make them agree")


# ---- a target


def check_model(folder: Folder) -> Iterator[Finding]:
    """A whole model (the target): fp8 with its scales, tied or own head."""
    config, names = folder.config, folder.tensors.keys()
    if not config.get("architectures"):
        yield Finding("architectures", "architectures is missing", 'write it, for example ["LlamaForCausalLM"]')
    if "lm_head.weight" not in names and not config.get("tie_word_embeddings"):
        yield Finding("missing", "lm_head.weight is missing and tie_word_embeddings is not true", "write it")
    entry = folder.tensors.get("embed_tokens.weight") or folder.tensors.get("model.embed_tokens.weight")
    V = config.get("vocab_size")
    if entry is not None and V is not None and entry.shape[0] != V:
        yield Finding(
            "vocab_size", f"the embedding has {entry.shape[0]} rows, config.json says {V}",
            "cut off rows that only pad the vocabulary",
        )  # fmt: skip
    yield from check_fp8(folder)
