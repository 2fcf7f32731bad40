"""Estimates of work and memory from configurations only: no weights, no GPU, no torch.

Work is that of the plain algorithm, which MFU is defined by (docs/performance.md). Memory is the estimated peak on one
rank, the sum of known allocations; it is within 10 % of the measured peaks in docs/scale.md.

H base hidden size, D draft vocabulary, S sequence, B micro-batch, T draft steps, K captured layers, X width of q, k, v.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_spec.config import (
    BaseConfig,
    BlockConfig,
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    ObjectiveConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_spec.config.machine import H100
from megatron_spec.config.structure import draft_tensors
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.planning.unroll_memory import ROWS_AT_ONCE, keeps_gates

GIB = 1 << 30
HEAD_CHUNK = 1100 << 20
"""Bytes of whole-vocabulary logits in memory at a time on a GPU (drafts/teacher.py, ops/head.py)."""


def attention_width(config: BaseConfig | EagleConfig | BlockConfig) -> int:
    """Columns of the query projection."""
    return config.num_attention_heads * config.head_dim


def qkv_width(config: BaseConfig | EagleConfig | BlockConfig) -> int:
    """X: columns of the query, key and value projections."""
    return attention_width(config) + 2 * config.num_key_value_heads * config.head_dim


def base_layer_parameters(base: BaseConfig) -> tuple[int, int]:
    """(parameters that every token uses, parameters of all experts) of one base layer."""
    H, experts = base.hidden_size, getattr(base, "num_experts", 0) or 0
    mlp = 3 * H * (base.moe.intermediate_size if base.moe else base.intermediate_size)
    shared = H * (qkv_width(base) + attention_width(base)) + 2 * H
    return (shared + H * experts, experts * mlp) if experts else (shared + mlp, 0)


def end_parameters(base: BaseConfig) -> int:
    """Parameters of embedding and LM head, which every pipeline stage has."""
    return base.vocab_size * base.hidden_size * (1 if base.tie_word_embeddings else 2)


def mlp_width(draft: EagleConfig, every_expert: bool = False) -> int:
    """Total MLP width per token, or of all experts."""
    if draft.moe is None:
        return draft.intermediate_size
    count = draft.moe.num_experts if every_expert else draft.moe.experts_per_token
    return count * draft.moe.intermediate_size + draft.moe.shared_intermediate_size


def draft_parameters(draft: DraftConfig) -> tuple[int, int]:
    """(parameters split over tensor parallel ranks, replicated parameters)."""
    table = draft_tensors(draft).values()
    split = sum(spec.size for spec in table if spec.split is not None)
    return split, sum(spec.size for spec in table) - split


def frozen_parameters(draft: DraftConfig) -> int:
    """Parameters of a frozen LM head of the draft's own, split over tensor parallel ranks."""
    return draft_tensors(draft)["lm_head.weight"].size if getattr(draft, "frozen_head", False) else 0


def block_flops(draft: BlockConfig, S: int, anchors: int) -> float:
    """FLOPs per token of training a block draft on sequences of S tokens with `anchors` blocks each.

    Context projections of every token; layers, attention scores (over half the context on average) and LM head of every
    slot. The base's LM head has no weight gradient; recomputation is not counted.
    """
    H, layers = draft.hidden_size, draft.num_hidden_layers
    kv = 2 * draft.num_key_value_heads * draft.head_dim
    context = len(draft.capture_layer_ids) * H * H + layers * H * kv
    layer = H * (qkv_width(draft) + attention_width(draft)) + 3 * H * draft.intermediate_size
    scores = 2 * attention_width(draft) * (S / 2 + draft.block_size)
    head = (2 / 3 * H + draft.markov_rank) * draft.draft_vocab_size
    blocks = min(anchors, S) / S
    slots = blocks * draft.block_size * layers * (2.0 * layer + scores) + blocks * draft.num_steps * 2.0 * head
    return 3 * (2.0 * context + slots)


def draft_passes(draft: DraftConfig, objective: ObjectiveConfig) -> float:
    """T: draft forwards per row; P-EAGLE drops rows at later depths."""
    if isinstance(draft, EagleConfig) and draft.parallel_drafting:
        return sum(objective.kept_share(depth) for depth in range(objective.ttt_steps))
    return objective.ttt_steps


def flops_per_token(base: BaseConfig, draft: DraftConfig, S: int, T: float, anchors: int = 512) -> dict[str, float]:
    """FLOPs per token of the plain algorithm: base forward with LM head, forward and backward of T draft steps."""
    H, scores = base.hidden_size, 2 * 2 * attention_width(base) * S / 2  # causal: q k and p v over S / 2 keys
    shared, experts = base_layer_parameters(base)
    if experts:
        shared += experts * getattr(base, "num_experts_per_token", 2) // base.num_experts  # type: ignore[attr-defined]
    found = {"base": base.num_layers * (2.0 * shared + scores) + 2.0 * H * base.vocab_size}
    split, replicated = draft_parameters(draft)
    shared_head = 2 / 3 * base.vocab_size * H  # the base's, frozen: without a weight gradient
    if isinstance(draft, MedusaConfig):
        head = draft.num_heads * shared_head if draft.share_base_head else 0
        found["draft"] = 3 * 2.0 * (split + replicated + head)
        return found
    if isinstance(draft, BlockConfig):
        found["draft"] = block_flops(draft, S, anchors)
        return found
    head = 0 if draft.own_head else shared_head
    once = replicated if draft.reads_captures else 0  # `fc` reads captures once; other projections run at every step
    idle = 3 * H * (mlp_width(draft, every_expert=True) - mlp_width(draft))  # experts that a token does not use
    draft_scores = draft.num_hidden_layers * 4 * attention_width(draft) * S / 2
    found["draft"] = T * 3 * (2.0 * (split - idle + head + replicated - once) + draft_scores) + 3 * 2.0 * once
    return found


@dataclass(frozen=True)
class Place:
    """One rank of a run.

    Attributes:
        ttt_steps: draft steps per row, `draft_passes`.
        world_size: number of processes.
        layers: number of base layers in the rank's stage.
        offline: only the ends of the base are loaded.
        stored: features come from disk.
        anchors: most blocks of a sequence, of block drafts.
    """

    base: BaseConfig
    draft: DraftConfig
    parallel: ParallelConfig
    train: TrainConfig
    seq_length: int
    ttt_steps: float
    world_size: int
    layers: int
    offline: bool = False
    paths: Paths | None = None
    """Default: the paths that an H100 can run."""
    anchors: int = 512
    stored: bool = False

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def fast_paths(self) -> Paths:
        """The fast paths that the estimate assumes."""
        if self.paths is not None:
            return self.paths
        dtype, rows = "bfloat16" if self.train.bf16 else "float32", self.train.micro_batch_size * self.seq_length
        objective = ObjectiveConfig(ttt_steps=ceil(self.ttt_steps))
        return Paths(Setting(H100, dtype, self.parallel, self.base, self.draft, objective, rows=rows))

    @property
    def features_ahead(self) -> int:
        """Number of micro-batches computed at once (`features.ahead.default_ahead`)."""
        return self.train.features_ahead or (4 if self.pp > 1 or self.offline or self.stored else 1)


def _block_activation_bytes(place: Place, draft: BlockConfig, rows: float, width: int) -> float:
    """Bytes that the layers of a block draft save for slots and for the keys and values of the context.

    A fused layer keeps both residual sums and their norms, the projected heads before and after norm and rotation, the
    attention's output, and gate and up.
    """
    H, M, heads = draft.hidden_size, draft.intermediate_size, attention_width(draft)
    tp, cp = place.parallel.tensor_model_parallel_size, place.parallel.context_parallel_size
    kv = 2 * draft.num_key_value_heads * draft.head_dim
    slots = place.train.micro_batch_size * min(place.anchors, place.seq_length) * draft.block_size / cp
    if place.fast_paths.on("draft_layer"):
        slot, context = 4.0 * H + (3 * heads + 2 * kv + 2 * M) / tp, 2 * kv / tp
    else:
        slot, context = 9.0 * H + (3 * (heads + kv) + 4 * M) / tp, 3 * kv / tp
    return width * draft.num_hidden_layers * (slots * slot + rows * context)


def _activation_bytes(place: Place, rows: float, width: int) -> float:
    """Bytes that T draft steps save for their backward."""
    draft, tp = place.draft, place.parallel.tensor_model_parallel_size
    if isinstance(draft, MedusaConfig):
        return rows * draft.num_heads * (draft.num_layers * 3 + 1) * draft.hidden_size * width
    if isinstance(draft, BlockConfig):
        return _block_activation_bytes(place, draft, rows, width)
    scattered, fused = place.parallel.sequence_parallel, place.fast_paths.on("draft_fused")
    residual, qkv = (9.0, 1) if fused else (3 + 11 / tp if scattered else 14.0, 2)
    goal = place.fast_paths.setting.objective
    residual += goal is not None and goal.step_weights == "d-pace"  # the states again, in another order
    step = residual * draft.hidden_size + (qkv * qkv_width(draft) + attention_width(draft)) / tp
    mlp, total = mlp_width(draft) / tp, rows * place.ttt_steps
    gates = total * (2 if fused else 4)
    if fused and not keeps_gates(total, mlp, width):
        gates = min(total, max(rows, ROWS_AT_ONCE)) * 2
    return (total * step + gates * mlp) * draft.num_hidden_layers * width


def checkpoint_bytes(draft: DraftConfig, bf16: bool) -> float:
    """Bytes of one iteration: the draft, two moments, and fp32 master weights if the draft is in bf16."""
    parameters, frozen = sum(draft_parameters(draft)), frozen_parameters(draft)
    return parameters * (2 if bf16 else 4) + (parameters - frozen) * (12 if bf16 else 8)


def memory(place: Place) -> dict[str, float]:
    """Bytes on one rank, by use."""
    base, parallel, train = place.base, place.parallel, place.train
    tp, cp, ep = (
        parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.expert_model_parallel_size,
    )  # fmt: skip
    width, H = 2 if train.bf16 else 4, base.hidden_size
    shared, experts = base_layer_parameters(base)
    layers = 0 if place.offline else place.layers
    split, replicated = draft_parameters(place.draft)
    own = split / tp + replicated
    trained = own - frozen_parameters(place.draft) / tp
    shards = place.world_size // tp if train.use_distributed_optimizer else 1
    rows = place.train.micro_batch_size * place.seq_length / cp
    spread = rows / (tp if parallel.sequence_parallel else 1)
    captures = len(place.draft.capture_layer_ids) + 1
    held = place.features_ahead + 1
    if place.pp > 1 and not (place.offline or place.stored):
        held += 3  # inputs that wait for this stage, and outputs that are being sent
    D, paths = place.draft.draft_vocab_size, place.fast_paths
    # This package keeps the weights in fp8 alone, Transformer Engine beside those in high precision.
    base_width = 1 if paths.on("base_fp8") else width + paths.on("te_fp8")
    head_fp8 = 0.0  # the gradient of a chunk of logits, and the operands of the weight gradient, a byte a value
    if paths.on("draft_head_fp8"):
        at_once = min(rows * place.ttt_steps, ROWS_AT_ONCE)
        head_fp8 = HEAD_CHUNK / 2 + at_once * (D + place.draft.hidden_size)
    copied = 0.0  # rows of the base's head, sorted into draft vocabulary and others
    if tp > 1 and base.vocab_size > D:
        copied = D if place.offline or not paths.on("teacher_kernel") else base.vocab_size
    return {
        "base layers": layers * (shared / tp + experts / tp / ep) * base_width,
        "embedding and head": end_parameters(base) / tp * width
        + (H * base.vocab_size if paths.on("teacher_fp8") else 0),
        "draft": own * width,
        "gradients (fp32)": trained * 4,
        "optimizer": trained * (12 if train.bf16 else 8) / shards,
        "features": held * spread * captures * H * width,
        "teacher": (rows * D + copied * H) / tp * width,
        "draft steps": _activation_bytes(place, rows, width),
        "working space": HEAD_CHUNK
        + head_fp8
        + (0 if place.offline else rows * (6 * H + 2 * base.intermediate_size / tp) * width),
    }
