"""Runs in the environment of vLLM: loads bases with exported drafts, decodes greedily, and reports what it saw.

    python vllm_worker.py CASES.json RESULTS.json

A case: {name, base, method, draft, k, parallel, prompts, tokens, dtype}; `draft` null decodes with the base alone. A
result: the token ids, the log-probabilities of the first token, the draft's first logits (EAGLE), the acceptance
counters.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1",
)  # fmt: skip


def watch_drafter(llm: Any, seen: list[Any]) -> None:
    """Keep every result of the draft's `compute_logits`."""

    def install(worker: Any) -> None:
        model = worker.model_runner.drafter.model
        inner = model.compute_logits

        def compute_logits(*args: Any) -> Any:
            logits = inner(*args)
            seen.append(logits)
            return logits

        model.compute_logits = compute_logits

    llm.collective_rpc(install)


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters of speculative decoding, which go on over all engines of a process."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            found[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """after - before, position by position."""
    return {
        name: [a - b for a, b in zip(value, before.get(name, [0] * len(value)), strict=False)]
        if isinstance(value, list)
        else value - before.get(name, 0)
        for name, value in after.items()
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One engine from start to end."""
    import torch
    from vllm import LLM, SamplingParams

    speculative = None
    if case["draft"]:
        speculative = {"method": case["method"], "model": case["draft"], "num_speculative_tokens": case["k"]}
        speculative |= {"parallel_drafting": True} if case["parallel"] else {}
    llm = LLM(
        case["base"], skip_tokenizer_init=True, dtype=case["dtype"], enforce_eager=True, max_model_len=128,
        max_num_seqs=8, speculative_config=speculative, disable_log_stats=False,
    )  # fmt: skip
    seen: list[Any] = []
    if speculative and case["method"] != "dspark":  # drafts inside another model runner, without a drafter
        watch_drafter(llm, seen)
    before = counters(llm)
    params = SamplingParams(
        temperature=0, max_tokens=case["tokens"], ignore_eos=True, detokenize=False, logprobs=5
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in case["prompts"]], params, use_tqdm=False)
    result: dict[str, Any] = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [{str(i): p.logprob for i, p in o.outputs[0].logprobs[0].items()} for o in outputs],
        "counters": difference(counters(llm), before),
    }
    if seen:
        first = seen[0] if isinstance(seen[0], torch.Tensor) else torch.stack(list(seen[0]), 1)
        if case["method"] == "dflash" or case["parallel"]:  # all slots of a block at once
            first = first[:: case["k"]]
        result["draft_logits"] = first.float().tolist()
    del llm, seen
    gc.collect()
    return result


def on_gpu() -> bool:
    """vLLM built for a GPU, as opposed to the package vllm-cpu."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def use_plain_activation() -> None:
    """On the CPU, vLLM's activation fused with the fp8 rounding of the next input gives garbage."""
    import vllm.model_executor.layers.fusion.fused_act_quant as fused
    import vllm.model_executor.models.llama as llama

    fused.maybe_fused_act_quant = llama.maybe_fused_act_quant = lambda act, x, linear: act(x)


def keep_own_heads() -> None:
    """On the CPU, vLLM takes the head of an fp8 base for that of an fp8 draft.

    It shares heads whose weights are equal. Packing has left an empty tensor of both, and those are equal.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    share = SpecDecodeBaseProposer._maybe_share_lm_head

    def share_unless_packed(proposer: Any, target: Any) -> None:
        model = proposer.model
        if not (getattr(model, "has_own_lm_head", False) and model.lm_head.weight.numel() == 0):
            share(proposer, target)

    SpecDecodeBaseProposer._maybe_share_lm_head = share_unless_packed


def norm_keys_layer_by_layer() -> None:
    """On the CPU, vLLM norms the context's keys of every layer of a DFlash draft with the weight of the first layer.

    It calls its kernel once with the weights of all layers [L, D], and the kernel of the CPU reads one row of them.
    """
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(model: Any, keys: Any) -> Any:
        pairs = zip(keys, model._k_norm_weights, strict=True)
        return torch.stack([torch.nn.functional.rms_norm(k, k.shape[-1:], w, model._rms_norm_eps) for k, w in pairs])

    DFlashQwen3Model._normalize_context_k = normalize


def main() -> None:
    """All cases, one after the other."""
    if not on_gpu():
        use_plain_activation()
        keep_own_heads()
        norm_keys_layer_by_layer()
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            results[case["name"]] = run(case)
        except Exception as e:  # the test that asks for this case fails, the others do not
            results[case["name"]] = {"error": f"{type(e).__name__}: {e}"[:2000]}
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
