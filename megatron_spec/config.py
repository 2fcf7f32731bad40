"""Every dataclass a user can set, and the rules that make one valid. Standard library only.

All of them read from and write to plain dictionaries (`from_dict`, `to_dict`); an unknown key is an
error with a suggestion, a value of the wrong type an error with the type that was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T", bound="Config")

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
RouterKind = Literal["softmax", "softmax_of_chosen", "sigmoid"]
EagleAlgorithm = Literal["eagle1", "eagle3", "eagle3.1", "eagle-mtp"]
LossKind = Literal["soft_ce", "kl", "reverse_kl", "tv", "lk", "hard_ce"]
Alignment = Literal["serving", "paper", "target"]
QuantFormat = Literal["none", "fp8", "nvfp4"]
DecodingType = Literal["Eagle3", "Eagle", "Medusa", "MTP", "NGram", "DraftTarget", "User"]


class UserError(ValueError):
    """A mistake the user can mend: scripts print its message and exit with code 2, without traceback."""


def suggest(name: str, known: typing.Iterable[str]) -> str:
    """' (did you mean X?)' for the closest known name, or ''."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (tuple, list):
        inner = typing.get_args(hint)[0]
        return isinstance(value, (list, tuple)) and all(_fits(v, inner) for v in value)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type):
        return isinstance(value, hint)
    return True


def _readable(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


@dataclass(frozen=True)
class Config:
    """Common behaviour of all configurations: typed reading, writing, validation on construction."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not _fits(value, hints[f.name]):
                raise UserError(f"{type(self).__name__}.{f.name}: found {value!r}, expected {_readable(hints[f.name])}")
            if isinstance(value, list):
                object.__setattr__(self, f.name, tuple(value))
        self.validate()

    def validate(self) -> None:
        """Raise UserError when the fields contradict one another."""

    @classmethod
    def from_dict(cls: type[T], values: dict[str, Any]) -> T:
        """Build from a dictionary (nested configurations as dictionaries). Raises UserError on unknown keys."""
        hints = typing.get_type_hints(cls)
        kwargs: dict[str, Any] = {}
        for key, value in values.items():
            if key not in hints:
                raise UserError(f"{cls.__name__}: unknown key {key!r}{suggest(key, hints)}; known: {', '.join(hints)}")
            nested: list[type[Config]] = [
                h for h in (hints[key], *typing.get_args(hints[key])) if isinstance(h, type) and issubclass(h, Config)
            ]
            kwargs[key] = _tagged(nested, value).from_dict(value) if nested and isinstance(value, dict) else value
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.name not in kwargs and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise UserError(f"{cls.__name__}: missing {', '.join(missing)}")
        return cls(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary, ready for json."""
        return dataclasses.asdict(self)

    def replace(self: T, **changes: Any) -> T:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def _tagged(kinds: list[type[Config]], value: dict[str, Any]) -> type[Config]:
    """Of several configurations a key may hold, the one whose `algorithm` is that of the value."""
    for kind in kinds:
        if value.get("algorithm") in typing.get_args(typing.get_type_hints(kind).get("algorithm")):
            return kind
    return kinds[0]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class RopeConfig(Config):
    """Rotary embedding, in the terms of a Hugging Face config.json."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that turns (the first ones)."""
    attention_factor: float = 1.0
    """yarn, longrope: turned queries and keys are multiplied by this."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies up to the original number of positions."""
    long_factor: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class MoeConfig(Config):
    """Mixture-of-experts MLP of a base."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of one expert."""
    router: RouterKind = "softmax"
    """What becomes of the router's logits; `softmax_of_chosen` normalises after the choice."""
    normalize: bool = True
    """Weights of the chosen experts add up to 1 (before `scale`)."""
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    choice_bias: bool = False
    """A bias per expert that counts for the choice only (DeepSeek-V3)."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token passes; 0: none."""
    bias: bool = False
    """Router and experts have biases (gpt-oss)."""
    clamp: float = 0.0
    """gpt-oss: gate and up are clamped to this, and the activation is gate * sigmoid(alpha * gate) * (up + 1)."""
    alpha: float = 1.702
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        _require(
            1 <= self.experts_per_token <= self.num_experts,
            f"num_experts_per_tok {self.experts_per_token} does not fit the {self.num_experts} experts",
        )
        _require(self.num_experts % self.groups == 0, f"{self.num_experts} experts do not fill {self.groups} groups")


@dataclass(frozen=True)
class MlaConfig(Config):
    """Multi-head latent attention of a base (DeepSeek)."""

    kv_lora_rank: int
    nope_head_dim: int
    """Dimensions of a query or key head that do not turn; `head_dim` is these and `rope_head_dim`."""
    rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    score_factor: float = 1.0
    """Scores are multiplied by this (yarn's mscale, squared)."""
    interleaved: bool = True
    """Turned dimensions lie in pairs (0, 1), (2, 3), ... instead of halves."""


@dataclass(frozen=True)
class BaseConfig(Config):
    """Architecture of the frozen base, derived from its config.json and never written by hand."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """True vocabulary V: never the padded one."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k, v and the output projection."""
    mlp_bias: bool = False
    hidden_act: str = "silu"
    torch_dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    qkv_bias: bool = False
    """Biases on q, k and v alone (Qwen 2)."""
    qk_norm: bool = False
    """A norm over each query and key head (Qwen 3)."""
    attention_sinks: bool = False
    """A learned score per query head that takes part in the softmax and has no value (gpt-oss)."""
    window: int | None = None
    """Sliding window: a token sees itself and the window - 1 tokens before it."""
    window_layers: tuple[int, ...] = ()
    """Layers with the window."""
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    mtp_layers: int = 0
    """Prediction modules behind the last layer that the base ships (DeepSeek-V3)."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {self.num_key_value_heads}",
        )

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense base."""
        return self.moe.num_experts if self.moe else 0

    @property
    def num_experts_per_token(self) -> int:
        """Routed experts a token passes."""
        return self.moe.experts_per_token if self.moe else 0

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer; None where it sees everything before it."""
        return self.window if layer in self.window_layers else None

    def has_experts(self, layer: int) -> bool:
        """True for a layer with a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Sizes of the process groups, under Megatron's names."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Refused: no interleaved pipeline schedule."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Refused: no interleaved pipeline schedule."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("tensor", "pipeline", "context", "expert"):
            name += "_parallel_size" if name == "context" else "_model_parallel_size"
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")
        _require(
            not (self.sequence_parallel and self.tensor_model_parallel_size == 1),
            "--sequence-parallel needs --tensor-model-parallel-size greater than 1",
        )


@dataclass(frozen=True)
class EagleConfig(Config):
    """Architecture of an EAGLE draft. Names follow the exported config.json where it has one.

    Built by `presets.eagle_config(base, overrides)`, which fills every field from the base.
    """

    algorithm: EagleAlgorithm
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Target vocabulary V."""
    draft_vocab_size: int
    """Draft vocabulary D <= V; D = V needs no d2t."""
    target_hidden_size: int
    max_position_embeddings: int
    capture_layer_ids: tuple[int, ...] = ()
    """Base layers whose *outputs* are captured, from 0, ascending, global (EAGLE-3)."""
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    fc_init: Literal["last_capture", "average"] = "last_capture"
    """What the feature is at the start. The last capture learned faster than the average in a sweep on SmolLM2."""
    init_from_base_layer: bool = False
    """Copy MLP and norms of the first draft layer from the base's last layer where shapes agree."""
    norm_before_fc: bool = False
    """EAGLE-3.1: one norm over all captures together, before `fc`."""
    fc_norm: bool = False
    """EAGLE-3.1: a norm of its own for every capture, before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1 and eagle-mtp: a draft step feeds back its state after the final norm, not before it."""
    moe: MoeConfig | None = None
    """eagle-mtp: the base's own prediction module, a layer of the base's kind."""
    mla: MlaConfig | None = None
    """eagle-mtp: the same."""
    layer_in_base: int | None = None
    """eagle-mtp: number of the base's own prediction module among the layers of its files."""

    @property
    def of_base(self) -> bool:
        """The base's own prediction module, not a fresh layer."""
        return self.layer_in_base is not None

    @property
    def own_embedding(self) -> bool:
        """A draft whose width is not the base's embeds tokens itself, at its own width."""
        return self.hidden_size != self.target_hidden_size

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        self._validate_sizes()
        options = [n for n in ("norm_before_fc", "fc_norm", "norm_output") if getattr(self, n)]
        if self.algorithm == "eagle3.1":
            _require(bool(options), "eagle3.1 without norm_before_fc, fc_norm and norm_output is eagle3: ask for that")
        else:
            allowed = ["norm_output"] if self.algorithm == "eagle-mtp" else []
            wrong = [n for n in options if n not in allowed]
            _require(not wrong, f"{', '.join(wrong)}: options of eagle3.1, found with algorithm {self.algorithm}")
        own = [n for n in ("moe", "mla", "layer_in_base") if getattr(self, n) is not None]
        _require(
            not own or (len(own) == 3 and self.algorithm == "eagle-mtp"),
            f"{', '.join(own)}: they are set together, by --mtp-from-base alone",
        )
        if not self.algorithm.startswith("eagle3"):
            self._validate_shared_head()

    def _validate_shared_head(self) -> None:
        """Drafts that read the base's final state and speak through its head."""
        for name, expected in (("hidden_size", self.target_hidden_size), ("draft_vocab_size", self.vocab_size)):
            _require(
                getattr(self, name) == expected,
                f"{self.algorithm} uses the base's own head: {name} must be the base's {expected}, found "
                f"{getattr(self, name)}",
            )
        _require(not self.capture_layer_ids, f"{self.algorithm} reads the base's final state: no capture_layer_ids")
        _require(
            self.algorithm != "eagle-mtp" or self.num_hidden_layers == 1,
            f"eagle-mtp is one module applied at every step: num_hidden_layers must be 1, found "
            f"{self.num_hidden_layers}",
        )

    def _validate_sizes(self) -> None:
        ids = self.capture_layer_ids
        _require(
            all(a < b for a, b in itertools.pairwise(ids)),
            f"capture_layer_ids must be distinct and ascending, found {list(ids)}",
        )
        _require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} must be between 1 and the base's vocabulary {self.vocab_size}",
        )
        _require(self.num_hidden_layers >= 1, f"num_hidden_layers must be at least 1, found {self.num_hidden_layers}")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"draft num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{self.num_key_value_heads}",
        )


@dataclass(frozen=True)
class MedusaConfig(Config):
    """Architecture of Medusa heads (arXiv 2401.10774). Built by `presets.medusa_config(base, ...)`."""

    num_heads: int
    """Head i (from 0) predicts the token 2 + i places ahead."""
    hidden_size: int
    """Of the base."""
    vocab_size: int
    """Of the base, and of every head."""
    num_layers: int = 1
    """Residual blocks per head."""
    share_base_head: bool = False
    """Use the base's frozen head behind the blocks, instead of a trained head each."""
    algorithm: Literal["medusa"] = "medusa"

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            _require(getattr(self, name) >= 1, f"Medusa {name} must be at least 1, found {getattr(self, name)}")

    @property
    def capture_layer_ids(self) -> tuple[int, ...]:
        """None: heads read the base's final state."""
        return ()

    @property
    def draft_vocab_size(self) -> int:
        """Heads speak the whole vocabulary."""
        return self.vocab_size


DraftConfig = EagleConfig | MedusaConfig


@dataclass(frozen=True)
class ObjectiveConfig(Config):
    """What a draft is trained for (ALGORITHMS: training-time test, alignment, losses)."""

    ttt_steps: int = 7
    """Draft steps T in training."""
    step_decay: float = 0.8
    """Weight of step k is step_decay ** k."""
    loss: LossKind = "soft_ce"
    temperature: float = 1.0
    """Teacher and draft logits are divided by it before the softmax."""
    alignment: Alignment = "serving"
    in_vocab_only: bool = True
    """Rows whose teacher argmax is outside the draft vocabulary add nothing to the loss."""
    detach: bool = False
    """Stop gradients between draft steps (fed-back hidden states, keys and values of earlier steps)."""
    feature_noise: float = 0.1
    """EAGLE-1: noise on the input feature, uniform in +- this."""
    feature_weight: float = 1.0
    """EAGLE-1: weight of the feature regression."""
    token_weight: float = 0.1
    """EAGLE-1: weight of the token loss."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("feature_noise", "feature_weight", "token_weight"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, found {getattr(self, name)}")
        _require(self.ttt_steps >= 1, f"ttt_steps must be at least 1, found {self.ttt_steps}")
        _require(self.temperature > 0, f"temperature must be positive, found {self.temperature}")
        _require(0 < self.step_decay <= 1, f"step_decay must be in (0, 1], found {self.step_decay}")


@dataclass(frozen=True)
class TrainConfig(Config):
    """The training loop, under Megatron's names."""

    train_iters: int
    micro_batch_size: int = 1
    global_batch_size: int = 8
    packing: bool = False
    """Put several conversations into one row of seq_length tokens, each seeing itself alone; batch sizes count rows."""
    lr: float = 1e-4
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_warmup_iters: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    bf16: bool = False
    use_distributed_optimizer: bool = False
    features_ahead: int = 0
    """Micro-batches of each rank whose features are held ready for the optimizer, also those of coming steps: keeps the
    pipeline of the base full. Changes memory and speed, never a result. 0: 1, or 4 with a pipeline or from disk."""
    save_interval: int = 0
    """0: only at the end."""
    async_save: bool = False
    """Write checkpoints in a process beside the training; each appears when it is complete."""
    ckpt_keep: int = 2
    """Checkpoints to keep, the newest ones."""
    log_interval: int = 1
    seed: int = 1234

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("train_iters", "micro_batch_size", "global_batch_size", "log_interval", "ckpt_keep"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("lr_warmup_iters", "save_interval", "features_ahead", "min_lr", "weight_decay", "clip_grad"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, found {getattr(self, name)}")
        for name in ("lr", "adam_eps"):
            _require(getattr(self, name) > 0, f"{name} must be positive, found {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), found {getattr(self, name)}")
        _require(self.min_lr <= self.lr, f"min_lr {self.min_lr} must not be greater than lr {self.lr}")


@dataclass(frozen=True)
class QuantConfig(Config):
    """Fake quantisation: per-tensor E4M3 of weights and inputs of linears (ALGORITHMS 6)."""

    base: QuantFormat = "fp8"
    draft: QuantFormat = "fp8"
    """'nvfp4' rounds weights alone: E2M1 in blocks of 16 with E4M3 scales."""
    exclude: tuple[str, ...] = ("*lm_head*", "*output_layer*", "*embed*", "*fc.*", "*fc", "*eh_proj*", "*router*")
    """Patterns (fnmatch) of module names that stay in high precision, in base and draft."""
    exclude_base: tuple[str, ...] = ()
    """Further patterns for the base alone."""
    exclude_draft: tuple[str, ...] = ()
    """Further patterns for the draft alone."""
    kv_cache: QuantFormat = "none"
    """Keys and values of the base."""
    clipped_ste: bool = False
    """Gradient is zero outside +-amax (default: plain straight-through)."""
    calibration: Literal["max", "percentile"] = "max"
    """Range of an input: the largest magnitude seen, or the magnitude that `percentile` % of the values stay within."""
    percentile: float = 99.99

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("base", "kv_cache"):
            _require(getattr(self, name) != "nvfp4", f"{name} 'nvfp4' is not supported: that format is for drafts")
        _require(0 < self.percentile <= 100, f"percentile must be in (0, 100], found {self.percentile}")
        _require(
            self.kv_cache == "none" or self.base != "none",
            "kv_cache 'fp8' quantises keys and values of the base: set base to 'fp8' too",
        )

    def excludes(self, role: Literal["base", "draft"]) -> tuple[str, ...]:
        """All patterns that hold for base or draft."""
        return self.exclude + (self.exclude_base if role == "base" else self.exclude_draft)


@dataclass(frozen=True)
class DecodeConfig(Config):
    """Decoding with the base verifying, in TensorRT-LLM's option names."""

    decoding_type: DecodingType | None = None
    """Way of drafting. Default: the one of the draft checkpoint or exported folder."""
    max_draft_len: int = 3
    """Draft tokens of a chain, or depth of a tree."""
    max_new_tokens: int = 128
    batch_size: int = 8
    cuda_graphs: bool = True
    """Replay the steps as CUDA graphs, on one GPU and without experts; the text is the same."""
    temperature: float = 0.0
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens that hold this probability together."""
    use_rejection_sampling: bool = False
    """Draw draft tokens from the draft's distribution q and accept with min(1, p/q) (arXiv 2302.01318). Default: the
    draft's most likely token, accepted with the base's probability of it, which gives the very text of the base."""
    seed: int = 0
    use_dynamic_tree: bool = False
    """EAGLE-2: a tree grown by the draft's joint probability, instead of a chain (Eagle3, Eagle, MTP, Medusa)."""
    dynamic_tree_max_topK: int = 4
    """Children a node may have, and nodes of a level that are drafted further."""
    max_total_draft_tokens: int = 16
    """Nodes of a dynamic tree that the base verifies: the most likely ones."""
    medusa_choices: str | None = None
    """A fixed tree of head ranks as a JSON list of paths, or a file of it: [[0], [1], [0, 0]] (Medusa)."""
    max_matching_ngram_size: int = 2
    """NGram: longest suffix that is looked up."""
    is_keep_all: bool = True
    """NGram: remember every continuation of a pattern, not only the first."""
    is_use_oldest: bool = True
    """NGram: of several continuations propose the oldest, not the newest."""
    is_public_pool: bool = True
    """NGram: all sequences share what was seen."""
    speculative_model: str | None = None
    """Exported draft folder; with DraftTarget the folder of a second, smaller model of the same tokenizer."""
    drafter: str | None = None
    """User: module:Class of a Drafter, called with (base, configuration)."""
    typical_acceptance: bool = False
    """Medusa's typical acceptance, at a temperature: the text is no longer the base's own distribution."""
    posterior_threshold: float = 0.09
    """Typical acceptance: accept above min(posterior_threshold, posterior_alpha * exp(-entropy))."""
    posterior_alpha: float = 0.3
    use_relaxed_acceptance_for_thinking: bool = False
    """Inside a thinking phase accept the base's relaxed_topk best tokens within relaxed_delta of the best one."""
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    """In natural log-probability."""
    begin_thinking_phase_token: int | None = None
    """Default: the tokenizer's <think>."""
    end_thinking_phase_token: int | None = None
    """Default: the tokenizer's </think>."""

    @property
    def lossless(self) -> bool:
        """True when drafts change the speed alone."""
        return not (self.typical_acceptance or self.use_relaxed_acceptance_for_thinking)

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name, least in (
            ("max_draft_len", 0), ("max_new_tokens", 1), ("batch_size", 1), ("temperature", 0), ("top_k", 0),
            ("dynamic_tree_max_topK", 1), ("max_total_draft_tokens", 1), ("max_matching_ngram_size", 1),
            ("posterior_threshold", 0), ("posterior_alpha", 0), ("relaxed_topk", 1), ("relaxed_delta", 0),
        ):  # fmt: skip
            _require(getattr(self, name) >= least, f"{name} must be at least {least}, found {getattr(self, name)}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], found {self.top_p}")
        hot = self.temperature > 0
        for name, default in (
            ("top_k", 0),
            ("top_p", 1.0),
            ("use_rejection_sampling", False),
            ("typical_acceptance", False),
        ):
            _require(hot or getattr(self, name) == default, f"{name} needs a temperature above 0, found 0")
