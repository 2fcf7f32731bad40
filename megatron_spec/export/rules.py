"""Rules an EAGLE-3 folder must follow so that engines load it as it was meant, for folders of any origin. No torch.

Every rule says which engines break, what was found, and how to mend it. Many breaches load without a word and merely
give a draft that nothing is accepted from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_spec.config import UserError
from megatron_spec.export.layout import LINEARS, SHARED_SCALE
from megatron_spec.export.tensor_files import Entry, read_entries
from megatron_spec.files import read_json

Engine = Literal["trtllm", "vllm", "sglang"]
ALL: tuple[Engine, ...] = ("trtllm", "vllm", "sglang")
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One rule that is broken."""

    rule: str
    found: str
    mend: str
    engines: tuple[Engine, ...] = ALL
    warning: bool = False
    """Works, but is fragile."""

    def __str__(self) -> str:
        kind = "warning" if self.warning else "error"
        return f"{kind} [{self.rule}] ({', '.join(self.engines)}): {self.found}\n    mend: {self.mend}"


@dataclass
class Folder:
    """What is checked: config.json and the tensors, and the target's config when it is known."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Entry]
    base: dict[str, Any] | None = None
    prefix: str = field(init=False, default="")
    """'model.' when the tensors carry it."""

    def __post_init__(self) -> None:
        if any(n.startswith("model.") for n in self.tensors):
            self.prefix = "model."
            self.tensors = {n.removeprefix("model."): e for n, e in self.tensors.items()}

    @property
    def layers(self) -> list[str]:
        """Prefix of every layer as this folder spells it."""
        count = self.config.get("num_hidden_layers", 1)
        if any(n.startswith("midlayer.") for n in self.tensors):
            return ["midlayer"]
        return [f"layers.{i}" for i in range(count)]

    @property
    def target_hidden(self) -> int:
        """Hidden size of the target."""
        base = (self.base or {}).get("hidden_size")
        return int(self.config.get("target_hidden_size") or base or self.config["hidden_size"])

    @property
    def draft_vocab(self) -> int:
        """D, which is V when the key is missing."""
        return int(self.config.get("draft_vocab_size") or self.config["vocab_size"])


def check_folder(path: Path | str, engine: Engine | None = None, base: Path | str | None = None) -> list[Finding]:
    """Everything that is wrong with an exported folder, for one engine or for all.

    Args:
        base: the target's folder; without it, what depends on the target is not checked.

    Raises:
        UserError: the folder cannot be read at all.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    base_config = read_json(Path(base) / "config.json") if base is not None else None
    folder = Folder(path, read_json(path / "config.json"), read_entries(path), base_config)
    findings = list(_config_keys(folder))
    if not any(f.rule == "config" for f in findings):
        for rule in (_rope, _names, _shapes, _vocab_map, _capture_ids, _fp8, _target, _embedding):
            findings += rule(folder)
    chosen = [f for f in findings if engine is None or engine in f.engines]
    return sorted(chosen, key=lambda f: f.warning)


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


def _rope(folder: Folder) -> Iterator[Finding]:
    config, parameters = folder.config, folder.config.get("rope_parameters")
    if "rope_theta" not in config:
        if parameters:
            yield Finding(
                "rope", f"rope is only in rope_parameters ({parameters}): transformers before 5 reads theta 10000",
                "write rope_theta and, when there is one, rope_scaling at the top level of config.json too",
            )  # fmt: skip
        else:
            yield Finding(
                "rope", "rope_theta is missing: engines take 10000", "write the rope_theta the draft was trained with"
            )
    elif parameters and parameters.get("rope_theta", config["rope_theta"]) != config["rope_theta"]:
        yield Finding(
            "rope", f"rope_theta {config['rope_theta']} and rope_parameters {parameters} disagree", "make them equal"
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
    if last in ("weight_scale", "input_scale", "k_scale", "v_scale"):
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
        width = folder.target_hidden + H if i == 0 else H
        shapes[f"{layer}.self_attn.q_proj.weight"] = (heads * d, width)
        for which in "kv":
            shapes[f"{layer}.self_attn.{which}_proj.weight"] = (c["num_key_value_heads"] * d, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (H, heads * d)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (F, H)
        shapes[f"{layer}.mlp.down_proj.weight"] = (H, F)
    return shapes


def _shapes(folder: Folder) -> Iterator[Finding]:
    for name, shape in _expected_shapes(folder).items():
        found = folder.tensors[name].shape if name in folder.tensors else shape
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
    if count is not None and len(ids) != count:
        yield Finding("capture_ids", f"{len(ids)} layer ids, but fc reads {count} captures", "make them agree")
    layers = (folder.base or {}).get("num_hidden_layers")
    if layers is not None and any(not 0 <= j < layers for j in ids):
        yield Finding("capture_ids", f"layer outputs {ids} do not all exist: the target has {layers}", "correct them")
    yield Finding(
        "capture_ids", f"layers other than the defaults are captured: {ids}",
        f"TensorRT-LLM reads them from its YAML alone: eagle3_layers_to_capture: {ids} (tools/make_serving_config.py)",
        ("trtllm",), warning=True,
    )  # fmt: skip


# ---- fp8


def _fp8(folder: Folder) -> Iterator[Finding]:
    fp8 = sorted(n for n, e in folder.tensors.items() if e.dtype.startswith("F8"))
    declared = folder.config.get("quantization_config")
    sidecar = (folder.path / "hf_quant_config.json").is_file()
    if not fp8:
        if declared or sidecar:
            yield Finding("fp8", "fp8 metadata beside tensors that are not fp8", "remove quantization_config and "
                          "hf_quant_config.json")  # fmt: skip
        return
    if not declared or not sidecar:
        lacking = "hf_quant_config.json" if declared else "quantization_config in config.json"
        mend = "write both hf_quant_config.json and quantization_config in config.json"
        yield Finding("fp8", f"fp8 tensors without {lacking}", mend)
    for name in fp8:
        stem = name.removesuffix(".weight")
        if stem in ("fc", "lm_head", "embed_tokens"):
            yield Finding(
                "fp8", f"{name} is fp8; engines exclude it, and SGLang loads its codes as numbers, silently",
                "keep fc, lm_head and the embedding in bf16",
            )  # fmt: skip
            continue
        missing = [s for s in (f"{stem}.weight_scale", f"{stem}.input_scale") if s not in folder.tensors]
        if missing:
            yield Finding("fp8", f"{name} is fp8, but {', '.join(missing)} is missing", "write amax / 448 as float32")
    yield from _shared_scales(folder)


def _shared_scales(folder: Folder) -> Iterator[Finding]:
    for layer in folder.layers:
        for group in SHARED_SCALE:
            for kind in ("weight_scale", "input_scale"):
                entries = [folder.tensors.get(f"{layer}.{name}.{kind}") for name in group]
                present = [e for e in entries if e is not None]
                if any(e.dtype != "F32" or e.shape not in ((), (1,)) for e in present):
                    yield Finding("fp8", f"{kind} of {layer} is not one float32", "write per-tensor scales as float32")
                elif len({e.number() for e in present}) > 1:
                    yield Finding(
                        "fp8", f"{kind} differs between {', '.join(group)} of {layer}, which engines fuse",
                        "quantise them with the largest of the scales",
                    )  # fmt: skip


# ---- the target


def _target(folder: Folder) -> Iterator[Finding]:
    base, config = folder.base, folder.config
    if base is None:
        return
    found, needed = config.get("max_position_embeddings"), base.get("max_position_embeddings")
    if needed is not None and (found is None or found < needed):
        yield Finding(
            "max_position_embeddings", f"max_position_embeddings is {found}, the target's is {needed}: longer contexts "
            "are cut off or read beyond the rotary table", f"write at least {needed}",
        )  # fmt: skip
    if base.get("vocab_size") not in (None, config["vocab_size"]):
        yield Finding(
            "vocab_size", f"vocab_size is {config['vocab_size']}, the target's is {base['vocab_size']}",
            "write the target's true vocabulary, without padding",
        )  # fmt: skip
    if base.get("hidden_size") not in (None, config["hidden_size"]) and not config.get("target_hidden_size"):
        yield Finding(
            "target_hidden_size",
            f"the target's hidden size is {base['hidden_size']}, the draft's {config['hidden_size']}",
            "write target_hidden_size",
        )  # fmt: skip


def _embedding(folder: Folder) -> Iterator[Finding]:
    own = folder.config.get("target_hidden_size") not in (None, folder.config["hidden_size"])
    if own and "embed_tokens.weight" not in folder.tensors:
        yield Finding(
            "embedding", "target_hidden_size differs from hidden_size, but embed_tokens.weight is missing",
            "write the draft's own embedding",
        )  # fmt: skip
    elif not own and "embed_tokens.weight" in folder.tensors:
        yield Finding(
            "embedding", "the folder holds embed_tokens.weight; vLLM uses it unless it equals the target's, SGLang and "
            "TensorRT-LLM use the target's", "leave it out unless it is the target's, bit for bit", warning=True,
        )  # fmt: skip
