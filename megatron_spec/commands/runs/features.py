"""Options of offline_feature_extract.py and tools/import_features.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from megatron_spec.commands.runs.common import ChatText, Layers, ModelRun, MovedBase, Parallel, Precision, ScriptRun
from megatron_spec.config import option


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, found {text!r}")
    return int(index), int(count)


@dataclass(frozen=True)
class ExtractRun(Parallel, Precision, Layers, ChatText, MovedBase, ModelRun):
    """offline_feature_extract.py: run the base over conversations and store its features."""

    load: str = option(metavar="DIR")
    """Draft checkpoint; it names the base and the captured layers."""
    output_dir: str = option(metavar="DIR")
    """Folder of the features."""
    data: str = option(metavar="JSONL")
    """Conversations."""
    seq_length: int = 2048
    """Truncate conversations to this many tokens."""
    micro_batch_size: int = option(4, least=1)
    """Conversations per forward pass."""
    features_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] | None = None
    """Type on disk (default: the base's); fp8 takes half of bfloat16's space and has a scale per row and layer."""
    part: tuple[int, ...] = option((0, 1), "I/N", parse=_part)
    """Part I of N of the work, from 0: this run writes shards I, I + N, ... (default: 0/1)."""


@dataclass(frozen=True)
class ImportRun(Precision, MovedBase, ScriptRun):
    """tools/import_features.py: convert features from another program to a store."""

    load: str = option(metavar="DIR")
    """Draft checkpoint; it names the base and the captured layers."""
    dumps: str = option(metavar="DIR")
    """Folder of the dumps (subfolders included)."""
    output_dir: str = option(metavar="DIR")
    """Folder of the features."""
    final_norm: Literal["applied", "missing"] = option()
    """Whether hidden_states includes the base's final norm (the last one that transformers returns does)."""
    seq_length: int = 2048
    """Truncate samples to this many tokens."""
    check: int = option(2, "N", flag="check-samples", least=0)
    """Compare the first N samples with the base's own features; 0 loads only embedding and LM head."""
    features_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None
    """Type on disk (default: that of the first dump)."""
