"""Exports Medusa heads as the folder that vLLM and the reference code load, and TensorRT-LLM's legacy converter reads.

{h}.{l}.linear.{weight, bias} and {h}.{layers}.weight in medusa_lm_head.safetensors, beside config.json. No loader of
this format knows fp8: heads that were fake-quantised are written with their rounded weights in high precision.

H base hidden size, V target vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_spec.config import BaseConfig, MedusaConfig, QuantConfig, UserError
from megatron_spec.distributed import World
from megatron_spec.drafts.base import BaseEnds
from megatron_spec.export.common import VerificationError, parse_dtype, shards_of, shared_folder, together, whole
from megatron_spec.export.eagle import BaseLike
from megatron_spec.fake_quant import round_trip
from megatron_spec.files import read_json, write_json
from megatron_spec.provenance import write_run_json

log = logging.getLogger(__name__)

WEIGHTS = "medusa_lm_head.safetensors"


def expected_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the file."""
    H = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(config.num_heads):
        for i in range(config.num_layers):
            shapes |= {f"{h}.{i}.linear.weight": (H, H), f"{h}.{i}.linear.bias": (H,)}
        shapes[f"{h}.{config.num_layers}.weight"] = (config.vocab_size, H)
    return shapes


def config_json(config: MedusaConfig, base: BaseLike, dtype: str) -> dict[str, Any]:
    """Content of config.json."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_fc_bias": True,  # without it vLLM drops the biases silently
        "torch_dtype": dtype,
        "base_model_name_or_path": str(base.path),
        "version": "2",
    }


def export_draft(
    draft: nn.Module, base: BaseLike, out_dir: Path | str, quant: QuantConfig | None, world: World, *,
    dtype: str = "bfloat16", ends: BaseEnds | None = None, overwrite: bool = False,
    run_config: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write the heads to `out_dir` and verify them. Collective over all ranks.

    Args:
        draft: a `MedusaDraft`.
        quant: the policy it was calibrated with.
        dtype: 'bfloat16', 'float16' or 'float32'.
        ends: the loaded base: needed when the heads share the base's.
        overwrite: replace a folder that is not empty.
        run_config: goes to run.json.

    Raises:
        UserError: an output folder or dtype that does not work, or a missing base. Nothing is written.
        VerificationError: what was written is not what is in memory. Nothing is published.
    """
    config: MedusaConfig = draft.config  # type: ignore[assignment]
    chosen = parse_dtype(dtype)
    if config.share_base_head and ends is None:
        raise UserError("these Medusa heads share the base's head, which the format repeats: load the base to export")
    if quant is not None and quant.draft != "none":
        log.warning("no engine loads Medusa heads as fp8 in this format: written as %s, rounded to fp8 before", dtype)
    with shared_folder(out_dir, world, overwrite) as folder:
        tensors = {n: x.to("cpu", chosen, copy=True).contiguous() for n, x in _tensors(draft, ends, world)}

        def write() -> None:
            save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
            write_json(folder / "config.json", config_json(config, base, dtype))
            write_run_json(folder, {"base": str(base.path), **(run_config or {})})

        together(lambda: write() if world.rank == 0 else None)
        mine = world.draft_dp.rank() == 0
        together(lambda: verify(folder, config, tensors, base.config) if mine else None)
        together(lambda: check_logits(folder, draft, world, ends) if mine else None)
    log.info("exported %d Medusa heads to %s (%s)", config.num_heads, out_dir, dtype)
    return Path(out_dir)


def _tensors(draft: Any, ends: Any, world: World) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, whole tensor as the draft computes with it), on every rank of the first copy of the draft."""
    if world.draft_dp.rank() != 0:
        return
    config: MedusaConfig = draft.config
    shared: Tensor | None = None
    if config.share_base_head:
        shared = torch.cat(shards_of(ends.head_weight.detach(), world.tp))[: config.vocab_size]
    for h, head in enumerate(draft.heads):
        for i, block in enumerate(head.blocks):
            weight, quantizer = block.linear.weight.detach(), block.linear.weight_quantizer
            yield f"{h}.{i}.linear.weight", weight if quantizer is None else round_trip(weight, quantizer.amax)
            yield f"{h}.{i}.linear.bias", block.linear.bias.detach()
        yield f"{h}.{config.num_layers}.weight", whole(head.lm_head.weight, world.tp) if shared is None else shared


@torch.no_grad()
def verify(folder: Path | str, config: MedusaConfig, memory: dict[str, Tensor], base: BaseConfig) -> None:
    """Compare a written folder with the tensors in memory: config, names, shapes, dtypes, values.

    Raises VerificationError with everything that differs.
    """
    raw = read_json(Path(folder) / "config.json")
    wanted = {
        "medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, "medusa_fc_bias": True,
        "hidden_size": base.hidden_size, "vocab_size": base.vocab_size,
    }  # fmt: skip
    problems = [f"config.json gives {k} {raw.get(k)!r}, expected {v!r}" for k, v in wanted.items() if raw.get(k) != v]
    with safe_open(str(Path(folder) / WEIGHTS), framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    expected = expected_shapes(config)
    problems += [f"missing {n}" for n in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {n}" for n in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if tuple(found[name].shape) != expected[name]:
            problems.append(f"{name} is {list(found[name].shape)}, expected {list(expected[name])}")
        elif not torch.isfinite(found[name].float()).all():
            problems.append(f"{name} holds values that are not finite")
        elif found[name].dtype != memory[name].dtype or not torch.equal(found[name], memory[name]):
            problems.append(f"{name} differs from the draft in memory")
    if problems:
        raise VerificationError(f"{folder} is not what is in memory: " + "; ".join(problems[:12]))


@torch.no_grad()
def check_logits(folder: Path | str, draft: Any, world: World, ends: BaseEnds | None) -> None:
    """Logits of every head, computed plainly from the file, against this rank's shard of those of the draft.

    Raises VerificationError when they differ by more than the rounding to the export's dtype, or to fp8, explains.
    """
    config: MedusaConfig = draft.config
    parameter = next(draft.parameters())
    with safe_open(str(Path(folder) / WEIGHTS), framework="pt") as file:
        found = {name: file.get_tensor(name).to(parameter) for name in expected_shapes(config)}
    state = torch.randn(8, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(parameter)
    quantised = any(getattr(m, "input_quantizer", None) is not None for m in draft.modules())
    tolerance = 0.15 if quantised else 0.05
    for h in range(config.num_heads):
        expected = draft.logits(state[None], h, ends)[0].float()
        width = expected.shape[-1]
        shard = plain_logits(found, config, h, state)[:, world.tp_rank * width : (world.tp_rank + 1) * width].float()
        error = float((shard - expected).norm() / expected.norm().clamp_min(1e-12))
        if not error <= tolerance:
            raise VerificationError(f"{folder}: logits of head {h} differ by {error:.2e} (relative) from the draft's")


def plain_logits(tensors: dict[str, Tensor], config: MedusaConfig, head: int, state_NH: Tensor) -> Tensor:
    """[N, V] logits of one head as an engine computes them from the file."""
    x = state_NH
    for i in range(config.num_layers):
        prefix = f"{head}.{i}.linear."
        x = x + F.silu(F.linear(x, tensors[prefix + "weight"], tensors[prefix + "bias"]))
    return F.linear(x, tensors[f"{head}.{config.num_layers}.weight"])
