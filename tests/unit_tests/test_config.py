"""Invalid values are refused in the configuration, with the name of the field."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_spec.commands.runs import ConvertRun
from megatron_spec.config import (
    BaseConfig,
    BlockConfig,
    DecodeConfig,
    EagleConfig,
    MoeConfig,
    ObjectiveConfig,
    ParallelConfig,
    RopeConfig,
    TrainConfig,
    UserError,
    presets,
)
from tests.tiny import llama

LLAMA3 = RopeConfig(
    theta=5e5, type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
BASE = llama(num_layers=12, rope=LLAMA3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("save_interval", -1), ("clip_grad", -1.0), ("lr_warmup_iters", -1), ("weight_decay", -0.1), ("min_lr", -1e-5),
        ("lr", 0.0), ("adam_eps", 0.0), ("adam_beta1", 1.0), ("adam_beta2", -0.1), ("train_iters", -1),
        ("lr", float("inf")), ("weight_decay", float("inf")), ("clip_grad", float("nan")),
    ],
)  # fmt: skip
def test_training_values_out_of_range(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field):
        TrainConfig(**{"train_iters": 1, field: value})


@pytest.mark.parametrize("kind", [TrainConfig, DecodeConfig, lambda **given: ConvertRun("b", "s", **given)])
def test_seeds_that_would_draw_the_numbers_of_another(kind: Any) -> None:
    assert kind(seed=2**32 - 1).seed == 2**32 - 1
    with pytest.raises(UserError, match="--seed must be at most 4294967295, found 4294967296"):
        kind(seed=2**32)
    with pytest.raises(UserError, match="--seed must be at least 0, found -1"):
        kind(seed=-1)


def test_the_longest_wait_of_ranks() -> None:
    with pytest.raises(UserError, match="--distributed-timeout-minutes must be at most 525600"):
        ParallelConfig(distributed_timeout_minutes=10**12)


def test_minimum_learning_rate_must_not_exceed_the_learning_rate() -> None:
    with pytest.raises(UserError, match=r"min_lr 0\.01 must not be greater than lr 0\.001"):
        TrainConfig(train_iters=1, lr=1e-3, min_lr=1e-2)
    with pytest.raises(UserError, match="lr_warmup_iters 9 must be below lr_decay_iters 9"):
        TrainConfig(train_iters=20, lr_warmup_iters=9, lr_decay_iters=9)
    assert TrainConfig(train_iters=1, lr=1e-3, min_lr=1e-3, clip_grad=0.0, save_interval=0).min_lr == 1e-3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("sa_threshold", 1 << 63),
        ("max_new_tokens", 0),
        ("max_draft_len", -1),
    ],
)
def test_decoding_values_out_of_range(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field):
        DecodeConfig(**{field: value})


def eagle(**overrides: Any) -> EagleConfig:
    return presets.eagle_config(BASE, overrides=overrides)


def test_draft_inherits_the_rope_of_its_base() -> None:
    assert eagle().rope == LLAMA3
    assert eagle(rope_theta=1000).rope == LLAMA3.replace(theta=1000.0)
    assert eagle(rope_scaling={"rope_type": "llama3", "factor": 2.0}).rope == LLAMA3.replace(factor=2.0)


def test_another_rope_type_replaces_the_inherited_one() -> None:
    assert eagle(rope_scaling=None).rope == RopeConfig(theta=5e5)
    assert eagle(rope_scaling={"type": "linear", "factor": 2.0}).rope == RopeConfig(
        theta=5e5, type="linear", factor=2.0
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"capture_layer_ids": []}, "capture_layer_ids is empty"),
        ({"capture_layer_ids": "lates"}, r"capture_layer_ids is 'lates', expected .* default, late.*late"),
        ({"rope_theta": "many"}, "rope_theta is 'many'"),
        ({"rope_scaling": "linear"}, "--eagle-config: rope_scaling is 'linear'"),
        ({"SETTLED": 1}, "unknown key 'SETTLED'"),
    ],
)
def test_impossible_drafts_are_refused(overrides: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        eagle(**overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"attention_bias": True}, "--draft-config: unknown key 'attention_bias'"),  # what such a class has settled
        ({"SETTLED": 1}, "unknown key 'SETTLED'"),
        ({"rope_scaling": "linear"}, "--draft-config: rope_scaling is 'linear'"),
        ({"block_size": 257}, "block_size 257 is longer than max_position_embeddings 256"),
        ({"mask_token_id": None}, '"mask_token_id" in --draft-config'),
    ],
)
def test_impossible_block_drafts_are_refused(overrides: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        presets.block_config(BASE, "dflash", {"mask_token_id": 3, **overrides})


def test_saved_configurations_hold_fields_alone() -> None:
    saved = presets.block_config(BASE, "dflash", {"mask_token_id": 3}).to_dict()
    with pytest.raises(UserError, match="BlockConfig: unknown key 'own_head'"):
        BlockConfig.from_dict({**saved, "own_head": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_key_value_heads", 0), ("num_attention_heads", 0), ("head_dim", 7), ("head_dim", 0),
        ("intermediate_size", -3), ("max_position_embeddings", 0), ("num_hidden_layers", 0), ("rope_theta", 0),
        ("rms_norm_eps", -1.0), ("rms_norm_eps", float("nan")), ("initializer_range", -0.1),
    ],
)  # fmt: skip
def test_sizes_that_make_no_layer_are_refused(name: str, value: float) -> None:
    for make in (
        lambda: eagle(**{name: value}),
        lambda: presets.block_config(BASE, "dspark", {"mask_token_id": 3, name: value}),
    ):
        with pytest.raises(UserError, match=name):
            make()


def test_overrides_that_would_not_be_read(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="rope and rope_scaling, rope_theta both set the rotary embedding"):
        presets.eagle_config(BASE, overrides={"rope": {"theta": 5.0}, "rope_theta": 7.0, "rope_scaling": None})
    for algorithm in ("eagle1", "eagle-mtp"):
        with pytest.raises(UserError, match="fc_init 'average' is for drafts of the base's width that read captures"):
            presets.eagle_config(BASE, algorithm, {"fc_init": "average"})
    with pytest.raises(UserError, match="Medusa: hidden_size is 3, but the base has 32"):
        presets.medusa_config(BASE, hidden_size=3)
    presets.block_config(BASE, "dflash", {"mask_token_id": 1, "max_position_embeddings": 64})
    assert "max_position_embeddings 64 is not used: exports have the base's, 256" in caplog.text


def test_captures_by_name() -> None:
    assert eagle().capture_layer_ids == eagle(capture_layer_ids="default").capture_layer_ids == (1, 5, 8)
    assert eagle(capture_layer_ids="late").capture_layer_ids == (5, 8, 10)
    blocks = [
        presets.block_config(BASE, "dflash", {"mask_token_id": 1, **x}) for x in ({}, {"capture_layer_ids": "late"})
    ]
    assert blocks[0].capture_layer_ids == presets.spread_capture_ids(BASE.num_layers, 5)
    assert blocks[1].capture_layer_ids == (5, 8, 10)
    with pytest.raises(UserError, match="expected layers of the base or one of default, late"):
        presets.block_config(BASE, "dflash", {"mask_token_id": 1, "capture_layer_ids": "early"})


def first_values(base: BaseConfig, algorithm: str = "eagle3", **overrides: Any) -> tuple[Any, ...]:
    config = presets.eagle_config(base, algorithm, overrides)
    return config.init_from_base_layer, config.fc_init, config.init_attention


MOE = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=16)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"experts_per_token": 9}, "num_experts_per_tok 9 does not fit the 8 experts"),
        ({"groups": 3}, "8 experts do not fill 3 groups"),
        ({"groups": 0}, "8 experts do not fill 0 groups"),
        ({"groups": 8, "groups_per_token": 2}, "n_group 8: groups of one expert"),
        ({"groups": 4, "groups_per_token": 5}, "topk_group 5: expected 1 to 4"),
        (
            {"groups": 4, "groups_per_token": 2, "experts_per_token": 5},
            "num_experts_per_tok 5 does not fit topk_group 2, groups of 2 experts",
        ),
    ],
)
def test_choices_of_experts_that_cannot_be_made(fields: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        MoeConfig(**{"num_experts": 8, "experts_per_token": 2, "intermediate_size": 16, **fields})
    assert MoeConfig(8, 4, 16, groups=4, groups_per_token=2).groups == 4


def test_default_initialisation_of_a_new_draft() -> None:
    """The base's last layer where the draft's has its shape; only EAGLE-3 was measured."""
    from_base, afresh = (True, "average", True), (False, "last_capture", False)
    assert first_values(BASE) == from_base == first_values(BASE, num_hidden_layers=2, capture_layer_ids=[0, 3])
    assert first_values(BASE.replace(qk_norm=True)) == (True, "average", False)
    assert first_values(BASE.replace(qk_norm=True), init_attention=True) == from_base
    for other in ({"intermediate_size": 64}, {"head_dim": 16}, {"num_key_value_heads": 4}, {"hidden_size": 16}):
        assert first_values(BASE, **other) == afresh, other
    assert first_values(BASE, init_from_base_layer=False) == afresh
    assert first_values(BASE, fc_init="last_capture", init_attention=False) == (True, "last_capture", False)
    assert first_values(BASE, "eagle1") == afresh
    assert first_values(BASE.replace(moe=MOE)) == afresh


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_draft_has_one_set_of_rope_frequencies() -> None:
    """longrope has two sets; a draft for such a base uses default frequencies, and one with longrope is refused."""
    with pytest.raises(UserError, match="a draft cannot have rope type longrope: use default"):
        eagle(rope_scaling=LONGROPE)
    with pytest.raises(UserError, match="a draft cannot have rope type longrope: use default"):
        presets.block_config(BASE, "dflash", {"mask_token_id": 1, "rope_scaling": LONGROPE})
    short, long = LONGROPE["short_factor"], LONGROPE["long_factor"]
    rope = RopeConfig(type="longrope", short_factor=tuple(short), long_factor=tuple(long))  # type: ignore[arg-type]
    assert presets.eagle_config(BASE.replace(rope=rope)).rope == RopeConfig()


def test_the_share_of_the_backbone_falls_to_zero() -> None:
    goal = ObjectiveConfig(backbone_weight=0.8, backbone_iters=4)
    assert [goal.at(i).backbone_weight for i in (0, 1, 3, 4, 9)] == pytest.approx([0.8, 0.6, 0.2, 0.0, 0.0])
    constant = ObjectiveConfig(backbone_weight=0.8)
    assert constant.at(9) is constant


@pytest.mark.parametrize(
    ("layout", "size", "message"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 6, "TP 2 x PP 2: start a multiple of 4"),
        ({"context_parallel_size": 2}, 3, "TP 1 x PP 1 x CP 2: start a multiple of 2"),
        ({"expert_model_parallel_size": 4}, 6, "over EP 4 with TP 1 x PP 1: start a multiple of 4"),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 6, "start a multiple of 4"),
    ],
)
def test_processes_that_a_layout_does_not_divide(layout: dict[str, int], size: int, message: str) -> None:
    parallel = ParallelConfig(**layout)
    with pytest.raises(UserError, match=f"{size} processes cannot .*{message}"):
        parallel.check_world_size(size)
    parallel.check_world_size(8)
