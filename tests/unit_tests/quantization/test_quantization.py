"""Quantisers on a draft and a base in one process: modes, exclusion, calibration, state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.checkpoint.base_import import load_base
from megatron_spec.config import QuantConfig, UserError
from megatron_spec.config.structure import draft_tensors
from megatron_spec.quantization import histogram, report
from megatron_spec.quantization.attach import (
    attach_quantizers,
    base_amax_state,
    check_policy,
    draft_linears,
    load_base_amax,
    quantizers,
    shared_scale_groups,
)
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.quantization.quantizer import Mode, TensorQuantizer
from megatron_spec.quantization.rounding import round_trip
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.quantization.tiny import OBJECTIVE, Tiny, make, world_of

FP8 = QuantConfig()
DRAFT_ONLY = QuantConfig(base="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_tiny(path, num_hidden_layers=8)
    return path


@pytest.fixture
def tiny(folder: Path) -> Tiny:
    return make(folder, world_of())


def run(tiny: Tiny, quant: QuantConfig = FP8, steps: int = 3) -> dict[str, float]:
    found = calibrate(
        tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE.replace(ttt_steps=steps), quant, tiny.world
    )
    return {line.name: line.amax_input for line in found}


# ---- one quantiser


def test_modes() -> None:
    quantizer = TensorQuantizer("place")
    x = torch.tensor([0.1, -3.0, 1.07])
    with pytest.raises(UserError, match=r"place.*never calibrated"):
        quantizer(x)
    quantizer.start_calibration()
    with pytest.raises(UserError, match="saw no data"):
        quantizer.check()
    assert torch.equal(quantizer(x), x)
    quantizer(torch.tensor([2.0]))
    assert float(quantizer.amax) == 3.0
    quantizer.enable()
    assert torch.equal(quantizer(x), round_trip(x, torch.tensor(3.0)))
    assert not torch.equal(quantizer(x), x)
    quantizer.mode = Mode.DISABLED
    assert torch.equal(quantizer(x), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_data_is_reported(bad: float) -> None:
    quantizer = TensorQuantizer("place")
    quantizer.start_calibration()
    quantizer(torch.tensor([1.0, bad]))
    quantizer(torch.tensor([1.0]))
    with pytest.raises(UserError, match="place"):
        quantizer.enable()


def test_state_dict_contains_amax_and_loading_nan_is_detected() -> None:
    quantizer, other = TensorQuantizer("a"), TensorQuantizer("b")
    quantizer.set_amax(2.5)
    other.load_state_dict(quantizer.state_dict())
    assert float(other.amax) == 2.5
    other(torch.ones(1))
    other.load_state_dict({"amax": torch.tensor(float("nan"))})
    with pytest.raises(UserError):
        other(torch.ones(1))


def test_amax_stays_fp32_when_the_model_is_cast() -> None:
    quantizer = TensorQuantizer("a")
    quantizer.set_amax(1.2345678)
    before = quantizer.amax.clone()
    quantizer.bfloat16()
    assert torch.equal(quantizer.amax, before)


# ---- attaching


def test_excludes_head_fc_and_embedding_by_default(tiny: Tiny) -> None:
    assert attach_quantizers(tiny.draft, FP8, "draft") == 7
    chosen = {n for n, m in draft_linears(tiny.draft).items() if m.weight_quantizer is not None}
    inside = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    assert chosen == {f"midlayer.{n}" for n in inside | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}}
    assert attach_quantizers(tiny.base, FP8, "base") == 8 * 4
    assert attach_quantizers(tiny.base, QuantConfig(base="none"), "base") == 0


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (("*k_proj*", "*fc", "*lm_head*"), "fuse"),
        (("*lm_head*",), "fc must stay"),
        (("*fc",), "lm_head must stay"),
        (("*",), "leave no linear"),
    ],
)
def test_refuses_what_no_engine_loads(tiny: Tiny, exclude: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attach_quantizers(tiny.draft, QuantConfig(exclude=exclude), "draft")


def test_unknown_formats_are_refused(tiny: Tiny) -> None:
    with pytest.raises(UserError, match="expected one of 'none', 'fp8'"):
        QuantConfig(draft="int4")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="kv_cache"):
        attach_quantizers(tiny.base, QuantConfig(base="none", kv_cache="fp8"), "base")


def test_base_exclusion_uses_hugging_face_names(tiny: Tiny) -> None:
    exclude = (*FP8.exclude, "*down_proj", "model.layers.3.self_attn.q_proj")
    assert attach_quantizers(tiny.base, FP8.replace(exclude=exclude), "base") == 8 * 3 - 1
    assert "layers.3.self_attention.linear_qkv.weight" not in quantizers(tiny.base)
    assert "layers.2.mlp.linear_fc2.weight" not in quantizers(tiny.base)


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        (
            {"exclude_base": ("*self_atn*",)},
            "exclude_base: \\*self_atn\\* matches no module; names are such as model.*proj",
        ),
        ({"exclude_draft": ("*mlp*", "layers.9.*")}, "exclude_draft: layers.9"),
        ({"exclude": (*FP8.exclude, "*w1")}, "exclude: \\*w1 matches no module"),
        ({"base": "none", "exclude": ("model.layers.0.*",)}, "exclude: model.layers.0"),
        ({"draft": "nvfp4", "clipped_ste": True}, "clipped_ste is for inputs of the draft"),
        ({"base": "none", "draft": "nvfp4", "calibration": "percentile"}, "calibration 'percentile' is for inputs"),
    ],
)
def test_settings_without_effect_are_refused(tiny: Tiny, quant: dict[str, Any], message: str) -> None:
    """A misspelt pattern left what it should exclude quantised."""
    names = draft_tensors(tiny.draft.config)
    with pytest.raises(UserError, match=message):
        check_policy(QuantConfig(**quant), tiny.base.config, names)
    patterns = {"exclude_base": ("model.layers.3.*", "*lm_head"), "exclude_draft": ("*down_proj",)}
    check_policy(QuantConfig(**patterns, clipped_ste=True), tiny.base.config, names)
    check_policy(FP8.replace(exclude=("*fc", "midlayer.*")), tiny.base.config, names)
    check_policy(QuantConfig(base="none", draft="none"), tiny.base.config, names)


def test_frozen_weights_are_rounded_once(tiny: Tiny, folder: Path) -> None:
    raw = load_base(tiny.reference, tiny.world, dtype=torch.float32)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    original = dict(raw.model.named_parameters())[name]
    attach_quantizers(tiny.base, FP8, "base")
    weight = dict(tiny.base.model.named_parameters())[name]
    assert torch.equal(weight, round_trip(original, original.abs().max()))
    before = weight.clone()
    attach_quantizers(tiny.base, FP8, "base")
    assert torch.equal(weight, before) and not torch.equal(weight, original)
    assert len(tiny.base.model.decoder.layers[1].mlp.linear_fc1._forward_pre_hooks) == 1


# ---- calibration


def test_shared_scale_groups_are_found() -> None:
    groups = shared_scale_groups(["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.gate_proj", "b.up_proj"])
    assert groups == [("a.q_proj", "a.k_proj", "a.v_proj"), ("b.gate_proj", "b.up_proj")]


def test_calibration_enables_everything_and_shares_scales(tiny: Tiny) -> None:
    run(tiny)
    linears = draft_linears(tiny.draft)
    attention = [linears[f"midlayer.self_attn.{n}_proj"] for n in "qkv"]
    largest = max(float(m.weight.abs().max()) for m in attention)
    assert {float(m.weight_quantizer.amax) for m in attention} == {largest}
    assert len({float(m.input_quantizer.amax) for m in attention}) == 1
    assert all(q.mode is Mode.ENABLED for n, q in quantizers(tiny.draft).items())
    lines = calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, FP8, tiny.world)
    assert len(lines) == 8 * 4 + 7
    assert all(line.weight_error is not None and 0.01 < line.weight_error < 0.05 for line in lines)


def test_ranges_are_those_of_an_independent_hook(tiny: Tiny) -> None:
    """Base: plain hooks on the rounded base, without input rounding, see the largest inputs that calibration found."""
    seen: dict[str, float] = {}
    attach_quantizers(tiny.base, FP8, "base")
    for quantizer in quantizers(tiny.base).values():
        quantizer.mode = Mode.DISABLED
    linear = tiny.base.model.decoder.layers[5].mlp.linear_fc2
    handle = linear.register_forward_pre_hook(
        lambda _m, args: seen.update(amax=max(seen.get("amax", 0.0), float(args[0].abs().max())))
    )
    for step in tiny.batches:
        tiny.source.features(step)
    handle.remove()
    for quantizer in quantizers(tiny.base).values():
        quantizer.mode = Mode.DISABLED if quantizer.name.endswith(".weight") else Mode.ENABLED
    assert run(tiny)["base.layers.5.mlp.linear_fc2"] == seen["amax"]


def test_calibration_sees_fed_back_features(tiny: Tiny, folder: Path) -> None:
    """Deeper unrolling widens ranges; with step 0 only they must be narrower somewhere, and never wider."""
    deep = run(tiny, DRAFT_ONLY, steps=3)
    shallow = run(make(folder, tiny.world), DRAFT_ONLY, steps=1)
    assert deep.keys() == shallow.keys()
    assert all(deep[n] >= shallow[n] for n in deep)
    assert any(deep[n] > shallow[n] for n in deep)


def test_draft_is_calibrated_on_the_quantised_base(tiny: Tiny, folder: Path) -> None:
    both = run(tiny, FP8)
    alone = run(make(folder, tiny.world), DRAFT_ONLY)
    assert any(both[n] != alone[n] for n in alone)


def test_offline_features_cannot_calibrate_the_base(tiny: Tiny) -> None:
    class Stored:
        def __init__(self, features: list) -> None:  # type: ignore[type-arg]
            self.stored = features

        def features(self, batches: list) -> list:  # type: ignore[type-arg]
            return self.stored

    source = Stored(tiny.source.features(tiny.batches[0]))
    with pytest.raises(UserError, match="saw no data"):
        calibrate(tiny.base, tiny.draft, source, tiny.batches, OBJECTIVE, FP8, tiny.world)
    with pytest.raises(UserError, match="at least one"):
        calibrate(tiny.base, tiny.draft, source, [], OBJECTIVE, FP8, tiny.world)


def test_every_draft_parameter_still_receives_gradient(tiny: Tiny) -> None:
    run(tiny)
    (features,) = tiny.source.features(tiny.batches[0])
    tiny.draft(features, tiny.base, OBJECTIVE).total.backward()
    assert [n for n, p in tiny.draft.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_weights_are_rounded_once_while_they_do_not_change(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients equal those of rounding at every draft step; the next forward uses a changed weight."""
    from megatron_spec.drafts.eagle3 import EagleDraft
    from megatron_spec.quantization import quantizer as module

    run(tiny, DRAFT_ONLY)
    (features,) = tiny.source.features(tiny.batches[0])
    calls, inputs = [], []
    rounded_once, fake_quant = module.RoundedOnce, module.fake_quant
    monkeypatch.setattr(module, "RoundedOnce", lambda *a: calls.append(1) or rounded_once(*a))
    monkeypatch.setattr(module, "fake_quant", lambda *a: inputs.append(1) or fake_quant(*a))

    def step(forward: Any) -> dict[str, torch.Tensor]:
        tiny.draft.zero_grad()
        losses = forward(features, tiny.base, OBJECTIVE)
        losses.total.backward()
        gradients = {n: p.grad.clone() for n, p in tiny.draft.named_parameters() if p.grad is not None}
        return {**gradients, "loss": losses.total.detach()}

    once = step(tiny.draft)
    assert len(calls) == 7 and len(inputs) == 3 * 4  # q, k and v read one input, gate and up another
    every = step(lambda *args: EagleDraft.forward(tiny.draft, *args))
    assert len(calls) == 7 and len(inputs) == 3 * 4 + 3 * 14
    shared = tiny.draft.midlayer.self_attn.q_proj.input_quantizer.shared
    assert (
        shared.x is None
        and shared.rounded is None
        and shared is tiny.draft.midlayer.self_attn.v_proj.input_quantizer.shared
    )
    assert once.keys() == every.keys()
    for name, value in once.items():  # gradients of one input are summed in another order
        assert torch.allclose(value, every[name], rtol=1e-5, atol=1e-6), name
    with tiny.draft.weights_fixed():
        for _ in range(3):
            step(tiny.draft)
    assert len(calls) == 14
    with torch.no_grad():
        tiny.draft.midlayer.mlp.down_proj.weight.mul_(0.5)
    assert not torch.equal(step(tiny.draft)["loss"], once["loss"])


def test_fused_linears_need_one_range(tiny: Tiny) -> None:
    run(tiny, DRAFT_ONLY)
    (features,) = tiny.source.features(tiny.batches[0])
    quantizer = tiny.draft.midlayer.mlp.up_proj.input_quantizer
    quantizer.set_amax(2 * float(quantizer.amax))
    tiny.draft.midlayer.mlp.gate_proj.input_quantizer._checked = False
    with pytest.raises(UserError, match=r"(up|gate)_proj.*differs"):
        quantizer.check()
        tiny.draft(features, tiny.base, OBJECTIVE)


# ---- percentile calibration


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_histogram_percentile(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(20000), torch.tensor([50.0])]).to(dtype)
    counts = histogram.magnitudes(x[:7000]) + histogram.magnitudes(x[7000:])
    assert counts.sum() == len(x)
    ordered = x.float().abs().sort().values
    for percent in (50.0, 99.0, 99.99, 100.0):
        exact = ordered[math.ceil(len(x) * percent / 100) - 1]
        found = histogram.percentile(counts, percent)
        assert exact <= found <= exact * (1.0 if dtype == torch.bfloat16 else 1.008)
    amax = histogram.percentile(counts, 99.0)
    share = float((x.float().abs() > amax).float().mean())
    assert histogram.clipped_share(counts, amax) == pytest.approx(share, abs=2e-3) and share > 0
    error = float((x.float() - round_trip(x.float(), amax)).norm() / x.float().norm())
    assert histogram.rounding_error(counts, amax) == pytest.approx(error, rel=0.02)


def test_percentile_clips_and_reports_it(tiny: Tiny, folder: Path) -> None:
    quant = FP8.replace(calibration="percentile", percentile=99.0, kv_cache="fp8")
    lines = calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, quant, tiny.world)
    whole = make(folder, tiny.world)
    widest = calibrate(whole.base, whole.draft, whole.source, whole.batches, OBJECTIVE, FP8, whole.world)
    assert len(lines) == 8 * 4 + 8 * 2 + 7 and len(widest) == 8 * 4 + 7
    ranges = {line.name: line for line in widest}
    for line in lines:
        assert 0 < line.clipped < 0.0101 and 0.01 < line.input_error < 0.5, line
        assert (line.amax_weight is None) == ("core_attention" in line.name)
    first = "base.layers.0.self_attention.linear_qkv"  # later inputs differ because earlier ones were clipped
    (clipped,) = (line for line in lines if line.name == first)
    assert clipped.amax_input < ranges[first].amax_input and ranges[first].clipped == 0
    assert clipped.amax_weight == ranges[first].amax_weight


def test_report_is_written(tiny: Tiny, tmp_path: Path) -> None:
    found = calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, FP8, tiny.world)
    report.write(found, tmp_path)
    assert (tmp_path / "calibration.md").read_text().count("\n") == len(found) + 2
    lines = json.loads((tmp_path / "calibration.json").read_text())
    names = {line["name"] for line in lines if line["amax_input"] > 0}
    assert {"base.layers.0.self_attention.linear_qkv", "draft.midlayer.mlp.down_proj"} <= names
    assert (tmp_path / "calibration.png").stat().st_size > 1000


# ---- state of the base


def test_base_state_round_trip(tiny: Tiny, folder: Path) -> None:
    run(tiny, QuantConfig(kv_cache="fp8"))
    state = base_amax_state(tiny.base)
    assert len(state) == 8 * (4 * 2 + 2)
    assert state["layers.7.self_attention.core_attention.k"] > 0
    other = make(folder, tiny.world)
    attach_quantizers(other.base, QuantConfig(kv_cache="fp8"), "base")
    load_base_amax(other.base, state)
    (a,), (b,) = (t.source.features(tiny.batches[0]) for t in (tiny, other))
    assert torch.equal(a.state_SBH, b.state_SBH)


def test_kv_cache_quantisation_changes_the_base(tiny: Tiny, folder: Path) -> None:
    run(tiny, QuantConfig(kv_cache="fp8"))
    (with_kv,) = tiny.source.features(tiny.batches[0])
    for name, quantizer in quantizers(tiny.base).items():
        if "core_attention" in name:
            quantizer.mode = Mode.DISABLED
    (without,) = tiny.source.features(tiny.batches[0])
    assert not torch.equal(with_kv.state_SBH, without.state_SBH)


def test_base_state_is_strict(tiny: Tiny, folder: Path) -> None:
    run(tiny)
    state = base_amax_state(tiny.base)
    less = {k: v for k, v in state.items() if k != "layers.2.mlp.linear_fc1.input"}
    with pytest.raises(UserError, match=r"missing \['layers.2.mlp.linear_fc1.input'\]"):
        load_base_amax(tiny.base, less)
    with pytest.raises(UserError, match="unexpected"):
        load_base_amax(tiny.base, {**state, "layers.2.other.input": 1.0})
    with pytest.raises(UserError, match="use the base of the checkpoint"):
        load_base_amax(tiny.base, {k: v * 1.5 for k, v in state.items()})
