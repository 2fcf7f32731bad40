"""TensorRT-LLM (PyTorch backend): the YAML file of `--extra_llm_api_options`, and the commands that read it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from megatron_spec.serving.draft import Speculation

IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"


def _speculative_config(plan: Speculation, older: bool) -> dict[str, Any]:
    length = {"max_draft_len": plan.max_draft_len}
    model = {"speculative_model_dir" if older else "speculative_model": plan.model}
    if plan.method == "eagle3":
        config: dict[str, Any] = {"decoding_type": "Eagle3", **length, **model}
        if plan.capture_layers is not None:  # this engine does not read them from the draft's config.json
            config["eagle3_layers_to_capture"] = list(plan.capture_layers)
        return config
    if plan.method == "draft_target":
        return {"decoding_type": "DraftTarget", **length, **model}
    if plan.method == "ngram":
        pool = {"is_public_pool": True, "is_keep_all": True, "is_use_oldest": True}
        size = {"max_matching_ngram_size": plan.max_matching_ngram_size}
        return {"decoding_type": "NGram", **length, **size, **pool}
    config = {"decoding_type": "MTP", **length, "num_nextn_predict_layers": plan.num_nextn_predict_layers}
    if plan.relaxed is not None:
        topk, delta = plan.relaxed
        config |= {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": topk, "relaxed_delta": delta}
    return config


def trtllm_config(plan: Speculation, *, max_batch_size: int = 1, older: bool = False) -> dict[str, Any]:
    """Content of the YAML file.

    Args:
        max_batch_size: largest batch that gets a CUDA graph.
        older: spell the draft's folder as releases before `speculative_model` did.

    Raises UserError for a draft that this engine does not serve.
    """
    plan.require(("eagle3", "mtp", "ngram", "draft_target"), "TensorRT-LLM (PyTorch backend)")
    return {
        "speculative_config": _speculative_config(plan, older),
        "enable_attention_dp": False,
        "disable_overlap_scheduler": True,
        "cuda_graph_config": {"max_batch_size": max_batch_size},
        "kv_cache_config": {"enable_block_reuse": False},
    }


def serve_command(base: str, options_file: str, port: int = 8000) -> list[str]:
    """`trtllm-serve` with the YAML file."""
    return [
        "trtllm-serve", base, "--backend", "pytorch", "--port", str(port), "--extra_llm_api_options", options_file,
    ]  # fmt: skip


def bench_command(base: str, options_file: str, dataset: str = "dataset.json") -> list[str]:
    """`trtllm-bench` with the YAML file, one request at a time."""
    return [
        "trtllm-bench", "--model", base, "--model_path", base, "throughput", "--backend", "pytorch",
        "--dataset", dataset, "--concurrency", "1", "--extra_llm_api_options", options_file,
    ]  # fmt: skip


def trtllm_yaml(plan: Speculation, base: str | None = None, options_file: str = "trtllm.yaml", **options: Any) -> str:
    """`trtllm_config` as text; with `base`, behind the commands that read it from `options_file`."""
    lines = []
    if base is not None:
        commands = (serve_command(base, options_file), bench_command(base, options_file))
        lines = [f"# {shlex.join(command)}\n" for command in commands]
    return "".join(lines) + yaml.safe_dump(trtllm_config(plan, **options), sort_keys=False)


def place_of(path: Path | str | None) -> str:
    """How a command names the YAML file: absolute, or by its usual name when it has none yet."""
    return "trtllm.yaml" if path is None else str(Path(path).resolve())
