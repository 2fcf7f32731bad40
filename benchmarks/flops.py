"""Floating-point operations of training with the plain algorithm.

S sequence, T draft steps, H hidden size, M width of the MLP.
"""

from __future__ import annotations

from megatron_spec.config import BaseConfig, BlockConfig, EagleConfig


def _projections(config: BaseConfig | BlockConfig | EagleConfig, inputs: int) -> tuple[int, int, int]:
    """(queries and output, keys and values, MLP) per token of a layer whose projections have `inputs` inputs."""
    H, attention = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = 2 * config.num_key_value_heads * config.head_dim
    return 2 * (attention * inputs + attention * H), 2 * keys * inputs, 2 * 3 * config.intermediate_size * H


def _scores(config: BaseConfig | BlockConfig | EagleConfig, keys: float) -> float:
    """Attention scores and the weighted sum of values for one query token over `keys` keys."""
    return 2 * 2 * config.num_attention_heads * config.head_dim * keys


def base_flops(base: BaseConfig, S: int) -> float:
    """Base forward without the LM head, per token."""
    return base.num_layers * (sum(_projections(base, base.hidden_size)) + _scores(base, S / 2))


def standard_flops(base: BaseConfig, draft: EagleConfig, S: int, T: int) -> dict[str, float]:
    """EAGLE-3, per token: the base forward with its head; T draft steps forward and backward."""
    H = base.hidden_size
    draft_layer = sum(_projections(draft, 2 * H)) + _scores(draft, S / 2)
    return {
        "base": base_flops(base, S) + 2 * H * base.vocab_size,
        "draft": T * 3 * (draft_layer + 2 * H * draft.draft_vocab_size) + 3 * 2 * len(draft.capture_layer_ids) * H * H,
    }


def block_flops(base: BaseConfig, draft: BlockConfig, anchors: int, S: int, teacher_rows: float) -> dict[str, float]:
    """Block drafts, per token of a sequence with so many anchors, spread evenly.

    Context rows pass fc and the key and value projections of every layer, slots pass the layers, slots that propose
    the frozen head (forward and the gradient of its input, not of its weight). The Markov head is left out.

    Args:
        teacher_rows: share of the tokens for which the base's head runs.
    """
    H, C = base.hidden_size, draft.block_size
    slots, proposing = anchors * C / S, anchors * draft.num_steps / S
    queries, keys, mlp = _projections(draft, H)
    layer = slots * (queries + keys + mlp + _scores(draft, S / 2 + C)) + keys
    fc = 2 * len(draft.capture_layer_ids) * H * H
    return {
        "base": base_flops(base, S) + teacher_rows * 2 * H * base.vocab_size,
        "draft": 3 * draft.num_hidden_layers * layer + 2 * fc + proposing * 2 * 2 * H * base.vocab_size,
    }
