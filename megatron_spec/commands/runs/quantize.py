"""Options of quantize.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_spec.commands.runs.common import ChatText, DraftModules, Layers, ModelRun, MovedBase, Parallel, Precision
from megatron_spec.config import ObjectiveConfig, group, option


@dataclass(frozen=True)
class QuantizeRun(Parallel, Precision, Layers, ChatText, MovedBase, DraftModules, ModelRun):
    """quantize.py: attach fake quantisers to base and draft and calibrate their ranges."""

    load: str = option(metavar="DIR")
    """Draft checkpoint to quantise."""
    save: str = option(metavar="DIR")
    """New or empty folder for the quantised checkpoint, or that of --load, where it becomes the next iteration."""
    data: str = option(metavar="JSONL")
    """Conversations to calibrate on."""
    policy: str = option("fp8", "POLICY", flag="export-quant-cfg")
    """fp8 (base and draft), fp8_draft_only, fp8_base_only, nvfp4_draft_only, none, or a JSON or YAML file with fields
    of QuantConfig: exclude, exclude_base, exclude_draft, calibration, ..."""
    kv_cache: Literal["none", "fp8"] | None = option(None, flag="export-kv-cache-quant")
    """Quantisation of the base's keys and values (default: the policy's)."""
    samples: int = option(256, "N", flag="calib-samples", least=1)
    """Number of conversations to calibrate on, drawn from the file with a fixed seed."""
    seq_length: int = 2048
    """Truncate conversations to this many tokens."""
    micro_batch_size: int = option(4, least=1)
    """Conversations of a rank whose features are held at once."""
    objective: ObjectiveConfig = group(ObjectiveConfig, only=("ttt_steps", "alignment"))
    """Draft steps to calibrate."""
