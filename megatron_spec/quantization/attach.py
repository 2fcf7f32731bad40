"""Attach quantisers to the linears of a draft and of the frozen base, with one policy for each.

Draft linears call `input_quantizer` and `weight_quantizer` themselves, so attaching is an assignment. The base consists
of megatron-core's or Transformer Engine's linears: its frozen weights are rounded once, in place, and its inputs by a
forward pre-hook. The global name of a base quantiser ("layers.3.self_attention.linear_qkv") depends neither on the
parallel layout nor on the kind of linear.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_spec.base import te
from megatron_spec.config import BaseConfig, DraftConfig, QuantConfig, UserError
from megatron_spec.config.structure import draft_tensors
from megatron_spec.families.rules import name_rules
from megatron_spec.quantization import nvfp4
from megatron_spec.quantization.quantizer import Mode, SharedInput, TensorQuantizer

log = logging.getLogger(__name__)

Role = Literal["base", "draft"]

SHARED_SCALE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that engines fuse into one matrix and that therefore share one scale."""

KV_PLACE = "self_attention.core_attention"


def excluded(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """True when a pattern (fnmatch) matches one of the names of a module."""
    patterns = list(patterns)
    return any(fnmatch.fnmatchcase(n, p) for n in names for p in patterns)


def _example(name: str) -> tuple[bool, str]:
    """Sorts linears first."""
    return "proj" not in name and "linear" not in name, name


def check_policy(quant: QuantConfig, base: BaseConfig, draft_names: Iterable[str]) -> None:
    """Raise UserError for settings without effect, such as a misspelt pattern: what it excludes would be quantised.

    Args:
        draft_names: modules of the draft, or their weights.
    """
    names = {"base": {hf.removesuffix(".weight") for rule in name_rules(base) for hf in rule.hf}}
    names["draft"] = {name.removesuffix(".weight") for name in draft_names}
    known = {role: names[role] for role in names if getattr(quant, role) != "none"}
    if not known:
        return
    given = {f"exclude_{role}": getattr(quant, f"exclude_{role}") for role in names}
    given["exclude"] = tuple(p for p in quant.exclude if p not in type(quant)().exclude)
    for field, patterns in given.items():
        where = {role: found for role, found in known.items() if field in ("exclude", f"exclude_{role}")}
        wrong = [p for p in patterns if not any(excluded(found, [p]) for found in where.values())]
        if wrong:
            example = ", ".join(f"{min(found, key=_example)} ({role})" for role, found in where.items())
            raise UserError(f"{field}: {', '.join(wrong)} matches no module; names are such as {example}")
    if quant.clipped_ste and quant.draft != "fp8":
        raise UserError(
            f"clipped_ste is for inputs of the draft, which has none in fp8 (draft {quant.draft}): leave it out"
        )
    if quant.calibration != "max" and "fp8" not in (quant.base, quant.draft):
        raise UserError(f"calibration {quant.calibration!r} is for inputs, and none is in fp8: leave it out")


def attach_quantizers(module: nn.Module, quant: QuantConfig, role: Role) -> int:
    """Attach enabled quantisers to every linear that `quant` does not exclude. Existing quantisers are kept.

    Args:
        module: a draft, or a `FrozenBase` whose weights are loaded.
        role: selects the policy of `quant`.

    Returns:
        The number of linears with quantisers; 0 when the policy is 'none'.

    Raises:
        UserError: unknown format; only some of the fused linears are excluded; a linear that no engine loads as fp8.
    """
    fmt = quant.base if role == "base" else quant.draft
    if fmt == "none":
        return 0
    count = _attach_base(module, quant) if role == "base" else _attach_draft(module, quant)
    if count == 0:
        raise UserError(
            f"{fmt} for the {role}: the exclude patterns {list(quant.excludes(role))} leave no linear to quantise"
        )
    log.info("%s: %d linears of the %s quantised", fmt, count, role)
    return count


def _kernel(model: Any) -> bool:
    """True when the model may use the path `rounding_kernel`; False for a module without paths."""
    return hasattr(model, "paths") and model.paths.on("rounding_kernel")


# ---- draft


def check_draft(config: DraftConfig, quant: QuantConfig) -> None:
    """Raise UserError for a draft that no engine loads in the policy's format."""
    if quant.draft != "none" and config.of_base:
        raise UserError(
            f"{quant.draft} for the base's own prediction module: engines read it in the format of the complete base; "
            "quantise the base alone (--export-quant-cfg fp8_base_only)"
        )


def draft_linears(draft: nn.Module) -> dict[str, nn.Module]:
    """Linears of a draft that may hold quantisers, by name."""
    table = draft_tensors(draft.config)  # type: ignore[arg-type]
    found = {n: m for n, m in draft.named_modules() if hasattr(m, "input_quantizer") and hasattr(m, "weight_quantizer")}
    # a linear outside the table is in a class of the user's
    return {n: m for n, m in found.items() if f"{n}.weight" not in table or table[f"{n}.weight"].linear}


def quantised_linears(draft: nn.Module) -> dict[str, Any]:
    """Linears of a draft with quantisers (at least of their weights), by name."""
    return {name: linear for name, linear in draft_linears(draft).items() if linear.weight_quantizer is not None}


def shared_scale_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of the given linear names that must share a scale; groups may be incomplete but not empty."""
    names = list(names)
    parents = dict.fromkeys(n.rpartition(".")[0] for n in names)
    found = []
    for parent in parents:
        for group in SHARED_SCALE:
            members = tuple(f"{parent}.{g}" for g in group if f"{parent}.{g}" in names)
            if members:
                found.append(members)
    return found


def _attach_draft(draft: nn.Module, quant: QuantConfig) -> int:
    check_draft(draft.config, quant)  # type: ignore[arg-type]
    linears, kernel = draft_linears(draft), _kernel(draft)
    chosen = [n for n in linears if not excluded([n], quant.excludes("draft"))]
    for name in chosen:
        if name.rpartition(".")[2] in ("fc", "lm_head", "eh_proj"):
            raise UserError(
                f"the draft's {name} must stay in high precision: no engine loads it as fp8. "
                f"Add {'*' + name!r} to the exclude patterns"
            )
    for group in shared_scale_groups(linears):
        inside = [n for n in group if n in chosen]
        if inside and len(inside) != len(group):
            raise UserError(
                f"engines fuse {', '.join(group)} into one matrix: quantise all of them or none "
                f"(now only {', '.join(inside)})"
            )
    for name in chosen:
        linear: Any = linears[name]
        if linear.weight_quantizer is None:
            device = linear.weight.device
            weight = TensorQuantizer(f"{name}.weight", quant.clipped_ste, device, True, quant.draft, kernel)
            linear.weight_quantizer = weight
            if quant.draft == "nvfp4":
                _check_blocks(name, linear.weight)
                continue  # only weights
            linear.input_quantizer = TensorQuantizer(f"{name}.input", quant.clipped_ste, device, kernel=kernel)
    if quant.draft == "nvfp4":
        return len(chosen)
    for group in shared_scale_groups(chosen):
        shared = SharedInput()
        for name in group:
            any_linear: Any = linears[name]
            any_linear.input_quantizer.shared = shared
    return len(chosen)


def _check_blocks(name: str, weight: Tensor) -> None:
    if weight.shape[1] % nvfp4.BLOCK:
        raise UserError(
            f"nvfp4: {name} has {weight.shape[1]} inputs on this rank, not a multiple of the block {nvfp4.BLOCK}: use "
            "fewer tensor parallel ranks, or exclude it"
        )


# ---- base


def _attach_base(base: nn.Module, quant: QuantConfig) -> int:
    model: Any = base
    chosen: list[tuple[str, Any]] = []
    if model.paths.on("te_fp8"):
        raise UserError(
            "fp8 for the base: it computes in Transformer Engine's fp8 already: load it without --fp8-format"
        )
    te.separate_norms(model)
    found = list(model.linears())
    if not found:
        raise UserError(
            "fp8 for the base: found no linears of megatron-core or Transformer Engine in its layers: load it with "
            "load_base"
        )
    if model.quantised_on_disk:
        raise UserError(
            "fp8 for the base: its own files are already in fp8, and it computes with their ranges: quantise the draft "
            "alone (--export-quant-cfg fp8_draft_only)"
        )
    names_of = {r.module: [n.removesuffix(".weight") for n in r.hf] for r in name_rules(model.config)}
    stacked = 0
    for name, linear in found:
        if name not in names_of:  # one tensor stores all experts (gpt-oss), without room for their scales
            stacked += 1
        elif not excluded(names_of[name], quant.excludes("base")):
            chosen.append((name, linear))
    if stacked:
        log.warning("fp8: %d linears of experts stay in high precision: their format cannot store scales", stacked)
    fresh = [(n, m) for n, m in chosen if getattr(m, "input_quantizer", None) is None]
    inputs: dict[str, TensorQuantizer] = {}
    kernel = _kernel(base)
    for name, linear in fresh:
        device = linear.weight.device
        place = f"{input_place(name)}.input"
        linear.input_quantizer = inputs.setdefault(place, TensorQuantizer(place, device=device, kernel=kernel))
        linear.weight_quantizer = TensorQuantizer(f"{name}.weight", device=device, kernel=kernel)
        linear.weight_quantizer.mode = Mode.DISABLED  # the weight itself is already rounded
        linear.register_forward_pre_hook(_quantize_input)
    quantize_weights_(fresh, model.world.tp)
    if quant.kv_cache == "fp8":
        _attach_kv(model)
    return len(chosen)


def input_place(name: str) -> str:
    """Name of the range of a linear's input: the experts of a layer share one, as in engines.

    So even an expert that no calibration token reaches has a range.
    """
    return re.sub(r"\.local_experts\.\d+\.", ".", name)


def _quantize_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (module.input_quantizer(args[0]), *args[1:])


def quantize_weights_(linears: list[tuple[str, Any]], tp: dist.ProcessGroup) -> None:
    """Round frozen weights in place, with the largest magnitude over the TP ranks as range.

    Each weight quantiser keeps the range and the relative error |w - q(w)| / |w| of the whole weight.
    """
    if not linears:
        return
    amax = torch.stack([m.weight.detach().abs().amax().float() for _, m in linears])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=tp)
    sums = []
    for (_, linear), value in zip(linears, amax, strict=True):
        linear.weight_quantizer.set_amax(value)
        linear.weight_quantizer.check()
        sums.append(_error_sums(linear))
        linear.weight.data.copy_(linear.weight_quantizer.rounded(linear.weight.data))
    _keep_errors(linears, torch.stack(sums), tp)


def _error_sums(linear: Any) -> Tensor:
    weight = linear.weight.detach()
    error = weight.float() - linear.weight_quantizer.rounded(weight).float()
    return torch.stack([error.square().sum(), weight.float().square().sum()])


def _keep_errors(linears: list[tuple[str, Any]], sums: Tensor, tp: dist.ProcessGroup) -> None:
    dist.all_reduce(sums, group=tp)
    for (_, linear), (error, norm) in zip(linears, sums.tolist(), strict=True):
        linear.weight_quantizer.relative_error = (error / norm) ** 0.5 if norm else 0.0


def measure_weight_errors(linears: list[tuple[str, Any]], tp: dist.ProcessGroup) -> None:
    """Set `relative_error` of the weight quantisers from the current weights (draft)."""
    if linears:
        sums = [_error_sums(m) for _, m in linears]
        _keep_errors(linears, torch.stack(sums), tp)


def _attach_kv(base: Any) -> None:
    if base.config.mla:
        raise UserError("fp8 KV cache for a base with latent attention: engines cache the latent; leave it out")
    for number, layer in base.layers():
        core = layer.self_attention.core_attention
        if getattr(core, "k_quantizer", None) is not None:
            continue
        device = next(layer.parameters()).device
        for which in ("k", "v"):
            place = f"layers.{number}.{KV_PLACE}.{which}"
            core.add_module(f"{which}_quantizer", TensorQuantizer(place, device=device, kernel=_kernel(base)))
        core.register_forward_pre_hook(_quantize_kv)


def _quantize_kv(core: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # megatron-core calls core attention with (query, key, value, mask, ...), keys already rotated.
    query, key, value, *rest = args
    return (query, core.k_quantizer(key), core.v_quantizer(value), *rest)


# ---- all quantisers


def quantizers(module: nn.Module) -> dict[str, TensorQuantizer]:
    """Every quantiser under `module` by its name (global for a base, independent of the PP layout)."""
    return {m.name: m for m in module.modules() if isinstance(m, TensorQuantizer)}


def base_amax_state(base: nn.Module) -> dict[str, float]:
    """Ranges of the base, gathered over its PP ranks: {"layers.0.mlp.linear_fc1.input": amax, ...}.

    Equal on every rank and for every layout. Raises UserError when a quantiser was never calibrated.
    """
    model: Any = base
    mine: dict[str, float] = {}
    for name, quantizer in quantizers(base).items():
        quantizer.check()
        mine[name] = float(quantizer.amax)
    stages: list[Any] = [None] * model.world.pp_size
    dist.all_gather_object(stages, mine, group=model.world.pp)
    return {name: value for stage in stages for name, value in stage.items()}


def load_base_amax(base: nn.Module, state: dict[str, float]) -> None:
    """Load the ranges of `base_amax_state` into the attached quantisers of a base.

    Raises:
        UserError: a quantiser of this stage is missing in `state`, `state` has one that this base lacks, or the range
            of a weight shows that another base was calibrated.
    """
    model: Any = base
    mine = quantizers(base)
    layers = {f"layers.{number}" for number, _ in model.layers()}
    missing = sorted(mine.keys() - state.keys())
    unexpected = sorted(n for n in state.keys() - mine.keys() if ".".join(n.split(".")[:2]) in layers)
    if model.world.parallel.expert_model_parallel_size > 1:
        unexpected = [n for n in unexpected if ".local_experts." not in n]  # of other ranks
    if missing or unexpected:
        raise UserError(
            f"ranges of the base do not match its quantisers: missing {missing[:4]} ({len(missing)}), unexpected "
            f"{unexpected[:4]} ({len(unexpected)}); the checkpoint was quantised with other exclude patterns"
        )
    for name, quantizer in mine.items():
        if quantizer.mode is Mode.DISABLED:  # a weight, already rounded with its own range
            if abs(state[name] - float(quantizer.amax)) > 0.01 * float(quantizer.amax):
                raise UserError(
                    f"{name}: the checkpoint was quantised with a base whose largest weight is {state[name]:.6g}, this "
                    f"one has {float(quantizer.amax):.6g}: use the base of the checkpoint"
                )
        else:
            quantizer.set_amax(state[name])
            quantizer.check()
