"""Export of any draft: the single entry point for scripts and library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from megatron_spec.config import MedusaConfig, QuantConfig
from megatron_spec.export import eagle, medusa
from megatron_spec.export.common import BaseLike
from megatron_spec.runtime.distributed import World


def export_draft(
    draft: nn.Module, base: BaseLike, out_dir: Path | str, quant: QuantConfig | None, world: World,
    **options: Any,
) -> Path:  # fmt: skip
    """Write the draft to `out_dir` in the format of its algorithm and verify it. Collective over all ranks.

    Arguments, options and errors as in `export.eagle.export_draft`; Medusa has no `features` and `export_embeddings`.
    """
    if isinstance(draft.config, MedusaConfig):
        return medusa.export_draft(draft, base, out_dir, quant, world, **options)
    return eagle.export_draft(draft, base, out_dir, quant, world, **options)
