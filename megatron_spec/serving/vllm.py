"""vLLM: the command line, and the model repository of Triton's vLLM backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.files import published_folder, write_json, write_text
from megatron_spec.serving.draft import check_draft_len, read_draft


def speculative_config(draft: Path | str, max_draft_len: int) -> dict[str, Any]:
    """vLLM's speculative_config. The method is always named: guessing it from the folder's name fails silently."""
    check_draft_len(max_draft_len)
    served = read_draft(draft, ("eagle3", "eagle", "medusa"))
    if served.num_heads is not None and max_draft_len > served.num_heads:
        raise UserError(f"--max-draft-len {max_draft_len}, but the draft has {served.num_heads} Medusa heads")
    return {"method": served.method, "model": str(served.path), "num_speculative_tokens": max_draft_len}


def vllm_command(draft: Path | str, base: Path | str, max_draft_len: int) -> list[str]:
    """Arguments that start an OpenAI-compatible server. Raises UserError when there is no draft that vLLM loads."""
    return ["vllm", "serve", str(base), "--speculative-config", json.dumps(speculative_config(draft, max_draft_len))]


def write_triton_repository(
    folder: Path | str, name: str, draft: Path | str, base: Path | str, max_draft_len: int, overwrite: bool = False
) -> None:
    """Write FOLDER/NAME/{config.pbtxt, 1/model.json} for Triton's vLLM backend.

    Raises UserError for a name that is no plain folder name, or a folder that is not empty.
    """
    if not name.replace("_", "").replace("-", "").isalnum():
        raise UserError(f"model name {name!r} may hold letters, digits, '-' and '_' only")
    engine = {"model": str(base), "speculative_config": speculative_config(draft, max_draft_len)}
    with published_folder(folder, overwrite) as temporary:
        write_json(temporary / name / "1" / "model.json", engine)
        write_text(
            temporary / name / "config.pbtxt",
            'backend: "vllm"\n\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]\n',
        )
