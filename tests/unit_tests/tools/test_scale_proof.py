"""scale.py: a layout that crashes is reported and the others continue; refusals; tables; experts over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import layouts, measure_layouts, scale, scale_proof, small_base
from benchmarks.random_models import random_base
from megatron_spec.base.moe import LocalExperts, Router
from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.config.machine import Machine
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from tests.worlds import run_world

CHILD = """
import json, sys
for name in sys.argv[1:]:
    print(json.dumps({"begin": name}), flush=True)
    if name == "broken":
        raise SystemExit("no such luck")
    print("a warning\\n" + json.dumps({"layout": name}), flush=True)
"""


def test_other_layouts_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(scale_proof, "SCRIPT", tmp_path / "child.py")
    findings, failures = scale_proof.run(1, ["tp2", "broken", "dp2"], [])
    assert [f["layout"] for f in findings] == ["tp2", "dp2"]
    assert failures == ["broken: no such luck"]


def test_tables() -> None:
    one = {"layout": "one@16384x1", "gpus": 1, "tokens_per_second": 100.0, "tokens_per_second_per_gpu": 100.0}
    two = {"layout": "cp2@16384x1", "gpus": 2, "tokens_per_second": 180.0, "tokens_per_second_per_gpu": 90.0}
    differences = {"loss_difference": 1e-9, "gradient_difference": 2e-7}
    text = scale_proof.tables({
        "equality": [{"layout": "cp2", "dtype": "float32", **differences}],
        "speed": [{**e, "peak_gib": 30.0} for e in (one, two)], "failed": ["equality tp2te: why"],
    })  # fmt: skip
    assert "| cp2 | 1.0e-09 | 2.0e-07 |  |  |  |" in text
    assert "| cp2@16384x1 | 180 | 90 | 90.0% | 30.0 |" in text and "failed: equality tp2te: why" in text


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_parallelism_is_tested(gpus: int) -> None:
    equal, fast = layouts.every(gpus, engine=True, experts=False)
    for wanted in ("tp", "pp", "dp", "cp"):
        assert f"{wanted}{gpus}" in equal and any(name.startswith(wanted) for name in fast)
    assert f"tp{gpus}sp" in equal and f"tp{gpus}te" in equal and len(set(equal)) == len(equal)
    assert not any("ep" in name for name in equal + fast)
    with_experts = layouts.every(gpus, engine=True, experts=True)
    assert set(equal) < set(with_experts[0]) and f"ep{gpus}te" in with_experts[0]
    assert all(f"ep{gpus}" in names for names in with_experts)
    chosen = scale_proof.Chosen(gpus, [], None, tiny=False, model="qwen3-30b-a3b")
    for kind, names in zip(("equality", "speed"), with_experts, strict=True):
        assert chosen.possible(kind, names, gpus) == (names, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for a CPU")
def test_tiny_throughput() -> None:
    found = measure_layouts.speed("one", scale.parse(["one", "--tiny", "--no-equality"]))
    assert found["tokens_per_second"] == found["tokens_per_second_per_gpu"] > 0
    assert (found["model"], found["gpus"], found["seq_length"]) == ("tiny", 1, 64)


def test_flags_that_all_layouts_set_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.parse(["--gpus", "2", "--tiny", "--without", "draft_fused"]).gpus == 2
    assert "leave out --micro-batches, --steps" in refused(
        capsys, "--gpus", "2", "--steps", "9", "--micro-batches", "3"
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of a command line that ends with exit code 2."""
    with pytest.raises(SystemExit) as left:
        scale.parse(list(words))
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


MIXTURE = ("--model", "qwen3-30b-a3b")


@pytest.mark.parametrize(("world", "words", "message"), [
    (1, ["xx3"], "layout 'xx3': expected for example"),
    (2, ["ep0", *MIXTURE], "layout 'ep0': expected for example"),
    (2, ["cp2@16384"], "layout 'cp2@16384': expected for example"),
    (4, ["tp2tp2"], "layout 'tp2tp2': found a size twice"),
    (2, ["sp"], "needs --tensor-model-parallel-size greater than 1"),
    (2, ["ep2"], "layout 'ep2': --expert-model-parallel-size 2: the base has no experts"),
    (3, ["ep3", *MIXTURE], "the base has 128 experts, expected a multiple of 3"),
    (1, ["ep2", *MIXTURE], "layout 'ep2': 1 processes cannot shard experts over EP 2"),
    (2, ["one"], "layout 'one': found 2 processes, expected 1"),
    (2, ["dp4"], "layout 'dp4': found 2 processes, expected 4"),
    (3, ["tp3"], "layout 'tp3': tensor_model_parallel_size 3 does not divide"),
    (2, ["tp2te"], "te is for equality alone"),
    (2, ["tp2", "--speed-of", "dp2"], "--speed-of: found dp2, expected some of tp2"),
    (2, ["dp2", "xx3"], "layout 'xx3'"),
])  # fmt: skip
def test_unknown_and_impossible_layouts(
    world: int, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert message in refused(capsys, *words, "--no-equality")


@pytest.mark.parametrize(("words", "message"), [
    (["--layouts", "xx3"], "layout 'xx3': expected for example"),
    (["--layouts", "ep2"], "layout 'ep2': --expert-model-parallel-size 2: the base has no experts"),
    (["--layouts", "tp2cp1"], "--layouts: found tp2cp1, expected some of tp2"),
    (["--model", "70b"], "does not hold --model 70b"),
])  # fmt: skip
def test_refusals_of_all_layouts(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "--gpus", "2", *words)
    assert scale.parse(["--gpus", "2", *MIXTURE, "--layouts", "ep2", "--ttt-steps", "1"]).ttt_steps == 1


def test_the_reference_has_the_base_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--reference", str(tmp_path), "--tiny", "--no-speed"]
    assert "run the layout one with this folder first" in refused(capsys, "dp1", *own)
    assert scale.parse(["one", *own]).reference == tmp_path
    small_base.write(tmp_path / "base", experts=False, tiny=True)
    assert scale.parse(["dp1", *own]).layouts == ["dp1"]
    assert "the base of another --model" in refused(capsys, "dp1", *own, *MIXTURE)


def test_layouts_are_chosen_by_name() -> None:
    equal, fast = layouts.every(2, engine=False, experts=False)
    chosen = scale_proof.Chosen(2, ["speed"], ["tp2", "cp2"], tiny=False)
    assert chosen.of(equal) == ["tp2", "cp2"] and chosen.of(fast) == ["tp2", "cp2@16384x1"]
    assert scale_proof.Chosen(2, [], None, False).of(fast) == fast
    with pytest.raises(UserError, match="found dp1tp2, expected some of tp2"):
        scale_proof.check(2, "8b", ["dp1tp2"], tiny=False)


def test_children_get_the_flags_of_their_kind() -> None:
    chosen = scale_proof.Chosen(2, [], None, True, ("draft_fused",), "qwen3-30b-a3b", ttt_steps=1)
    common = ["--model", "qwen3-30b-a3b", "--tiny"]
    assert chosen.flags("equality") == common
    assert chosen.flags("speed") == [*common, "--ttt-steps", "1", "--without", "draft_fused"]


def test_impossible_layouts_are_reported() -> None:
    found, reasons = scale_proof.Chosen(3, [], None, False).possible("speed", ["dp3", "tp3", "pp3"], 3)
    assert found == ["dp3", "pp3"] and len(reasons) == 1 and "layout 'tp3'" in reasons[0]


def test_experts_of_a_gpu_are_grouped_under_expert_parallelism() -> None:
    _, base = layouts.speed_shape("qwen3-30b-a3b", tiny=False)
    paths = Paths(Setting(Machine(True, (9, 0), "triton", True), "bfloat16", ParallelConfig(1, 1, 1, 2), base))
    assert paths.on("base_direct") and paths.on("grouped_experts")


def test_ranks_choose_experts_alike_whatever_their_seed() -> None:
    """Otherwise tensor parallel ranks, whose weights differ, would sum parts of different experts."""
    world, (_, config) = distributed.initialize(), layouts.speed_shape("qwen3-30b-a3b", tiny=True)
    routers, others = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        base = random_base(config, world, torch.float32)
        routers.append([m.weight for m in base.modules() if isinstance(m, Router)])
        others.append(base.core.layers[0].self_attention.linear_qkv.weight)
    assert all(torch.equal(a, b) for a, b in zip(*routers, strict=True)) and not torch.equal(*others)
    assert not torch.equal(*routers[0][:2])


def experts_over_two(reference: str) -> dict[str, Any]:
    """Of one rank: throughput and equality of ep2, and of the base where it runs in the throughput test."""
    words = ["ep2", *MIXTURE, "--tiny", "--ttt-steps", "1", "--reference", reference]
    args, found = scale.parse(words), {}
    build = measure_layouts.random_base

    def built(*given: Any, **options: Any) -> Any:
        base = build(*given, **options)
        found["experts"] = [(m.here.first, m.here.count) for m in base.modules() if isinstance(m, LocalExperts)]
        return base

    measure_layouts.random_base = built
    return {"speed": measure_layouts.speed("ep2", args), "equality": measure_layouts.equality(
        "ep2", args.reference, args.tiny), **found}  # fmt: skip


def alone(reference: str) -> list[dict[str, Any]]:
    small_base.write(Path(reference, "base"), experts=True, tiny=True)
    return measure_layouts.equality("one", Path(reference), tiny=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for a CPU")
def test_tiny_experts_over_two_processes(tmp_path: Path) -> None:
    run_world(1, alone, str(tmp_path))
    first, second = run_world(2, experts_over_two, str(tmp_path))
    speed = first["speed"]
    assert speed["tokens_per_second"] == 2 * speed["tokens_per_second_per_gpu"] > 0
    assert (speed["model"], speed["gpus"], speed["ttt_steps"]) == ("tiny-moe", 2, 1) and "grouped_experts" in speed[
        "off"
    ]
    assert first["experts"] == [(0, 2)] * 8 and second["experts"] == [(2, 2)] * 8
    exact, half = first["equality"]
    assert exact["dtype"] == "float32" and exact["same_rows"]
    assert exact["loss_difference"] < 1e-6 and exact["gradient_difference"] < 1e-5
    assert half["dtype"] == "bfloat16" and half["gradient_from_fp32"] < 0.3
