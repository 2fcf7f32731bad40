"""SGLang: the command line."""

from __future__ import annotations

from megatron_spec.serving.draft import Method, Speculation

IMAGE = "lmsysorg/sglang:latest"
_ALGORITHMS: dict[Method, str] = {
    "eagle3": "EAGLE3", "eagle": "EAGLE", "dflash": "DFLASH", "dspark": "DSPARK", "mtp": "NEXTN",
    "draft_target": "STANDALONE", "ngram": "NGRAM",
}  # fmt: skip


def sglang_command(
    plan: Speculation, base: str, port: int = 8000, tp_size: int = 1, host: str | None = None
) -> list[str]:
    """Arguments that start a server which drafts one chain (no tree).

    SGLang counts the verified tokens: the drafted ones and the last accepted one; it has /metrics only on request.
    Raises UserError for drafts that it does not serve.
    """
    plan.require(tuple(_ALGORITHMS), "sglang")
    plan.require_plain("SGLang")
    command = ["python3", "-m", "sglang.launch_server", "--enable-metrics", "--model-path", base, "--port", str(port)]
    command += ["--host", host] if host else []
    command += ["--tp-size", str(tp_size)] if tp_size > 1 else []
    command += ["--speculative-algorithm", _ALGORITHMS[plan.method]]
    if plan.model is not None:
        command += ["--speculative-draft-model-path", plan.model]
    if plan.method == "dflash":
        return [*command, "--speculative-dflash-block-size", str(plan.max_draft_len + 1)]
    if plan.method == "dspark":
        return [*command, "--speculative-dspark-block-size", str(plan.max_draft_len)]
    verified = ["--speculative-num-draft-tokens", str(plan.max_draft_len + 1)]
    if plan.method == "ngram":
        return [*command, *verified]
    return [
        *command, "--speculative-num-steps", str(plan.max_draft_len), "--speculative-eagle-topk", "1", *verified,
    ]  # fmt: skip
