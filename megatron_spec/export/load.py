"""Loading of drafts in any known format, and of fp8 bases, under any parallel layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron_spec.base.ends import EndsOnly
from megatron_spec.base.model import FrozenBase
from megatron_spec.checkpoint.base_import import BaseReference, inspect_base, load_base, load_ends
from megatron_spec.checkpoint.fingerprint import fingerprint
from megatron_spec.checkpoint.huggingface import HuggingFaceWeights, load_huggingface, weight_files
from megatron_spec.config import LOCAL, BaseConfig, BaseLayers, QuantConfig, QuantFormat, UserError
from megatron_spec.config.structure import draft_tensors
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.contract import Draft
from megatron_spec.drafts.own import check_tensors
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export.common import shard
from megatron_spec.export.formats import Reading, read_draft
from megatron_spec.families import parse_base_config
from megatron_spec.families.names import EVERYTHING
from megatron_spec.families.rules import name_rules
from megatron_spec.planning.paths import Paths
from megatron_spec.quantization import nvfp4
from megatron_spec.quantization.attach import KV_PLACE, attach_quantizers, input_place, load_base_amax
from megatron_spec.quantization.rounding import amax_of, dequantize, quantize
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import read_object
from megatron_spec.runtime.hub import model_folder

log = logging.getLogger(__name__)

_FP8 = "hf_quant_config.json"
_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")
"""ModelOpt's names of the supported quantisation algorithms."""
_SCALES = ("_scale", "_scale_inv", "_scale_2")
_EMBEDDING_ROWS = 8192
"""Rows compared at a time."""
_BY_DRAFT_ID = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Parameters with a row for each token of the draft vocabulary."""
_SAID = {"embed_tokens": "embedding", "lm_head": "LM head"}


class ExportedScale(nn.Module):
    """Input quantiser of an exported linear: rounds to E4M3 with the scale from the file."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """x rounded, in its shape and dtype."""
        return dequantize(quantize(x, self.scale), self.scale, x.dtype)


class StoredTensors:
    """The tensors of a `Reading` by parameter name, dequantised."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._files: dict[Path, Any] = {}
        ids = reading.target_ids
        self.order: Tensor | None = None
        if ids is None:
            self.vocab = DraftVocab.full(reading.config.vocab_size)
        else:
            self.order = torch.tensor(ids).argsort()
            self.vocab = DraftVocab(torch.tensor(ids)[self.order], reading.config.vocab_size)

    def stored(self, name: str) -> Tensor:
        """A tensor of the folder as stored, on the CPU."""
        entry = self.reading.source.entries[name]
        if entry.tensor is not None:
            tensor: Tensor = entry.tensor
            return tensor
        if entry.path not in self._files:
            self._files[entry.path] = safe_open(str(entry.path), framework="pt")
        return self._files[entry.path].get_tensor(entry.name)  # type: ignore[no-any-return]

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the folder in `dtype`; fp8 and nvfp4 are dequantised."""
        tensor, stem = self.stored(name), name.removesuffix(".weight")
        if tensor.dtype == torch.uint8:
            scales = self.stored(f"{stem}.weight_scale"), self.stored(f"{stem}.weight_scale_2")
            return nvfp4.decode(nvfp4.unpack(tensor), *scales, dtype)
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantize(tensor, self.stored(f"{stem}.weight_scale").reshape(()), dtype)
        return tensor.to(dtype)

    def parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole parameter of the draft; rows of the LM head in the order of the draft vocabulary."""
        stored = self.reading.names[name]
        if stored is None:
            return torch.zeros(draft_tensors(self.reading.config)[name].shape, dtype=dtype)
        tensor = self.weight(stored, dtype)
        if name == "mask_hidden":  # one vector, in whatever shape
            return tensor.reshape(draft_tensors(self.reading.config)[name].shape)
        return tensor if self.order is None or name not in _BY_DRAFT_ID else tensor[self.order]


def open_draft(folder: Path | str, reference: BaseReference) -> Reading:
    """Open the draft in a folder of any known format, for its base.

    Reads tensor names, and compares an embedding and an LM head that are copies of the target's.

    Raises UserError for a folder that is not a draft, that cannot be read completely, or that does not fit the base.
    """
    reading = read_draft(Path(folder), reference.config)
    stored = reading.names.get("embed_tokens.weight")
    config = reading.config
    if config.own_embed_tokens and stored is not None:
        if _is_target(reading, stored, "embed_tokens", reference):
            reading.without_embedding("the target's embedding")
        return reading
    for stored, name in reading.copies.items():
        if reference.kind == "hf" and not _is_target(reading, stored, name, reference):
            raise UserError(
                f"{folder}: {stored} is not the target's {_SAID[name]}, which engines use for a draft of this kind: "
                "use the target that the draft was trained for"
            )
    return reading


def _is_target(reading: Reading, stored: str, name: str, reference: BaseReference) -> bool:
    """True when the tensor is the base's 'embed_tokens' or 'lm_head', up to rounding to its dtype."""
    if reference.kind != "hf":
        return False
    mine = StoredTensors(reading).stored(stored)
    with HuggingFaceWeights(Path(reference.path)) as weights:
        tied = name == "lm_head" and "lm_head.weight" not in weights.names
        name = "lm_head.weight" if name == "lm_head" and not tied else "model.embed_tokens.weight"
        if name not in weights.names or weights.shape(name) != tuple(mine.shape):
            return False
        for start in range(0, len(mine), _EMBEDDING_ROWS):
            stop = min(start + _EMBEDDING_ROWS, len(mine))
            if not torch.equal(weights.read(name, 0, start, stop).to(mine.dtype), mine[start:stop]):
                return False
    return True


def load_draft(
    reading: Reading, world: World, dtype: torch.dtype = torch.float32, paths: Paths | None = None,
    draft_class: type[Draft] | None = None,
) -> Draft:  # fmt: skip
    """Build a draft with the weights of a folder; fp8 linears round their inputs as engines do.

    Args:
        paths, draft_class: see `build_draft`; the class must have the tensors of the folder, and no others.
    """
    tensors = StoredTensors(reading)
    draft: Draft = build_draft(reading.config, tensors.vocab, world, dtype, paths, draft_class)
    check_tensors(draft, "start from a published draft")
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            whole = tensors.parameter(name, parameter.dtype)
            if not whole.isfinite().all():
                stored = f"{reading.source.folder}: {reading.names[name]}"
                raise UserError(f"{stored} has values that are NaN or infinite: copy the folder again, or retrain")
            parameter.copy_(shard(whole, parameter, world.tp))
    modules = dict(draft.named_modules())
    for name, stem in reading.quantised().items():
        if f"{stem}.input_scale" in reading.source.entries:
            linear: Any = modules[name]
            linear.input_quantizer = ExportedScale(tensors.stored(f"{stem}.input_scale").reshape(()).to(world.device))
    return draft


def load_exported_draft(
    folder: Path | str, base: BaseConfig, world: World, dtype: torch.dtype = torch.float32
) -> Draft:
    """`load_draft` that takes an embedding in the folder for the draft's own, without comparing it to the target's."""
    return load_draft(read_draft(Path(folder), base), world, dtype)


class _QuantisedWeights(HuggingFaceWeights):
    """Tensors of a base in fp8 (one scale each) or nvfp4, multiplied by their scales."""

    def check_names(self, expected: dict[str, tuple[int, ...]], ignorable: Callable[[str], bool]) -> None:
        """As in the parent class, but allowing scales and nvfp4's packed shapes (two numbers per byte)."""
        every = self._handle_of
        self._handle_of = {n: h for n, h in every.items() if not n.endswith(_SCALES)}
        packed = {n: (*shape[:-1], shape[-1] // 2) for n, shape in expected.items() if self._is_packed(n)}
        try:
            super().check_names({**expected, **packed}, ignorable)
        finally:
            self._handle_of = every

    def _is_packed(self, name: str) -> bool:
        return name in self._handle_of and self._handle_of[name].get_slice(name).get_dtype() == "U8"

    def has_scales(self, name: str) -> bool:
        """True for every name: scales are checked when they are read."""
        return True

    def scalar(self, name: str) -> float | None:
        """A scale, or None if there is none. Raises UserError for scales per channel or block."""
        if name not in self._handle_of:
            return None
        scale: Tensor = self._handle_of[name].get_tensor(name)
        if scale.numel() != 1:
            raise UserError(f"{self.folder}: {name} is {list(scale.shape)}: only fp8 with one scale per tensor is read")
        return float(scale)

    def read(self, name: str, dim: int, start: int, stop: int, outer: slice = EVERYTHING) -> Tensor:
        """See HuggingFaceWeights."""
        stem = name.removesuffix(".weight")
        if self._is_packed(name):
            parts = [self._handle_of[n].get_tensor(n) for n in (name, f"{stem}.weight_scale", f"{stem}.weight_scale_2")]
            index = [outer] + [slice(None)] * dim if dim else [EVERYTHING]
            index[dim] = slice(start, stop)
            return nvfp4.decode(nvfp4.unpack(parts[0]), parts[1], parts[2], torch.float32)[tuple(index)]
        tensor = super().read(name, dim, start, stop, outer)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        scale = self.scalar(f"{stem}.weight_scale")
        if scale is None:
            raise UserError(f"{self.folder}: {name} is in fp8 without {stem}.weight_scale")
        return dequantize(tensor, torch.tensor(scale), torch.float32)


def inspect_exported_base(path: Path | str) -> BaseReference:
    """`inspect_base` that also accepts a base in ModelOpt's fp8 or nvfp4, as export.py writes it. Same errors."""
    folder = model_folder(path).absolute()
    if not (folder / "config.json").is_file() or _quantization(folder) is None:
        return inspect_base(folder)
    raw = {k: v for k, v in read_object(folder / "config.json").items() if k != "quantization_config"}
    content = fingerprint((folder / "config.json").read_bytes(), weight_files(folder))
    return BaseReference(str(folder), "hf", content, parse_base_config(raw, str(folder / "config.json")))


def _quantization(folder: Path) -> dict[str, Any] | None:
    """Quantisation of a base by ModelOpt or this package, from hf_quant_config.json or config.json; else None.

    Raises UserError for an unknown algorithm.
    """
    found: dict[str, Any] | None = None
    if (folder / _FP8).is_file():
        found = read_object(folder / _FP8).get("quantization")
        if not isinstance(found, dict):
            raise UserError(f"{folder / _FP8}: expected an object `quantization`")
    elif (folder / "config.json").is_file():
        inside = read_object(folder / "config.json").get("quantization_config") or {}
        if isinstance(inside, dict) and inside.get("quant_method") == "modelopt":
            found = {**inside, "exclude_modules": inside.get("ignore")}
            found["kv_cache_quant_algo"] = "FP8" if inside.get("kv_cache_scheme") else None
    if found is not None and found.get("quant_algo") not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise UserError(f"{folder}: found quant_algo {found.get('quant_algo')!r}, expected one of {known}")
    return found


def load_exported_base(
    reference: BaseReference, world: World, capture_layer_ids: Sequence[int] = (), dtype: torch.dtype = torch.float32,
    layers: BaseLayers = LOCAL, paths: Paths | None = None,
) -> FrozenBase:  # fmt: skip
    """`load_base` for quantised bases: an fp8 base quantises its inputs as engines do, an nvfp4 base is dequantised.

    Raises UserError as `load_base` does.
    """
    quantization = _quantization(Path(reference.path)) if reference.kind == "hf" else None
    if quantization is None:
        return load_base(reference, world, capture_layer_ids, dtype, layers, paths)
    if layers.recipe:
        raise UserError(f"--fp8-format: {reference.path} is quantised already: leave the flag out")
    base = FrozenBase.build(reference.config, world, capture_layer_ids, dtype, None, layers, paths)
    load_huggingface(base, Path(reference.path), _QuantisedWeights)
    if quantization["quant_algo"] != "FP8":
        log.info("%s: %s weights are dequantised; inputs are not rounded", reference.path, quantization["quant_algo"])
        return base
    kv_cache: QuantFormat = "fp8" if quantization.get("kv_cache_quant_algo") else "none"
    exclude = tuple(quantization.get("exclude_modules") or ())
    attach_quantizers(base, QuantConfig(draft="none", exclude=exclude, kv_cache=kv_cache), "base")
    load_base_amax(base, _ranges(reference, kv_cache == "fp8"))
    base.quantised_on_disk = True
    return base


def load_exported_ends(reference: BaseReference, world: World, dtype: torch.dtype = torch.float32) -> EndsOnly:
    """`load_ends` that also accepts a quantised base, whose embedding and LM head are in high precision."""
    quantised = reference.kind == "hf" and _quantization(Path(reference.path)) is not None
    return load_ends(reference, world, dtype, _QuantisedWeights if quantised else HuggingFaceWeights)


def _ranges(reference: BaseReference, with_kv: bool) -> dict[str, float]:
    """Ranges of an exported fp8 base by quantiser name."""
    found: dict[str, float] = {}
    weights = _QuantisedWeights(Path(reference.path))
    with weights:
        for rule in name_rules(reference.config):
            stems = [
                name.removesuffix(".weight") for name in rule.hf
            ]  # fused linears share the largest scale, as in engines
            place = rule.core.removeprefix("decoder.").removesuffix(".weight")
            for name, kind in (("weight_scale", "weight"), ("input_scale", "input")):
                scales = [x for stem in stems if (x := weights.scalar(f"{stem}.{name}")) is not None]
                if scales:
                    where = place if kind == "weight" else input_place(place)
                    found[f"{where}.{kind}"] = float(amax_of(torch.tensor(max(scales))))
        for n in range(reference.config.num_layers if with_kv else 0):
            for which in ("k", "v"):
                scale = weights.scalar(f"model.layers.{n}.self_attn.{which}_proj.{which}_scale")
                if scale is None:
                    raise UserError(f"{reference.path}: declares an fp8 KV cache, but layer {n} has no {which}_scale")
                found[f"layers.{n}.{KV_PLACE}.{which}"] = float(amax_of(torch.tensor(scale)))
    return found
