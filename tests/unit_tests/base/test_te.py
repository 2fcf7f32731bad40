"""A base of Transformer Engine's modules, by a stand-in for them: every family equals transformers and local layers.

tests/gpu/test_transformer_engine.py does the same with the modules themselves.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_spec.base import te
from megatron_spec.base.schedule import run_base
from megatron_spec.batch import Batch
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.commands.finetune import _paths_that_run
from megatron_spec.config import ENGINE, BaseLayers, ParallelConfig, QuantConfig, UserError
from megatron_spec.config.machine import H100, Machine
from megatron_spec.ops.moe import mixed, mixed_in_order
from megatron_spec.planning import te_paths
from megatron_spec.planning.paths import Paths
from megatron_spec.quantization.attach import attach_quantizers, quantizers
from megatron_spec.quantization.quantizer import Mode
from megatron_spec.runtime import distributed
from tests import te_stand_in
from tests.tiny import make_batch
from tests.unit_tests.families.families import CAPTURES, MODELS, answers, save, tokens
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


def ranges(base: Any) -> dict[str, float]:
    """Ranges of a base, its keys and values included, after calibration on one batch."""
    attach_quantizers(base, QuantConfig(draft="none", kv_cache="none" if base.config.mla else "fp8"), "base")
    for quantizer in quantizers(base).values():
        if quantizer.mode is not Mode.DISABLED:
            quantizer.start_calibration()
    run_base(base, [causal(tokens(base.vocab_size)[0])])
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
                    batch = replace(make_batch(2, 16, 3, 80), context=world.context)
                    result["gaps"] = gaps_of_two(base, local, batch)
                    found[layout, name] = result
                    continue
                result["gaps"] = forward_gaps(base, world, references[name])
                if layout in ("TP 2", "PP 2"):
                    result["gaps"]["decode"] = decode_gap(base, world, references[name])
                    out = Path(folder, f"{name} {layout} engine")
                    result["export"] = _export_differs(base, reference, out, Path(folder, name), world)
                result["gaps"]["ranges"] = range_gap(ranges(base), ranges(local))
                ids = tokens(base.vocab_size)[0]
                for each in (base, local):
                    enable(each)
                result["gaps"] |= {f"again {k}": v for k, v in gaps_of_two(base, local, causal(ids)).items()}
            found[layout, name] = result
        parallel_state.destroy_model_parallel()
    return found


def causal(ids: torch.Tensor) -> Batch:
    """Rows of one document each."""
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    zeros = torch.zeros_like(positions, dtype=torch.int32)
    return Batch(ids, positions, zeros, zeros)


def enable(base: Any) -> None:
    """Round from now on. A last bit may then change a code, which is 6 % of a value."""
    for quantizer in quantizers(base).values():
        if quantizer.mode is not Mode.DISABLED:
            quantizer.enable()


def gaps_of_two(base: Any, local: Any, batch: Batch) -> dict[str, float]:
    """Relative differences of the results of two bases."""
    results = [run_base(each, [batch]) for each in (base, local)]
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


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("first", [0, 2, 5])
def test_experts_in_order(first: int, multiple: int) -> None:
    """One call on all rows equals a call for each expert; with padding, and with experts without rows."""
    torch.manual_seed(first)
    R, K, H, here = 13, 2, 6, 3
    x, weights, chosen = torch.randn(R, H), torch.rand(R * K), torch.stack([torch.randperm(6)[:K] for _ in range(R)])
    matrices = torch.randn(here, H, H)

    def all_experts(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        assert len(rows) == sum(sizes) and len(sizes) == here and all(size % multiple == 0 for size in sizes)
        return torch.cat([part @ matrix + 1 for part, matrix in zip(rows.split(sizes), matrices, strict=True)])

    one: Any = [lambda rows, m=matrix: rows @ m + 1 for matrix in matrices]
    expected = mixed(x, weights, chosen, one, first)
    torch.testing.assert_close(mixed_in_order(x, weights, chosen, first, here, all_experts, multiple), expected)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_runs_in_the_base(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stand-in shows of fp8: megatron-core's configuration, padded experts, when weights are quantised."""
    save("mixtral", tmp_path / "base")
    monkeypatch.setattr(te_paths, "linear_sizes", lambda *_: ())
    reference, world = inspect_base(tmp_path / "base"), distributed.initialize()
    batch, events, contexts = make_batch(2, 16, 3, 80), [], []
    monkeypatch.setattr(te_paths, "fp8_products", lambda _: {})
    from megatron.core.transformer import transformer_block

    with te_stand_in.installed():
        wanted = run_base(load_base(reference, world, CAPTURES, layers=ENGINE), [batch])[0]
        base = load_base(reference, world, CAPTURES, layers=ENGINE.replace(fp8_format="hybrid", fp8_recipe=recipe))
        config: Any = base.model.config
        assert (config.fp8, config.fp8_recipe, config.tp_only_amax_red) == ("hybrid", recipe, True)
        firsts = [m for m in base.modules() if hasattr(m, "is_first_microbatch")]
        experts = [layer.mlp.experts.engine for _, layer in base.layers()]
        assert len(firsts) == 8 and {each.multiple for each in experts} == {te.FP8_ROWS}

        def seen(*_: Any) -> None:
            events.append({each.is_first_microbatch for each in (*firsts, *experts)})
            assert not torch.is_grad_enabled()

        def context(config: Any, layer: int = -1, **_: Any) -> Any:
            """In place of Transformer Engine's."""
            contexts.append(layer)
            return nullcontext()

        base.model.decoder.register_forward_pre_hook(seen)
        monkeypatch.setattr(transformer_block, "get_fp8_context", context)
        monkeypatch.setattr(te, "update_ranges", lambda: events.append("update"))
        for _ in range(2):
            for found, expected in zip(run_base(base, [batch])[0], wanted, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                assert not found.requires_grad
    # delayed: one forward more finds the ranges, and the weights are quantised again with them.
    delayed = [{True}, "update", {True}, "update", {False}, "update"]
    assert events == (delayed if recipe == "delayed" else [{True}, {False}])
    assert contexts == ([-1] * 3 if recipe == "delayed" else [0, 1, 2, 3] * 2)


def test_attention_without_a_kernel_is_this_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Transformer Engine would hold all scores, its attention is left out, with a warning.

    Two layers have a window and two have none: one probe for each.
    """
    save("qwen2 window", tmp_path / "base")
    reference, world = inspect_base(tmp_path / "base"), distributed.initialize()
    unfused = {"use_flash_attention": False, "use_fused_attention": False}
    for fused, warnings in (
        ([unfused, {**unfused, "use_fused_attention": True}], 1),
        ([{}] * 2, 0),
        ([unfused] * 2, 1),
    ):
        left = iter(fused)
        monkeypatch.setattr(te, "backends", lambda left=left: next(left))
        caplog.clear()
        with te_stand_in.installed():
            base = load_base(reference, world, CAPTURES, layers=ENGINE)
        assert not list(left)
        expected = [not choice or choice["use_fused_attention"] for choice in fused for _ in range(2)]
        assert [bool(layer.self_attention.core_attention.engine) for _, layer in base.layers()] == expected
        assert base.paths.on("te_attention") == any(expected)
        before = Paths(replace(base.paths.setting, off=()))  # what the run was planned with, which its draft keeps
        recorded = _paths_that_run(SimpleNamespace(base=base, draft=SimpleNamespace(paths=before)))  # type: ignore[arg-type]
        assert recorded == {**before.to_dict(), "te_attention": base.paths.to_dict()["te_attention"]}
        assert (recorded["te_attention"] == "on") == any(expected)
        told = [r.getMessage() for r in caplog.records if "no fused attention" in r.getMessage()]
        assert len(told) == warnings and all("cuDNN of Transformer Engine" in text for text in told)
        if warnings:
            assert f"layers {', '.join(str(i) for i, on in enumerate(expected) if not on)} here" in told[0]


def test_a_base_in_fp8_is_not_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path / "base")
    monkeypatch.setattr(te_paths, "fp8_products", lambda _: {})
    monkeypatch.setattr(te_paths, "linear_sizes", lambda *_: ())
    with te_stand_in.installed():
        layers = ENGINE.replace(fp8_format="e4m3")
        base = load_base(inspect_base(tmp_path / "base"), distributed.initialize(), CAPTURES, layers=layers)
        with pytest.raises(UserError, match="Transformer Engine's fp8 already"):
            ranges(base)


def test_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    te.check(BaseLayers(), Machine())
    monkeypatch.setattr(te, "installed", lambda: False)
    with pytest.raises(UserError, match="not installed"):
        te.check(ENGINE, H100)
    monkeypatch.setattr(te, "installed", lambda: True)
    with pytest.raises(UserError, match="needs a GPU"):
        te.check(ENGINE, Machine())
