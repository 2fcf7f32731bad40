"""vLLM: the command line, and the model repository of Triton's vLLM backend."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.files import write_json, write_text
from megatron_spec.runtime.folders import published_folder
from megatron_spec.serving.draft import Method, Speculation

log = logging.getLogger(__name__)

IMAGE = "vllm/vllm-openai:latest"
MEDUSA_IMAGE = "vllm/vllm-openai:v0.32.0"
"""The last release with Medusa."""
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:26.10-vllm-python-py3"
MEMORY = 0.9
"""Share of a GPU's memory that vLLM takes when it is alone (its own default)."""
OTHER_MODELS = ("base_model", "draft_target_model")
"""Models of a Triton repository beside the one with the draft."""
_METHODS: dict[Method, str] = {
    "eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp",
    "ngram": "ngram", "draft_target": "draft_model", "pard": "draft_model",
}  # fmt: skip


def speculative_config(plan: Speculation) -> dict[str, Any]:
    """vLLM's speculative_config. The method is always named: guessing it from the folder's name fails silently.

    Raises UserError for drafts that vLLM does not serve.
    """
    plan.require(tuple(_METHODS), "vllm")
    plan.require_plain("vLLM")
    if plan.method == "medusa":
        log.warning("vLLM serves Medusa up to release 0.32.0, newer ones refuse the method: install vllm==0.32.0")
    config: dict[str, Any] = {"method": _METHODS[plan.method]}
    if plan.model is not None:
        config["model"] = plan.model
    if plan.parallel or plan.method == "pard":
        config["parallel_drafting"] = True
    if plan.method == "ngram":
        config |= {"prompt_lookup_max": plan.ngram_size, "prompt_lookup_min": 1}
    return {**config, "num_speculative_tokens": plan.max_draft_len}


def vllm_command(plan: Speculation, base: str, port: int = 8000, tp_size: int = 1) -> list[str]:
    """Arguments that start an OpenAI-compatible server."""
    parallel = ["--tensor-parallel-size", str(tp_size)] if tp_size > 1 else []
    text = json.dumps(speculative_config(plan))
    return ["vllm", "serve", base, "--port", str(port), *parallel, "--speculative-config", text]


def triton_models(
    plan: Speculation, base: str, name: str, other: Speculation | None, tp_size: int = 1, memory: float = MEMORY
) -> dict[str, dict[str, Any]]:
    """Engine arguments by model name: with the draft, without (for comparison), and with a second model.

    Args:
        memory: share of GPU memory for one model.

    Raises UserError if the first one is named like another.
    """
    if name in OTHER_MODELS:
        raise UserError(f"--name {name} is that of a model to compare with: give another one")
    engine: dict[str, Any] = {"model": base, "gpu_memory_utilization": memory}
    if tp_size > 1:
        engine["tensor_parallel_size"] = tp_size
    models: dict[str, dict[str, Any]] = {name: {**engine, "speculative_config": speculative_config(plan)}}
    models[OTHER_MODELS[0]] = dict(engine)
    if other is not None:
        models[OTHER_MODELS[1]] = {**engine, "speculative_config": speculative_config(other)}
    return models


def triton_command(repository: str, models: Iterable[str], http_port: int = 8000) -> list[str]:
    """`tritonserver` that loads only `models`; HTTP, gRPC and metrics on three ports from `http_port`."""
    command = ["tritonserver", "--model-repository", repository, "--model-control-mode", "explicit"]
    for name in models:
        command += ["--load-model", name]
    for offset, flag in enumerate(("--http-port", "--grpc-port", "--metrics-port")):
        command += [flag, str(http_port + offset)]
    return command


def write_triton_repository(folder: Path | str, models: Mapping[str, Any]) -> None:
    """Write FOLDER/NAME/{config.pbtxt, 1/model.json} for Triton's vLLM backend, per model.

    Raises UserError for a name that is not a plain folder name, or a folder that is not empty.
    """
    for name in models:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise UserError(f"model name {name!r} may hold letters, digits, '-' and '_' only")
    with published_folder(folder) as temporary:
        for name, engine in models.items():
            write_json(temporary / name / "1" / "model.json", engine)
            write_text(
                temporary / name / "config.pbtxt",
                'backend: "vllm"\n\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]\n',
            )
