"""Rewrite a draft of any known format in the format that engines load. Values do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_spec.checkpoint.base_import import BaseReference
from megatron_spec.config import MedusaConfig, UserError
from megatron_spec.config.structure import draft_tensors
from megatron_spec.export import layout, medusa, native_mtp
from megatron_spec.export.common import copy_side_files
from megatron_spec.export.formats.reading import Reading
from megatron_spec.export.load import StoredTensors, open_draft
from megatron_spec.export.quant_metadata import hf_quant_config, quantization_config
from megatron_spec.export.stream import Plan, TensorWriter
from megatron_spec.runtime.files import write_json
from megatron_spec.runtime.folders import published_folder
from megatron_spec.runtime.provenance import write_run_json

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def rewrite(folder: Path | str, reference: BaseReference, out: Path | str) -> Path:
    """Write the draft of `folder` to the new folder `out`, for the base `reference`. Returns `out`.

    Raises UserError for a folder that is not a draft, cannot be read completely, or does not fit the base.
    """
    reading = open_draft(folder, reference)
    tensors, dtype = StoredTensors(reading), _dtype(reading)
    with published_folder(out, False) as new:
        if isinstance(reading.config, MedusaConfig):
            plan: Plan = {n: (dtype, shape) for n, shape in medusa.expected_shapes(reading.config).items()}
            writer = TensorWriter(new, plan, Path(medusa.WEIGHTS).stem)
            values = medusa.config_json(reading.config, reference, dtype)
            found = _medusa(tensors, reading.config, dtype)
        else:
            form = "nvfp4" if any(e.dtype == "U8" for e in reading.source.entries.values()) else "fp8"
            fp8 = set(reading.quantised())
            writer = TensorWriter(new, layout.expected_tensors(reading.config, dtype, fp8, form=form))
            values = _config(reading.config, reference, dtype)
            if fp8:
                exclude = layout.high_precision(reading.config, fp8)
                values["quantization_config"] = quantization_config(exclude, form=form)
                write_json(new / "hf_quant_config.json", hf_quant_config(exclude, form=form))
            found = _eagle(tensors, reading.config, dtype)
        for name, tensor in found:
            writer.add(name, tensor.contiguous())
        writer.close()
        copy_side_files(reference.path, new)
        write_json(new / "config.json", values)
        write_run_json(new, {"base": str(reference.path), "rewritten_from": str(Path(folder).resolve())})
    return Path(out)


def _config(config: layout.Exported, reference: BaseReference, dtype: str) -> dict[str, Any]:
    if config.of_base:
        return native_mtp.config_json(reference.path, dtype)
    return layout.config_json(config, reference.config, dtype)


def _dtype(reading: Reading) -> str:
    """dtype of the high-precision tensors."""
    found = {reading.source.entries[n].dtype for n in reading.names.values() if n is not None} & _DTYPES.keys()
    if not found:
        raise UserError(f"{reading.source.folder}: expected tensors in bfloat16, float16 or float32")
    return _DTYPES[min(found, key=list(_DTYPES).index)]


def _medusa(tensors: StoredTensors, config: MedusaConfig, dtype: str) -> Iterator[tuple[str, Tensor]]:
    for name in draft_tensors(config):
        yield medusa.file_name(config, name), tensors.parameter(name, getattr(torch, dtype))


def _eagle(tensors: StoredTensors, config: layout.Exported, dtype: str) -> Iterator[tuple[str, Tensor]]:
    chosen, quantised, entries = getattr(torch, dtype), tensors.reading.quantised(), tensors.reading.source.entries
    written = layout.weight_shapes(config)
    for name in draft_tensors(config):
        file, stem = native_mtp.file_name(config, name), quantised.get(name.removesuffix(".weight"))
        if stem is not None:
            yield file, tensors.stored(f"{stem}.weight")
            for kind in ("weight_scale", "input_scale", "weight_scale_2"):
                if f"{stem}.{kind}" in entries:
                    scale = tensors.stored(f"{stem}.{kind}")
                    yield f"{file.removesuffix('.weight')}.{kind}", scale.reshape(()) if scale.numel() == 1 else scale
            continue
        value = tensors.parameter(name, getattr(torch, native_mtp.dtype_of(name, dtype)))
        yield file, value
        twin = file.replace(".input_layernorm.", ".hidden_norm.")
        if twin != file and twin in written and twin not in draft_tensors(config):
            yield twin, value
    for name, shape in layout.zero_shapes(config).items():
        yield name, torch.zeros(shape, dtype=chosen)
    if not tensors.vocab.is_full:
        yield "d2t", tensors.vocab.d2t
        yield "t2d", tensors.vocab.t2d
