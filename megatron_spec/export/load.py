"""Builds drafts and fp8 bases from exported folders, under any parallel layout: what is measured is what is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_spec.base.model import FrozenBase
from megatron_spec.checkpoint.base_import import BaseReference, inspect_base, load_base
from megatron_spec.checkpoint.fingerprint import fingerprint
from megatron_spec.checkpoint.huggingface import HuggingFaceWeights, load_huggingface, weight_files
from megatron_spec.config import BaseConfig, DraftConfig, MedusaConfig, QuantConfig, QuantFormat, UserError
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.contract import Draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export import layout, medusa
from megatron_spec.export.common import shard
from megatron_spec.export.native_mtp import file_name
from megatron_spec.families import name_rules, parse_base_config
from megatron_spec.families.names import EVERYTHING, NameRule
from megatron_spec.quantization import nvfp4
from megatron_spec.quantization.attach import KV_PLACE, attach_quantizers, input_place, load_base_amax
from megatron_spec.quantization.rounding import amax_of, dequantize, quantize
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import read_json

_FP8 = "hf_quant_config.json"


class ExportedScale(nn.Module):
    """Input quantiser of an exported linear: rounds to E4M3 under the scale of the file."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """x rounded, in its shape and dtype."""
        return dequantize(quantize(x, self.scale), self.scale, x.dtype)


class ExportedFolder:
    """An exported draft on disk: its configuration, its vocabulary, and its tensors one by one.

    Raises UserError when config.json or the file of tensors is missing or malformed.
    """

    def __init__(self, folder: Path | str, num_base_layers: int) -> None:
        self.folder = Path(folder)
        self.json: dict[str, Any] = read_json(self.folder / "config.json")
        self.config: layout.Exported = layout.read_config_json(self.json, num_base_layers)
        path = self.folder / layout.WEIGHTS
        if not path.is_file():
            raise UserError(f"{self.folder} holds no {layout.WEIGHTS}")
        self._file = safe_open(str(path), framework="pt")
        self.names = set(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is in the file, on the CPU."""
        return self._file.get_tensor(name)  # type: ignore[no-any-return]

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter in `dtype`; fp8 and nvfp4 are multiplied by their scales."""
        tensor = self.tensor(name)
        if tensor.dtype == torch.uint8:
            stem = name.removesuffix(".weight")
            scales = self.tensor(f"{stem}.weight_scale"), self.tensor(f"{stem}.weight_scale_2")
            return nvfp4.decode(nvfp4.unpack(tensor), *scales, dtype)
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantize(tensor, self.tensor(f"{name.removesuffix('.weight')}.weight_scale"), dtype)
        return tensor.to(dtype)

    def vocab(self) -> DraftVocab:
        """The draft vocabulary. Raises UserError when d2t and t2d are missing, contradict each other or the config."""
        V, D = self.config.vocab_size, self.config.draft_vocab_size
        if not {"d2t", "t2d"} & self.names:
            if D < V:
                raise UserError(f"{self.folder}: draft_vocab_size {D} < vocab_size {V}, but d2t and t2d are missing")
            return DraftVocab.full(V)
        if not {"d2t", "t2d"} <= self.names:
            raise UserError(f"{self.folder}: d2t and t2d come together, found only one of them")
        vocab = DraftVocab.from_tensors(self.tensor("d2t"), self.tensor("t2d"))
        if (len(vocab), vocab.vocab_size) != (D, V):
            raise UserError(
                f"{self.folder}: d2t maps {len(vocab)} of {vocab.vocab_size} tokens, config.json says {D} of {V}"
            )
        return vocab


def read_exported_config(folder: Path | str, num_base_layers: int) -> DraftConfig:
    """Configuration of an exported draft of any kind. Raises UserError when there is none, or a malformed one."""
    raw = read_json(Path(folder) / "config.json")
    if raw.get("model_type") == "medusa":
        try:
            sizes = (raw["medusa_num_heads"], raw["hidden_size"], raw["vocab_size"], raw["medusa_num_layers"])
        except KeyError as e:
            raise UserError(f"{folder}/config.json: missing {e.args[0]}") from None
        return MedusaConfig(*sizes)
    try:
        return layout.read_config_json(raw, num_base_layers)
    except UserError as e:
        raise UserError(f"{folder}/{e}") from None


def load_exported_draft(
    folder: Path | str, num_base_layers: int, world: World, dtype: torch.dtype = torch.float32
) -> Draft:
    """A draft with the weights of an exported folder; fp8 linears round their inputs as an engine does.

    Raises UserError on a missing tensor.
    """
    config = read_exported_config(folder, num_base_layers)
    if isinstance(config, MedusaConfig):
        return _load_medusa(Path(folder), config, world, dtype)
    exported = ExportedFolder(folder, num_base_layers)
    draft = build_draft(exported.config, exported.vocab(), world, dtype)
    parameters = {file_name(exported.config, name): p for name, p in draft.named_parameters()}
    missing = sorted(parameters.keys() - exported.names)
    if missing:
        raise UserError(f"{folder}: missing {', '.join(missing[:8])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard(exported.weight(name, parameter.dtype), parameter, world.tp))
    for name, module in draft.named_modules():
        if f"{name}.input_scale" in exported.names:
            linear: Any = module
            linear.input_quantizer = ExportedScale(exported.tensor(f"{name}.input_scale").to(world.device))
    return draft


def _load_medusa(folder: Path, config: MedusaConfig, world: World, dtype: torch.dtype) -> Draft:
    """Every head has a head of its own in the file, also where it was trained with the base's."""
    draft: Draft = build_draft(config, DraftVocab.full(config.vocab_size), world, dtype)
    if not (folder / medusa.WEIGHTS).is_file():
        raise UserError(f"{folder} holds no {medusa.WEIGHTS}")
    tensors = load_file(folder / medusa.WEIGHTS)
    missing = sorted(medusa.expected_shapes(config).keys() - tensors.keys())
    if missing:
        raise UserError(f"{folder}: missing {', '.join(missing[:8])}")
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            _, head, part, *rest = name.split(".")  # heads.H.blocks.L.linear.X or heads.H.lm_head.weight
            stored = f"{head}.{config.num_layers}.weight" if part == "lm_head" else ".".join([head, *rest])
            parameter.copy_(shard(tensors[stored].to(dtype), parameter, world.tp))
    return draft


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
    folder = Path(path).absolute()
    if not (folder / _FP8).is_file() or not (folder / "config.json").is_file():
        return inspect_base(path)
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
