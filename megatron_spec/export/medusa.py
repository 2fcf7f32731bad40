"""Export of Medusa heads in the format that vLLM, the reference code and TensorRT-LLM's legacy converter load.

{h}.{l}.linear.{weight, bias} and {h}.{layers}.weight in medusa_lm_head.safetensors, beside config.json
(docs/formats.md#medusa). No loader of this format supports fp8: fake-quantised heads are written with their rounded
weights in high precision.

H base hidden size, V target vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_spec.config import BaseConfig, MedusaConfig, QuantConfig, UserError
from megatron_spec.config.structure import draft_tensors, share
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.export.base_rows import KEY, base_rows
from megatron_spec.export.common import (
    BaseLike,
    VerificationError,
    copy_side_files,
    parse_dtype,
    shards_of,
    shared_folder,
    whole,
)
from megatron_spec.export.stream import TensorFile, TensorWriter, write_stream
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.files import read_object, write_json
from megatron_spec.runtime.provenance import write_run_json

log = logging.getLogger(__name__)

WEIGHTS = "medusa_lm_head.safetensors"
PICKLED = "medusa_lm_head.pt"


def file_name(config: MedusaConfig, name: str) -> str:
    """Name in the file of the parameter heads.H.blocks.L.linear.X or heads.H.lm_head.weight."""
    _, head, part, *rest = name.split(".")
    return f"{head}.{config.num_layers}.weight" if part == "lm_head" else ".".join([head, *rest])


def expected_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the file; shared LM heads are repeated for every Medusa head."""
    own = config.replace(share_base_head=False)
    return {file_name(own, name): spec.shape for name, spec in draft_tensors(own).items()}


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
    dtype: str = "bfloat16", ends: BaseEnds | None = None, overwrite: bool = False, also_pt: bool = False,
    run_config: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write the heads to `out_dir` and verify them. Collective over all ranks.

    Args:
        draft: a `MedusaDraft`.
        quant: the policy it was calibrated with.
        dtype: 'bfloat16', 'float16' or 'float32'.
        ends: the loaded base, required when the heads share the base's LM head.
        overwrite: replace a folder that is not empty.
        also_pt: also write the tensors as medusa_lm_head.pt for old loaders.
        run_config: configuration recorded in run.json.

    Raises:
        UserError: unusable output folder or dtype, or a missing base. Nothing is written.
        VerificationError: the written files differ from the draft in memory. Nothing is published.
    """
    config: MedusaConfig = draft.config  # type: ignore[assignment]
    chosen = parse_dtype(dtype)
    if config.share_base_head and ends is None:
        raise UserError("these Medusa heads share the base's LM head, which the format repeats: load the base")
    if quant is not None and quant.draft != "none":
        log.warning("no engine loads fp8 Medusa heads in this format: writing the fp8-rounded weights as %s", dtype)
    first, mine = world.rank == 0, world.draft_dp.rank() == 0
    plan = {name: (dtype, shape) for name, shape in expected_shapes(config).items()}
    with shared_folder(out_dir, world, overwrite) as folder:
        writer = together(lambda: TensorWriter(folder, plan, Path(WEIGHTS).stem) if first else None)
        write_stream(((n, x.to("cpu", chosen)) for n, x in _tensors(draft, ends, world)), writer)

        def finish() -> None:
            """Write the files that follow the tensors."""
            copy_side_files(base.path, folder)
            write_json(folder / "config.json", config_json(config, base, dtype))
            if also_pt:
                torch.save(load_file(str(folder / WEIGHTS)), folder / PICKLED)
            write_run_json(folder, {"base": str(base.path), KEY: base_rows(base.path), **(run_config or {})})

        together(lambda: finish() if first else None)
        verify(folder, draft, base.config, world, dtype=dtype, ends=ends, also_pt=also_pt)
        together(lambda: check_logits(folder, draft, world, ends) if mine else None)
    log.info("wrote %d Medusa heads (%s)", config.num_heads, dtype)
    return Path(out_dir)


def _tensors(draft: Any, ends: Any, world: World) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the file, whole tensor as used by the draft) on every rank of the draft's first replica."""
    if world.draft_dp.rank() != 0:
        return
    config: MedusaConfig = draft.config
    shared: Tensor | None = None
    if config.share_base_head:
        shared = torch.cat(shards_of(ends.head_weight.detach(), world.tp))[: config.vocab_size]
    for h, head in enumerate(draft.heads):
        for i, block in enumerate(head.blocks):
            weight, quantizer = block.linear.weight.detach(), block.linear.weight_quantizer
            yield f"{h}.{i}.linear.weight", weight if quantizer is None else quantizer.rounded(weight)
            yield f"{h}.{i}.linear.bias", block.linear.bias.detach()
        yield f"{h}.{config.num_layers}.weight", whole(head.lm_head.weight, world.tp) if shared is None else shared


def verify(
    folder: Path, draft: Any, base: BaseConfig, world: World, *, dtype: str = "bfloat16", ends: Any = None,
    also_pt: bool = False,
) -> None:  # fmt: skip
    """Compare a written folder with the draft in memory: config, and names, shapes, dtypes and values of tensors.

    Raises VerificationError on every rank, with all differences.
    """
    config: MedusaConfig = draft.config
    problems: list[str] = []
    found: TensorFile | None = None
    if world.rank == 0:
        problems = _check_config(folder, config, base)
        found = TensorFile(folder / WEIGHTS)
        expected = expected_shapes(config)
        problems += [f"missing {n}" for n in sorted(expected.keys() - found.names)]
        problems += [f"unexpected {n}" for n in sorted(found.names - expected.keys())]
        pickled = torch.load(folder / PICKLED, weights_only=True, mmap=True) if also_pt else {}
        if also_pt and pickled.keys() != found.names:
            problems.append(f"{PICKLED} and {WEIGHTS} hold different tensors")
    for name, tensor in _tensors(draft, ends, world):
        if found is None or name not in found.names:
            continue
        written, memory = found.tensor(name), tensor.to("cpu", parse_dtype(dtype))
        if written.shape != memory.shape:
            problems.append(f"{name} is {list(written.shape)}, expected {list(memory.shape)}")
        elif written.dtype != memory.dtype or not torch.equal(written, memory):
            problems.append(f"{name} differs from the draft in memory")
        elif not torch.isfinite(written.float()).all():
            problems.append(f"{name} holds values that are not finite")
        if also_pt and not torch.equal(pickled.get(name, written.new_empty(0)), written):
            problems.append(f"{name} in {PICKLED} differs")

    def report() -> None:
        """Raise VerificationError with all problems."""
        if problems:
            raise VerificationError(f"{folder} differs from the draft in memory: " + "; ".join(problems[:12]))

    together(report)


def _check_config(folder: Path, config: MedusaConfig, base: BaseConfig) -> list[str]:
    raw = read_object(folder / "config.json")
    wanted = {
        "medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, "medusa_fc_bias": True,
        "hidden_size": base.hidden_size, "vocab_size": base.vocab_size,
    }  # fmt: skip
    return [f"config.json gives {k} {raw.get(k)!r}, expected {v!r}" for k, v in wanted.items() if raw.get(k) != v]


@torch.no_grad()
def check_logits(folder: Path | str, draft: Any, world: World, ends: BaseEnds | None) -> None:
    """Compare logits of every head, computed from the file, with this rank's shard of the draft's logits.

    Raises VerificationError for differences larger than rounding to the export's dtype, or to fp8, explains.
    """
    config: MedusaConfig = draft.config
    parameter = next(draft.parameters())
    file = TensorFile(Path(folder) / WEIGHTS)
    state = torch.randn(8, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(parameter)
    quantised = any(getattr(m, "input_quantizer", None) is not None for m in draft.modules())
    tolerance = 0.15 if quantised else 0.05
    for h in range(config.num_heads):
        found = {n: file.tensor(n).to(parameter) for n in expected_shapes(config) if n.startswith(f"{h}.")}
        expected = draft.logits(state[None], h, ends)[0].float()
        mine = share(config.vocab_size, world.tp_size, world.tp_rank)
        shard, expected = (
            plain_logits(found, config, h, state)[:, mine.start : mine.stop].float(),
            expected[:, : len(mine)],
        )
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
