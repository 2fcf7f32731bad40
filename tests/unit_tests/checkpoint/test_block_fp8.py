"""Block-wise fp8 bases: reading equals a plain dequantisation, unsharded and in every rank's slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spec.checkpoint import block_fp8
from megatron_spec.checkpoint.huggingface import HuggingFaceWeights
from megatron_spec.config import UserError
from megatron_spec.families import parse_base_config, read_base_config
from megatron_spec.families.names import Experts, read_shard
from megatron_spec.families.rules import name_rules
from tests.unit_tests.families.families import save

BLOCK = (16, 16)
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "norm")


def encode(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, dequantised values), block by block."""
    rows, columns = block_fp8.scale_shape(tuple(weight.shape), block)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales, plain = torch.empty(rows, columns), torch.empty_like(weight)
    for r in range(rows):
        for c in range(columns):
            here = (slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1]))
            scales[r, c] = weight[here].abs().max() / 448
            codes[here] = (weight[here] / scales[r, c]).to(torch.float8_e4m3fn)
            plain[here] = codes[here].float() * scales[r, c]
    return codes, scales, plain


@pytest.mark.parametrize(
    ("dim", "start", "stop"), [(0, 0, 300), (0, 127, 129), (0, 130, 260), (1, 0, 7), (1, 100, 200)]
)
def test_slices_of_a_matrix(dim: int, start: int, stop: int) -> None:
    torch.manual_seed(0)
    codes, scales, plain = encode(torch.randn(300, 200), (128, 128))
    stored, seen = {"w": codes, "w_scale_inv": scales}, 0

    def read(name: str, d: int, first: int, last: int) -> Tensor:
        nonlocal seen
        part = stored[name].narrow(d, first, last - first)
        seen += part.numel() if name == "w" else 0
        return part

    assert torch.equal(block_fp8.read(read, "w", (128, 128), dim, start, stop), plain.narrow(dim, start, stop - start))
    assert seen == plain.narrow(dim, start, stop - start).numel()


def to_fp8(source: Path, fp8: Path, plain: Path) -> None:
    """The folder in block-wise fp8, and dequantised."""
    raw = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    both: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or any(part in name for part in KEPT):
            both[0][name] = both[1][name] = tensor
            continue
        both[0][name], both[0][name + "_scale_inv"], both[1][name] = encode(tensor, BLOCK)
    for folder, tensors, extra in ((fp8, both[0], {"quantization_config": quantization}), (plain, both[1], {})):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**raw, **extra}))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3"])
def test_every_shard_of_a_base(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "source")
    to_fp8(tmp_path / "source", tmp_path / "fp8", tmp_path / "plain")
    config = read_base_config(tmp_path / "fp8")
    assert config == read_base_config(tmp_path / "plain")
    with HuggingFaceWeights(tmp_path / "fp8") as fp8, HuggingFaceWeights(tmp_path / "plain") as plain:
        rules = name_rules(config)
        for weights in (fp8, plain):
            weights.check(rules, config)
        for rule in rules:
            for tp in (1, 2):
                for rank in range(tp):
                    here = Experts.of(config, 0, 1)
                    found, expected = (
                        read_shard(rule, config, rank, tp, w.read, experts=here) for w in (fp8, plain)
                    )  # fmt: skip
                    assert torch.equal(found, expected), (rule.core, tp, rank)


def test_codes_without_scales_are_refused(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "source")
    to_fp8(tmp_path / "source", tmp_path / "fp8", tmp_path / "plain")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight_scale_inv"
    scales = tensors.pop(lost)
    config = read_base_config(tmp_path / "fp8")

    def message() -> str:
        save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
        with HuggingFaceWeights(tmp_path / "fp8") as weights, pytest.raises(UserError) as error:
            weights.check(name_rules(config), config)
        return str(error.value)

    assert f"model.layers.1.mlp.up_proj.weight is in fp8 without {lost}" in message()
    tensors[lost] = scales[:1]
    assert f"{lost}: found shape [1, 2], expected [3, 2]" in message()


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [({"weight_block_size": [128]}, "expected two integers"), ({}, "already quantised"),
     ({"weight_block_size": [128, 128], "fmt": "e5m2"}, "'e5m2' is not supported")],
)  # fmt: skip
def test_other_kinds_of_fp8(quantization: dict[str, Any], expected: str, tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UserError, match=expected):
        parse_base_config({**raw, "quantization_config": {"quant_method": "fp8", **quantization}}, "config.json")
