"""A base of Transformer Engine's modules, by a stand-in for them: every family equals transformers and local layers.

tests/gpu/test_transformer_engine.py does the same with the modules themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.base import te
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.config import ENGINE, BaseLayers, ParallelConfig, QuantConfig, UserError
from megatron_spec.config.machine import H100, Machine
from megatron_spec.runtime import distributed
from tests import te_stand_in
from tests.unit_tests.families.families import CAPTURES, MODELS, answers, save
from tests.unit_tests.families.test_families import (
    MIXTURES,
    TOLERANCE,
    _export_differs,
    counted_reads,
    decode_gap,
    forward_gaps,
    lazy,
)
from tests.worlds import run_world

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "CP 2": {"context_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}


def runs(layout: str, name: str) -> bool:
    """Layouts and families that are tested together."""
    if layout == "CP 2":
        return name in ("llama", "qwen3")
    return layout != "EP 2" or name in MIXTURES


def used(base: Any) -> dict[str, bool]:
    """Which of its modules a base runs."""
    layers = [layer for _, layer in base.layers()]
    experts = [layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts")]
    return {
        "attention": all(layer.self_attention.core_attention.engine for layer in layers),
        "experts": all(each.engine is not None for each in experts),
        "norms": all(type(m).__name__ != "RMSNorm" for m in base.modules()),
        "linears": {type(m).__name__ for m in base.modules()}.isdisjoint({"ReplicatedLinear"}),
        "no parameters of its own": not any("engine" in name for name, _ in base.named_parameters()),
    }


def ranges(base: Any, name: str) -> dict[str, float]:
    """Ranges of a base, its keys and values included, after calibration on one batch."""
    from megatron_spec.base.schedule import run_base
    from megatron_spec.batch import Batch
    from megatron_spec.quantization.attach import attach_quantizers, quantizers
    from megatron_spec.quantization.quantizer import Mode
    from tests.unit_tests.families.families import tokens

    attach_quantizers(base, QuantConfig(draft="none", kv_cache="none" if base.config.mla else "fp8"), "base")
    inputs = [q for q in quantizers(base).values() if q.mode is not Mode.DISABLED]
    for quantizer in inputs:
        quantizer.start_calibration()
    ids = tokens(base.vocab_size)[0]
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    zeros = torch.zeros_like(positions, dtype=torch.int32)
    run_base(base, [Batch(ids, positions, zeros, zeros)])
    return {name: float(q.amax) for name, q in quantizers(base).items()}


def range_gap(found: dict[str, float], expected: dict[str, float]) -> float:
    """Largest relative difference; infinite if other places have ranges."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(abs(found[name] / value - 1) for name, value in expected.items())


def world_cases(folder: str, references: dict[str, dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """{(layout, model): what was found}."""
    from megatron.core import parallel_state

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, values in LAYOUTS.items():
        world = distributed.initialize(ParallelConfig(**values))
        for name in (name for name in MODELS if runs(layout, name)):
            reference = inspect_base(Path(folder, name))
            local = load_base(reference, world, CAPTURES)
            with te_stand_in.installed(), counted_reads() as seen:
                base = load_base(reference, world, CAPTURES, layers=ENGINE)
                result: dict[str, Any] = {"used": used(base), "lazy": lazy(base, seen)}
                result["names"] = base.weights().keys() ^ local.weights().keys()
                if layout == "CP 2":
                    found[layout, name] = result
                    continue
                result["gaps"] = forward_gaps(base, world, references[name])
                if layout in ("TP 2", "PP 2"):
                    result["gaps"]["decode"] = decode_gap(base, world, references[name])
                    out = Path(folder, f"{name} {layout} engine")
                    result["export"] = _export_differs(base, reference, out, Path(folder, name), world)
                result["gaps"]["ranges"] = range_gap(ranges(base, name), ranges(local, name))
                result["gaps"] |= {f"again {k}": v for k, v in forward_gaps_of_two(base, local, world).items()}
            found[layout, name] = result
        parallel_state.destroy_model_parallel()
    return found


def forward_gaps_of_two(base: Any, local: Any, world: Any) -> dict[str, float]:
    """Relative differences of two fake-quantised bases: a last bit may change a code, which is 6 % of a value."""
    from megatron_spec.base.schedule import run_base
    from megatron_spec.batch import Batch
    from megatron_spec.quantization.attach import quantizers
    from megatron_spec.quantization.quantizer import Mode
    from tests.unit_tests.families.families import tokens

    ids = tokens(base.vocab_size)[0]
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    zeros = torch.zeros_like(positions, dtype=torch.int32)
    results = []
    for each in (base, local):
        for quantizer in quantizers(each).values():
            if quantizer.mode is not Mode.DISABLED:
                quantizer.enable()
        results.append(run_base(each, [Batch(ids, positions, zeros, zeros)]))
    return {
        part: float((a - b).norm() / b.norm())
        for found, expected in zip(*results, strict=True)
        for part, a, b in zip(("captures", "state"), found, expected, strict=True)
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("families")
    references: dict[str, dict[str, Any]] = {name: answers(save(name, folder / name)) for name in MODELS}
    return run_world(2, world_cases, str(folder), references)


CASES = [(layout, name) for layout in LAYOUTS for name in MODELS if runs(layout, name)]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_families(found: list[dict[tuple[str, str], dict[str, Any]]], layout: str, name: str) -> None:
    for results in found:
        result = results[layout, name]
        assert result["used"] == {**dict.fromkeys(result["used"], True), "attention": layout != "CP 2"}
        assert result["lazy"] and not result["names"] and not result.get("export"), result
        gaps = result.get("gaps", {})
        assert all(gap < TOLERANCE for case, gap in gaps.items() if "again" not in case), gaps
        assert all(gap < 0.05 for case, gap in gaps.items() if "again" in case), gaps


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp8_format": "hybrid"}, "--fp8-format is Transformer Engine's"),
        ({"fp8_recipe": "blockwise"}, "--fp8-recipe is Transformer Engine's"),
        ({"transformer_impl": "transformer_engine", "fp8_recipe": "blockwise"}, "needs --fp8-format"),
        ({"transformer_impl": "transformer_engine", "fp8_format": "mxfp8"}, "expected"),
    ],
)
def test_layers_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BaseLayers(**values)


def test_recipes() -> None:
    assert ENGINE.recipe is None and ENGINE.replace(fp8_format="e4m3").recipe == "delayed"
    assert ENGINE.replace(fp8_format="e4m3", fp8_recipe="tensorwise").recipe == "tensorwise"


def test_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    te.check(BaseLayers(), Machine())
    monkeypatch.setattr(te, "installed", lambda: False)
    with pytest.raises(UserError, match="not installed"):
        te.check(ENGINE, H100)
    monkeypatch.setattr(te, "installed", lambda: True)
    with pytest.raises(UserError, match="needs a GPU"):
        te.check(ENGINE, Machine())
