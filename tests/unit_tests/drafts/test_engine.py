"""A draft from Transformer Engine's modules equals the local one, in every layout, and has its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.checkpoint import sharded
from megatron_spec.config import (
    DraftConfig,
    Fp8Recipe,
    MlaConfig,
    MoeConfig,
    ObjectiveConfig,
    ParallelConfig,
    QuantConfig,
    UserError,
    presets,
)
from megatron_spec.config.machine import H100, Machine
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.engine import TransformerEngine
from megatron_spec.planning.draft_modules import RECIPES, check_draft_modules
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.quantization.attach import attach_quantizers
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.runtime import distributed, platform
from tests import te_stand_in
from tests.unit_tests.drafts import test_blocks
from tests.unit_tests.drafts.plain_drafts import VOCAB
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds, eagle_config
from tests.unit_tests.drafts.test_eagle1_mtp_medusa import CASES, batch_features, goal_of, vocabulary
from tests.unit_tests.drafts.test_eagle1_mtp_medusa_parallel import outcome as parallel_outcome
from tests.unit_tests.drafts.test_eagle_parallel import close, joined
from tests.unit_tests.drafts.test_eagle_parallel import outcome as eagle_outcome
from tests.worlds import run_world

ENGINE = Paths(Setting(draft_transformer_engine=True))
GOAL = ObjectiveConfig(ttt_steps=3)
EAGLE3: dict[str, dict[str, Any]] = {
    "eagle3": {"attention_bias": True, "mlp_bias": True, "fc_bias": True, "qk_norm": True},
    "one kv head": {"num_key_value_heads": 1, "num_hidden_layers": 2},
}
MLA = MlaConfig(kv_lora_rank=8, nope_head_dim=4, rope_head_dim=2, v_head_dim=4, q_lora_rank=8)
MOE = MoeConfig(num_experts=3, experts_per_token=1, intermediate_size=8, shared_intermediate_size=8)
OF_BASE = eagle_config(
    algorithm="eagle-mtp",
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    capture_layer_ids=(),
    mla=MLA,
    moe=MOE,
    layer_in_base=4,
)
DRAFTS: dict[str, tuple[DraftConfig, dict[str, Any]]] = {
    **{name: CASES[name] for name in ("eagle1", "eagle1, two layers", "mtp", "3.1 all", "medusa, hard labels")},
    "eagle3": (eagle_config(vocab_size=VOCAB, attention_bias=True, mlp_bias=True, qk_norm=True), {}),
    "p-eagle": (eagle_config(algorithm="p-eagle", mask_token_id=7, vocab_size=VOCAB, num_hidden_layers=2), {}),
    "latent attention, experts": (OF_BASE, {}),
}
WIDE = eagle_config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, head_dim=8, num_attention_heads=4, num_key_value_heads=2
)


@pytest.fixture(autouse=True)
def engine_stands_in() -> Iterator[None]:
    with te_stand_in.installed():
        yield


def made(config: DraftConfig, paths: Paths | None = None, dtype: torch.dtype = torch.float32) -> Any:
    draft = build_draft(config, vocabulary(config), distributed.initialize(), dtype, paths)
    draft.initialize(StandInEnds(16, dtype, vocab_size=VOCAB), seed=13)
    with torch.no_grad():
        for i, (_, p) in enumerate(sorted(draft.named_parameters())):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(dtype)
            p += noise * (0.3 if p.dim() == 2 else 0.1)
    return draft


def outcome(draft: Any, goal: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(4)
    losses = draft(batch_features(draft.config, dtype), StandInEnds(16, dtype, vocab_size=VOCAB), goal)
    losses.total.backward()
    found = {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}
    return {"total": losses.total.detach(), "correct": losses.correct_T, **found}


@pytest.mark.parametrize("name", list(DRAFTS))
def test_equals_the_local_draft(name: str) -> None:
    config, goal = DRAFTS[name][0], goal_of(*DRAFTS[name])
    local, built = made(config), made(config, ENGINE)
    assert not te_stand_in.calls
    expected = outcome(local, goal)
    assert not te_stand_in.calls
    found = outcome(built, goal)
    kinds = {kind for kind, _, _ in te_stand_in.calls}
    assert kinds == ({"linear"} if name.startswith("medusa") else {"linear", "norm"})
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        close(found[key], value, f"{name}: {key}", exact=False)


@pytest.mark.parametrize("name", list(DRAFTS))
def test_parameters_and_marks_are_those_of_the_local_draft(name: str) -> None:
    config, world = DRAFTS[name][0], distributed.initialize()
    local, built = (build_draft(config, vocabulary(config), world, torch.float32, p) for p in (None, ENGINE))
    marks = ("tensor_model_parallel", "sequence_parallel", "requires_grad")
    described = [
        {n: (p.shape, p.dtype, *(getattr(p, mark, None) for mark in marks)) for n, p in draft.named_parameters()}
        for draft in (local, built)
    ]
    assert described[0] == described[1]
    assert all(bool(p.isnan().all()) for p in built.parameters()), "a parameter that nothing sets must be noticed"
    assert local.state_dict().keys() == built.state_dict().keys()
    keys = [sharded.sharded_state(draft, world).keys() for draft in (local, built)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_block_drafts(algorithm: str) -> None:
    config = test_blocks.block_config(algorithm=algorithm)
    goal, found = presets.objective_for(config, ObjectiveConfig()), []
    for own in (None, TransformerEngine()):
        draft, ends = test_blocks.made(config, distributed.initialize().tp, torch.float32, engine=own)
        torch.manual_seed(11)
        losses = draft(test_blocks.features(torch.float32), ends, goal)
        losses.total.backward()
        found.append({"total": losses.total.detach(), **{n: p.grad for n, p in draft.named_parameters()}})
    assert te_stand_in.calls
    for key, value in found[0].items():
        close(found[1][key], value, key, exact=False)


LAYOUTS = ("eagle1, two layers", "mtp", "3.1 all", "medusa, hard labels")


def ranks() -> dict[str, Any]:
    platform.activate()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    alone, both = [dist.new_group([r]) for r in range(2)][dist.get_rank()], dist.new_group([0, 1])
    with te_stand_in.installed():
        return outcomes(alone, both)


def outcomes(alone: Any, both: Any) -> dict[str, Any]:
    """{draft and layout: losses and gradients}."""
    found: dict[str, Any] = {}
    for name in LAYOUTS:
        config, goal = CASES[name][0], goal_of(*CASES[name])
        found[name] = parallel_outcome(config, goal, alone, False, 3)
        for scattered in (False, True):
            found[f"{name} {scattered}"] = parallel_outcome(config, goal, both, scattered, 3, TransformerEngine())
    for name, changes in EAGLE3.items():
        config = eagle_config(**changes)
        found[name] = eagle_outcome(config, GOAL, alone, False)
        for scattered in (False, True):
            found[f"{name} {scattered}"] = eagle_outcome(config, GOAL, both, scattered, engine=TransformerEngine())
    assert te_stand_in.calls
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(2, ranks)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", [*LAYOUTS, "eagle3", "one kv head"])
def test_every_layout_equals_the_local_draft_on_one_rank(
    world: list[dict[str, Any]], name: str, scattered: bool
) -> None:
    for key, expected in world[0][name].items():
        shards = [world[r][f"{name} {scattered}"][key] for r in range(2)]
        if shards[0].shape == expected.shape:
            for shard in shards:
                close(shard, expected, key, exact=False)
        else:
            close(joined(shards, expected), expected, key, exact=False)


def test_fp8_pads_rows_and_leaves_the_projection_of_captures() -> None:
    paths = Paths(Setting(draft_transformer_engine=True, draft_fp8_recipe="tensorwise"))
    goal = goal_of(WIDE, {})
    exact, eight = made(WIDE, ENGINE), made(WIDE, paths)
    expected = outcome(exact, goal)
    te_stand_in.calls.clear()
    found = outcome(eight, goal)
    linears = [(rows, low) for kind, rows, low in te_stand_in.calls if kind == "linear"]
    assert [low for _, low in linears] == [False, *[True] * 7 * goal.ttt_steps], "fc, then 7 linears at every step"
    error = float((found["fc.weight"] - expected["fc.weight"]).norm() / expected["fc.weight"].norm())
    assert 1e-3 < error < 0.5
    assert not te_stand_in.autocasts

    te_stand_in.calls.clear()
    eight.eval()
    with torch.no_grad():
        eight(batch_features(WIDE, torch.float32), StandInEnds(16, torch.float32, vocab_size=VOCAB), goal)
    assert not any(low for _, _, low in te_stand_in.calls), "a draft is served in high precision"


def test_fake_quantisation_on_top() -> None:
    """Quantised weights stand in for those of the modules; gradients reach the draft's own."""
    config, goal, found = DRAFTS["eagle3"][0], goal_of(*DRAFTS["eagle3"]), []
    for paths in (None, ENGINE):
        draft = made(config, paths)
        attach_quantizers(draft, QuantConfig(base="none"), "draft")
        world, f = distributed.initialize(), batch_features(config, torch.float32)
        ends: Any = StandInEnds(16, torch.float32, vocab_size=VOCAB)

        class Source:
            def features(self, batches: list[Any], made: Any = f) -> list[Any]:
                return [made]

        calibrate(None, draft, Source(), [[f.batch]], goal, QuantConfig(base="none"), world, ends)
        found.append(outcome(draft, goal))
    assert float((found[0]["total"] - outcome(made(config), goal)["total"]).abs()) > 1e-4, "nothing was rounded"
    for key, value in found[0].items():
        close(found[1][key], value, key, exact=False)


def test_no_fake_quantisation_of_a_draft_with_a_recipe() -> None:
    draft = made(WIDE, Paths(Setting(draft_transformer_engine=True, draft_fp8_recipe="delayed")))
    with pytest.raises(UserError, match="rounded twice: build it without draft_fp8_recipe"):
        calibrate(None, draft, None, [[]], GOAL, QuantConfig(base="none"), distributed.initialize())  # type: ignore[arg-type]


TE_GPU = Setting(H100, "bfloat16", draft=WIDE, draft_transformer_engine=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_transformer_engine": False, "draft_fp8_recipe": "delayed"}, "add --draft-transformer-impl"),
        ({"machine": Machine()}, "needs a GPU"),
        ({"dtype": "float64"}, "float64"),
        ({"draft_fp8_recipe": "tensorwise", "dtype": "float32"}, "add --bf16"),
        ({"draft_fp8_recipe": "mxfp8"}, "10.0 .Blackwell. or newer, found 9.0; use delayed or tensorwise or blockwise"),
        ({"draft_fp8_recipe": "nvfp4"}, "Blackwell"),
        ({"draft_fp8_recipe": "blockwise", "machine": Machine(True, (8, 9), "triton")}, "9.0 .Hopper. or newer"),
        ({"draft_fp8_recipe": "delayed", "machine": Machine(True, (8, 0), "triton")}, "no fp8"),
        ({"draft_fp8_recipe": "delayed", "quant": QuantConfig()}, "rounded twice"),
        ({"draft_fp8_recipe": "blockwise"}, "midlayer.self_attn.q_proj.weight has the shape .32, 64. .*of 128"),
        (
            {"draft_fp8_recipe": "delayed", "parallel": ParallelConfig(tensor_model_parallel_size=2)},
            "midlayer.self_attn.k_proj.weight has the shape .8, 64. on a rank",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check_draft_modules(TE_GPU)
    with pytest.raises(UserError, match=reason):
        check_draft_modules(replace(TE_GPU, **changes))


def test_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        check_draft_modules(TE_GPU)


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_a_recipe_that_the_installation_lacks(name: Fp8Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_stand_in.PYTORCH, RECIPES[name].check, lambda return_reason: (False, "cuBLAS is too old"),
                        raising=False)  # fmt: skip
    with pytest.raises(UserError, match=f"{name}: cuBLAS is too old"):
        TransformerEngine(name)


def test_fast_paths_say_why_they_are_off() -> None:
    paths = Paths(replace(TE_GPU, wanted=("draft_fp8",)))
    reason = "--draft-transformer-impl transformer_engine builds the draft"
    assert all(paths.blocked[name] == reason for name in ("draft_fused", "draft_fp8", "draft_decode", "cuda_graphs"))
    block = Paths(replace(TE_GPU, draft=test_blocks.block_config()))
    assert block.blocked["draft_layer"] == reason and "loss_kernel" not in paths.blocked
    assert reason not in Paths(replace(TE_GPU, draft_transformer_engine=False)).blocked.values()
