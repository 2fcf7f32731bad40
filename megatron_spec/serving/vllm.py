"""vLLM: the command line, and the model repository of Triton's vLLM backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.files import published_folder, write_json, write_text
from megatron_spec.serving.draft import Speculation

IMAGE = "vllm/vllm-openai:latest"
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:25.08-vllm-python-py3"


def speculative_config(plan: Speculation) -> dict[str, Any]:
    """vLLM's speculative_config. The method is always named: guessing it from the folder's name fails silently."""
    method = "draft_model" if plan.method == "draft_target" else plan.method
    config: dict[str, Any] = {"method": method}
    if plan.model is not None:
        config["model"] = plan.model
    if plan.method == "ngram":
        config |= {"prompt_lookup_max": plan.max_matching_ngram_size, "prompt_lookup_min": 1}
    return {**config, "num_speculative_tokens": plan.max_draft_len}


def vllm_command(plan: Speculation, base: str, port: int = 8000) -> list[str]:
    """Arguments that start an OpenAI-compatible server."""
    text = json.dumps(speculative_config(plan))
    return ["vllm", "serve", base, "--port", str(port), "--speculative-config", text]


def triton_models(plan: Speculation, base: str, name: str, other: Speculation | None) -> dict[str, dict[str, Any]]:
    """Engine arguments by model name: with the draft, the base alone (to compare), and with a second model."""
    models: dict[str, dict[str, Any]] = {name: {"model": base}, "base_model": {"model": base}}
    models[name]["speculative_config"] = speculative_config(plan)
    if other is not None:
        models["draft_target_model"] = {"model": base, "speculative_config": speculative_config(other)}
    return models


def write_triton_repository(folder: Path | str, models: Mapping[str, Any], overwrite: bool = False) -> None:
    """Write FOLDER/NAME/{config.pbtxt, 1/model.json} for Triton's vLLM backend, per model.

    Raises UserError for a name that is no plain folder name, or a folder that is not empty.
    """
    for name in models:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise UserError(f"model name {name!r} may hold letters, digits, '-' and '_' only")
    with published_folder(folder, overwrite) as temporary:
        for name, engine in models.items():
            write_json(temporary / name / "1" / "model.json", engine)
            write_text(
                temporary / name / "config.pbtxt",
                'backend: "vllm"\n\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]\n',
            )
