"""TensorRT-LLM (PyTorch backend): the YAML file of `trtllm-serve --extra_llm_api_options` / `--config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_spec.files import write_text
from megatron_spec.serving.draft import check_draft_len, read_draft


def trtllm_config(
    draft: Path | str, max_draft_len: int, *, max_batch_size: int = 1, older: bool = False,
    place: Path | str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Content of the YAML file for an exported EAGLE-3 draft.

    Args:
        max_draft_len: tokens drafted per step.
        max_batch_size: largest batch that gets a CUDA graph.
        place: where the draft will be served from, when that is not where it is now.
        older: spell the draft's folder as releases before `speculative_model` did.

    Raises:
        UserError: no EAGLE-3 draft there, or max_draft_len below 1.
    """
    check_draft_len(max_draft_len)
    served = read_draft(draft)
    speculative: dict[str, Any] = {
        "decoding_type": "Eagle3",
        "max_draft_len": max_draft_len,
        "speculative_model_dir" if older else "speculative_model": str(served.path if place is None else place),
    }
    if served.capture_layers is not None:  # this engine does not read them from the draft's config.json
        speculative["eagle3_layers_to_capture"] = list(served.capture_layers)
    return {
        "speculative_config": speculative,
        "enable_attention_dp": False,
        "disable_overlap_scheduler": True,
        "cuda_graph_config": {"max_batch_size": max_batch_size},
        "kv_cache_config": {"enable_block_reuse": False},
    }


def trtllm_yaml(draft: Path | str, max_draft_len: int, **options: Any) -> str:
    """`trtllm_config` as text."""
    return yaml.safe_dump(trtllm_config(draft, max_draft_len, **options), sort_keys=False)


def write_trtllm_yaml(path: Path | str, draft: Path | str, max_draft_len: int = 3, **options: Any) -> None:
    """Write the YAML file for the draft in folder `draft`. Raises UserError as `trtllm_config` does."""
    write_text(path, trtllm_yaml(draft, max_draft_len, **options))
