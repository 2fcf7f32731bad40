"""Options of export.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_spec.commands.runs.common import DraftModules, Layers, ModelRun, MovedBase, Parallel, Precision
from megatron_spec.config import option


@dataclass(frozen=True)
class ExportRun(Parallel, Precision, Layers, MovedBase, DraftModules, ModelRun):
    """export.py: export a draft, and its base on request, for serving engines."""

    load: str = option(metavar="DIR")
    """Draft checkpoint."""
    export_dir: str = option(metavar="OUT")
    """New or empty folder."""
    extra_modules: bool = option(False, flag="export-extra-modules")
    """Write the draft (default: only a quantised base is written)."""
    with_base: bool = option(False, flag="export-base")
    """Write the base next to the draft even if it is not quantised."""
    max_draft_len: int | None = option(None, "N", least=1)
    """Draft length in the serving configuration (default: 3)."""
    format: Literal["hf", "trtllm-legacy", "speculators"] = option("hf", flag="export-format")
    """Format of the draft; vLLM, SGLang and TensorRT-LLM load hf."""
    trtllm_tp: int = option(1, "N", least=1)
    """trtllm-legacy: number of ranks."""
    medusa_pt: bool = option(False, flag="export-medusa-pt")
    """Medusa: also write medusa_lm_head.pt."""
    export_embeddings: bool = False
    """Also write the base's embedding into the draft."""
    yarn_factor: float | None = option(None, "F", flag="export-yarn-factor")
    """Write the draft with YaRN, for contexts up to F times as long as in training. This changes acceptance at every
    length: measure the export with validate.py --speculative-model."""
    yarn_original: int | None = option(None, "N", flag="export-yarn-original", least=1)
    """With --export-yarn-factor: --seq-length of the training."""
