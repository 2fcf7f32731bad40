"""Options of the scripts: one dataclass per script, whose fields are its flags and help text. No torch here.

Every command takes its run, or the run's fields: `convert(ConvertRun("base", "draft"))` and `convert("base", "draft")`.
"""

from megatron_spec.commands.runs.common import (
    ChatText,
    DraftModules,
    Layers,
    ModelRun,
    MovedBase,
    Parallel,
    Precision,
    ScriptRun,
    settings_of,
    takes,
)
from megatron_spec.commands.runs.convert import ConvertRun, DraftRequest
from megatron_spec.commands.runs.decode import GenerateRun, ValidateRun
from megatron_spec.commands.runs.export import ExportRun
from megatron_spec.commands.runs.features import ExtractRun, ImportRun
from megatron_spec.commands.runs.finetune import EvalRequest, FinetuneRun
from megatron_spec.commands.runs.quantize import QuantizeRun

__all__ = [
    "ChatText",
    "ConvertRun",
    "DraftModules",
    "DraftRequest",
    "EvalRequest",
    "ExportRun",
    "ExtractRun",
    "FinetuneRun",
    "GenerateRun",
    "ImportRun",
    "Layers",
    "ModelRun",
    "MovedBase",
    "Parallel",
    "Precision",
    "QuantizeRun",
    "ScriptRun",
    "ValidateRun",
    "settings_of",
    "takes",
]
