"""Every dataclass a user can set, and the rules that make one valid. Standard library only.

All of them read from and write to plain dictionaries (`from_dict`, `to_dict`); an unknown key is an
error with a suggestion, a value of the wrong type an error with the type that was expected.
"""

from __future__ import annotations

from megatron_spec.config.base import BaseConfig, MlaConfig, MoeConfig, RopeConfig, RopeType, RouterKind
from megatron_spec.config.block import BlockAlgorithm, BlockConfig
from megatron_spec.config.core import (
    LARGEST_SEED,
    Config,
    UserError,
    expect,
    expect_choice,
    flag_name,
    group,
    option,
    require,
    suggest,
)
from megatron_spec.config.decoding import DecodeConfig, DecodingType
from megatron_spec.config.draft import DraftConfig, EagleAlgorithm, EagleConfig, MedusaConfig
from megatron_spec.config.layers import ENGINE, LOCAL, BaseLayers
from megatron_spec.config.training import (
    Alignment,
    Fp8Recipe,
    LossKind,
    ObjectiveConfig,
    OptimizerImpl,
    ParallelConfig,
    QuantConfig,
    QuantFormat,
    TrainConfig,
    TransformerImpl,
)

__all__ = [
    "ENGINE",
    "LARGEST_SEED",
    "LOCAL",
    "Alignment",
    "BaseConfig",
    "BaseLayers",
    "BlockAlgorithm",
    "BlockConfig",
    "Config",
    "DecodeConfig",
    "DecodingType",
    "DraftConfig",
    "EagleAlgorithm",
    "EagleConfig",
    "Fp8Recipe",
    "LossKind",
    "MedusaConfig",
    "MlaConfig",
    "MoeConfig",
    "ObjectiveConfig",
    "OptimizerImpl",
    "ParallelConfig",
    "QuantConfig",
    "QuantFormat",
    "RopeConfig",
    "RopeType",
    "RouterKind",
    "TrainConfig",
    "TransformerImpl",
    "UserError",
    "expect",
    "expect_choice",
    "flag_name",
    "group",
    "option",
    "require",
    "suggest",
]
