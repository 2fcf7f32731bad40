"""NVFP4 weights: codes against enumeration, gradients, and a draft through calibration, export and reading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_spec.config import QuantConfig, UserError
from megatron_spec.export.check import check_folder
from megatron_spec.export.eagle import export_draft
from megatron_spec.export.load import load_exported_draft
from megatron_spec.quantization import nvfp4
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.quantization.rounding import fake_quant
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.quantization.tiny import OBJECTIVE, Tiny, make, world_of

QUANT = QuantConfig(base="none", draft="nvfp4")


def plainly(weight: torch.Tensor, amax: float) -> torch.Tensor:
    """Element by element, in float64, from the definition."""
    magnitudes, out = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], torch.zeros_like(weight)
    whole = float(torch.tensor(amax, dtype=torch.float32) / torch.tensor(2688.0))
    for o in range(weight.shape[0]):
        for b in range(0, weight.shape[1], 16):
            block = weight[o, b : b + 16]
            scale = float((block.abs().max() / 6.0 / whole).to(torch.float8_e4m3fn)) * whole
            for i, w in enumerate(block.tolist()):
                best = min(range(8), key=lambda k: (abs(magnitudes[k] * scale - abs(w)), k % 2))
                out[o, b + i] = magnitudes[best] * scale * (-1 if w < 0 else 1)
    return out


def test_equals_the_definition() -> None:
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    weight[0, :16] *= 1e-4  # a block far below the others
    weight[1, :16] = 0.0
    amax = weight.abs().max()
    found = nvfp4.round_trip(weight, amax)
    assert torch.allclose(found, plainly(weight, float(amax)), rtol=1e-6, atol=0)
    error = float((found - weight).norm() / weight.norm())
    assert 0.05 < error < 0.13, error


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_round_to_even(sign: float) -> None:
    halfway = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, *[0.0] * 8]]) * sign
    amax = torch.tensor(2688.0)  # global scale 1, block scale 1
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert nvfp4.round_trip(halfway, amax)[0, :8].tolist() == [sign * v for v in expected]


def test_packing() -> None:
    codes = torch.randint(16, (3, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = nvfp4.pack(codes)
    assert packed.shape == (3, 16) and packed[0, 0] == codes[0, 0, 0] + 16 * codes[0, 0, 1]
    assert torch.equal(nvfp4.unpack(packed), codes)


def test_nan_zeros_and_gradient() -> None:
    assert nvfp4.round_trip(torch.full((1, 16), torch.nan), torch.tensor(1.0)).isnan().all()
    assert not nvfp4.round_trip(torch.zeros(1, 16), torch.tensor(0.0)).any()
    weight = torch.tensor([[0.5, -2.0] * 8], requires_grad=True)
    fake_quant(weight, torch.tensor(1.0), True, "nvfp4").sum().backward()
    assert weight.grad is not None and weight.grad[0, :2].tolist() == [1.0, 0.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_tiny(path, num_hidden_layers=8, head_dim=16, num_attention_heads=4)
    return path


def quantised(folder: Path) -> Tiny:
    tiny = make(folder, world_of())
    lines = calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, QUANT, tiny.world)
    assert len(lines) == 7 and all(line.amax_input is None and (line.weight_error or 0) > 0.05 for line in lines)
    return tiny


def test_exported_codes_are_what_training_sees(folder: Path, tmp_path: Path) -> None:
    tiny = quantised(folder)
    out = export_draft(tiny.draft, tiny.reference, tmp_path / "d", QUANT, tiny.world, dtype="float32", ends=tiny.base)
    found = load_file(str(out / "model.safetensors"))
    stem = "midlayer.mlp.down_proj"
    assert found[f"{stem}.weight"].shape == (32, 24) and found[f"{stem}.weight"].dtype == torch.uint8
    assert found[f"{stem}.weight_scale"].shape == (32, 3) and f"{stem}.input_scale" not in found
    shared = {float(found[f"midlayer.self_attn.{n}_proj.weight_scale_2"]) for n in "qkv"}
    assert len(shared) == 1
    assert [f for f in check_folder(out, base=folder) if not f.warning] == []
    again = load_exported_draft(out, tiny.reference.config, tiny.world)
    (features,) = tiny.source.features(tiny.batches[1])
    with torch.no_grad():
        losses = [d(features, tiny.base, OBJECTIVE).loss_T for d in (tiny.draft, again)]
    assert torch.equal(*losses)
    tiny.draft.zero_grad()
    tiny.draft(features, tiny.base, OBJECTIVE).total.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in tiny.draft.parameters())


def test_refusals(folder: Path) -> None:
    for values in ({"base": "nvfp4"}, {"kv_cache": "nvfp4"}):
        with pytest.raises(UserError, match="that format is for drafts"):
            QuantConfig(**values)  # type: ignore[arg-type]
    tiny = make(folder, world_of(), intermediate_size=40)
    with pytest.raises(UserError, match="not a multiple of the block 16"):
        calibrate(tiny.base, tiny.draft, tiny.source, tiny.batches, OBJECTIVE, QUANT, tiny.world)
