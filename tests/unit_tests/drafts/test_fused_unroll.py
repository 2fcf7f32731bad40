"""The unroll with a hand-written backward against the plain one, on the CPU, over the plain twins of the kernels.

With and without fake quantisation, with and without dropping unsupervised rows. (Kernels: tests/gpu/test_kernels.py.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations

from megatron_spec.config import ObjectiveConfig, QuantConfig, UserError
from megatron_spec.config.machine import Machine
from megatron_spec.drafts import build_draft, eagle3, fused_tape, fused_unroll
from megatron_spec.drafts.dspark import DSparkDraft
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.layer import GatedMLP
from megatron_spec.drafts.linear import RMSNorm, VocabLinear
from megatron_spec.drafts.medusa import MedusaDraft
from megatron_spec.drafts.mtp import MtpDraft
from megatron_spec.ops import head
from megatron_spec.planning import unroll_memory
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.quantization.attach import attach_quantizers, draft_linears, quantizers
from megatron_spec.quantization.quantizer import Mode
from megatron_spec.runtime import distributed
from tests.unit_tests.drafts.plain_eagle3 import StandInEnds, conversations, draft_vocab, eagle_config, features
from tests.unit_tests.drafts.test_eagle import make

OBJECTIVE = ObjectiveConfig(ttt_steps=3)


def quantised(quant: QuantConfig | None) -> tuple[EagleDraft, StandInEnds]:
    draft, ends = make(eagle_config())
    if quant is not None:
        attach_quantizers(draft, quant, "draft")
        for linear in draft_linears(draft).values():
            for quantizer, width in ((linear.input_quantizer, 2.5), (linear.weight_quantizer, 1.5)):
                if quantizer is not None:
                    quantizer.set_amax(width)  # some values lie outside
    return draft, ends


def results(draft: EagleDraft, ends: StandInEnds, objective: ObjectiveConfig = OBJECTIVE) -> dict[str, Tensor]:
    draft.zero_grad()
    losses = draft(features(conversations(), draft.config, torch.float64), ends, objective)
    losses.total.backward()
    return {
        "total": losses.total.detach(),
        "loss": losses.loss_T.detach(),
        **{n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None},
    }


def fuse(draft: EagleDraft) -> None:
    """Make a draft use the fused unroll, over plain twins."""
    draft.paths = Paths(Setting(Machine(kernels="plain"), draft=draft.config))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every fused unroll."""
    inner, found = fused_unroll.fused_unroll, []
    monkeypatch.setattr(eagle3, "fused_unroll", lambda *a: found.append(1) or inner(*a))
    return found


POLICIES: dict[str, QuantConfig | None] = {
    "high precision": None,
    "fp8": QuantConfig(base="none"),
    "some linears": QuantConfig(base="none", exclude_draft=("*down_proj", "*o_proj")),
}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_and_gradients(policy: str, compact: bool, monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    draft, ends = quantised(POLICIES[policy])
    expected = results(draft, ends)
    assert not taken
    fuse(draft)
    monkeypatch.setattr(fused_unroll, "COMPACT_BELOW", 1.0 if compact else 0.0)
    found = results(draft, ends)
    assert taken == [1]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    if policy == "fp8":
        other, _ = quantised(None)
        assert not torch.allclose(results(other, ends)["loss"], found["loss"], rtol=1e-3)  # rounding matters here


@pytest.mark.parametrize("compact", [False, True])
def test_paced_steps(compact: bool, monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    """The states of all steps are one buffer, which the head takes row by row."""
    objective = ObjectiveConfig(ttt_steps=4, step_weights="d-pace", alignment="target")
    draft, ends = quantised(None)
    expected = results(draft, ends, objective)
    fuse(draft)
    monkeypatch.setattr(fused_unroll, "COMPACT_BELOW", 1.0 if compact else 0.0)
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": 9 * 8 * 12})
    found = results(draft, ends, objective)
    assert taken == [1] and draft.paths.under(objective).on("loss_kernel")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at_once", [1, 65536])
def test_gates_that_are_not_kept(policy: str, at_once: int, monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    """Computed again in the backward, with the weight gradients of one step at a time or of all."""
    draft, ends = quantised(POLICIES[policy])
    fuse(draft)
    expected = results(draft, ends)
    monkeypatch.setattr(unroll_memory, "MOST_GATES", 0)
    monkeypatch.setattr(fused_tape, "ROWS_AT_ONCE", at_once)
    found = results(draft, ends)
    assert taken == [1, 1]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


class Damped(EagleDraft):
    """Feeds back another state than EAGLE-3."""

    def layer_step(self, hidden_SBH: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """EAGLE-3's step, half of which is fed back."""
        fed_SBH, normed_SBH = super().layer_step(hidden_SBH, *given)
        return 0.5 * fed_SBH, normed_SBH


def test_steps_of_a_subclass_and_hooks_are_not_skipped(taken: list[int]) -> None:
    draft, ends = quantised(None)
    plain = results(draft, ends)["loss"]
    draft.__class__ = Damped
    damped = results(draft, ends)["loss"]
    fuse(draft)
    assert torch.equal(results(draft, ends)["loss"], damped) and not torch.allclose(damped, plain, rtol=1e-3)
    draft.__class__ = EagleDraft
    draft.midlayer.mlp.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    assert not torch.allclose(results(draft, ends)["loss"], plain, rtol=1e-3)
    assert not taken
    draft.midlayer.mlp._forward_hooks.clear()
    torch.testing.assert_close(results(draft, ends)["loss"], plain)
    assert taken == [1]


class Relu(GatedMLP):
    """Another activation."""

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Squared."""
        return self.down_proj(self.gate_proj(x_SBH).relu() ** 2)  # type: ignore[no-any-return]


class Shifted(RMSNorm):
    """Adds one."""

    def forward(self, x: Tensor) -> Tensor:
        """Not a norm any more."""
        return super().forward(x) + 1


def change_type(module: Any, kind: type) -> None:
    module.__class__ = kind


CHANGES: dict[str, Any] = {
    "another MLP": lambda d: change_type(d.midlayer.mlp, Relu),
    "another norm": lambda d: change_type(d.midlayer.hidden_norm, Shifted),
    "another final norm": lambda d: change_type(d.norm, Shifted),
    "a parametrised weight": lambda d: parametrizations.weight_norm(d.midlayer.self_attn.o_proj),
    "forward of an instance": lambda d: setattr(d.midlayer.mlp, "forward", lambda x: 2 * x),
    "a backward hook": lambda d: d.midlayer.mlp.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_replaced_modules_are_not_skipped(change: str, taken: list[int]) -> None:
    """The fused unroll reads weights alone: with another module it silently trained EAGLE-3's step."""
    draft, ends = quantised(None)
    CHANGES[change](draft)
    expected = results(draft, ends)["loss"]
    fuse(draft)
    assert torch.equal(results(draft, ends)["loss"], expected) and not taken


def test_a_weight_that_is_frozen_after_wrapping_stays(taken: list[int]) -> None:
    """Its `main_grad` from before was filled on, and the optimizer went on training it."""
    draft, ends = quantised(None)
    fuse(draft)
    expected = results(draft, ends)
    for p in draft.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
    for name, p in draft.midlayer.named_parameters():
        p.requires_grad_("o_proj" in name)
    frozen = {n for n, p in draft.named_parameters() if not p.requires_grad}
    results(draft, ends)
    assert taken == [1, 1] and len(frozen) == 9
    for name, p in draft.named_parameters():
        total: Tensor = p.main_grad + (0 if p.grad is None else p.grad)  # type: ignore[attr-defined]
        torch.testing.assert_close(total, expected[name] * (name not in frozen), rtol=1e-9, atol=1e-11)


def test_fp8_of_a_subclass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products would be in bf16 without a word."""
    config, world = eagle_config(), distributed.initialize()
    asked = Paths(Setting(Machine(kernels="plain"), draft=config))
    assert build_draft(config, draft_vocab(config), world, torch.float32, asked).paths.on("draft_fused")
    monkeypatch.setattr(EagleDraft, "has_own_steps", True)
    assert not build_draft(config, draft_vocab(config), world, torch.float32, asked).paths.on("draft_fused")
    asked = asked.asked_for("draft_fp8")
    with pytest.raises(UserError, match="--draft-fp8 cannot run here"):
        build_draft(config, draft_vocab(config), world, torch.float32, asked)


def test_a_head_that_training_would_not_use_is_refused() -> None:
    with pytest.raises(TypeError, match="Scaled overrides logits, which training does not call"):
        type("Scaled", (EagleDraft,), {"logits": lambda *_: None})
    type("Whole", (EagleDraft,), {"logits": lambda *_: None, "forward": lambda *_: None})
    for kind in (MtpDraft, MedusaDraft, DSparkDraft):
        with pytest.raises(TypeError, match="Scaled overrides logits, which training does not call"):
            type("Scaled", (kind,), {"logits": lambda *_: None})


def test_modules_of_the_head_that_training_would_not_call_are_refused() -> None:
    draft, ends = quantised(None)
    handle = draft.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match=r"found hooks on lm_head, expected .* override the draft's forward"):
        results(draft, ends)
    handle.remove()
    results(draft, ends)
    change_type(draft.lm_head, type("Capped", (VocabLinear,), {}))
    with pytest.raises(UserError, match="found a Capped as lm_head"):
        results(draft, ends)


def test_cases_of_the_plain_unroll(taken: list[int]) -> None:
    """Clipped gradients, and calibration."""
    draft, ends = quantised(QuantConfig(base="none", clipped_ste=True))
    fuse(draft)
    results(draft, ends)
    draft, ends = quantised(QuantConfig(base="none"))
    for quantizer in quantizers(draft).values():
        quantizer.mode = Mode.CALIBRATING
    fuse(draft)
    results(draft, ends)
    assert not taken


def test_a_quantiser_rounds_in_place() -> None:
    draft, _ = quantised(QuantConfig(base="none"))
    quantizer: Any = draft.midlayer.mlp.down_proj.input_quantizer
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
        wanted, kept = quantizer(x), x.clone()
        assert quantizer.round_(x) is x and torch.equal(x, wanted) and not torch.equal(x, kept)
    quantizer.mode = Mode.DISABLED
    assert torch.equal(quantizer.round_(kept.clone()), kept)


@pytest.mark.parametrize("frozen", [False, True])
def test_in_fp8(frozen: bool, taken: list[int]) -> None:
    """Layer and head in real fp8, over plain twins: losses and gradients near the exact ones, and not the same."""
    draft, ends = make(eagle_config(hidden_size=32, target_hidden_size=32, intermediate_size=64, frozen_head=frozen))
    with torch.no_grad():  # attention that is nearly a choice would multiply errors
        for parameter in draft.parameters():
            parameter *= 0.5 if parameter.dim() == 2 else 1.0

    def run() -> dict[str, Tensor]:
        draft.zero_grad()
        losses = draft(features(conversations(), draft.config, torch.float64), ends, OBJECTIVE)
        losses.total.backward()
        trained = {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}
        return {"loss": losses.loss_T.detach(), **trained}

    def apart(found: dict[str, Tensor], known: dict[str, Tensor]) -> dict[str, float]:
        assert found.keys() == known.keys() and ("lm_head.weight" in found) is not frozen
        return {name: float((found[name] - x).norm() / x.norm()) for name, x in known.items()}

    exact = run()
    fuse(draft)
    draft.paths = draft.paths.asked_for("draft_fp8")
    draft.paths.check()
    assert draft.paths.under(OBJECTIVE).on("draft_head_fp8")
    both = run()
    draft.paths = draft.paths.without("draft_head_fp8")
    layer = run()
    assert taken == [1, 1]
    for errors in (apart(both, exact), apart(layer, exact), apart(both, layer)):
        assert 0 < errors["loss"] < 0.03 and all(0.01 < x < 0.12 for n, x in errors.items() if n != "loss"), errors
