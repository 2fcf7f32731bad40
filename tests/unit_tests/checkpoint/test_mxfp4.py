"""MXFP4 of gpt-oss: values against transformers, slices against the whole, and a folder through import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spec.checkpoint import mxfp4
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.config import UserError
from megatron_spec.runtime import distributed
from tests.unit_tests.families.families import save

E, R, C = 3, 6, 64


def packed(seed: int, rows: int = R, columns: int = C, experts: int = E) -> dict[str, Tensor]:
    """Random blocks and scales."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // mxfp4.BLOCK
    return {
        mxfp4.BLOCKS: torch.randint(256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8),
        mxfp4.SCALES: torch.randint(118, 130, (experts, rows, groups), generator=generator, dtype=torch.uint8),
    }


def test_equals_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = packed(0)
    expected = convert_moe_packed_tensors(tensors[mxfp4.BLOCKS], tensors[mxfp4.SCALES])  # [E, C, R]
    ours = mxfp4.dequantize(tensors[mxfp4.BLOCKS], tensors[mxfp4.SCALES]).transpose(1, 2)
    assert ours.shape == (E, C, R) and torch.equal(ours, expected)


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 1, 3), (1, 0, 32), (1, 20, 50), (2, 2, 5)])
def test_a_slice_is_a_slice_of_the_whole(dim: int, start: int, stop: int) -> None:
    tensors = packed(1)
    whole = mxfp4.dequantize(tensors[mxfp4.BLOCKS], tensors[mxfp4.SCALES]).transpose(1, 2)

    def read(name: str, d: int, a: int, b: int, experts: slice) -> Tensor:
        return tensors[name].narrow(d, a, b - a)[experts if d else slice(None)]

    expected = whole.narrow(dim, start, stop - start)
    assert torch.equal(mxfp4.read(read, "", dim, start, stop), expected)
    if dim:
        assert torch.equal(mxfp4.read(read, "", dim, start, stop, slice(1, 2)), expected[1:2])


def test_a_folder_in_mxfp4_loads_as_its_dequantised_twin(tmp_path: Path) -> None:
    world = distributed.initialize()
    for name in ("plain", "packed"):
        save("gpt_oss", tmp_path / name, intermediate_size=64)
    plain, small = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "packed"))
    for n, key in enumerate([k for k in plain if k.endswith(("gate_up_proj", "down_proj"))]):
        experts, columns, rows = plain[key].shape
        tensors = packed(n, rows, columns, experts)
        plain[key] = mxfp4.dequantize(*tensors.values()).transpose(1, 2).float().contiguous()
        del small[key]
        small |= {key + kind: tensor for kind, tensor in tensors.items()}
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(small, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    config = tmp_path / "packed" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    one, other = (load_base(inspect_base(tmp_path / name), world) for name in ("plain", "packed"))
    twin = dict(one.named_parameters())
    assert all(torch.equal(p, twin[n]) for n, p in other.named_parameters())
    config.write_text(json.dumps({**raw, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match="already quantised"):
        inspect_base(tmp_path / "packed")
    distributed.shutdown()
