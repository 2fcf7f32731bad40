"""Drafts that benchmarks/ablate_drafts.py knows by name, and ablations of EAGLE-3."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_spec.config import suggest


@dataclass(frozen=True)
class Kind:
    """What a draft is and how it is trained, where that is not the default.

    Attributes:
        fields: of its configuration.
        objective: fields of ObjectiveConfig.
        train: fields of TrainConfig.
        vocab: size of the draft vocabulary; 0: --draft-vocab-size.
        fp8: opt-in fast paths of its training: "base_fp8", "draft_fp8" (finetune.py's --base-fp8 and --draft-fp8).
    """

    algorithm: str
    fields: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    vocab: int = 0
    fp8: tuple[str, ...] = ()


_FROM_BASE = {"init_from_base_layer": True, "init_attention": True, "fc_init": "average"}
HEADLINE = ("eagle3", "eagle1", "eagle-mtp", "medusa")
DRAFTERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in HEADLINE},
    "eagle3 late": {"algorithm": "eagle3", "fields": {"capture_layer_ids": "late", "frozen_head": True}},
    "eagle-mtp from the base": {"algorithm": "eagle-mtp", "fields": {
        "init_from_base_layer": True, "init_attention": True,
    }},
    "p-eagle": {},
    "p-eagle from the base": {"algorithm": "p-eagle", "fields": _FROM_BASE},
    "p-eagle late": {"algorithm": "p-eagle", "fields": {**_FROM_BASE, "capture_layer_ids": "late"}},
}  # fmt: skip
"""Drafts that can be compared: name -> algorithm (the name, where it is not given) and what is not the default."""
BLOCKS = re.compile(r"(dflash|dspark) ([1-9]\d*) x ([1-9]\d*)(?: kv ([1-9]\d*))?( late)?")
"""Names of block drafts: algorithm, layers, slots, key/value heads; late: the context starts as the average of late
captures, and the first MLP as the base's last one."""
_AFRESH = {"init_from_base_layer": False, "fc_init": "last_capture", "init_attention": False}
_LATE = {"capture_layer_ids": "late"}
ABLATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "nothing from the base": {"fields": _AFRESH},
    "layer from the base, not attention": {"fields": {**_AFRESH, "init_from_base_layer": True}},
    "fc from the average alone": {"fields": {**_AFRESH, "fc_init": "average"}},
    "all but attention": {"fields": {"init_attention": False}},
    "biases of the base": {"fields": {"attention_bias": True}},
    "detached": {"objective": {"detach": True}},
    "alignment target": {"objective": {"alignment": "target"}},
    "alignment paper": {"objective": {"alignment": "paper"}},
    "decay 1.0": {"objective": {"step_decay": 1.0}},
    "all rows (no in_vocab_only)": {"objective": {"in_vocab_only": False}},
    "loss lk": {"objective": {"loss": "lk"}},
    "T = 4": {"objective": {"ttt_steps": 4}},
    "loss lk_hybrid": {"objective": {"loss": "lk_hybrid"}},
    "decay 0.8": {"objective": {"step_decay": 0.8}},
    "weight decay 0.1": {"train": {"weight_decay": 0.1}},
    "D = 2048": {"vocab": 2048},
    "five captures": {"fields": {"capture_layer_ids": "five"}},
    "frozen head": {"fields": {"frozen_head": True}},
    "late captures": {"fields": _LATE},
    "q/k norm": {"fields": {"qk_norm": True}},
    "two layers": {"fields": {"num_hidden_layers": 2}},
    "late captures, frozen head": {"fields": {**_LATE, "frozen_head": True}},
    "late captures, T = 4": {"fields": _LATE, "objective": {"ttt_steps": 4}},
    "late captures, frozen head, T = 4": {"fields": {**_LATE, "frozen_head": True}, "objective": {"ttt_steps": 4}},
    "late captures, frozen head, T = 4, decay 0.8": {
        "fields": {**_LATE, "frozen_head": True}, "objective": {"ttt_steps": 4, "step_decay": 0.8},
    },
    "base in fp8": {"fp8": ("base_fp8",)},
    "draft in fp8": {"fp8": ("draft_fp8",)},
    "base and draft in fp8": {"fp8": ("base_fp8", "draft_fp8")},
    "late captures, frozen head, T = 4, base and draft in fp8": {
        "fields": {**_LATE, "frozen_head": True}, "objective": {"ttt_steps": 4}, "fp8": ("base_fp8", "draft_fp8"),
    },
}  # fmt: skip
"""EAGLE-3 with something changed: see `Kind`."""
USUAL = [name for name, change in ABLATIONS.items() if "fp8" not in change]
"""Those that run on any machine."""


def drafter(name: str) -> str:
    """The name; an error of argparse if there is no such drafter."""
    if name not in DRAFTERS and not BLOCKS.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"no drafter is called {name!r}{suggest(name, DRAFTERS)}; there are {', '.join(DRAFTERS)}, and block "
            "drafts such as 'dflash 2 x 8' or 'dspark 2 x 5 kv 14' (layers, slots, key/value heads)"
        )
    return name


def kind_of(name: str, settings: dict[str, dict[str, Any]] = DRAFTERS) -> Kind:
    """Of a drafter, or of an ablation of EAGLE-3."""
    if settings is DRAFTERS and (block := BLOCKS.fullmatch(name)):
        sizes = zip(("num_hidden_layers", "block_size", "num_key_value_heads"), block.groups()[1:4], strict=True)
        late = {"capture_layer_ids": "late", "fc_init": "average", "init_from_base_layer": True} if block[5] else {}
        return Kind(block[1], {field: int(size) for field, size in sizes if size is not None} | late)
    return Kind(**{"algorithm": name if settings is DRAFTERS else "eagle3", **settings[name]})
