"""Drafts and losses of the user's: the loss in every kind of draft and on its fast paths, what is refused, and what a
loaded or changed model computes (docs/architecture.md#your-own-draft-or-loss)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_spec import api
from megatron_spec.batch import Features
from megatron_spec.commands.convert import new_draft
from megatron_spec.config import (
    DecodeConfig,
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    ObjectiveConfig,
    UserError,
    presets,
)
from megatron_spec.config.machine import Machine
from megatron_spec.drafts import build_draft, shipped_class
from megatron_spec.drafts.contract import Draft
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.own import check_modules, check_tensors, objective_of, own_class
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.evaluation.validate import check_draft_lens
from megatron_spec.losses import reference
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from tests.tiny import make_batch
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds, V, conversations, draft_vocab, eagle_config
from tests.unit_tests.drafts.test_blocks import block_config


def full(algorithm: str, **changes: Any) -> EagleConfig:
    captures = {} if algorithm == "p-eagle" else {"capture_layer_ids": ()}
    return eagle_config(algorithm=algorithm, draft_vocab_size=V, **captures, **changes)


CONFIGS: dict[str, tuple[DraftConfig, dict[str, Any]]] = {
    "eagle3": (eagle_config(), {"ttt_steps": 3}),
    "p-eagle": (full("p-eagle", mask_token_id=5), {"ttt_steps": 3}),
    "eagle1": (full("eagle1"), {"ttt_steps": 2}),
    "eagle-mtp": (full("eagle-mtp"), {"ttt_steps": 2, "step_weights": "d-pace"}),
    "medusa": (MedusaConfig(num_heads=2, hidden_size=16, vocab_size=V), {}),
    "dflash": (block_config(), {"block_weights": "d-pace"}),
    "dspark": (block_config(algorithm="dspark"), {"backbone_weight": 0.3}),
}


def results(draft: Draft, ends: Any, goal: ObjectiveConfig) -> list[Tensor]:
    """Losses and every gradient."""
    generator, batch = torch.Generator().manual_seed(7), conversations()
    captures = max(1, len(draft.config.capture_layer_ids))
    shape = (*reversed(batch.tokens_BS.shape),)
    found = [torch.randn(*shape, n * 16, generator=generator, dtype=torch.float64) for n in (captures, 1)]
    draft.zero_grad()
    torch.manual_seed(3)
    losses = draft(Features(batch, *found), ends, goal)
    losses.total.backward()
    return [losses.total.detach(), losses.loss_T, losses.overlap_T, *(p.grad for p in draft.parameters())]


@pytest.mark.parametrize("kernels", ["none", "plain"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_loss_of_ones_own_in_every_draft(kind: str, kernels: Any) -> None:
    """The same function under the name of the package's: equal values and gradients, with and without fast paths."""
    config, settings = CONFIGS[kind]
    vocab = draft_vocab(config) if isinstance(config, EagleConfig) else DraftVocab.full(V)
    world, ends = distributed.initialize(), StandInEnds(16, torch.float64)
    paths = Paths(Setting(Machine(kernels=kernels), "float64", draft=config))
    mine = type("Mine", (shipped_class(config.algorithm),), {"row_loss": staticmethod(reference.tv)})
    drafts = [build_draft(config, vocab, world, torch.float64, paths, c) for c in (None, mine)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in drafts[0].named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + ("norm" in name))
    drafts[1].load_state_dict(drafts[0].state_dict())
    goal = presets.objective_for(config, ObjectiveConfig(temperature=0.7, **settings))
    named = results(drafts[0], ends, goal.replace(loss="tv"))
    for own, expected in zip(results(drafts[1], ends, objective_of(drafts[1], goal)), named, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(results(drafts[0], ends, goal)[0], named[0]), "the loss matters"


class Mine(EagleDraft):
    """A class of the user's."""


def test_classes_that_cannot_be_built_are_refused() -> None:
    world, config = distributed.initialize(), eagle_config()

    def build(kind: Any) -> Any:
        return build_draft(config, draft_vocab(config), world, torch.float32, None, kind)

    assert own_class(build(Mine)) == f"{__name__}:Mine" and own_class(build(None)) is None
    short = type("Short", (Mine,), {"__init__": lambda self, config: None})
    bare = type("Bare", (Draft,), {"__init__": lambda self, *_: nn.Module.__init__(self)})
    for kind, said in (
        (nn.Linear, "expected a class derived from megatron_spec.drafts.contract.Draft"),
        ("Mine", "expected a class derived from"),
        (type("M", (shipped_class("medusa"),), {}), "M is derived from MedusaDraft, expected EagleDraft for a draft"),
        (short, r"found the constructor Short\(config\), expected \(config, vocab, place\)"),
        (bare, "found a Bare without config and vocab, expected a draft with config"),
    ):
        with pytest.raises(UserError, match=said):
            build(kind)


@pytest.mark.parametrize("loss", [lambda p, q: 0.0, lambda p, q: (q - p).sum(), lambda p, q: p.sum(-1)])
def test_losses_of_another_form_are_refused(loss: Any) -> None:
    config = eagle_config()
    kind = type("Bad", (EagleDraft,), {"row_loss": staticmethod(loss)})
    draft = build_draft(config, draft_vocab(config), distributed.initialize(), torch.float64, None, kind)
    with pytest.raises(UserError, match=r"row_loss: found .*, expected a tensor of shape \[\d+\], one number for each"):
        results(draft, StandInEnds(16, torch.float64), ObjectiveConfig(ttt_steps=2))
    with pytest.raises(UserError, match="the loss is lk, but Bad has a row_loss of its own"):
        objective_of(draft, ObjectiveConfig(loss="lk"))


def test_what_load_would_not_build_is_not_saved() -> None:
    config, world = eagle_config(), distributed.initialize()
    for kind in (None, Mine):
        draft = build_draft(config, draft_vocab(config), world, torch.float32, None, kind)
        check_modules(draft)
        check_tensors(draft, "be exported")
        draft.midlayer.mlp = type("Other", (nn.Module,), {})()
        with pytest.raises(UserError, match=r"cannot be exported: .* fewer: midlayer.mlp.down_proj.weight, "):
            check_tensors(draft, "be exported")
        if kind is None:
            with pytest.raises(UserError, match=r"save: midlayer.mlp of the draft is a module of yours, .* EagleDraft"):
                check_modules(draft)
        else:
            check_modules(draft)


def test_an_objective_that_is_set_later_is_completed_and_checked() -> None:
    """It trained with other step weights than the same objective at `convert`."""
    config: Any = eagle_config()
    draft = build_draft(config, draft_vocab(config), distributed.initialize(), torch.float32)
    model = api.SpecModel(SimpleNamespace(world=None), draft, draft.vocab, None, ObjectiveConfig(ttt_steps=2))  # type: ignore[arg-type]
    model.objective = ObjectiveConfig(ttt_steps=3)
    assert model.objective.step_weights == "d-pace" and replace(model).objective == model.objective
    with pytest.raises(UserError, match="--anchors: only for block drafts"):
        model.objective = ObjectiveConfig(anchors=3)
    with pytest.raises(UserError, match="objective: found a dict, expected ObjectiveConfig"):
        model.objective = {"loss": "kl"}  # type: ignore[assignment]
    assert model.objective.ttt_steps == 3


def test_documents_longer_than_the_base_reads_are_refused() -> None:
    """Of packed documents each counts, and padding does not."""
    batch = make_batch(1, 18, seed=0)
    batch.check_positions(18)
    with pytest.raises(
        UserError, match="found a document with position 17, expected at most 16, by the base's max_pos"
    ):
        batch.check_positions(17)
    replace(batch, positions_BS=batch.positions_BS % 9).check_positions(9)
    replace(batch, documents_BS=torch.where(torch.arange(18) > 16, -1, batch.documents_BS)).check_positions(17)


def test_arguments_of_another_class_are_named() -> None:
    world = distributed.initialize()
    draft = build_draft(eagle_config(), draft_vocab(eagle_config()), world, torch.float32)
    model = api.SpecModel(SimpleNamespace(world=world), draft, draft.vocab, None)  # type: ignore[arg-type]
    wrapped = nn.Sequential(draft)
    for act, said in (
        (lambda: model([torch.zeros(1)]), "micro-batch: found a Tensor, expected Batch"),
        (lambda: model({"input_ids": 1}), "micro-batch: found a str, expected Batch"),
        (lambda: setattr(model, "draft", wrapped), "draft of a SpecModel: found a Sequential, expected Draft"),
        (lambda: api.quantize(model, [], {"draft": "fp8"}), "quant: found a dict, expected QuantConfig"),
        (lambda: api.validate(model, "x", {"max_draft_len": 1}), "config: found a dict, expected DecodeConfig"),
        (lambda: api.decode(model, [[1]], {"max_draft_len": 1}), "config: found a dict, expected DecodeConfig"),
        (lambda: api.decode(model, [[1]], DecodeConfig(speculative_model="x")), "leave speculative_model out"),
        (lambda: api.decode(model, [[1.5]]), "decode: found text, numbers or a single prompt"),
        (lambda: api.decode(model, [[1]], stop_ids="ab"), "decode: found text, numbers or a single prompt"),
        (lambda: model(3), "micro-batch: found a int, expected Batch"),
        (lambda: api.quantize(model, [3]), "micro-batch: found a int, expected Batch"),
        (lambda: api.initialize({"tp": 2}), "parallel: found a dict, expected ParallelConfig"),
        (lambda: api.load("x", dtype="bfloat16"), "dtype: found a str, expected dtype"),
        (lambda: api.load("x", dtype=torch.int32), "dtype: found torch.int32, expected a floating point type"),
        (lambda: api.load("x", layers="te"), "layers: found a str, expected BaseLayers"),
        (lambda: api.load("x", draft_transformer_impl="apex"), "draft_transformer_impl: found 'apex', expected one of"),
        (lambda: new_draft(None, draft.config, draft.vocab, None, None, "a"), "seed: found a str, expected int"),
        (lambda: check_draft_lens(2), "found 2, expected distinct numbers"),
        (lambda: check_draft_lens([]), "expected distinct numbers"),
    ):
        with pytest.raises(UserError, match=said):
            act()  # type: ignore[no-untyped-call]
