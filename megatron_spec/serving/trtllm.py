"""TensorRT-LLM (PyTorch backend): the YAML file of `--extra_llm_api_options`, and the commands that read it.

Two spellings, as `llmapi/llm_args.py` of the releases reads them. Releases from 1.3 on: `Eagle3`, `Draft_Target`,
`speculative_model`, and PARD, DFlash, DSpark and SA. Releases up to 1.2 (`older`): `Eagle` for an EAGLE-3 draft,
`DraftTarget`, `speculative_model_dir`, and none of the four. MTP takes its length from `num_nextn_predict_layers` in
old releases and from `max_draft_len` in new ones, which reject no file that has both.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_spec.config import UserError
from megatron_spec.serving.draft import NAMES, Method, Speculation

IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc23"
OLDER_IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
_TYPES: dict[Method, str] = {
    "eagle3": "Eagle3", "mtp": "MTP", "ngram": "NGram", "sa": "SA", "draft_target": "Draft_Target", "pard": "PARD",
    "dflash": "DFlash", "dspark": "DSpark",
}  # fmt: skip
_OLDER_TYPES: dict[Method, str] = {
    "eagle3": "Eagle", "mtp": "MTP", "ngram": "NGram", "draft_target": "DraftTarget",
}  # fmt: skip


@dataclass(frozen=True)
class EngineOptions:
    """Options of TensorRT-LLM other than drafting. None keeps its default.

    Attributes:
        max_batch_size: most requests per step; CUDA graphs are captured up to it.
        max_num_tokens: most tokens per forward, prompts included.
        max_seq_len: longest prompt plus answer.
        free_gpu_memory_fraction: share of the memory left after loading that the KV cache takes.
        enable_autotuner: benchmark kernels at start; off starts faster and is reproducible.
        tp_size: tensor parallel size.
        older: use the spelling of releases up to 1.2.
    """

    max_batch_size: int = 1
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    free_gpu_memory_fraction: float | None = None
    enable_autotuner: bool | None = None
    tp_size: int = 1
    older: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "tp_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
        share = self.free_gpu_memory_fraction
        if share is not None and not 0 < share < 1:
            raise UserError(f"--free-gpu-memory-fraction must lie between 0 and 1, found {share}")


def _speculative_config(plan: Speculation, older: bool) -> dict[str, Any]:
    types = _OLDER_TYPES if older else _TYPES
    if plan.method not in types and plan.method in _TYPES:
        raise UserError(f"--older: TensorRT-LLM knows {NAMES[plan.method]} from release 1.3 on, leave --older out")
    plan.require(tuple(types), "trtllm")
    config: dict[str, Any] = {"decoding_type": types[plan.method], "max_draft_len": plan.max_draft_len}
    if plan.model is not None:
        config["speculative_model_dir" if older else "speculative_model"] = plan.model
    if plan.method == "eagle3" and plan.capture_layers is not None:  # not read from the draft's config.json
        config["eagle3_layers_to_capture"] = list(plan.capture_layers)
    if plan.method == "mtp":
        config["num_nextn_predict_layers"] = plan.max_draft_len
    if plan.method in ("ngram", "sa"):
        config["max_matching_ngram_size"] = plan.ngram_size
    return config | _method_options(plan, older)


def _method_options(plan: Speculation, older: bool) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if plan.method == "ngram":
        config |= {name: getattr(plan, name) for name in ("is_public_pool", "is_keep_all", "is_use_oldest")}
    if plan.method == "sa" and plan.enable_global_pool:
        config["enable_global_pool"] = True
        if plan.global_pool_size is not None:
            config["global_pool_size"] = plan.global_pool_size
    if plan.sa_threshold is not None:
        if older:
            raise UserError("--older: TensorRT-LLM knows SA from release 1.3 on, leave --sa-threshold or --older out")
        config["sa_config"] = {"threshold": plan.sa_threshold}
    if plan.relaxed is not None:
        topk, delta = plan.relaxed
        config |= {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": topk, "relaxed_delta": delta}
    return config


def trtllm_config(plan: Speculation, options: EngineOptions | None = None) -> dict[str, Any]:
    """Content of the YAML file. Raises UserError for a draft that this engine does not serve."""
    options = options or EngineOptions()
    config: dict[str, Any] = {
        "speculative_config": _speculative_config(plan, options.older),
        "enable_attention_dp": False,
        "disable_overlap_scheduler": True,
        "max_batch_size": options.max_batch_size,
        "cuda_graph_config": {"max_batch_size": options.max_batch_size},
        "kv_cache_config": {"enable_block_reuse": False},
    }
    for name in ("max_num_tokens", "max_seq_len", "enable_autotuner"):
        if getattr(options, name) is not None:
            config[name] = getattr(options, name)
    if options.tp_size > 1:
        config["tensor_parallel_size"] = options.tp_size
    if options.free_gpu_memory_fraction is not None:
        config["kv_cache_config"]["free_gpu_memory_fraction"] = options.free_gpu_memory_fraction
    return config


def serve_command(base: str, options_file: str, port: int = 8000, tp_size: int = 1, host: str = "") -> list[str]:
    """`trtllm-serve` with the YAML file."""
    command = ["trtllm-serve", base, "--backend", "pytorch"]
    command += ["--host", host] if host else []
    command += ["--tp_size", str(tp_size)] if tp_size > 1 else []
    return [*command, "--port", str(port), "--extra_llm_api_options", options_file]


def bench_command(base: str, options_file: str, tp_size: int = 1) -> list[str]:
    """`trtllm-bench` with the YAML file, one request at a time."""
    return [
        "trtllm-bench", "--model", base, "--model_path", base, "throughput", "--backend", "pytorch",
        "--dataset", "dataset.json", "--concurrency", "1", *(["--tp", str(tp_size)] if tp_size > 1 else []),
        "--extra_llm_api_options", options_file,
    ]  # fmt: skip


def trtllm_yaml(
    plan: Speculation, base: str | None = None, options_file: str = "trtllm.yaml",
    options: EngineOptions | None = None, port: int = 8000,
) -> str:  # fmt: skip
    """`trtllm_config` as text; with `base`, after the commands that read it from `options_file`."""
    options, lines = options or EngineOptions(), []
    if base is not None:
        commands = (
            serve_command(base, options_file, port, options.tp_size),
            bench_command(base, options_file, options.tp_size),
        )
        lines = [f"# {shlex.join(command)}\n" for command in commands]
    return "".join(lines) + yaml.safe_dump(trtllm_config(plan, options), sort_keys=False)


def options_path(path: Path | str | None) -> str:
    """Path of the YAML file in a command: absolute, or the default name if there is none yet."""
    return "trtllm.yaml" if path is None else str(Path(path).resolve())
