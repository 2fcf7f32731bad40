"""Export of the frozen base as a Hugging Face folder, in high precision or fp8, from any TP and PP layout.

Tensor by tensor: the TP ranks of the stage that owns a parameter gather its shards, the stage's first rank splits it
into Hugging Face tensors and sends them to rank 0, which writes files of bounded size. The weights of a quantised base
are already rounded in memory; dividing by the same scale recovers their E4M3 codes exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megatron_spec.config import BaseConfig, QuantConfig, UserError
from megatron_spec.export.carried import Carried
from megatron_spec.export.common import (
    BaseLike,
    VerificationError,
    copy_side_files,
    parse_dtype,
    shards_of,
    shared_folder,
)
from megatron_spec.export.quant_metadata import BASE_EXCLUDES, hf_quant_config, quantization_config
from megatron_spec.export.stream import TensorWriter, write_stream
from megatron_spec.families import config_json
from megatron_spec.families.names import NameRule, hf_shapes, join_shards, local_names, to_hf
from megatron_spec.families.rules import name_rules
from megatron_spec.quantization.attach import KV_PLACE, base_amax_state, excluded, input_place
from megatron_spec.quantization.rounding import quantize, scale_of
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.files import read_object, write_json
from megatron_spec.runtime.provenance import write_run_json

log = logging.getLogger(__name__)


@dataclass
class Scales:
    """Scales of all layers of the base by global module name ("layers.0.mlp.linear_fc1"), equal on all PP ranks."""

    linears: dict[str, tuple[float, float]]
    """(amax of the weight, amax of the input)."""
    kv: dict[str, tuple[float, float]]
    """(amax of keys, amax of values) by "layers.N"."""


def export_base(
    base: nn.Module,
    reference: BaseLike,
    out_dir: Path | str,
    quant: QuantConfig | None,
    world: World,
    *,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    max_shard_bytes: int = 5 * 2**30,
    trained_module: Path | None = None,
    run_config: dict[str, Any] | None = None,
) -> Path:
    """Write the base to `out_dir` (tensors, config, tokenizer, generation config) and verify it. Collective.

    Args:
        base: a `FrozenBase`, quantised when `quant.base` is 'fp8'.
        reference: the original, whose config.json and tokenizer are copied. For a Megatron checkpoint without them,
            config.json is written from the architecture.
        max_shard_bytes: maximum size of one tensor file.
        trained_module: folder of an exported draft that is the base's own prediction module (DeepSeek-V3); it
            replaces the original's module. All other tensors of the original are exported unchanged.

    Raises:
        UserError: policy and model do not match, or the output folder is not empty. Nothing is written.
        VerificationError: the written files differ from the model in memory. Nothing is published.
    """
    parse_dtype(dtype)
    source = Path(reference.path)
    scales = _gather_scales(base)
    shape: Any = base.config
    _check(scales, quant, source)
    first = world.rank == 0
    carried = together(lambda: _carried(reference, trained_module) if first else None)
    exclude = _excludes(shape, scales, quant, carried) if scales.linears else None
    with shared_folder(out_dir, world, overwrite) as folder:
        writer = together(lambda: _writer(folder, shape, scales, dtype, carried, max_shard_bytes))
        write_stream(_tensors(base, scales, dtype, carried), writer)
        kv = bool(scales.kv)
        together(lambda: _finish(folder, source, shape, exclude, kv, dtype, run_config) if first else None)
        _verify(folder, base, scales, dtype, carried)
    log.info("wrote the base (%s)", "fp8" if scales.linears else dtype)
    return Path(out_dir)


def _gather_scales(base: Any) -> Scales:
    amax = base_amax_state(base)
    weights = [name.removesuffix(".weight") for name in amax if name.endswith(".weight")]
    linears = {name: (amax[f"{name}.weight"], amax[f"{input_place(name)}.input"]) for name in weights}
    keys = [name.removesuffix(f".{KV_PLACE}.k") for name in amax if name.endswith(f".{KV_PLACE}.k")]
    return Scales(linears, {layer: (amax[f"{layer}.{KV_PLACE}.k"], amax[f"{layer}.{KV_PLACE}.v"]) for layer in keys})


def _check(scales: Scales, quant: QuantConfig | None, source: Path) -> None:
    wanted = quant is not None and quant.base == "fp8"
    if wanted and not scales.linears:
        raise UserError("fp8 export of a base that was never quantised: run quantize.py first, or export without fp8")
    if scales.linears and not wanted:
        raise UserError(
            "the base is fake-quantised in memory, but the export is not fp8: load the base without quantisers, or "
            "export it with the QuantConfig of its checkpoint"
        )
    if not source.is_dir():
        raise UserError(f"the base's folder {source} no longer exists: pass its new path")


def _carried(reference: BaseLike, trained_module: Path | None) -> Carried:
    carried = Carried(reference, trained_module)
    if len(carried.layers) < reference.config.mtp_layers:
        log.warning(
            "%s/config.json announces %d prediction modules, but its files hold %d; the export keeps this mismatch",
            reference.path, reference.config.mtp_layers, len(carried.layers),
        )  # fmt: skip
    return carried


def _excludes(config: BaseConfig, scales: Scales, quant: QuantConfig | None, carried: Carried | None) -> list[str]:
    """Modules that stay in high precision, as ModelOpt lists them: by pattern, otherwise by full name."""
    assert quant is not None
    defaults = set(QuantConfig().exclude)
    found = BASE_EXCLUDES + [p for p in quant.excludes("base") if p not in defaults and p not in BASE_EXCLUDES]
    for rule in name_rules(config):
        matrices = [name for name, shape in hf_shapes(rule).items() if len(shape) > 1 and not name.endswith("bias")]
        modules = [
            name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0] for name in matrices
        ]
        if _amax(rule, scales) is None:
            found += [m for m in dict.fromkeys(modules) if not excluded([m], found)]
    return found + [f"model.layers.{layer}*" for layer in (carried.layers if carried else ())]


# ---- tensors, one at a time, to rank 0


def _local(rule: NameRule, base: Any, parameters: dict[str, Tensor]) -> Tensor:
    if rule.kind == "vocab":
        return base.embedding_weight if rule.core.startswith("embedding.") else base.head_weight  # type: ignore[no-any-return]
    found = [parameters[name].detach() for name in local_names(rule, base.stage.first, base.experts)]
    return torch.stack(found) if rule.kind.startswith("stacked") else found[0]


def _stage_of_layers(base: Any) -> dict[int, int]:
    stages = [stage for stage, count in enumerate(base.stage_counts) for _ in range(count)]
    return dict(enumerate(stages))


def _owner(rule: NameRule, owners: dict[int, int], world: World) -> int:
    """Pipeline rank that sends the parameter. Embedding and LM head are on every stage, so rank 0 has them."""
    if rule.kind == "vocab":
        return 0
    return world.pp_size - 1 if rule.layer is None else owners[rule.layer]


def _high_precision(base: Any) -> Iterator[tuple[NameRule, dict[str, Tensor]]]:
    """Yield (rule, its Hugging Face tensors in the base's dtype) for every parameter; {} on ranks other than 0."""
    world: World = base.world
    if world.dp_rank != 0:
        return
    parameters = base.weights()
    owners = _stage_of_layers(base)
    for rule in name_rules(base.config):
        owner = _owner(rule, owners, world)
        tensors: dict[str, Tensor] = {}
        if world.pp_rank == owner:
            shards = [_local(rule, base, parameters).detach()]
            if rule.kind not in ("replicated", "stacked_down_bias"):
                shards = shards_of(shards[0], world.tp)
            if world.tp_rank == 0:
                tensors = to_hf(rule, join_shards(rule, shards), base.config)
        if owner != 0 and world.tp_rank == 0:
            tensors = _to_first_stage(rule, tensors, owner, base)
        yield rule, tensors if world.rank == 0 else {}


def _to_first_stage(rule: NameRule, tensors: dict[str, Tensor], owner: int, base: Any) -> dict[str, Tensor]:
    world: World = base.world
    ranks = dist.get_process_group_ranks(world.pp)
    received = {}
    dtype = torch.float32 if rule.float32 else base.dtype
    for name, shape in hf_shapes(rule).items():
        if world.pp_rank == owner:
            dist.send(tensors[name], ranks[0], group=world.pp)
        elif world.pp_rank == 0:
            received[name] = torch.empty(shape, dtype=dtype, device=world.device)
            dist.recv(received[name], ranks[owner], group=world.pp)
    return received


def _writer(
    folder: Path, config: BaseConfig, scales: Scales, dtype: str, carried: Carried | None, max_shard_bytes: int
) -> TensorWriter | None:
    if carried is None:  # not the rank that writes
        return None
    plan = {**planned(config, scales, dtype), **carried.plan(dtype)}
    return TensorWriter(folder, plan, max_shard_bytes=max_shard_bytes)


def planned(config: BaseConfig, scales: Scales, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) of every tensor of the export."""
    plan: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rule in name_rules(config):
        fp8 = _amax(rule, scales) is not None
        for name, shape in hf_shapes(rule).items():
            plan[name] = ("float8_e4m3fn" if fp8 else "float32" if rule.float32 else dtype, shape)
            if fp8:
                stem = name.removesuffix(".weight")
                plan |= {f"{stem}.weight_scale": ("float32", ()), f"{stem}.input_scale": ("float32", ())}
    for layer in scales.kv:
        attention = f"model.{layer}.self_attn."
        plan |= {f"{attention}{name}_proj.{name}_scale": ("float32", ()) for name in "kv"}
    return plan


def _amax(rule: NameRule, scales: Scales) -> tuple[float, float] | None:
    """Ranges of weight and input of a quantised weight, else None."""
    return scales.linears.get(rule.module) if rule.core.endswith(".weight") else None


@torch.no_grad()
def _tensors(base: Any, scales: Scales, dtype: str, carried: Carried | None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the export in its file format on rank 0; other ranks only join the collectives."""
    for rule, tensors in _high_precision(base):
        amax = _amax(rule, scales)
        high = torch.float32 if rule.float32 else parse_dtype(dtype)
        for name, tensor in tensors.items():
            if amax is None:
                yield name, tensor.to("cpu", high, copy=True)
                continue
            weight_scale, input_scale = (scale_of(torch.tensor(value)) for value in amax)
            stem = name.removesuffix(".weight")
            yield name, quantize(tensor, weight_scale.to(tensor.device)).cpu()
            yield f"{stem}.weight_scale", weight_scale
            yield f"{stem}.input_scale", input_scale
    if base.world.rank == 0:
        for layer, (k, v) in scales.kv.items():
            yield f"model.{layer}.self_attn.k_proj.k_scale", scale_of(torch.tensor(k))
            yield f"model.{layer}.self_attn.v_proj.v_scale", scale_of(torch.tensor(v))
    if carried is not None:
        yield from carried.tensors(dtype)


# ---- files


def _finish(
    folder: Path, source: Path, architecture: BaseConfig, exclude: list[str] | None,
    kv_cache: bool, dtype: str, run_config: dict[str, Any] | None,
) -> None:  # fmt: skip
    copy_side_files(source, folder)
    if not any(folder.glob("tokenizer*")):
        log.warning(
            "the exported base has no tokenizer, since %s has none: before an engine serves it, copy its files to the "
            "export, and the end of text as eos_token_id into config.json and generation_config.json", source,
        )  # fmt: skip
    found = source / "config.json"
    config: dict[str, Any] = read_object(found) if found.is_file() else config_json(architecture)
    key = "dtype" if "dtype" in config else "torch_dtype"
    if exclude is None and config.get(key) in ("float32", "float16") and config[key] != dtype:
        log.warning(
            "the original base is in %s, this one is rounded to %s: its text may differ; measure the draft on it with "
            "validate.py --base", config[key], dtype,
        )  # fmt: skip
    config[key] = dtype
    config.pop("quantization_config", None)  # a base in MXFP4 was dequantised on import
    if exclude is not None:
        config["quantization_config"] = quantization_config(exclude, kv_cache)
        write_json(folder / "hf_quant_config.json", hf_quant_config(exclude, kv_cache))
    write_json(folder / "config.json", config)
    write_run_json(folder, {"base": str(source), **(run_config or {})})


def _verify(folder: Path, base: Any, scales: Scales, dtype: str, carried: Carried | None) -> None:
    """Read every tensor back and compare it bit by bit with a second pass over the model.

    Names are also compared with those of the original (`carried`, on rank 0).
    """
    problems: list[str] = []
    handles: dict[str, Any] = {}
    if carried is not None:
        for path in sorted(folder.glob("*.safetensors")):
            handle = safe_open(str(path), framework="pt")
            handles |= dict.fromkeys(handle.keys(), handle)
    unseen = set(handles)
    for name, expected in _tensors(base, scales, dtype, carried):
        found = handles[name].get_tensor(name) if name in handles else None
        unseen.discard(name)
        if found is None or found.dtype != expected.dtype or not torch.equal(found.float(), expected.float()):
            problems.append(f"{name} {'is missing' if found is None else 'differs'}")
    problems += [f"unexpected {name}" for name in sorted(unseen)]
    if carried is not None:
        problems += [f"{name} of the original is missing" for name in carried.lost(handles)]

    def report() -> None:
        """Raise VerificationError with all problems."""
        if problems:
            raise VerificationError(f"{folder} differs from the base in memory: " + "; ".join(problems[:12]))

    together(report)
