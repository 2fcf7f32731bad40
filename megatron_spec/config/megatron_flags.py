"""Flags of Megatron-LM that are not flags of ours: what each means here. One table for the parser and for the docs.

`tools/megatron_flags_table.py --write` renders it into docs/megatron_flags.md. Flags of the same name and meaning are
not listed: they are in `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["not needed", "checked", "fixed", "renamed", "refused"]

VERDICTS: dict[Verdict, str] = {
    "renamed": "an error that names our flag",
    "refused": "an error that says what to do",
    "fixed": "accepted with the values in parentheses, else an error",
    "checked": "accepted when the base has this value, else an error",
    "not needed": "accepted; a log line says that nothing depends on it",
}


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM."""

    name: str
    verdict: Verdict
    text: str
    """Why, or what to do; of a renamed flag: ours."""
    takes_value: bool = True
    values: tuple[str, ...] = ()
    """Of a fixed flag."""
    attribute: str = ""
    """Of a checked flag: attribute of `BaseConfig`, with dots."""


def _switches(names: str, verdict: Verdict, text: str) -> list[MegatronFlag]:
    return [MegatronFlag(f"--{name}", verdict, text, takes_value=False) for name in names.split()]


def _valued(names: str, verdict: Verdict, text: str, *values: str) -> list[MegatronFlag]:
    return [MegatronFlag(f"--{name}", verdict, text, values=values) for name in names.split()]


def _shapes(**attributes: str) -> list[MegatronFlag]:
    text = "the architecture is that of the base in --load"
    return [MegatronFlag(f"--{n.replace('_', '-')}", "checked", text, attribute=a) for n, a in attributes.items()]


_FUSIONS = (
    "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
    "no-gradient-accumulation-fusion no-persist-layer-norm cross-entropy-loss-fusion moe-permute-fusion "
    "moe-grouped-gemm use-flash-attn no-async-tensor-model-parallel-allreduce tp-comm-overlap "
    "overlap-grad-reduce overlap-param-gather overlap-p2p-communication no-overlap-p2p-communication "
    "no-create-attention-mask-in-dataloader manual-gc no-mmap-bin-files accumulate-allreduce-grads-in-fp32"
)
_TABLE = [
    *_shapes(
        num_layers="num_layers", hidden_size="hidden_size", ffn_hidden_size="intermediate_size",
        num_attention_heads="num_attention_heads", num_query_groups="num_key_value_heads", kv_channels="head_dim",
        max_position_embeddings="max_position_embeddings", vocab_size="vocab_size", norm_epsilon="rms_norm_eps",
        layernorm_epsilon="rms_norm_eps", rotary_base="rope.theta", rotary_percent="rope.partial_rotary_factor",
        num_experts="num_experts", moe_router_topk="num_experts_per_token",
    ),
    *_switches(
        "group-query-attention swiglu untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias "
        "qk-layernorm use-rope-scaling multi-latent-attention use-rotary-position-embeddings no-position-embedding",
        "not needed", "the architecture is that of the base in --load",
    ),
    *_valued("position-embedding-type", "fixed", "the base decides", "rope", "yarn"),
    *_valued("normalization", "fixed", "bases have RMSNorm", "RMSNorm"),
    *_switches("apply-layernorm-1p", "refused", "bases with zero-centered norm weights are not supported"),
    *_valued("attention-dropout hidden-dropout", "fixed", "a draft is trained without dropout", "0", "0.0"),
    *_valued("make-vocab-size-divisible-by", "not needed", "ranks split a vocabulary of any size"),
    *_valued("init-method-std", "refused", 'give "initializer_range" in --eagle-config'),
    *_valued("tokenizer-type", "fixed", "the tokenizer is that of the base's folder, or of --tokenizer",
             "HuggingFaceTokenizer"),
    *_valued("tokenizer-model vocab-file merge-file", "renamed", "--tokenizer"),
    *_switches("use-checkpoint-args", "not needed", "the architecture is always read from the checkpoint"),
    *_switches("use-mcore-models use-dist-ckpt auto-detect-ckpt-format export-te-mcore-model export-legacy-megatron",
               "not needed", "checkpoints and models have one form here"),
    *_valued("ckpt-format dist-ckpt-format", "fixed", "checkpoints have the torch_dist format", "torch_dist"),
    *_valued("export-model-type", "not needed", "the base's config.json says what it is"),
    *_valued("pretrained-checkpoint", "renamed", "--load"),
    *_switches("finetune", "not needed", "a checkpoint without optimizer state, or another --save, starts a new run"),
    *_switches("no-load-rng no-save-rng", "not needed", "random numbers are a function of --seed and the iteration"),
    *_switches("no-load-optim no-save-optim", "refused",
               "a run continues with its optimizer; to start without one, give another --save folder"),
    *_valued("data-path train-data-path per-split-data-args-path", "renamed", "--data"),
    *_valued("valid-data-path test-data-path", "renamed", "--eval-data"),
    *_valued("offline-distillation-data", "renamed", "--offline-data"),
    *_switches("export-offline-model", "renamed", "--offline-data"),
    *_valued("finetune-hf-dataset finetune-data-split", "refused",
             "nothing is downloaded: write the conversations with tools/prepare_conversations.py and give --data"),
    *_valued("split", "refused", "all of --data is trained on; give held-out prompts with --eval-data"),
    *_valued("dataloader-type", "fixed", "rows are drawn in a random order that --seed decides", "cyclic", "single"),
    *_switches("reset-position-ids reset-attention-mask", "renamed", "--packing"),
    *_switches("eod-mask-loss", "not needed", "what the assistant writes is trained, its end included"),
    *_valued("num-workers", "not needed", "tokens are read from a cache on disk"),
    *_switches("fp16", "refused", "half precision is --bf16"),
    *_valued("params-dtype", "renamed", "--bf16"),
    *_valued("fp8-format fp8-recipe", "refused",
             "it is an option of finetune.py, with --transformer-impl transformer_engine; of a draft: "
             "--draft-fp8-recipe"),
    *_valued("fp8-margin fp8-amax-history-len fp8-amax-compute-algo", "refused",
             "the delayed recipe scales by the largest value of 1024 micro-batches"),
    *_switches("fp8-param-gather", "refused", "the base keeps its weights in bf16 beside those in fp8"),
    *_valued("optimizer", "fixed", "the optimizer is AdamW", "adam"),
    *_switches("use-precision-aware-optimizer", "refused", "the optimizer keeps its state in float32"),
    *_valued("train-samples", "refused", "give --train-iters (samples / --global-batch-size) or --train-epochs"),
    *_valued("lr-decay-samples", "refused", "give --lr-decay-iters"),
    *_valued("lr-warmup-samples lr-warmup-fraction", "refused", "give --lr-warmup-iters"),
    *_valued("lr-warmup-init", "fixed", "the warm-up begins at 0", "0", "0.0"),
    *_valued("start-weight-decay end-weight-decay weight-decay-incr-style", "refused", "give --weight-decay"),
    *_valued("rampup-batch-size", "refused", "the batch size is constant: give --global-batch-size"),
    *_switches("calculate-per-token-loss check-for-nan-in-loss-and-grad", "not needed", "always so"),
    *_switches("no-check-for-nan-in-loss-and-grad", "refused", "a loss that is not finite always ends the run"),
    *_valued("eval-interval", "renamed", "--eval-acceptance-interval"),
    *_valued("eval-iters", "renamed", "--eval-prompts"),
    *_valued("exit-interval exit-duration-in-mins", "refused",
             "send SIGTERM or SIGUSR1: the run saves and exits with code 3"),
    *_switches("exit-signal-handler", "not needed", "SIGTERM and SIGUSR1 save and end the run"),
    *_switches("log-throughput log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard "
               "log-validation-ppl-to-tensorboard log-memory-to-tensorboard", "not needed",
               "metrics.jsonl and --tensorboard-dir have the metrics of every step"),
    *_valued("timing-log-level tensorboard-queue-size tensorboard-log-interval empty-unused-memory-level "
             "manual-gc-interval", "not needed", "nothing depends on it"),
    *_valued("wandb-exp-name wandb-save-dir", "refused", "give --wandb-project; its files are in --save"),
    *_valued("distributed-backend", "fixed", "NCCL with a GPU, gloo without one", "nccl", "gloo"),
    *_switches(_FUSIONS, "not needed", "fast paths are chosen at start and give the same numbers"),
    *_valued("attention-backend cp-comm-type moe-token-dispatcher-type", "not needed", "chosen at start"),
    *_valued("moe-router-load-balancing-type moe-aux-loss-coeff", "not needed", "the base is frozen"),
    *_switches("recompute-activations", "not needed", "the base is frozen: no activations are kept"),
    *_valued("recompute-granularity recompute-method recompute-num-layers", "not needed",
             "the base is frozen: no activations are kept"),
    *_valued("expert-tensor-parallel-size", "refused", "experts have the tensor parallel size of the other layers"),
    *_switches("trust-remote-code", "refused", "code from model folders is never run"),
]  # fmt: skip

FLAGS: dict[str, MegatronFlag] = {flag.name: flag for flag in _TABLE}
"""Name -> flag."""


VALUES = {
    "eagle2": "EAGLE-2 is EAGLE-1 decoded with a dynamic tree: train eagle1, decode with --use-dynamic-tree",
    "eagle": "choose eagle1 or eagle3",
    "peagle": "it is spelled p-eagle",
    "mtp": "multi-token prediction is eagle-mtp",
    "eagle3-mtp": "multi-token prediction is eagle-mtp",
}
"""Values that others use -> a hint."""


def opposite(name: str) -> MegatronFlag | None:
    """A flag for the `--no-...` twin of a flag that nothing depends on, or the other way round."""
    twin = "--" + name.removeprefix("--no-") if name.startswith("--no-") else "--no-" + name.removeprefix("--")
    found = FLAGS.get(twin)
    return found if found is not None and found.verdict == "not needed" and not found.takes_value else None


def table() -> str:
    """A section of Markdown per verdict; flags with the same explanation share a row."""
    lines: list[str] = []
    for verdict, meaning in VERDICTS.items():
        rows: dict[str, list[str]] = {}
        for flag in sorted(FLAGS.values(), key=lambda f: f.name):
            if flag.verdict == verdict:
                text = f"`{flag.text}`" if verdict == "renamed" else flag.text
                values = f" ({', '.join(flag.values)})" if flag.values else ""
                rows.setdefault(text + values, []).append(f"`{flag.name}`")
        lines += [
            f"## {verdict.capitalize()}",
            "",
            f"{meaning[0].upper()}{meaning[1:]}.",
            "",
            "| flags | |",
            "|---|---|",
        ]
        lines += [f"| {', '.join(names)} | {text} |" for text, names in rows.items()] + [""]
    return "\n".join(lines)
