"""Drafts from Transformer Engine's modules on a GPU: in bf16 as near to fp32 as the local ones, in fp8 near bf16."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_spec.batch import Features
from megatron_spec.config import (
    BlockConfig,
    DraftConfig,
    Fp8Recipe,
    MedusaConfig,
    ObjectiveConfig,
    QuantConfig,
    TrainConfig,
    UserError,
    presets,
)
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.ops.attention import attend
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.draft_modules import check_draft_modules
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.quantization.attach import attach_quantizers
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.runtime import distributed, platform
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer
from tests.gpu.test_eagle1_mtp_medusa import BASE, CONFIGS, LENGTH, ROWS, Ends, H, V, micro_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]

DRAFTS: dict[str, DraftConfig] = {
    **CONFIGS,
    "eagle3": presets.eagle_config(BASE, "eagle3", {"capture_layer_ids": [1, 3, 4]}),
    "p-eagle": presets.eagle_config(BASE, "p-eagle", {"capture_layer_ids": [1, 3, 4], "mask_token_id": 7}),
}
BF16 = torch.bfloat16


def paths_of(config: DraftConfig, engine: bool, dtype: torch.dtype = BF16, recipe: Fp8Recipe | None = None) -> Paths:
    """Plain paths, so that both drafts run the same code around their products."""
    setting = Setting(
        platform.machine(), str(dtype).removeprefix("torch."), draft=config, plain=True,
        draft_transformer_engine=engine, draft_fp8_recipe=recipe,
    )  # fmt: skip
    check_draft_modules(setting)
    return Paths(setting)


def made(config: DraftConfig, engine: bool, dtype: torch.dtype = BF16, recipe: Fp8Recipe | None = None) -> Any:
    """A draft with numbers that bf16 has, the same for both kinds and every dtype."""
    world = distributed.initialize()
    draft = build_draft(config, DraftVocab.full(V), world, dtype, paths_of(config, engine, dtype, recipe))
    draft.initialize(Ends(dtype, world.device), seed=1)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, p in sorted(draft.named_parameters()):
            p.add_((torch.randn(p.shape, generator=random) * 0.02).to(world.device, dtype))
            p.copy_(p.bfloat16())
    return draft


def features_of(dtype: torch.dtype) -> Features:
    device, random = distributed.initialize().device, torch.Generator().manual_seed(5)
    captures, state = (torch.randn(LENGTH, ROWS, n, generator=random).bfloat16() for n in (3 * H, H))
    return Features(micro_batch(device), captures.to(device, dtype), state.to(device, dtype))


def goal_of(config: DraftConfig) -> ObjectiveConfig:
    steps = {} if isinstance(config, (BlockConfig, MedusaConfig)) else {"ttt_steps": 3}
    quiet = {"feature_noise": 0.0} if config.algorithm == "eagle1" else {}
    return presets.objective_for(config, ObjectiveConfig(**steps, **quiet))


def outcome(draft: Any, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(losses of the steps, gradients)."""
    draft.zero_grad()
    torch.manual_seed(9)
    losses = draft(features_of(dtype), Ends(dtype, distributed.initialize().device), goal_of(draft.config))
    losses.total.backward()
    return losses.loss_T, {n: p.grad.float() for n, p in draft.named_parameters() if p.grad is not None}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-12))


@pytest.mark.parametrize("name", list(DRAFTS))
def test_bf16_is_as_near_to_fp32_as_the_local_draft(name: str) -> None:
    config = DRAFTS[name]
    exact, exact_gradients = outcome(made(config, False, torch.float32), torch.float32)
    local, local_gradients = outcome(made(config, False))
    draft = made(config, True)
    found, gradients = outcome(draft)
    assert draft.engine is not None and type(draft.engine.te.Linear).__module__ is not None
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0.0)
    assert gradients.keys() == local_gradients.keys() == exact_gradients.keys()
    for n, wanted in exact_gradients.items():
        own, theirs = distance(local_gradients[n], wanted), distance(gradients[n], wanted)
        assert theirs < max(1.5 * own, 0.01), f"gradient of {n}: relative error {theirs}, of the local draft {own}"
    assert distance(found, local) < 1e-2


def test_state_moves_between_both_kinds() -> None:
    local, draft = made(DRAFTS["eagle3"], False), made(DRAFTS["eagle3"], True)
    with torch.no_grad():
        for p in local.parameters():
            p.mul_(1.25)
    draft.load_state_dict(local.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(draft.parameters(), local.parameters(), strict=True))
    assert distance(outcome(draft)[0], outcome(local)[0]) < 1e-2
    local.load_state_dict(draft.state_dict())


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_decoding_step(rows: int) -> None:
    """Any number of rows, without gradients, as drafters call it."""
    found = []
    for engine in (False, True):
        draft = made(DRAFTS["eagle3"], engine).eval()
        ends = Ends(BF16, distributed.initialize().device)
        cache = draft.new_cache(1, rows)
        slots = torch.arange(rows, device=ends.table.device)[None]
        visibility, tokens = Visibility.cached(cache, slots), slots + 5

        def attention(layer: int, q: Any, k: Any, v: Any, visibility: Any = visibility) -> torch.Tensor:
            return attend(q, k, v, visibility, layer)

        with torch.no_grad():
            captures = features_of(BF16).captures_SBC[:rows, :1]
            state, normed = draft.layer_step(draft.project(captures), draft.embed(tokens, ends), slots, attention)
            found.append((state, draft.logits(normed)))
    for a, b in zip(*found, strict=True):
        assert distance(a, b) < 2e-2


RECIPES: list[Fp8Recipe] = ["delayed", "tensorwise", "blockwise"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle-mtp", "p-eagle", "medusa", "dflash"])
def test_fp8_is_near_bf16(name: str, recipe: Fp8Recipe) -> None:
    """Delayed scaling knows its ranges from the third step on."""
    if platform.machine().capability < (9, 0):
        pytest.skip("needs Hopper")
    config = DRAFTS[name]
    wanted, wanted_gradients = outcome(made(config, True))
    draft = made(config, True, recipe=recipe)
    for _ in range(3):
        found, gradients = outcome(draft)
    assert distance(found, wanted) < 0.03
    low = [n for n in gradients if ".self_attn." in n or ".mlp." in n or ".blocks." in n]
    far = []
    for n, gradient in wanted_gradients.items():
        error = distance(gradients[n], gradient)
        assert error < 0.5, f"gradient of {n}: relative error {error}"
        far.append(error if n in low else 0.0)
    assert max(far) > 0.01, "nothing was rounded to 8 bits"
    if name == "p-eagle":  # supervises all rows in evaluation
        return
    draft.eval()
    torch.manual_seed(9)
    with torch.no_grad():
        exact = draft(features_of(BF16), Ends(BF16, distributed.initialize().device), goal_of(config)).loss_T
    assert distance(exact, wanted) < distance(found, wanted) or distance(exact, wanted) < 1e-3


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recipes_of_blackwell(recipe: Fp8Recipe) -> None:
    if platform.machine().capability < (10, 0):
        with pytest.raises(UserError, match="Blackwell"):
            made(DRAFTS["eagle3"], True, recipe=recipe)
    else:
        wanted = outcome(made(DRAFTS["eagle3"], True))[0]
        assert distance(outcome(made(DRAFTS["eagle3"], True, recipe=recipe))[0], wanted) < 0.1


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_training_falls_like_the_local_draft(distributed_optimizer: bool, recipe: Fp8Recipe | None) -> None:
    """Ten steps with megatron-core's DDP and optimizer, on one micro-batch."""
    if recipe is not None and platform.machine().capability < (8, 9):
        pytest.skip("needs fp8")
    world, curves = distributed.initialize(), []
    train = TrainConfig(
        train_iters=10, bf16=True, lr=1e-3, lr_decay_style="constant", use_distributed_optimizer=distributed_optimizer
    )
    for engine in (False, True):
        draft = made(DRAFTS["eagle3"], engine, recipe=recipe if engine else None)
        ddp = wrap_ddp(draft, world, train)
        optimizer, scheduler = build_optimizer(ddp, world, train)
        trainer = Trainer(world, ddp, optimizer, scheduler, Ends(BF16, world.device), goal_of(draft.config))
        steps = [trainer.step([features_of(BF16)]) for _ in range(10)]
        curves.append(torch.tensor([step.loss for step in steps]))
    assert curves[0][-1] < 0.9 * curves[0][0], "the local draft learns"
    assert distance(curves[1], curves[0]) < (0.01 if recipe is None else 0.05), curves


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_fake_quantisation_on_top(kind: Any) -> None:
    config, quant, found = DRAFTS["eagle3"], QuantConfig(base="none", draft=kind), []
    world = distributed.initialize()
    ends: Any = Ends(BF16, world.device)

    class Source:
        def features(self, batches: list[Any]) -> list[Any]:
            return [features_of(BF16)]

    for engine in (False, True):
        draft = made(config, engine)
        attach_quantizers(draft, quant, "draft")
        calibrate(None, draft, Source(), [[micro_batch(world.device)]], goal_of(config), quant, world, ends)
        found.append(outcome(draft))
    assert distance(found[1][0], found[0][0]) < 2e-2
    for n, gradient in found[0][1].items():  # a last bit of an input may move a value to the next code
        error = distance(found[1][1][n], gradient)
        assert math.isfinite(error) and error < 0.25, f"gradient of {n}: relative error {error}"
    with pytest.raises(UserError, match="rounded twice"):
        check_draft_modules(replace(paths_of(config, True).setting, quant=quant, draft_fp8_recipe="tensorwise"))
