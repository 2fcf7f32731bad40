"""What quantize.py and validate.py find depends neither on the layout nor on whether input divides among ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_spec
from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.planning import layouts
from tests.functional_tests.script_helpers import make_base, write_conversations
from tests.worlds import run_world

SAMPLES = 5
POLICIES = {
    "percentile": {"calibration": "percentile", "percentile": 97.0, "kv_cache": "fp8"},
    "draft": {"base": "none"},
}
LAYOUTS = {"dp2": {}, "pp2": {"pipeline_model_parallel_size": 2}, "tp2": {"tensor_model_parallel_size": 2}}


def ranges(root: str, name: str, policy: str, micro_batch_size: int = 1, **sizes: Any) -> dict[str, float]:
    """What quantize.py finds in a layout: the ranges of base and draft, and those that it reports."""
    from megatron.core import dist_checkpointing, parallel_state

    from megatron_spec.commands.quantize import quantize
    from megatron_spec.config import ObjectiveConfig

    parallel_state.destroy_model_parallel()
    folder = quantize(
        f"{root}/draft", f"{root}/{name} {policy}", f"{root}/train.jsonl", policy=f"{root}/{policy}.json",
        samples=SAMPLES, seq_length=64, micro_batch_size=micro_batch_size, objective=ObjectiveConfig(ttt_steps=3),
        parallel=ParallelConfig(**sizes),
    )  # fmt: skip
    found = dist_checkpointing.load_plain_tensors(str(folder / "dist"))
    known = {key: float(value) for key, value in found.items() if key.endswith("amax")}
    base, report = folder / "base_amax.json", json.loads((folder.parent / "calibration.json").read_text())
    known |= {f"line {i}, {line['name']}": line["amax_input"] for i, line in enumerate(report)}
    return known | (json.loads(base.read_text()) if base.is_file() else {})


def one_rank(root: str) -> dict[tuple[str, str], Any]:
    from megatron_spec.commands.convert import convert

    convert(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")
    sizes = {"one": 1, "four together": 4}
    found = {(name, policy): ranges(root, name, policy, size) for name, size in sizes.items() for policy in POLICIES}
    return {**found, ("one", "acceptance"): acceptance(root, "one")}


def acceptance(root: str, name: str) -> dict[str, Any]:
    """What validate.py writes of the answers to one prompt (of two rounds)."""
    from megatron.core import parallel_state

    from megatron_spec.commands.decode import validate
    from megatron_spec.config import DecodeConfig

    parallel_state.destroy_model_parallel()
    validate(
        f"{root}/train.jsonl", f"{root}/draft", output=f"{root}/{name}.json", num_prompts=1,
        decode=DecodeConfig(max_new_tokens=6),
    )  # fmt: skip
    run = json.loads(Path(f"{root}/{name}.json").read_text())
    return {
        key: run[key] for key in ("memory", "answers", "text_identical", "acceptance_length", "acceptance_per_position")
    }


def two_ranks(root: str) -> dict[tuple[str, str], Any]:
    found = {(n, policy): ranges(root, n, policy, **sizes) for n, sizes in LAYOUTS.items() for policy in POLICIES}
    return {**found, ("dp2", "acceptance"): acceptance(root, "dp2")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    root: Path = tmp_path_factory.mktemp("calibration")
    make_base(root / "base", initializer_range=0.4)
    write_conversations(root / "train.jsonl", 7)
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6], "fc_init": "average"}))
    for name, policy in POLICIES.items():
        (root / f"{name}.json").write_text(json.dumps(policy))
    return {**run_world(1, one_rank, str(root))[0], **run_world(2, two_ranks, str(root))[0]}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["four together", *LAYOUTS])
def test_ranges_are_those_of_one_process(found: dict[tuple[str, str], Any], name: str, policy: str) -> None:
    expected, ranges = found["one", policy], found[name, policy]
    assert len(expected) >= 14 and ranges.keys() == expected.keys()
    if name != "tp2":
        assert ranges == expected  # the same sums
    elif policy == "draft":
        assert ranges == pytest.approx(expected, rel=1e-4)
    else:  # sums in another order: a value may fall into the next bin of a histogram, or to the next number in fp8
        assert ranges == pytest.approx(expected, rel=0.1)


def test_a_rank_may_have_no_prompt(found: dict[tuple[str, str], Any]) -> None:
    assert found["dp2", "acceptance"] == found["one", "acceptance"]
    assert found["one", "acceptance"]["answers"] > 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "--sequence-parallel .*: the draft computes more",
        ),
        ({"context_parallel_size": 2}, "--context-parallel-size .*: calibration needs the full sequence"),
    ],
)
def test_layouts_with_other_results_are_refused(sizes: dict[str, Any], expected: str) -> None:
    """By the script, and in the library."""
    parallel = ParallelConfig(**sizes)
    with pytest.raises(UserError, match=expected):
        layouts.check("quantize", parallel)
    model: Any = SimpleNamespace(world=SimpleNamespace(parallel=parallel))
    with pytest.raises(UserError, match=expected):
        megatron_spec.quantize(model, [])
    with pytest.raises(UserError, match=r"does not work with validate\.py, generate\.py"):
        megatron_spec.validate(model, "prompts.jsonl")
    with pytest.raises(UserError, match=r"does not work with validate\.py, generate\.py"):
        megatron_spec.decode(model, [[1]])
