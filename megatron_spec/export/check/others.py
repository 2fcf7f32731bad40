"""Rules of the other kinds of folder: EAGLE-1, Medusa, MTP, speculators, TensorRT-LLM's legacy checkpoint, a target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_spec.export import layout, native_mtp
from megatron_spec.export.block import ARCHITECTURES
from megatron_spec.export.check import block
from megatron_spec.export.check.eagle3 import served_by_some
from megatron_spec.export.check.finding import ALL, Finding, Folder
from megatron_spec.export.check.shared import check_biases, check_fp8, check_rope, check_target
from megatron_spec.export.formats.eagle import CAPTURE_KEY, DEFAULT_CAPTURES
from megatron_spec.export.formats.keys import flatten
from megatron_spec.export.tensor_files import read_entries


def _require(config: dict[str, Any], keys: tuple[str, ...]) -> Iterator[Finding]:
    missing = [k for k in keys if k not in config]
    if missing:
        yield Finding("config", f"config.json lacks {', '.join(missing)}", "copy them from the trained configuration")


# ---- EAGLE-1


def check_eagle1(folder: Folder) -> Iterator[Finding]:
    """EAGLE-1 as vLLM and SGLang load it: no norm before the first layer, no final norm, no LM head, fc.bias zero."""
    if folder.config.get("architectures") != layout.ARCHITECTURES["eagle1"]:
        yield Finding(
            "architectures", f"architectures is {folder.config.get('architectures')!r}",
            f"write {layout.ARCHITECTURES['eagle1']}: vLLM expects the first, SGLang the second",
            ("vllm", "sglang"),
        )  # fmt: skip
    bias = folder.tensors.get("fc.bias")
    if bias is None:
        yield Finding(
            "fc.bias", "fc.bias is missing: SGLang leaves it uninitialised, TensorRT-LLM's converter raises",
            "write zeros, [hidden_size]", ("sglang", "trtllm"),
        )  # fmt: skip
    elif any(bias.raw()):
        yield Finding("fc.bias", "fc.bias is not zero: vLLM drops it silently", "train without it", ("vllm",))
    yield from _eagle1_options(folder)
    for rule in (check_biases, check_rope, check_fp8, check_target):
        yield from rule(folder)


def _eagle1_options(folder: Folder) -> Iterator[Finding]:
    """Options whose tensors an engine drops. Biases of attention are computed by both, that of `fc` is above."""
    for finding in served_by_some(folder):
        if finding.rule == "qk_norm":
            found = "the draft has norms over query and key heads, which no engine has in EAGLE-1"
            yield replace(finding, found=found, fix="train without them, or an EAGLE-3 draft", engines=ALL)
        elif finding.rule in ("mlp_bias", "partial_rotation"):
            yield finding


# ---- MTP


def check_mtp(folder: Folder) -> Iterator[Finding]:
    """An MTP module in the format of this package, or a base's own module under the base's names."""
    announced = folder.config.get("num_nextn_predict_layers") or 1
    if announced != 1:
        yield Finding(
            "num_nextn_predict_layers", f"config.json announces {announced} modules: only the first is read here",
            "write 1 for a folder with one module; serve several with the base that ships them", warning=True,
        )  # fmt: skip
    own = native_mtp.is_own_module(folder.config)
    for rule in (check_fp8,) if own else (check_rope, check_fp8, check_target):
        yield from rule(folder)


# ---- Medusa


def check_medusa(folder: Folder) -> Iterator[Finding]:
    """Medusa heads as vLLM (up to 0.32.0, the last release with Medusa) and the reference code load them."""
    config = folder.config
    yield from _require(config, ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size"))
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
    if any(name.startswith(("blocks.", "medusa_head")) for name in folder.tensors):
        yield Finding(
            "names", "heads are not named {head}.{layer}, as the reference code reads them", "rename them (--fix)",
            ("trtllm",), warning=True,
        )  # fmt: skip
    bare = {n: e for n, e in folder.tensors.items() if n.endswith(".bias")}
    if not bare:
        yield Finding(
            "bias", "the blocks have no biases: loaders that expect them do not initialise them", "write zeros"
        )
    yield from check_target(folder, with_context=False)


# ---- speculators


def check_speculators(folder: Folder) -> Iterator[Finding]:
    """Drafts in the format of the speculators library."""
    config, kind = folder.config, folder.config.get("speculators_model_type")
    if kind in ARCHITECTURES:
        yield from block.check_speculators(folder)
        return
    if kind == "eagle":
        fix = "rewrite it as an EAGLE-1 folder (tools/check_export.py --fix)"
        yield Finding("speculators", "no engine loads EAGLE-1 in the format of speculators", fix)
        return
    if kind not in ("eagle3", "peagle"):
        found = f"speculators_model_type is {kind!r}: only eagle3, peagle, dflash and dspark are checked here"
        yield Finding("speculators", found, "-", warning=True)
        return
    yield from _require(config, ("draft_vocab_size", "transformer_layer_config", "speculators_config", "architectures"))
    if kind == "eagle3" and "embed_tokens.weight" not in folder.tensors:
        yield Finding("missing", "missing embed_tokens.weight", "write the target's: this format always includes it")
    if kind == "eagle3" and config.get("norm_before_residual") is None:
        yield Finding(
            "norm_before_residual", "norm_before_residual is missing: vLLM reads true, the speculators library false",
            'write "norm_before_residual" as it was in training', ("vllm",),
        )  # fmt: skip
    if any(n.startswith("midlayer.") for n in folder.tensors):
        yield Finding("midlayer", "the first layer is called midlayer", "rename midlayer.* to layers.0.*")
    yield from _count(folder)
    yield from served_by_some(folder)
    yield from check_target(replace(folder, config=flatten(config)))


def _count(folder: Folder) -> Iterator[Finding]:
    """Captures other than three, which vLLM's Llama draft counts in a key that speculators does not write."""
    flat = flatten(folder.config)
    ids, layer = flat.get(CAPTURE_KEY) or (), folder.config.get("transformer_layer_config") or {}
    counted = flat.get("num_aux_hidden_states") is not None or layer.get("model_type", "llama") != "llama"
    if ids and len(ids) != DEFAULT_CAPTURES and not counted:
        yield Finding(
            "capture_ids", f"{len(ids)} layers are captured, but vLLM builds fc for {DEFAULT_CAPTURES}",
            f'write "num_aux_hidden_states": {len(ids)} in transformer_layer_config', ("vllm",),
        )  # fmt: skip


def speculators_served(folder: Folder) -> Iterator[Finding]:
    """Options that vLLM, which alone loads this format, does not compute. Needs no tensors."""
    kind = folder.config.get("speculators_model_type")
    yield from (block.speculators_served if kind in ARCHITECTURES else served_by_some)(folder)


# ---- TensorRT-LLM, legacy


def check_legacy(folder: Folder) -> Iterator[Finding]:
    """TensorRT-LLM's own checkpoint format: one file per rank, all with the same tensor names."""
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
    """A complete model (the target): fp8 with scales, tied or separate LM head."""
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
