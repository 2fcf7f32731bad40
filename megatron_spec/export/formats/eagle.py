"""EAGLE-1, EAGLE-3 and MTP drafts of ModelOpt, SpecForge, speculators, SafeAILab, AngelSlim, vLLM, SGLang. No torch.

H draft hidden, Ht target hidden, K captured layers, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_spec.config import BaseConfig, EagleConfig, UserError
from megatron_spec.config.presets import default_capture_ids
from megatron_spec.config.rope import read_rope
from megatron_spec.config.structure import draft_tensors
from megatron_spec.export import native_mtp
from megatron_spec.export.formats.keys import flatten
from megatron_spec.export.formats.options import COUNT_KEYS, MASK_TOKEN_KEYS, PARALLEL_KEYS, check_options, draft_window
from megatron_spec.export.formats.reading import (
    Problem,
    Reading,
    Source,
    checked,
    integer,
    meaningless,
)
from megatron_spec.export.formats.vocabulary import read_vocabulary

OPTIONS = ("norm_before_fc", "fc_norm", "norm_output")
"""Keys of config.json that distinguish EAGLE-3.1 from EAGLE-3; the last one is also an option of MTP."""
CAPTURE_KEY = "eagle_aux_hidden_state_layer_ids"
DEFAULT_CAPTURES = 3
"""Captures of a draft whose config.json names none."""

_LAYER = re.compile(
    r"^(?:model\.)?(?:midlayer\.(?:(?P<mid>\d+)\.)?|layers\.(?P<layer>\d+)\.|additional_layers\.(?P<more>\d+)\.)(?P<rest>.+)$"
)
_RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
"""speculators' names for EAGLE-1 tensors."""
_REASONS = {
    "input_layernorm": "an EAGLE-1 draft has no such tensor: engines have no norm before its first layer",
    "lm_head.weight": "this draft uses the target's LM head; a head of its own is not supported",
    "hnorm": "norms before fc of an EAGLE-1 draft (HASS) are not supported",
    "enorm": "norms before fc of an EAGLE-1 draft (HASS) are not supported",
    "norm.weight": "an EAGLE-1 draft has no final norm",
    "kv_a_proj": "drafts with latent attention are not supported",
    "experts.": "drafts with a mixture of experts are not supported",
    "parallel_draft_heads": "parallel draft heads are not supported: export the draft without them",
    "medusa": "parallel draft heads are not supported: export the draft without them",
    "sinks": "attention sinks in a draft are not supported",
}

_OF_EAGLE1 = {"input_layernorm", "norm.weight", "enorm", "hnorm"}
"""Those of `_REASONS` that hold for EAGLE-1 alone."""


def _nested(raw: dict[str, Any], key: str) -> Any:
    """Value of a key in `eagle_config`, or None."""
    inside = raw.get("eagle_config")
    return inside.get(key) if isinstance(inside, dict) else None


def capture_ids(
    source: Source, raw: dict[str, Any], shape: tuple[int, ...], target_hidden: int, base: BaseConfig | None
) -> tuple[int, ...]:
    """Indices of captured base layers, from 0. Top level: 'state after k layers'; eagle_config: 'output of layer j'.

    Args:
        shape: shape of fc.weight; () when it is missing.

    Raises DraftProblems when ids, fc and the target's hidden size disagree.
    """
    top, nested = raw.get(CAPTURE_KEY) or None, _nested(raw, CAPTURE_KEY) or None
    if len(shape) != 2 or shape[1] % target_hidden:
        found = f"fc.weight is {list(shape)}: its width is no multiple of the target's hidden size {target_hidden}"
        fix = "write target_hidden_size when the target's hidden size is not the draft's"
        raise source.problem("shape" if shape else "missing", found if shape else "missing fc.weight", fix)
    count = shape[1] // target_hidden
    for key in COUNT_KEYS:
        if raw.get(key) not in (None, count):
            found = f"{key} is {raw[key]!r}, but fc reads {count} captures"
            raise source.problem("capture_ids", found, "make them agree")
    for ids in (top, nested):
        if ids is not None and not (isinstance(ids, list) and all(isinstance(j, int) for j in ids)):
            raise source.problem("capture_ids", f"{CAPTURE_KEY} is {ids!r}", "write a list of layers")
    if top is not None and nested is not None and [j + 1 for j in nested] != top:
        found = f"capture ids disagree: top-level ids {top} must be the nested ids {nested} plus one"
        fix = "top level: 'state after k layers'; eagle_config: 'output of layer j, from 0', k = j + 1"
        raise source.problem("capture_ids", found, fix)
    ids = nested if nested is not None else [k - 1 for k in top] if top is not None else None
    if ids is not None and len(ids) != count:
        found = f"{len(ids)} layer ids, but fc reads {count} captures"
        raise source.problem("capture_ids", found, "make them agree")
    if ids is not None:
        return tuple(ids)
    if count != DEFAULT_CAPTURES:
        found = f"fc reads {count} captures, but no layer ids are given"
        raise source.problem("capture_ids", found, f"write {CAPTURE_KEY}, in both places")
    return default_capture_ids(base.num_layers) if base is not None else (0, 1, 2)


class OwnModule:
    """Reader of a base's own prediction module under the names of the base's files (`export.native_mtp`)."""

    def matches(self, source: Source) -> bool:
        """True for a base's config.json with only the module's tensors."""
        return native_mtp.is_own_module(source.raw) and "model.embed_tokens.weight" not in source.entries

    def read(self, source: Source, base: BaseConfig | None) -> Reading:
        """See `Format`."""
        config = native_mtp.read_config_json(source.raw)
        names: dict[str, str | None] = {name: native_mtp.file_name(config, name) for name in draft_tensors(config)}
        copies = dict.fromkeys(native_mtp.end_shapes(config), "a copy of the target's")
        unused = {name: why for name, why in copies.items() if name in source.entries}
        return checked(Reading(source, config, names, unused | meaningless(source.entries)), base)


class Eagle:
    """Reader of EAGLE-1, EAGLE-3 and MTP under every published naming."""

    def matches(self, source: Source) -> bool:
        """Match by names of architectures or tensors."""
        named = any(part in source.architectures for part in ("Eagle", "EAGLE", "MTP"))
        stems = {name.removeprefix("model.") for name in source.entries}
        inside = bool({"fc.weight", "fusion_fc.weight"} & stems) or any("eh_proj" in name for name in stems)
        return named or "speculators_model_type" in source.raw or inside

    def read(self, source: Source, base: BaseConfig | None) -> Reading:
        """See `Format`."""
        return _Folder(source, base).read()


def _canonical(source: Source) -> dict[str, str]:
    """Name without prefixes, layers numbered from 0 -> name in the folder. Duplicates are left out."""
    found: dict[str, str] = {}
    for stored in sorted(source.entries):
        name = stored
        for theirs, ours in _RENAMED.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        if match := _LAYER.match(name):
            number = match["mid"] or match["layer"] or (int(match["more"]) + 1 if match["more"] else 0)
            name = f"layers.{number}.{match['rest']}"
        found.setdefault(name.removeprefix("model."), stored)
    return found


class _Folder:
    """Translation of one folder from published names to those of this package."""

    def __init__(self, source: Source, base: BaseConfig | None) -> None:
        self.source, self.base, self.raw = source, base, flatten(source.raw)
        self.found = _canonical(source)
        self.problems: list[Problem] = []
        self.unused = meaningless(source.entries)
        kind = str(source.raw.get("speculators_model_type", "eagle3"))
        if kind not in ("eagle", "eagle3", "peagle"):
            raise UserError(
                f"{source.folder}: speculators_model_type {kind!r} is not supported: expected eagle, eagle3, "
                "peagle, dflash or dspark"
            )
        self.kind = self._kind()
        marks = [key for key in PARALLEL_KEYS if self.raw.get(key) not in (None, False)]
        self.parallel = self.kind == "eagle3" and (kind == "peagle" or "mask_hidden" in self.found or bool(marks))

    def _kind(self) -> str:
        if "MTP" in self.source.architectures or any("eh_proj" in name for name in self.found):
            return "eagle-mtp"
        marks = {"layers.0.hidden_norm.weight", "d2t", "mask_hidden"} & self.found.keys()
        mid = any(stored.removeprefix("model.").startswith("midlayer") for stored in self.found.values())
        model_type = self.source.raw.get("speculators_model_type")
        named = "Eagle3" in self.source.architectures or model_type in ("eagle3", "peagle")
        return "eagle3" if marks or mid or named else "eagle1"

    # ---- sizes and options

    def _layers(self) -> int:
        """Number of decoder layers. config.json of SafeAILab, and EAGLE-1's of speculators, may give the target's."""
        stored = 1 + max((int(n.split(".")[1]) for n in self.found if n.startswith("layers.")), default=0)
        configured = integer(self.raw, "num_hidden_layers", self.source, stored)
        foreign = "Eagle" not in self.source.architectures and self.kind != "eagle-mtp"
        foreign |= self.source.raw.get("speculators_model_type") == "eagle"  # has one layer, whatever it says
        return stored if stored == 1 and foreign else configured

    def _shapes(self) -> dict[str, Any]:
        raw, source = self.raw, self.source
        if self.kind == "eagle-mtp" and "layers.0.eh_proj.weight" not in self.found:
            there = next((n for n in sorted(source.entries) if "eh_proj" in n or "mtp" in n), "no eh_proj")
            found = f"a prediction module under other names: found {there}, expected layers.0.eh_proj.weight"
            fix = "a module that a base ships is read for DeepSeek-V3 alone: convert_model.py --mtp-from-base"
            raise source.problem("missing", found, fix)
        H, heads = integer(raw, "hidden_size", source), integer(raw, "num_attention_heads", source)
        embeds = self.base is not None and "embed_tokens.weight" in self.found  # only then may the widths differ
        base_width = self.base.hidden_size if self.base is not None and embeds else H
        target = integer(raw, "target_hidden_size", source, base_width if self.kind == "eagle3" else H)
        V = integer(raw, "vocab_size", source)
        head = self._shape("lm_head.weight")
        rows = head[0] if head and self.kind == "eagle3" else V
        return dict(
            hidden_size=H,
            intermediate_size=integer(raw, "intermediate_size", source),
            num_attention_heads=heads,
            num_key_value_heads=integer(raw, "num_key_value_heads", source, heads),
            head_dim=integer(raw, "head_dim", source, H // heads),
            vocab_size=V,
            draft_vocab_size=integer(raw, "draft_vocab_size", source, rows) if self.kind == "eagle3" else V,
            target_hidden_size=target,
            max_position_embeddings=integer(raw, "max_position_embeddings", source, 2048),
            num_hidden_layers=self._layers(),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=read_rope(self.raw, str(self.source.folder / "config.json")),
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.source.entries[self.found[name]].shape if name in self.found else ()

    def _flag(self, name: str) -> bool:
        """An option at the top level or in eagle_config."""
        inside, top = _nested(self.raw, name), self.raw.get(name)
        for value in (top, inside):
            if value is not None and not isinstance(value, bool):
                found = f"config.json: {name} is {value!r}"
                self.problems.append(Problem("config", found, "expected true or false"))
        if top is not None and inside is not None and bool(top) != bool(inside):
            found = f"config.json: top level and eagle_config disagree about {name}"
            self.problems.append(Problem("config", found, "make them agree"))
        return bool(top) or bool(inside)

    def _tensor_options(self) -> dict[str, bool]:
        """Options that the tensors themselves show."""
        names = self.found
        attention = any(re.search(r"self_attn\.[qkvo]_proj\.bias$", n) for n in names)
        mlp = any(re.search(r"mlp\.\w+_proj\.bias$", n) for n in names)
        for key, there in (("attention_bias", attention), ("mlp_bias", mlp)):
            if not there and self.raw.get(key):
                found = f"config.json says {key}, but there are no such biases"
                self.problems.append(Problem("bias", found, "make them agree"))
        fc_bias = "fc.bias" in names and any(self.source.entries[names["fc.bias"]].raw())
        if "fc.bias" in names and not fc_bias:
            self.unused[names["fc.bias"]] = "zeros"
        return {
            "attention_bias": attention,
            "mlp_bias": mlp,
            "fc_bias": fc_bias,
            "qk_norm": any(re.search(r"self_attn\.[qk]_norm\.weight$", n) for n in names),
        }

    # ---- the complete reading

    def read(self) -> Reading:
        """See `Format`."""
        values = self._shapes()
        values |= {"algorithm": self.kind, **self._tensor_options()}
        options = {name: self._flag(name) for name in (*OPTIONS, "norm_before_residual")}
        if self.kind == "eagle3":
            values |= {**options, "capture_layer_ids": self._captures(values["target_hidden_size"])}
            values["own_embed_tokens"] = "embed_tokens.weight" in self.found and not self._other_width(values)
            values["sliding_window"] = draft_window(self.raw)
            values["algorithm"] = "eagle3.1" if any(options[name] for name in OPTIONS) else "eagle3"
            if self.parallel:
                values |= {"algorithm": "p-eagle", "mask_token_id": self._mask_token()}
        elif self.kind == "eagle-mtp":
            values["norm_output"] = options["norm_output"]
        try:
            config = EagleConfig.from_dict({k: v.to_dict() if k == "rope" else v for k, v in values.items()})
        except UserError as e:
            raise self.source.problem("config", f"config.json: {e}", "correct it") from None
        kind = "p-eagle" if self.parallel else self.kind
        self.problems += check_options(self.source, self.raw, kind)
        reading = Reading(self.source, config, self._names(config), self.unused)
        if not config.reads_captures and "embed_tokens.weight" in self.found:
            reading.copy_of("embed_tokens", self.found["embed_tokens.weight"])
        self.problems += read_vocabulary(reading, self.found)
        others = set() if config.regresses_state else _OF_EAGLE1
        reasons = {part: why for part, why in _REASONS.items() if part not in others}
        return checked(reading, self.base, reasons, self.problems)

    def _mask_token(self) -> int:
        """Token id of rows yet to be drafted. Raises DraftProblems when it is missing or ambiguous."""
        given = {key: self.raw[key] for key in MASK_TOKEN_KEYS if self.raw.get(key) is not None}
        if given and all(type(token) is int for token in given.values()) and len(set(given.values())) == 1:
            return int(next(iter(given.values())))
        found = f"config.json: found mask tokens {given}" if given else "config.json names no mask token"
        fix = f'write "{MASK_TOKEN_KEYS[0]}": the id used in training; vLLM does not start without one'
        raise self.source.problem("mask_token", found, fix)

    def _captures(self, target_hidden: int) -> tuple[int, ...]:
        return capture_ids(self.source, self.raw, self._shape("fc.weight"), target_hidden, self.base)

    def _other_width(self, values: dict[str, Any]) -> bool:
        return bool(values["hidden_size"] != values["target_hidden_size"])

    def _names(self, config: EagleConfig) -> dict[str, str | None]:
        """Parameter -> tensor of the folder; missing biases count as zero."""
        self._fold_twin_norms(config)
        names: dict[str, str | None] = {}
        for name in draft_tensors(config):
            plain = re.sub(r"^midlayer\.", "layers.0.", name)
            if plain in self.found:
                names[name] = self.found[plain]
            elif name.endswith(".bias"):
                names[name] = None
        for stored in ("t2d", "verifier_norm.weight", "verifier_lm_head.weight"):
            if stored in self.found:
                self.unused[self.found[stored]] = "follows from d2t" if stored == "t2d" else "a copy of the target's"
        return names

    def _fold_twin_norms(self, config: EagleConfig) -> None:
        """Merge the names of a later EAGLE-3 layer's single input norm: input_layernorm, hidden_norm, or both."""
        for i in range(1, config.num_hidden_layers if config.reads_captures else 1):
            one, other = f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"
            if other not in self.found:
                continue
            twin = self.found[other]
            if one not in self.found:
                self.found[one] = twin
            elif self.source.entries[twin].raw() == self.source.entries[self.found[one]].raw():
                self.unused[twin] = f"the same as {self.found[one]}"
