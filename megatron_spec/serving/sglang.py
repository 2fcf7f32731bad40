"""SGLang: the command line."""

from __future__ import annotations

from pathlib import Path

from megatron_spec.serving.draft import check_draft_len, read_draft


def sglang_command(draft: Path | str, base: Path | str, max_draft_len: int) -> list[str]:
    """Arguments that start a server which drafts one chain of `max_draft_len` tokens (no tree).

    SGLang counts the verified tokens: the drafted ones and the last accepted one. Raises UserError when there is no
    EAGLE draft.
    """
    check_draft_len(max_draft_len)
    served = read_draft(draft, ("eagle3", "eagle"))
    return [
        "python", "-m", "sglang.launch_server", "--model-path", str(base),
        "--speculative-algorithm", "EAGLE3" if served.method == "eagle3" else "EAGLE",
        "--speculative-draft-model-path", str(served.path),
        "--speculative-num-steps", str(max_draft_len),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(max_draft_len + 1),
    ]  # fmt: skip
