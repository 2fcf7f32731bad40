"""How a draft is trained: layout, objective, loop, and fake quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_spec.config.core import LARGEST_SEED, Config, option, require

LossKind = Literal["soft_ce", "kl", "reverse_kl", "tv", "lk", "lk_hybrid", "hard_ce", "ce_l1"]
StepWeights = Literal["decay", "d-pace"]
BlockWeights = Literal["exponential", "d-pace"]
Alignment = Literal["serving", "paper", "target"]
QuantFormat = Literal["none", "fp8", "nvfp4"]
OptimizerImpl = Literal["auto", "transformer_engine", "apex", "torch"]
TransformerImpl = Literal["local", "transformer_engine"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
"""Recipes of Transformer Engine, under Megatron's names."""


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Sizes of the process groups, under Megatron's names."""

    tensor_model_parallel_size: int = 1
    """Ranks that share the matrices of a layer."""
    pipeline_model_parallel_size: int = 1
    """Stages that the base's layers are split into."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of a sequence."""
    expert_model_parallel_size: int = 1
    """Ranks that the base's experts are spread over."""
    sequence_parallel: bool = False
    """Split the activations between layers over the tensor parallel ranks."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage (default: an equal share)."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage (default: an equal share)."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None, unlisted=True)
    """Refused: interleaved pipeline schedules are not supported."""
    num_virtual_stages_per_pipeline_rank: int | None = option(None, unlisted=True)
    """Refused: interleaved pipeline schedules are not supported."""
    distributed_timeout_minutes: int = option(30, "N", least=1, most=525_600)
    """Minutes that ranks wait for one another (for example while one still reads its data) before the run fails."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("tensor", "pipeline", "context", "expert"):
            name += "_parallel_size" if name == "context" else "_model_parallel_size"
            require(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")
        require(
            not (self.sequence_parallel and self.tensor_model_parallel_size == 1),
            "--sequence-parallel needs --tensor-model-parallel-size greater than 1",
        )

    def check_world_size(self, world_size: int) -> None:
        """Raise UserError when the sizes do not divide the number of processes."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        cp, ep = self.context_parallel_size, self.expert_model_parallel_size
        copy, also = tp * pp * cp, f" x CP {cp}" if cp > 1 else ""
        require(
            world_size % copy == 0,
            f"{world_size} processes cannot hold replicas of TP {tp} x PP {pp}{also}: start a multiple of {copy} "
            "(torchrun --nproc-per-node)",
        )
        require(
            world_size // pp % (tp * ep) == 0,  # experts use the TP size of the other layers
            f"{world_size} processes cannot shard experts over EP {ep} with TP {tp} x PP {pp}: start a multiple of "
            f"{tp * pp * ep}",
        )


@dataclass(frozen=True)
class ObjectiveConfig(Config):
    """Training objective of a draft (docs/algorithms.md#training-time-test, #alignment, #losses)."""

    ttt_steps: int = 7
    """Draft steps T unrolled in training. Not for Medusa and block drafts, which have one per head or token."""
    step_decay: float | None = None
    """Weight of step k is step_decay ** k; default: 0.8."""
    step_weights: StepWeights | None = None
    """EAGLE-3, MTP: weight of a step is step_decay ** k, or its contribution to the accepted length (D-PACE); default:
    d-pace for eagle3, unless step_decay is given, else decay."""
    loss: LossKind | None = None
    """Distance between draft and base: cross entropy with the base's distribution, KL divergence in either direction,
    total variation, the acceptance loss lk, a mixture of KL and total variation that moves from the first to the second
    as acceptance grows (lk_hybrid), cross entropy with the base's most likely token (Medusa and block drafts: with the
    token of the text), or, for block drafts, that plus sum |q - p| (ce_l1); default: soft_ce, for dspark ce_l1."""
    temperature: float = 1.0
    """Softmax temperature of teacher and draft."""
    alignment: Alignment = "serving"
    """Which base row supervises a draft step: as engines verify it, as in the EAGLE-3 paper, or the next token."""
    in_vocab_only: bool = True
    """Exclude rows from the loss if the base's most likely token is outside the draft vocabulary (block drafts whose
    loss reads the text: also if the token of the text is)."""
    detach: bool = False
    """Stop gradients between draft steps (fed-back hidden states, keys and values of earlier steps)."""
    replay_weight: float = 1.0
    """Weight of the draft steps whose target replaced a rejected draft token (recorded in the data by generate.py
    --save-rejections); all others have weight 1."""
    row_keep: float = 0.7
    """P-EAGLE: depth d trains on a share row_keep ** d of the rows, redrawn at every step."""
    row_keep_least: float = 0.2
    """P-EAGLE: smallest share of rows at any depth."""
    feature_noise: float = 0.1
    """EAGLE-1: half-width of the uniform noise on the input feature."""
    feature_weight: float = 1.0
    """EAGLE-1: weight of the feature regression."""
    token_weight: float = 0.1
    """EAGLE-1: weight of the token loss."""
    anchors: int = 512
    """Block drafts: maximum number of blocks drawn per conversation and step."""
    block_weights: BlockWeights = "exponential"
    """Block drafts: weight of slot s is exp(-s / block_gamma), or follows its acceptance probability (D-PACE)."""
    block_gamma: float | None = None
    """Block drafts, exponential weights; default: 7, 5, 4 for blocks of 16, 10, 8."""
    pace_alpha: float = 0.5
    """D-PACE: how far acceptance probabilities are smoothed towards 1."""
    ce_weight: float = 0.1
    """Loss ce_l1 (DSpark): weight of the cross-entropy to the tokens of the text."""
    l1_weight: float = 0.9
    """Loss ce_l1 (DSpark): weight of sum |q - p|."""
    confidence_weight: float = 1.0
    """DSpark: weight of the confidence head's binary cross-entropy."""
    backbone_weight: float = 0.0
    """DSpark: initial share of the loss computed without the Markov head."""
    backbone_iters: int = 0
    """DSpark: iterations over which backbone_weight falls to 0 (Domino's curriculum); 0: constant."""

    @property
    def loss_kind(self) -> LossKind:
        """`loss`, or its default."""
        return self.loss or "soft_ce"

    @property
    def decay(self) -> float:
        """`step_decay`, or its default."""
        return 0.8 if self.step_decay is None else self.step_decay

    def kept_share(self, depth: int) -> float:
        """P-EAGLE: share of rows trained at a depth, from 0."""
        return max(self.row_keep**depth, self.row_keep_least)

    def at(self, iteration: int) -> ObjectiveConfig:
        """The objective of one iteration, from 0."""
        if not self.backbone_weight or not self.backbone_iters:
            return self
        left = max(0.0, 1 - iteration / self.backbone_iters)
        return self.replace(backbone_weight=self.backbone_weight * left)

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("feature_noise", "feature_weight", "token_weight", "ce_weight", "l1_weight", "confidence_weight"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, found {getattr(self, name)}")
        require(self.ttt_steps >= 1, f"ttt_steps must be at least 1, found {self.ttt_steps}")
        require(self.temperature > 0, f"temperature must be positive, found {self.temperature}")
        require(self.replay_weight > 0, f"replay_weight must be positive, found {self.replay_weight}")
        require(0 < self.decay <= 1, f"step_decay must be in (0, 1], found {self.step_decay}")
        for name in ("row_keep", "row_keep_least"):
            require(0 < getattr(self, name) <= 1, f"{name} must be in (0, 1], found {getattr(self, name)}")
        for name in ("pace_alpha", "backbone_weight"):
            require(0 <= getattr(self, name) <= 1, f"{name} must be in [0, 1], found {getattr(self, name)}")
        require(self.backbone_iters >= 0, f"backbone_iters must not be negative, found {self.backbone_iters}")
        require(self.anchors >= 1, f"anchors must be at least 1, found {self.anchors}")
        require(
            self.block_gamma is None or self.block_gamma > 0, f"block_gamma must be positive, found {self.block_gamma}"
        )


@dataclass(frozen=True)
class TrainConfig(Config):
    """The training loop, under Megatron's names."""

    train_iters: int = 0
    """Optimizer steps. 0: given by --train-epochs."""
    micro_batch_size: int = 1
    """Rows per forward pass of a rank."""
    global_batch_size: int = 8
    """Rows per optimizer step, over all ranks."""
    packing: bool = False
    """Pack conversations into rows of seq_length tokens, without attention across them; batch sizes count rows."""
    lr: float = 1e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    lr_decay_iters: int | None = option(None, least=1)
    """Step at which the decay reaches min_lr (default: train_iters)."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up from 0."""
    weight_decay: float = 0.0
    """AdamW: decoupled weight decay."""
    adam_beta1: float = 0.9
    """AdamW: decay of the first moment."""
    adam_beta2: float = 0.95
    """AdamW: decay of the second moment."""
    adam_eps: float = 1e-8
    """AdamW: epsilon added to the root of the second moment."""
    clip_grad: float = 1.0
    """Clip the gradient norm to this; 0: off."""
    bf16: bool = False
    """Weights and activations in bfloat16, optimizer state in float32."""
    optimizer_impl: OptimizerImpl = "auto"
    """Implementation of Adam, the gradient norm and the weight-gradient kernels. auto: the first of Transformer Engine
    (only if another flag names it, because its import takes seconds), apex and torch that is installed and works. A
    resumed run may use another one."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the ranks that hold the same part of the draft."""
    features_ahead: int = 0
    """Micro-batches per rank whose features are computed ahead, also for later steps, to keep the base's pipeline full.
    Affects memory and speed, never results. 0: automatic (1; 4 with a pipeline, or from disk)."""
    save_interval: int = 0
    """Steps between checkpoints. 0: only at the end."""
    async_save: bool = False
    """Write checkpoints in the background while training continues; each appears once complete."""
    ckpt_keep: int = 2
    """Number of latest checkpoints to keep."""
    log_interval: int = 1
    """Steps between progress lines; metrics.jsonl has every step."""
    seed: int = option(1234, least=0, most=LARGEST_SEED)
    """Seed of the data order and of the noise in training."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("micro_batch_size", "global_batch_size", "log_interval", "ckpt_keep"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")
        for name in (
            "train_iters",
            "lr_warmup_iters",
            "save_interval",
            "features_ahead",
            "min_lr",
            "weight_decay",
            "clip_grad",
        ):
            require(getattr(self, name) >= 0, f"{name} must not be negative, found {getattr(self, name)}")
        for name in ("lr", "adam_eps"):
            require(getattr(self, name) > 0, f"{name} must be positive, found {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), found {getattr(self, name)}")
        for name in ("min_lr", "lr_decay_iters") if self.lr_decay_style == "constant" else ():
            require(not getattr(self, name), f"{name} does nothing with lr_decay_style 'constant': leave it out")
        require(
            self.lr_decay_iters is None or self.lr_warmup_iters < self.lr_decay_iters,
            f"lr_warmup_iters {self.lr_warmup_iters} must be below lr_decay_iters {self.lr_decay_iters}: the decay "
            "follows the warm-up",
        )
        require(self.min_lr <= self.lr, f"min_lr {self.min_lr} must not be greater than lr {self.lr}")

    def micro_batches(self, dp_size: int, pp_size: int) -> int:
        """Micro-batches of a rank in a step. Raises UserError if the global batch does not fill every rank equally."""
        unit = self.micro_batch_size * dp_size * pp_size
        require(
            self.global_batch_size % unit == 0,
            f"--global-batch-size {self.global_batch_size} must be a multiple of micro-batch size "
            f"{self.micro_batch_size} x data parallel {dp_size} x pipeline parallel {pp_size} = {unit}, so that every "
            "rank trains the draft on as many micro-batches as the others",
        )
        return self.global_batch_size // unit


@dataclass(frozen=True)
class QuantConfig(Config):
    """Per-tensor E4M3 fake quantisation of weights and inputs of linears (docs/algorithms.md#fp8-fake-quantisation)."""

    base: QuantFormat = "fp8"
    """Linears of the base."""
    draft: QuantFormat = "fp8"
    """Linears of the draft. 'nvfp4' quantises weights only: E2M1 in blocks of 16 with E4M3 scales."""
    exclude: tuple[str, ...] = ("*lm_head*", "*output_layer*", "*embed*", "*fc.*", "*fc", "*eh_proj*", "*router*")
    """Patterns (fnmatch) of module names that stay in high precision, in base and draft."""
    exclude_base: tuple[str, ...] = ()
    """Further patterns for the base."""
    exclude_draft: tuple[str, ...] = ()
    """Further patterns for the draft."""
    kv_cache: QuantFormat = "none"
    """Keys and values of the base."""
    clipped_ste: bool = False
    """Gradient is zero outside +-amax (default: plain straight-through)."""
    calibration: Literal["max", "percentile"] = "max"
    """Range of an input: the largest magnitude seen, or the magnitude that `percentile` % of the values stay within."""
    percentile: float = 99.99
    """For calibration 'percentile'."""

    @property
    def without_base(self) -> QuantConfig:
        """The same for the draft, with the base in high precision."""
        return self.replace(base="none", kv_cache="none", exclude_base=())

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("base", "kv_cache"):
            require(getattr(self, name) != "nvfp4", f"{name} 'nvfp4' is not supported: that format is for drafts")
        require(
            self.calibration == "percentile" or self.percentile == type(self).percentile,
            f"percentile {self.percentile} does nothing with calibration 'max': leave it out, or use 'percentile'",
        )
        for role, patterns in (("base", self.exclude_base), ("draft", self.exclude_draft)):
            require(
                not patterns or getattr(self, role) != "none", f"exclude_{role} does nothing: {role} is not quantised"
            )
        require(0 < self.percentile <= 100, f"percentile must be in (0, 100], found {self.percentile}")
        require(
            self.kv_cache == "none" or self.base != "none",
            "kv_cache 'fp8' quantises keys and values of the base: set base to 'fp8' too",
        )

    def excludes(self, role: Literal["base", "draft"]) -> tuple[str, ...]:
        """All patterns that apply to base or draft."""
        return self.exclude + (self.exclude_base if role == "base" else self.exclude_draft)
