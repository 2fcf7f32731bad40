"""How text is decoded, in the option names of TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_spec.config.core import LARGEST_SEED, Config, option, require

DecodingType = Literal[
    "Eagle3",
    "Eagle",
    "Medusa",
    "MTP",
    "DFlash",
    "DSpark",
    "NGram",
    "SA",
    "DraftTarget",
    "User",
    "Draft_Target",
    "UserProvided",
    "User_Provided",
]
_SPELLINGS: dict[str, DecodingType] = {
    "Draft_Target": "DraftTarget", "UserProvided": "User", "User_Provided": "User",
}  # fmt: skip
"""Other spellings in TensorRT-LLM's releases -> ours."""


@dataclass(frozen=True)
class DecodeConfig(Config):
    """Decoding with the base verifying, in TensorRT-LLM's option names."""

    decoding_type: DecodingType | None = None
    """How tokens are drafted (default: that of the draft checkpoint or exported folder)."""
    max_draft_len: int = 3
    """Draft tokens of a chain, or depth of a tree; if not given, no more than the draft proposes."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 8
    """Prompts decoded together."""
    cuda_graphs: bool = True
    """Replay the steps as CUDA graphs, on one GPU (with experts: where the path grouped_experts is on); the text is the
    same."""
    temperature: float = 0.0
    """Sampling temperature; 0: greedy decoding."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability."""
    use_rejection_sampling: bool = False
    """Draw draft tokens from the draft's distribution q and accept with min(1, p/q) (arXiv 2302.01318). Without it the
    draft proposes its most likely token, which is accepted with the base's probability of it; the text is then exactly
    the base's."""
    seed: int = option(0, least=0, most=LARGEST_SEED)
    """Seed of sampling."""
    use_dynamic_tree: bool = False
    """EAGLE-2: propose a tree, grown by joint draft probability, instead of a chain (Eagle3, Eagle, MTP, Medusa)."""
    dynamic_tree_max_topK: int = 4
    """Children per node, and nodes per level that are expanded."""
    max_total_draft_tokens: int = 16
    """Nodes of a dynamic tree that the base verifies: the most likely ones."""
    confidence_threshold: float = 0.0
    """DSpark: truncate a block where the product of its confidences falls below this; 0: never."""
    medusa_choices: str | None = None
    """A fixed tree of head ranks as a JSON list of paths, or a file with one: [[0], [1], [0, 0]] (Medusa)."""
    max_matching_ngram_size: int | None = None
    """Length of the suffix to look up. NGram: at most this many tokens (default: 2). SA: exactly this many, or -1: the
    longest that occurred before (default: -1)."""
    sa_threshold: int | None = None
    """Beside a draft: if the longest suffix that occurred before has at least this many tokens, propose what followed
    it instead of the draft's tokens (TensorRT-LLM's sa_config)."""
    is_keep_all: bool = True
    """NGram: remember every continuation of a pattern, not only the first."""
    is_use_oldest: bool = True
    """NGram: of several continuations propose the oldest, not the newest."""
    is_public_pool: bool = True
    """NGram: share patterns between all sequences."""
    speculative_model: str | None = None
    """Exported draft folder; with DraftTarget the folder of a second, smaller model with the same tokenizer."""
    drafter: str | None = None
    """User: module:Class of a Drafter, called with (base, configuration)."""
    typical_acceptance: bool = False
    """Medusa's typical acceptance, at a temperature > 0; the text no longer follows the base's distribution."""
    posterior_threshold: float = 0.09
    """Typical acceptance: accept above min(posterior_threshold, posterior_alpha * exp(-entropy))."""
    posterior_alpha: float = 0.3
    """Typical acceptance: see posterior_threshold."""
    use_relaxed_acceptance_for_thinking: bool = False
    """Inside a thinking phase accept the base's relaxed_topk best tokens within relaxed_delta of the best one."""
    relaxed_topk: int = 1
    """Relaxed acceptance: how many of the base's best tokens may be accepted."""
    relaxed_delta: float = 0.0
    """Relaxed acceptance: distance to the best token, in natural log-probability."""
    begin_thinking_phase_token: int | None = None
    """Token that begins a thinking phase (default: the tokenizer's <think>)."""
    end_thinking_phase_token: int | None = None
    """Token that ends a thinking phase (default: the tokenizer's </think>)."""

    @property
    def lossless(self) -> bool:
        """True when drafts change the speed alone."""
        return not (self.typical_acceptance or self.use_relaxed_acceptance_for_thinking)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decoding_type", _SPELLINGS.get(self.decoding_type or "", self.decoding_type))
        super().__post_init__()

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name, least in (
            ("max_draft_len", 0), ("max_new_tokens", 1), ("batch_size", 1), ("temperature", 0), ("top_k", 0),
            ("dynamic_tree_max_topK", 1), ("max_total_draft_tokens", 1), ("sa_threshold", 1),
            ("posterior_threshold", 0), ("posterior_alpha", 0), ("relaxed_topk", 1), ("relaxed_delta", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} must be at least {least}, found {value}")
        size = self.max_matching_ngram_size
        longest = self.decoding_type == "SA" and size == -1
        require(size is None or size >= 1 or longest, f"max_matching_ngram_size must be at least 1, found {size}")
        require(
            0 <= self.confidence_threshold <= 1,
            f"confidence_threshold must be in [0, 1], found {self.confidence_threshold}",
        )
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], found {self.top_p}")
        hot = self.temperature > 0
        for name in ("top_k", "top_p", "use_rejection_sampling", "typical_acceptance"):
            require(hot or not self.sets(name), f"{name} needs a temperature above 0, found 0")
