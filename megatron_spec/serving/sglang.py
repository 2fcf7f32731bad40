"""SGLang: the command line."""

from __future__ import annotations

from megatron_spec.serving.draft import Method, Speculation

IMAGE = "lmsysorg/sglang:latest"
_ALGORITHMS: dict[Method, str] = {
    "eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "draft_target": "STANDALONE", "ngram": "NGRAM",
}  # fmt: skip


def sglang_command(plan: Speculation, base: str, port: int = 8000) -> list[str]:
    """Arguments that start a server which drafts one chain (no tree).

    SGLang counts the verified tokens: the drafted ones and the last accepted one. Raises UserError for Medusa.
    """
    plan.require(tuple(_ALGORITHMS), "SGLang")
    command = ["python", "-m", "sglang.launch_server", "--model-path", base, "--port", str(port)]
    command += ["--speculative-algorithm", _ALGORITHMS[plan.method]]
    if plan.model is not None:
        command += ["--speculative-draft-model-path", plan.model]
    verified = ["--speculative-num-draft-tokens", str(plan.max_draft_len + 1)]
    if plan.method == "ngram":
        return [*command, *verified]
    return [
        *command, "--speculative-num-steps", str(plan.max_draft_len), "--speculative-eagle-topk", "1", *verified,
    ]  # fmt: skip
