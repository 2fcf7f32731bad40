"""Export of an EAGLE or MTP draft: EAGLE-3 as TensorRT-LLM, vLLM and SGLang load it, EAGLE-1 as vLLM and SGLang do.

From any TP layout: shards are joined tensor by tensor, rank 0 writes a temporary folder, the folder is read back and
compared with the draft in memory, and only then renamed to its final name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_spec.batch import Features
from megatron_spec.config import EagleConfig, QuantConfig, UserError
from megatron_spec.config.structure import quantisable
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export import layout, native_mtp
from megatron_spec.export.base_rows import KEY, base_rows
from megatron_spec.export.common import (
    BaseLike,
    copy_side_files,
    parameters_by_file_name,
    parse_dtype,
    shards_of,
    shared_folder,
    whole,
)
from megatron_spec.export.quant_metadata import hf_quant_config, quantization_config
from megatron_spec.export.stream import TensorWriter, write_stream
from megatron_spec.export.verify import verify_draft
from megatron_spec.quantization import nvfp4
from megatron_spec.quantization.attach import quantised_linears
from megatron_spec.quantization.rounding import quantize, scale_of
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.files import write_json
from megatron_spec.runtime.provenance import write_run_json

log = logging.getLogger(__name__)


def export_draft(
    draft: nn.Module,
    base: BaseLike,
    out_dir: Path | str,
    quant: QuantConfig | None,
    world: World,
    *,
    dtype: str = "bfloat16",
    features: Features | None = None,
    ends: BaseEnds | None = None,
    export_embeddings: bool = False,
    overwrite: bool = False,
    run_config: dict[str, Any] | None = None,
) -> Path:
    """Write the draft to `out_dir` and verify it. Collective over all ranks.

    Args:
        draft: a `RecurrentDraft` with its `config` and `vocab`; with quantisers when `quant.draft` is 'fp8'.
        quant: the policy it was calibrated with; None or draft 'none' writes high precision.
        dtype: data type of everything that is not fp8: 'bfloat16', 'float16' or 'float32'.
        features: real captures on which logits are compared (each rank its own); None: computed with `ends`.
        ends: the loaded base; without it, logits are compared on random captures.
        export_embeddings: also write the target's `embed_tokens.weight` (otherwise engines use the target's own).
            With a base's own prediction module, embedding and LM head are always written when the base is loaded.
        overwrite: replace a folder that is not empty.
        run_config: configuration recorded in run.json.

    Returns:
        The folder.

    Raises:
        UserError: unsupported algorithm or policy, or unusable output folder. Nothing is written.
        VerificationError: the written files differ from the draft in memory. Nothing is published.
    """
    config: EagleConfig = draft.config  # type: ignore[assignment]
    vocab: DraftVocab = draft.vocab  # type: ignore[assignment]
    parse_dtype(dtype)
    fp8 = _fp8_linears(draft, quant)
    form = quant.draft if fp8 and quant is not None else "fp8"
    _check(config, vocab, export_embeddings, ends)
    exclude = _exclude_modules(config, fp8, quant)
    export_embeddings = export_embeddings or (config.of_base and hasattr(ends, "embedding_weight"))
    with shared_folder(out_dir, world, overwrite) as folder:
        first = world.rank == 0
        plan = layout.expected_tensors(config, dtype, fp8, export_embeddings, form)
        writer = together(lambda: TensorWriter(folder, plan) if first else None)
        write_stream(_tensors(draft, config, vocab, dtype, world, ends if export_embeddings else None), writer)
        together(lambda: _write(folder, config, base, dtype, exclude, form, run_config) if first else None)
        verify_draft(folder, draft, base.config, world, dtype=dtype, features=features, ends=ends)
    log.info("wrote the %s draft (%s)", config.algorithm, form if fp8 else dtype)
    return Path(out_dir)


def _check(config: EagleConfig, vocab: DraftVocab, export_embeddings: bool, ends: BaseEnds | None) -> None:
    if export_embeddings and config.own_embedding:
        raise UserError("--export-embeddings writes the target's embedding, but this draft has its own: leave it out")
    if (len(vocab), vocab.vocab_size) != (config.draft_vocab_size, config.vocab_size):
        raise UserError(
            f"the draft vocabulary has {len(vocab)} of {vocab.vocab_size} tokens, the configuration says "
            f"{config.draft_vocab_size} of {config.vocab_size}"
        )
    if export_embeddings and not hasattr(ends, "embedding_weight"):
        raise UserError("--export-embeddings needs the base to be loaded")


def _fp8_linears(draft: nn.Module, quant: QuantConfig | None) -> set[str]:
    found = quantised_linears(draft)
    wanted = quant is not None and quant.draft != "none"
    if wanted and not found:
        raise UserError("fp8 export of a draft that was never quantised: run quantize.py first, or export without fp8")
    if found and not wanted:
        raise UserError(
            "the draft is fake-quantised, but the export is not fp8: export it with the QuantConfig of its checkpoint"
        )
    for linear in found.values():
        linear.weight_quantizer.check()
        if linear.input_quantizer is not None:
            linear.input_quantizer.check()
    return set(found)


def _exclude_modules(config: EagleConfig, fp8: set[str], quant: QuantConfig | None) -> list[str] | None:
    """Modules that stay in high precision, as patterns an engine can match; None without fp8."""
    if not fp8:
        return None
    assert quant is not None
    found = layout.high_precision(config, set(quantisable(config)))
    kept = [n for n in quantisable(config) if n not in fp8]
    patterns = [p for p in quant.excludes("draft") if p not in found] if kept else []
    for pattern in patterns:
        if layout.has_layer_number(pattern):
            raise UserError(
                f"exclude pattern {pattern!r} contains a layer number: engines number the layers of a draft "
                "differently, so it would match nothing there. Exclude by kind of layer, for example '*down_proj'"
            )
    return found + patterns


def _tensors(
    draft: nn.Module, config: EagleConfig, vocab: DraftVocab, dtype: str, world: World, ends: BaseEnds | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the file on the CPU of rank 0; other ranks only join the collectives.

    Args:
        ends: the base, when its embedding (and LM head) are also written.
    """
    if world.draft_dp.rank() != 0:
        return
    quantised, chosen, first = quantised_linears(draft), parse_dtype(dtype), world.rank == 0
    for name, parameter in parameters_by_file_name(draft):
        tensor = whole(parameter, world.tp)
        if first:
            high = parse_dtype(native_mtp.dtype_of(name, dtype))
            yield from _encode(name, tensor, quantised.get(name.removesuffix(".weight")), high).items()
    for name in layout.end_shapes(config) if ends is not None else ():
        weight: Tensor = ends.embedding_weight if "embed" in name else ends.head_weight  # type: ignore[union-attr]
        table = torch.cat(shards_of(weight.detach(), world.tp))
        if first:
            yield name, table[: config.vocab_size].to("cpu", chosen)
    if not first:
        return
    for name, shape in layout.zero_shapes(config).items():
        yield name, torch.zeros(shape, dtype=chosen)
    if not vocab.is_full:
        yield "d2t", vocab.d2t
        yield "t2d", vocab.t2d


def _encode(name: str, tensor: Tensor, linear: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    if linear is None:
        return {name: tensor.to("cpu", dtype, copy=True).contiguous()}
    stem = name.removesuffix(".weight")
    amax = linear.weight_quantizer.amax
    if linear.weight_quantizer.form == "nvfp4":
        codes, block_scales = nvfp4.encode(tensor, amax)
        return {
            name: nvfp4.pack(codes).cpu(),
            f"{stem}.weight_scale": block_scales.cpu(),
            f"{stem}.weight_scale_2": nvfp4.global_scale(amax).cpu(),
        }
    scale = scale_of(amax)
    return {
        name: quantize(tensor, scale).cpu().contiguous(),
        f"{stem}.weight_scale": scale.cpu(),
        f"{stem}.input_scale": scale_of(linear.input_quantizer.amax).cpu(),
    }


def _write(
    folder: Path,
    config: EagleConfig,
    base: BaseLike,
    dtype: str,
    exclude: list[str] | None,
    form: str,
    run_config: dict[str, Any] | None,
) -> None:
    copy_side_files(base.path, folder)
    values = native_mtp.config_json(base.path, dtype) if config.of_base else None
    values = values or layout.config_json(config, base.config, dtype)
    if exclude is not None:
        values["quantization_config"] = quantization_config(exclude, form=form)
        write_json(folder / "hf_quant_config.json", hf_quant_config(exclude, form=form))
    write_json(folder / "config.json", values)
    write_run_json(folder, {"base": str(base.path), KEY: base_rows(base.path), **(run_config or {})})
