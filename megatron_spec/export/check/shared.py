"""Rules that more than one kind of folder must follow: rope, fp8, and what depends on the target."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_spec.export.check.finding import Finding, Folder
from megatron_spec.export.layout import SHARED_SCALE


def check_rope(folder: Folder) -> Iterator[Finding]:
    """Top-level rope_theta, in agreement with rope_parameters and, as a warning, with the target."""
    config, parameters = folder.config, folder.config.get("rope_parameters")
    if "rope_theta" not in config:
        if parameters:
            yield Finding(
                "rope", f"rope is only in rope_parameters ({parameters}): transformers before 5 reads theta 10000",
                "also write rope_theta and, if there is one, rope_scaling at the top level of config.json",
            )  # fmt: skip
        else:
            yield Finding(
                "rope", "rope_theta is missing: engines use 10000", "write the rope_theta the draft was trained with"
            )
    elif parameters and parameters.get("rope_theta", config["rope_theta"]) != config["rope_theta"]:
        yield Finding(
            "rope", f"rope_theta {config['rope_theta']} and rope_parameters {parameters} disagree", "make them equal"
        )
    theirs = _theta(folder.base or {})
    if theirs is not None and config.get("rope_theta") not in (None, theirs):
        yield Finding(
            "rope", f"rope_theta is {config['rope_theta']}, the target's is {theirs}",
            "make sure the draft was trained with its own value: a theta lost at export costs most of the acceptance",
            warning=True,
        )  # fmt: skip


def _theta(config: dict[str, object]) -> object:
    parameters = config.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return nested if nested is not None else config.get("rope_theta")


# ---- fp8


def check_fp8(folder: Folder) -> Iterator[Finding]:
    """fp8 tensors, their scales, and the metadata that declares them."""
    fp8 = sorted(n for n, e in folder.tensors.items() if e.dtype in ("F8_E4M3", "U8") and n.endswith(".weight"))
    declared = folder.config.get("quantization_config")
    sidecar = (folder.path / "hf_quant_config.json").is_file()
    if not fp8:
        if declared or sidecar:
            yield Finding("fp8", "fp8 metadata with tensors that are not fp8", "remove quantization_config and "
                          "hf_quant_config.json")  # fmt: skip
        return
    if not declared or not sidecar:
        lacking = "hf_quant_config.json" if declared else "quantization_config in config.json"
        fix = "write both hf_quant_config.json and quantization_config in config.json"
        yield Finding("fp8", f"fp8 tensors without {lacking}", fix)
    for name in fp8:
        stem = name.removesuffix(".weight")
        if stem in ("fc", "lm_head", "embed_tokens"):
            yield Finding(
                "fp8", f"{name} is fp8; engines exclude it, and SGLang silently loads its codes as numbers",
                "keep fc, lm_head and the embedding in bf16",
            )  # fmt: skip
            continue
        four_bits = folder.tensors[name].dtype == "U8"
        needed = ("weight_scale", "weight_scale_2") if four_bits else ("weight_scale", "input_scale")
        missing = [s for s in (f"{stem}.{kind}" for kind in needed) if s not in folder.tensors]
        if missing:
            yield Finding("fp8", f"{name} is fp8, but {', '.join(missing)} is missing", "write amax / 448 as float32")
    yield from _shared_scales(folder)


def _shared_scales(folder: Folder) -> Iterator[Finding]:
    for layer in folder.layers:
        for group in SHARED_SCALE:
            for kind in ("weight_scale", "input_scale", "weight_scale_2"):
                entries = [folder.tensors.get(f"{layer}.{name}.{kind}") for name in group]
                present = [e for e in entries if e is not None and e.dtype != "F8_E4M3"]  # block scales differ
                if any(e.dtype != "F32" or e.shape not in ((), (1,)) for e in present):
                    yield Finding("fp8", f"{kind} of {layer} is not one float32", "write per-tensor scales as float32")
                elif len({e.number() for e in present}) > 1:
                    yield Finding(
                        "fp8", f"{kind} differs between {', '.join(group)} of {layer}, which engines fuse",
                        "quantise them with the largest of the scales",
                    )  # fmt: skip


# ---- tensors that engines require


def check_biases(folder: Folder) -> Iterator[Finding]:
    """Biases missing while others of their kind are present: engines create them all together."""
    missing = [n for n, stored in folder.reading.names.items() if stored is None] if folder.reading else []
    if missing:
        yield Finding(
            "bias", f"{', '.join(missing[:8])} ({len(missing)}) are missing while others of their kind are present: "
            "engines leave them uninitialised", "write zeros (tools/check_export.py --fix does)",
        )  # fmt: skip


# ---- the target


def check_target(folder: Folder, with_context: bool = True) -> Iterator[Finding]:
    """Context length, vocabulary and hidden size against the target, when it is known."""
    base, config = folder.base, folder.config
    if base is None:
        return
    found, needed = config.get("max_position_embeddings"), base.get("max_position_embeddings")
    if with_context and needed is not None and (found is None or found < needed):
        yield Finding(
            "max_position_embeddings", f"max_position_embeddings is {found}, the target's is {needed}: longer contexts "
            "are cut off or index beyond the rotary table", f"write at least {needed}",
        )  # fmt: skip
    if config.get("vocab_size") not in (None, base.get("vocab_size", config.get("vocab_size"))):
        yield Finding(
            "vocab_size", f"vocab_size is {config['vocab_size']}, the target's is {base['vocab_size']}",
            "write the target's true vocabulary, without padding",
        )  # fmt: skip
    if config.get("hidden_size") not in (None, base.get("hidden_size", config.get("hidden_size"))) and not config.get(
        "target_hidden_size"
    ):
        yield Finding(
            "target_hidden_size",
            f"the target's hidden size is {base['hidden_size']}, the draft's {config['hidden_size']}",
            "write target_hidden_size",
        )  # fmt: skip


def check_embedding(folder: Folder) -> Iterator[Finding]:
    """embed_tokens present if and only if it is needed."""
    own = folder.config.get("target_hidden_size") not in (None, folder.config["hidden_size"])
    if own and "embed_tokens.weight" not in folder.tensors:
        yield Finding(
            "embedding", "target_hidden_size differs from hidden_size, but embed_tokens.weight is missing",
            "write the draft's own embedding",
        )  # fmt: skip
    elif not own and "embed_tokens.weight" in folder.tensors and not folder.embedding_compared:
        yield Finding(
            "embedding", "the folder holds embed_tokens.weight; vLLM uses it unless it equals the target's, SGLang and "
            "TensorRT-LLM use the target's", "leave it out unless it is bitwise the target's", warning=True,
        )  # fmt: skip
