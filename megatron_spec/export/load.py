"""Drafts of any known format, and fp8 bases, from folders, under any parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron_spec.base.model import FrozenBase
from megatron_spec.checkpoint.base_import import BaseReference, inspect_base, load_base
from megatron_spec.checkpoint.fingerprint import fingerprint
from megatron_spec.checkpoint.huggingface import HuggingFaceWeights, load_huggingface, weight_files
from megatron_spec.config import BaseConfig, EagleConfig, QuantConfig, QuantFormat, UserError
from megatron_spec.config.structure import draft_tensors
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.contract import Draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export.common import shard
from megatron_spec.export.formats import Reading, read_draft
from megatron_spec.families import name_rules, parse_base_config
from megatron_spec.families.names import EVERYTHING, NameRule
from megatron_spec.quantization import nvfp4
from megatron_spec.quantization.attach import KV_PLACE, attach_quantizers, input_place, load_base_amax
from megatron_spec.quantization.rounding import amax_of, dequantize, quantize
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import read_json
from megatron_spec.runtime.hub import model_folder

_FP8 = "hf_quant_config.json"
_EMBEDDING_ROWS = 8192
"""Rows of an embedding compared at a time."""


class ExportedScale(nn.Module):
    """Input quantiser of an exported linear: rounds to E4M3 under the scale of the file."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """x rounded, in its shape and dtype."""
        return dequantize(quantize(x, self.scale), self.scale, x.dtype)


class StoredTensors:
    """The tensors of a draft that was read, under the names of its module, as it computes with them."""

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
        """A tensor of the folder as it is there, on the CPU."""
        entry = self.reading.source.entries[name]
        if entry.tensor is not None:
            tensor: Tensor = entry.tensor
            return tensor
        if entry.path not in self._files:
            self._files[entry.path] = safe_open(str(entry.path), framework="pt")
        return self._files[entry.path].get_tensor(entry.name)  # type: ignore[no-any-return]

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the folder in `dtype`; fp8 and nvfp4 are multiplied by their scales."""
        tensor, stem = self.stored(name), name.removesuffix(".weight")
        if tensor.dtype == torch.uint8:
            scales = self.stored(f"{stem}.weight_scale"), self.stored(f"{stem}.weight_scale_2")
            return nvfp4.decode(nvfp4.unpack(tensor), *scales, dtype)
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantize(tensor, self.stored(f"{stem}.weight_scale").reshape(()), dtype)
        return tensor.to(dtype)

    def parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter of the draft, whole; rows of the head in the order of the draft vocabulary."""
        stored = self.reading.names[name]
        if stored is None:
            return torch.zeros(draft_tensors(self.reading.config)[name].shape, dtype=dtype)
        tensor = self.weight(stored, dtype)
        return tensor if self.order is None or name != "lm_head.weight" else tensor[self.order]


def open_draft(folder: Path | str, reference: BaseReference) -> Reading:
    """The draft in a folder of any known format, beside its base. Reads its names, and its embedding where it has one.

    Raises UserError for a folder that is no draft, that cannot be read whole, or that does not fit the base.
    """
    reading = read_draft(Path(folder), reference.config)
    stored = reading.names.get("embed_tokens.weight")
    config = reading.config
    if isinstance(config, EagleConfig) and config.own_embed_tokens and stored is not None:
        if _is_embedding_of(reading, stored, reference):
            reading.without_embedding("the target's embedding")
        return reading
    spare = [name for name, why in reading.unused.items() if "target's embedding" in why]
    if spare and reference.kind == "hf" and not _is_embedding_of(reading, spare[0], reference):
        raise UserError(
            f"{folder}: {spare[0]} is not the target's embedding, which engines use for a draft of this kind: take the "
            "target that the draft was trained for"
        )
    return reading


def _is_embedding_of(reading: Reading, stored: str, reference: BaseReference) -> bool:
    """True when the tensor is the base's embedding, up to rounding to its dtype."""
    name = "model.embed_tokens.weight"
    if reference.kind != "hf":
        return False
    mine = StoredTensors(reading).stored(stored)
    with HuggingFaceWeights(Path(reference.path)) as weights:
        if name not in weights.names:
            return False
        for start in range(0, len(mine), _EMBEDDING_ROWS):
            stop = min(start + _EMBEDDING_ROWS, len(mine))
            if not torch.equal(weights.read(name, 0, start, stop).to(mine.dtype), mine[start:stop]):
                return False
    return True


def load_draft(reading: Reading, world: World, dtype: torch.dtype = torch.float32) -> Draft:
    """A draft with the weights of a folder; fp8 linears round their inputs as an engine does."""
    tensors = StoredTensors(reading)
    draft: Draft = build_draft(reading.config, tensors.vocab, world, dtype)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(shard(tensors.parameter(name, parameter.dtype), parameter, world.tp))
    modules = dict(draft.named_modules())
    for name, stem in reading.quantised().items():
        if f"{stem}.input_scale" in reading.source.entries:
            linear: Any = modules[name]
            linear.input_quantizer = ExportedScale(tensors.stored(f"{stem}.input_scale").reshape(()).to(world.device))
    return draft


def load_exported_draft(
    folder: Path | str, base: BaseConfig, world: World, dtype: torch.dtype = torch.float32
) -> Draft:
    """`load_draft` of a folder that carries no copy of its target's embedding, or one that it may use as its own."""
    return load_draft(read_draft(Path(folder), base), world, dtype)


class _Fp8Weights(HuggingFaceWeights):
    """Tensors of an fp8 folder, multiplied by their scales."""

    def check(self, rules: list[NameRule], config: BaseConfig) -> None:
        """As for any folder, the scales apart."""
        every = self._handle_of
        self._handle_of = {n: h for n, h in every.items() if not n.endswith(("_scale", "_scale_inv"))}
        try:
            super().check(rules, config)
        finally:
            self._handle_of = every

    def has_scales(self, name: str) -> bool:
        """They are per tensor, and `read` finds them."""
        return True

    def scalar(self, name: str) -> float | None:
        """A scale; None without one."""
        return float(self._handle_of[name].get_tensor(name)) if name in self._handle_of else None

    def read(self, name: str, dim: int, start: int, stop: int, outer: slice = EVERYTHING) -> Tensor:
        """See HuggingFaceWeights."""
        tensor, scale = (
            super().read(name, dim, start, stop, outer),
            self.scalar(f"{name.removesuffix('.weight')}.weight_scale"),
        )
        return tensor if scale is None else dequantize(tensor, torch.tensor(scale), torch.float32)


def inspect_exported_base(path: Path | str) -> BaseReference:
    """`inspect_base`, also for a base that export.py wrote in fp8. Raises UserError as that does."""
    folder = model_folder(path).absolute()
    if not (folder / _FP8).is_file() or not (folder / "config.json").is_file():
        return inspect_base(folder)
    raw = {k: v for k, v in read_json(folder / "config.json").items() if k != "quantization_config"}
    content = fingerprint((folder / "config.json").read_bytes(), weight_files(folder))
    return BaseReference(str(folder), "hf", content, parse_base_config(raw, str(folder / "config.json")))


def load_exported_base(
    reference: BaseReference, world: World, capture_layer_ids: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> FrozenBase:
    """`load_base`, and for an fp8 folder also the quantisers of its inputs, as engines apply them.

    Raises UserError as `load_base` does.
    """
    metadata = Path(reference.path) / _FP8
    if reference.kind != "hf" or not metadata.is_file():
        return load_base(reference, world, capture_layer_ids, dtype)
    quantization = read_json(metadata)["quantization"]
    if quantization.get("quant_algo") != "FP8":
        raise UserError(f"{metadata}: found quant_algo {quantization.get('quant_algo')!r}, expected 'FP8'")
    base = FrozenBase.build(reference.config, world, capture_layer_ids, dtype)
    load_huggingface(base, Path(reference.path), _Fp8Weights)
    kv_cache: QuantFormat = "fp8" if quantization.get("kv_cache_quant_algo") else "none"
    exclude = tuple(quantization.get("exclude_modules") or ())
    attach_quantizers(base, QuantConfig(draft="none", exclude=exclude, kv_cache=kv_cache), "base")
    load_base_amax(base, _ranges(reference, kv_cache == "fp8"))
    return base


def _ranges(reference: BaseReference, with_kv: bool) -> dict[str, float]:
    """Ranges of an exported fp8 base under the names of its quantisers."""
    found: dict[str, float] = {}
    weights = _Fp8Weights(Path(reference.path))
    with weights:
        for rule in name_rules(reference.config):
            stem = rule.hf[0].removesuffix(".weight")
            place = rule.core.removeprefix("decoder.").removesuffix(".weight")
            for name, kind in (("weight_scale", "weight"), ("input_scale", "input")):
                if (scale := weights.scalar(f"{stem}.{name}")) is not None:
                    where = place if kind == "weight" else input_place(place)
                    found[f"{where}.{kind}"] = float(amax_of(torch.tensor(scale)))
        for n in range(reference.config.num_layers if with_kv else 0):
            for which in ("k", "v"):
                scale = weights.scalar(f"model.layers.{n}.self_attn.{which}_proj.{which}_scale")
                if scale is None:
                    raise UserError(
                        f"{reference.path}: says that its KV cache is fp8, but layer {n} has no {which}_scale"
                    )
                found[f"layers.{n}.{KV_PLACE}.{which}"] = float(amax_of(torch.tensor(scale)))
    return found
