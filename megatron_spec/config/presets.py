"""Defaults derived from the base: the architecture of a draft, and named training settings."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

from megatron_spec.config import (
    BaseConfig,
    BlockConfig,
    Config,
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    ObjectiveConfig,
    UserError,
    suggest,
)
from megatron_spec.config.core import field_names
from megatron_spec.config.draft import READS_CAPTURES
from megatron_spec.config.rope import rope_overrides

log = logging.getLogger(__name__)

_HUGGING_FACE_NAMES = {"rope_theta", "rope_scaling"}
LARGE = 2048
"""Minimum hidden size of a base for drafts with the published number of layers."""


def require_mask_token(algorithm: str, overrides: dict[str, Any], where: str) -> None:
    """Raise UserError unless the overrides have a mask token."""
    if overrides.get("mask_token_id") is None:
        raise UserError(
            f"{algorithm} needs a mask token, a token id in the base's embedding that no text contains: none is known "
            f'for this base, give one as "mask_token_id" in {where}'
        )


def default_capture_ids(num_layers: int) -> tuple[int, int, int]:
    """Base layers whose outputs EAGLE-3 reads: 1, L//2-1, L-4 counted from 0 (docs/algorithms.md#features).

    Raises UserError for a base so small that these are not three distinct layers in ascending order.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= ids[0] < ids[1] < ids[2]:
        raise UserError(
            f"a base of {num_layers} layers is too small for three default capture layers (1, L//2-1, L-4 gives "
            f'{list(ids)}): name them with "capture_layer_ids" in --eagle-config'
        )
    return ids


def late_capture_ids(num_layers: int) -> tuple[int, ...]:
    """The layers at one half and three quarters of the depth, and the second to last: better than the default on one of
    two bases measured (docs/acceptance.md)."""
    return tuple(sorted({max(0, num_layers // 2 - 1), max(0, 3 * num_layers // 4 - 1), max(0, num_layers - 2)}))


def spread_capture_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` base layers spread evenly from 1 to L-3; fewer in a small base."""
    first = min(1, num_layers - 1)
    last = max(num_layers - 3, first)
    count = min(count, last - first + 1)
    if count == 1:
        return (last,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


_spread_over = functools.partial(spread_capture_ids, count=5)
"""The default of block drafts."""
_CAPTURES = {"default": default_capture_ids, "late": late_capture_ids, "five": _spread_over}
"""Names for `capture_layer_ids`."""
_BLOCK_CAPTURES = {"default": _spread_over, "late": late_capture_ids}


def _capture_ids(base: BaseConfig, given: Any, names: Mapping[str, Any], where: str = "--eagle-config") -> Any:
    """The layers of a name; other values unchanged. Raises UserError for an unknown name."""
    if not isinstance(given, str):
        return given
    if given not in names:
        raise UserError(
            f"{where}: capture_layer_ids is {given!r}, expected layers of the base or one of "
            f"{', '.join(names)}{suggest(given, names)}"
        )
    return names[given](base.num_layers)


def _first_values(base: BaseConfig, values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Default initialisation of a new EAGLE-3 draft: from the base's last layer, if the draft's layer has its shape.

    On both bases measured, acceptance is higher for every seed (docs/acceptance.md). Attention with `qk_norm` was not
    measured, so it is copied only on request.
    """
    shape = {name: overrides.get(name, values[name]) for name in ("hidden_size", *_draft_shape(base))}
    own = {"hidden_size": base.hidden_size, "intermediate_size": base.intermediate_size}
    own |= {name: getattr(base, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    if base.mla or base.moe or shape != own or not overrides.get("init_from_base_layer", True):
        return {}
    return {"init_from_base_layer": True, "fc_init": "average", "init_attention": not base.qk_norm}


def _draft_shape(base: BaseConfig) -> dict[str, int]:
    """Heads and MLP width of a dense Llama-style layer for `base`, whatever the base's own layers are."""
    heads, groups, size, width = (
        base.num_attention_heads, base.num_key_value_heads, base.head_dim, base.intermediate_size,
    )  # fmt: skip
    if base.mla:  # latent attention has no key/value heads to copy: heads of 128, eight to a group
        size = math.gcd(base.hidden_size, 128)
        heads = base.hidden_size // size
        groups = heads // math.gcd(heads, 8)
    if base.moe and width < 2 * base.hidden_size:  # width of one expert: use the total width per token
        width = base.moe.experts_per_token * base.moe.intermediate_size
    return dict(num_attention_heads=heads, num_key_value_heads=groups, head_dim=size, intermediate_size=width)


def _check_trainable(config: EagleConfig) -> None:
    """Raise UserError, before a base is loaded, for configurations that no draft supports."""
    if config.reads_captures and not config.capture_layer_ids:
        raise UserError(
            f"--eagle-config: capture_layer_ids is empty, but {config.algorithm} reads layers of the base: name at "
            "least one, or leave it out for the default"
        )


def _check_overrides(overrides: dict[str, Any], cls: type[Config], fixed: dict[str, int], where: str) -> None:
    """Raise UserError for keys that `cls` does not have, and for values that conflict with the base."""
    names = field_names(cls)
    known = [*names, *cls.SETTLED, *(_HUGGING_FACE_NAMES if "rope" in names else ())]
    for key in overrides:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}{suggest(key, known)}; known: {', '.join(known)}")
    for name, expected in fixed.items():
        if overrides.get(name, expected) != expected:
            raise UserError(f"{where}: {name} is {overrides[name]}, but the base has {expected}")
    if "rope" in overrides and (both := sorted(_HUGGING_FACE_NAMES & overrides.keys())):
        raise UserError(f"{where}: rope and {', '.join(both)} both set the rotary embedding: give one of them")


def _say_positions(overrides: dict[str, Any], base: BaseConfig) -> None:
    given, longest = overrides.get("max_position_embeddings"), base.max_position_embeddings
    if isinstance(given, int) and given < longest:
        log.warning("max_position_embeddings %d is not used: exports have the base's, %d", given, longest)


def eagle_config(base: BaseConfig, algorithm: str = "eagle3", overrides: dict[str, Any] | None = None) -> EagleConfig:
    """EAGLE draft for `base`: its shapes and rope, one dense Llama-style layer, then the user's overrides.

    P-EAGLE has four layers for a base of hidden size 2048 or more, as published, else two.

    Args:
        overrides: fields of `EagleConfig`, for P-EAGLE including `mask_token_id`; Hugging Face's `rope_theta` and
            `rope_scaling` are accepted, and "default", "late" or "five" for `capture_layer_ids`.

    Raises:
        UserError: unknown key (with a suggestion), wrong type, conflicting values, or no mask token.
    """
    overrides = dict(overrides or {})
    fixed = {"vocab_size": base.vocab_size, "target_hidden_size": base.hidden_size}
    _check_overrides(overrides, EagleConfig, fixed, "--eagle-config")
    values: dict[str, Any] = dict(
        algorithm=algorithm,
        hidden_size=base.hidden_size,
        **_draft_shape(base),
        **fixed,
        draft_vocab_size=base.vocab_size,
        max_position_embeddings=base.max_position_embeddings,
        rms_norm_eps=base.rms_norm_eps,
    )
    if algorithm == "eagle3.1":
        values.update(fc_norm=True, norm_output=True)
    if algorithm == "p-eagle":
        require_mask_token(algorithm, overrides, "--eagle-config")
        values["num_hidden_layers"] = 4 if base.hidden_size >= LARGE else 2
    if algorithm in READS_CAPTURES:
        overrides["capture_layer_ids"] = _capture_ids(base, overrides.get("capture_layer_ids", "default"), _CAPTURES)
    if algorithm == "eagle3":
        values.update(_first_values(base, values, overrides))
    values["rope"] = rope_overrides(base, overrides, "--eagle-config")
    values.update({k: v for k, v in overrides.items() if k not in _HUGGING_FACE_NAMES})
    _say_positions(overrides, base)
    config = EagleConfig.from_dict(values)
    _check_trainable(config)
    for layer in config.capture_layer_ids:
        if not 0 <= layer < base.num_layers:
            raise UserError(
                f"--eagle-config: capture layer {layer} is out of range: the base has layers 0..{base.num_layers - 1}"
            )
    return config


def own_mtp_config(base: BaseConfig) -> EagleConfig:
    """The base's own prediction module (DeepSeek-V3) as a draft: a layer of the base's architecture.

    Raises UserError for a base without one.
    """
    if base.mtp_layers < 1 or base.mla is None or base.moe is None:
        raise UserError(
            "--mtp-from-base: this base ships no prediction module (num_nextn_predict_layers in its config.json, "
            "DeepSeek-V3); without the flag, eagle-mtp creates a new one"
        )
    if base.mtp_layers > 1:
        log.warning(
            "the base ships %d prediction modules: the first one is trained, the others are unchanged", base.mtp_layers
        )
    return EagleConfig(
        algorithm="eagle-mtp",
        hidden_size=base.hidden_size,
        intermediate_size=base.moe.intermediate_size,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.head_dim,
        vocab_size=base.vocab_size,
        draft_vocab_size=base.vocab_size,
        target_hidden_size=base.hidden_size,
        max_position_embeddings=base.max_position_embeddings,
        rms_norm_eps=base.rms_norm_eps,
        rope=base.rope,
        moe=base.moe.replace(dense_layers=()),
        mla=base.mla,
        layer_in_base=base.num_layers,
    )


def medusa_config(base: BaseConfig, num_heads: int = 4, num_layers: int = 1, **overrides: Any) -> MedusaConfig:
    """Medusa heads for `base`. Raises UserError for unknown keys and sizes below 1."""
    sizes = {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}
    _check_overrides(overrides, MedusaConfig, sizes, "Medusa")
    return MedusaConfig.from_dict({**sizes, "num_heads": num_heads, "num_layers": num_layers, **overrides})


def block_config(base: BaseConfig, algorithm: str, overrides: dict[str, Any] | None = None) -> BlockConfig:
    """DFlash or DSpark draft for `base`: Qwen3-style layers of the base's shape, then the user's overrides.

    Five layers and captures for a base of hidden size 2048 or more, else two layers; Markov rank 256 or 64.

    Args:
        overrides: fields of `BlockConfig` including `mask_token_id`; `rope_theta` and `rope_scaling` are accepted, and
            "default" or "late" for `capture_layer_ids`.

    Raises:
        UserError: unknown key (with a suggestion), wrong type, conflicting values, or no mask token.
    """
    overrides = dict(overrides or {})
    fixed = {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size, "num_target_layers": base.num_layers}
    _check_overrides(overrides, BlockConfig, fixed, "--draft-config")
    require_mask_token(algorithm, overrides, "--draft-config")
    large = base.hidden_size >= LARGE
    values: dict[str, Any] = dict(
        algorithm=algorithm,
        **fixed,
        **_draft_shape(base),
        max_position_embeddings=base.max_position_embeddings,
        rms_norm_eps=base.rms_norm_eps,
        num_hidden_layers=5 if large else 2,
    )
    captures = overrides.get("capture_layer_ids", "default")
    overrides["capture_layer_ids"] = _capture_ids(base, captures, _BLOCK_CAPTURES, "--draft-config")
    if algorithm == "dspark":
        values["markov_rank"] = 256 if large else 64
    values["rope"] = rope_overrides(base, overrides, "--draft-config")
    values.update({k: v for k, v in overrides.items() if k not in _HUGGING_FACE_NAMES})
    _say_positions(overrides, base)
    return BlockConfig.from_dict(values)


def _block_objective(config: BlockConfig, objective: ObjectiveConfig) -> ObjectiveConfig:
    steps = config.num_steps
    if objective.ttt_steps != steps and objective.sets("ttt_steps"):
        raise UserError(
            f"--ttt-steps {objective.ttt_steps}, but a block of {config.block_size} proposes {steps} tokens: leave it "
            "out"
        )
    unread = ["step_decay", "step_weights", "alignment", "detach", "replay_weight"]
    unread += [] if config.own_head else ["in_vocab_only"]
    unread += [] if config.has_markov_head else ["confidence_weight", "backbone_weight", "backbone_iters"]
    _refuse_unread(objective, unread, f"no effect on {config.algorithm}")
    if not config.has_confidence_head:
        _refuse_unread(objective, ["confidence_weight"], "the draft has no confidence head")
    if objective.loss is None:
        objective = objective.replace(loss="ce_l1" if config.has_markov_head else "soft_ce")  # as in the papers
    _refuse_without_owner(objective, ["confidence_weight"] if config.has_confidence_head else [])
    return objective.replace(ttt_steps=steps)


def _refuse_without_owner(objective: ObjectiveConfig, of_heads: list[str]) -> None:
    """Raise UserError for options that have no effect with the others. Args: of_heads: weights of other heads."""
    if objective.block_weights == "exponential":
        _refuse_unread(objective, ["pace_alpha"], "no effect without --block-weights d-pace")
    else:
        _refuse_unread(objective, ["block_gamma"], f"no effect with --block-weights {objective.block_weights}")
    weights = ["ce_weight", "l1_weight", *of_heads]
    if objective.loss == "ce_l1" and not any(getattr(objective, n) for n in weights):
        flags = ", ".join("--" + n.replace("_", "-") for n in weights)
        raise UserError(f"{flags} are all 0, so nothing is trained: leave one out")
    if objective.loss != "ce_l1":
        _refuse_unread(objective, ["ce_weight", "l1_weight"], f"only for --loss ce_l1, the loss is {objective.loss}")
    if not objective.backbone_weight:
        _refuse_unread(objective, ["backbone_iters"], "no effect without --backbone-weight")


def _refuse_unread(objective: ObjectiveConfig, names: list[str], why: str) -> None:
    values = {n.replace("_", "-"): getattr(objective, n) for n in names if objective.sets(n)}
    given = [("--no-" if value is False else "--") + n for n, value in values.items()]
    if given:
        raise UserError(f"{', '.join(given)}: {why}; leave {'it' if len(given) == 1 else 'them'} out")


def _check_parallel_objective(objective: ObjectiveConfig) -> None:
    """P-EAGLE."""
    if objective.ttt_steps < 2:
        raise UserError(
            "--ttt-steps 1: p-eagle is trained to propose several tokens at once: give the most that are to be "
            "proposed, 2 or more"
        )
    _refuse_unread(objective, ["detach"], "no effect on p-eagle, where no step reads the output of another")


_BLOCK_OPTIONS = [
    "anchors", "block_weights", "block_gamma", "ce_weight", "l1_weight", "confidence_weight", "backbone_weight",
    "backbone_iters",
]  # fmt: skip


_PACED = ("eagle3", "eagle3.1", "eagle-mtp")
"""Drafts whose steps D-PACE may weigh: each step continues the one before, and only its token counts."""


def _weighed(config: DraftConfig, objective: ObjectiveConfig) -> ObjectiveConfig:
    """The objective with its weights of steps, of all but block drafts. Raises UserError."""
    if objective.step_weights is None:
        paced = config.algorithm == "eagle3" and objective.step_decay is None
        objective = objective.replace(step_weights="d-pace" if paced else "decay")
    if objective.step_weights == "decay":
        _refuse_unread(objective, ["pace_alpha"], "no effect without --step-weights d-pace")
        return objective.replace(step_decay=objective.decay)
    if config.algorithm not in _PACED:
        raise UserError(
            f"--step-weights {objective.step_weights} is for {', '.join(_PACED)}, the draft is {config.algorithm}: "
            "leave it out"
        )
    _refuse_unread(objective, ["step_decay"], f"no effect with --step-weights {objective.step_weights}")
    return objective


def _refuse_idle(config: EagleConfig | MedusaConfig, objective: ObjectiveConfig) -> None:
    """Raise UserError for flags that others leave without effect. Flags alone: older runs have recorded such values."""
    steps = config.num_heads if isinstance(config, MedusaConfig) else objective.ttt_steps
    least, given = objective.row_keep_least, objective.given
    for idle, names, why in (
        (steps == 1, ("step_decay", "detach"), "no effect with a single draft step"),
        (not objective.token_weight, ("loss", "temperature", "replay_weight"), "no effect with --token-weight 0"),
        (objective.row_keep < least, ("row_keep",), f"no effect below --row-keep-least, which is {least}"),
    ):
        _refuse_unread(objective, [name for name in names if idle and name in given], why)


def objective_for(config: DraftConfig, objective: ObjectiveConfig) -> ObjectiveConfig:
    """The objective for a draft: with its weights of steps, and for Medusa with one step per head.

    Raises UserError for settings that this draft does not support.
    """
    if not config.regresses_state:
        for name in ("feature_noise", "feature_weight", "token_weight"):
            if objective.sets(name):
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} belongs to eagle1, the draft is {config.algorithm}: leave it out")
    elif not (objective.feature_weight or objective.token_weight):
        raise UserError("--feature-weight, --token-weight are both 0, so nothing is trained: leave one out")
    if isinstance(config, EagleConfig) and config.parallel_drafting:
        _check_parallel_objective(objective)
    else:
        _refuse_unread(objective, ["row_keep", "row_keep_least"], f"only for p-eagle, the draft is {config.algorithm}")
    if isinstance(config, BlockConfig):
        return _block_objective(config, objective)
    _refuse_unread(objective, _BLOCK_OPTIONS, f"only for block drafts, the draft is {config.algorithm}")
    _refuse_idle(config, objective)
    objective = _weighed(config, objective).replace(loss=objective.loss_kind)
    if objective.loss == "ce_l1":
        raise UserError(f"--loss ce_l1 is for block drafts, the draft is {config.algorithm}: choose another")
    if not objective.in_vocab_only and config.draft_vocab_size == config.vocab_size:
        raise UserError(
            "--no-in-vocab-only: this draft has the whole vocabulary, so that no row is outside of it: leave it out"
        )
    if not isinstance(config, MedusaConfig):
        window = config.sliding_window
        if window is not None and objective.ttt_steps > window:  # a step sees its own branches and a trunk row at least
            raise UserError(f"--ttt-steps {objective.ttt_steps}: more than the draft's sliding_window, {window}")
        return objective
    if objective.ttt_steps != config.num_heads and objective.sets("ttt_steps"):
        raise UserError(
            f"--ttt-steps {objective.ttt_steps}, but the draft has {config.num_heads} Medusa heads and no other steps: "
            "leave it out"
        )
    if objective.detach:
        raise UserError("--detach: Medusa heads do not read one another, so there is nothing to detach: leave it out")
    return objective.replace(ttt_steps=config.num_heads)
