"""Export of any draft: the single entry point for scripts and library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from megatron_spec.config import DraftConfig, MedusaConfig, QuantConfig, UserError
from megatron_spec.drafts.own import check_tensors, own_class
from megatron_spec.export import eagle, medusa
from megatron_spec.export.common import BaseLike, VerificationError
from megatron_spec.runtime.distributed import World


def export_draft(
    draft: nn.Module, base: BaseLike, out_dir: Path | str, quant: QuantConfig | None, world: World,
    **options: Any,
) -> Path:  # fmt: skip
    """Write the draft to `out_dir` in the format of its algorithm and verify it. Collective over all ranks.

    Arguments, options and errors as in `export.eagle.export_draft`; Medusa has no `features` and `export_embeddings`.
    """
    check_tensors(draft, "be exported")
    export = medusa.export_draft if isinstance(draft.config, MedusaConfig) else eagle.export_draft
    try:
        return export(draft, base, out_dir, quant, world, **options)
    except VerificationError as e:
        if own_class(draft) is None:
            raise
        config: DraftConfig = draft.config  # type: ignore[assignment]
        raise UserError(
            f"{type(draft).__name__} cannot be exported: it computes something else than {config.algorithm}, which "
            f"engines would run with its weights ({e})"
        ) from None
