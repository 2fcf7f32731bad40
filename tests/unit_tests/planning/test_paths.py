"""Fast paths: one table decides and refuses, and no other code depends on the machine."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import (
    ENGINE,
    LOCAL,
    EagleConfig,
    MoeConfig,
    ObjectiveConfig,
    ParallelConfig,
    QuantConfig,
    UserError,
    presets,
)
from megatron_spec.config.machine import H100, Machine
from megatron_spec.ops import backend, plain
from megatron_spec.planning.estimate import HEAD_CHUNK, Place, _activation_bytes
from megatron_spec.planning.paths import NO_PATHS, PATHS, Paths, Setting
from tests.tiny import llama

ROOT = Path(__file__).resolve().parents[3]
BASE = llama(hidden_size=64, intermediate_size=96, num_layers=4, head_dim=16, max_position_embeddings=64)
DRAFT = EagleConfig(
    algorithm="eagle3", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=96, draft_vocab_size=48, target_hidden_size=64, max_position_embeddings=64, capture_layer_ids=(0, 1, 2),
)  # fmt: skip
MOE = MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=48)
GPU = Setting(H100, "bfloat16", base=BASE, draft=DRAFT, objective=ObjectiveConfig())
FP8 = ("base_fp8", "draft_fp8")


def test_an_h100_runs_all_paths() -> None:
    paths = Paths(replace(GPU, wanted=FP8))
    paths.check()
    block = dict.fromkeys(("draft_layer", "block_kernel"), "the draft is not a block draft")
    block["grouped_experts"] = "the base has no experts"
    block |= dict.fromkeys(("te_attention", "te_experts"), "--transformer-impl local builds the base")
    block["te_fp8"] = "not requested (--fp8-format)"
    assert paths.blocked == block and set(paths.to_dict().values()) == {"on", *block.values()}
    opt_in = {"base_fp8": "not requested (--base-fp8)", "draft_fp8": "not requested (--draft-fp8)"}
    opt_in |= {
        "teacher_fp8": "the base's layers are not in fp8: not requested (--base-fp8)",
        "draft_head_fp8": "the draft's layer is not in fp8: not requested (--draft-fp8)",
    }
    assert Paths(GPU).blocked == opt_in | block
    assert set(Paths(replace(GPU, plain=True)).blocked) == set(PATHS) == set(NO_PATHS.blocked) | {"common_prompt"}
    assert Paths(replace(GPU, plain=True)).kernels() == "none" and Paths(GPU).kernels("draft_fused") == "triton"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("draft_fp8", {"parallel": ParallelConfig(tensor_model_parallel_size=2)}, "parts of a row separately"),
        ("draft_fp8", {"draft": DRAFT.replace(num_hidden_layers=2)}, "several layers"),
        ("draft_fp8", {"draft": DRAFT.replace(algorithm="eagle3.1", norm_output=True)}, "norm_output"),
        ("draft_fp8", {"objective": ObjectiveConfig(detach=True)}, "detached"),
        ("draft_fp8", {"quant": QuantConfig(base="none")}, "fake-quantised"),
        ("draft_fp8", {"dtype": "float32"}, "float32, not in half precision"),
        ("draft_fp8", {"dtype": "float16"}, "float16, not in bf16"),
        ("draft_fp8", {"machine": Machine(True, (8, 0), "triton")}, "no fp8 tensor cores"),
        ("draft_fp8", {"machine": Machine(True, (9, 0))}, "Triton is missing"),
        ("draft_fp8", {"plain": True}, "--plain"),
        ("base_fp8", {"machine": Machine()}, "there is no GPU"),
        ("base_fp8", {"base": BASE.replace(window=8, window_layers=(1,))}, "a sliding window"),
        ("base_fp8", {"base": BASE.replace(intermediate_size=100)}, "multiples of 16"),
        ("base_fp8", {"quant": QuantConfig(draft="none")}, "the base is fake-quantised"),
        ("base_fp8", {"layers": ENGINE}, "transformer_engine"),
        ("base_fp8", {"base": BASE.replace(moe=MOE)}, "experts"),
    ],
)  # fmt: skip
def test_requested_paths_are_refused_with_the_reason(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"{PATHS[name].flag} cannot run here: .*{reason}"):
        Paths(replace(GPU, wanted=(name,), **changes)).check()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("draft_head_fp8", {"draft": DRAFT.replace(draft_vocab_size=50)}, r"\(64, 50\), not both multiples of 16"),
        ("draft_head_fp8", {"objective": ObjectiveConfig(loss="tv")}, "the loss is tv"),
        ("teacher_fp8", {"parallel": ParallelConfig(tensor_model_parallel_size=2)}, "split over tensor parallel ranks"),
    ],
)
def test_heads_stay_in_bf16_where_they_must(name: str, changes: dict[str, Any], reason: str) -> None:
    """Without refusing the flag, which the layers follow."""
    wanted = ("base_fp8",) if name == "teacher_fp8" else FP8
    paths = Paths(replace(GPU, wanted=wanted, **changes))
    paths.check()
    assert set(wanted) & paths.blocked.keys() == set() and re.search(reason, paths.blocked[name])


def test_an_optimizer_that_is_asked_for_runs() -> None:
    assert "optimizer_pass" not in Paths(GPU).blocked
    assert "--optimizer-impl apex" in Paths(replace(GPU, optimizer_impl="apex")).blocked["optimizer_pass"]


def test_objective_can_be_added_later() -> None:
    paths = Paths(replace(GPU, objective=None))
    assert paths.on("draft_fused") and paths.on("loss_kernel")
    under = paths.under(ObjectiveConfig(loss="lk", detach=True))
    assert not under.on("draft_fused") and under.blocked["loss_kernel"] == "the loss lk has no kernel"
    assert paths.under(ObjectiveConfig(loss="lk", detach=True)) is under
    assert paths.under(ObjectiveConfig(loss="ce_l1")).on("loss_kernel")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": "float32"}, "float32, not in half precision"),
        ({"quant": QuantConfig(base="none")}, "the draft is fake-quantised"),
        ({"parallel": ParallelConfig(tensor_model_parallel_size=4)}, "fewer key/value heads"),
        ({"plain": True}, "--plain"),
    ],
)
def test_layers_of_block_drafts(changes: dict[str, Any], reason: str | None) -> None:
    draft = presets.block_config(BASE, "dflash", {"mask_token_id": 1})
    paths = Paths(replace(GPU, draft=draft, **changes))
    assert paths.on("draft_layer") is (reason is None) and (reason or "") in paths.to_dict()["draft_layer"]


@pytest.mark.parametrize(
    ("draft", "fused"),
    [
        (DRAFT, True),
        (DRAFT.replace(algorithm="eagle3.1", norm_before_fc=True), True),
        (DRAFT.replace(algorithm="eagle3.1", norm_output=True), False),
        (DRAFT.replace(num_hidden_layers=2), False),
    ],
)
def test_memory_is_estimated_for_active_paths(draft: EagleConfig, fused: bool) -> None:
    from megatron_spec.config import TrainConfig

    place = Place(BASE, draft, ParallelConfig(), TrainConfig(train_iters=1, bf16=True), 64, 3, 1, 4)
    assert Paths(replace(GPU, draft=draft)).on("draft_fused") is fused
    width = 9.0 * 64 + 128 + 64 + 2 * 96 if fused else 14.0 * 64 + 2 * 128 + 64 + 4 * 96
    assert _activation_bytes(place, 64, 2) == 64 * 3 * draft.num_hidden_layers * width * 2


def test_memory_of_heads_in_fp8() -> None:
    from megatron_spec.config import TrainConfig
    from megatron_spec.planning.estimate import memory

    place = Place(BASE, DRAFT, ParallelConfig(), TrainConfig(train_iters=1, bf16=True, micro_batch_size=2), 64, 3, 1, 4)
    usual, fp8 = memory(place), memory(replace(place, paths=Paths(replace(GPU, wanted=FP8))))
    assert fp8["embedding and head"] - usual["embedding and head"] == 64 * 96
    assert fp8["working space"] - usual["working space"] == HEAD_CHUNK / 2 + 2 * 64 * 3 * (48 + 64)
    assert fp8["base layers"] == usual["base layers"] / 2
    setting = replace(GPU, layers=ENGINE.replace(fp8_format="e4m3"), wanted=("te_fp8",))
    assert memory(replace(place, paths=Paths(setting)))["base layers"] == usual["base layers"] * 1.5


def test_tests_and_twins_exist() -> None:
    for path in PATHS.values():
        file, _, name = path.test.partition("::")
        assert name in (ROOT / file).read_text()
    assert all(callable(getattr(plain, name)) for name in plain.OPERATORS) and backend.load("plain") is plain
    kernels = [ROOT / f"megatron_spec/ops/kernels/{name}.py" for name in backend.KERNELS]
    written = [n.name for file in kernels for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert {name: written.count(name) for name in plain.OPERATORS} == dict.fromkeys(plain.OPERATORS, 1)


ASKS = {
    "ops/attention.py": "the table of attention kernels",
    "ops/products.py": "an operator of torch that only CUDA has",
    "runtime/platform.py": "the one place that knows the machine", "runtime/distributed.py": "names the device",
    "batch.py": "copies in the host's memory", "features/offline.py": "pinned memory",
    "training/loop.py": "peak memory of a device", "evaluation/validate.py": "warm-up of a timing",
    "commands/decode.py": "name of the device in a report",
    "families/transformer_config.py": "says the dtype to megatron-core",
}  # fmt: skip
"""Files that may ask about the device, and what for: never to choose a fast path."""


def asked(tree: ast.Module) -> set[str]:
    """What a file asks about the machine."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "get_device_capability", "has_cuda"):
            found.add(node.attr)
        if isinstance(node, ast.Compare) and ".type" in ast.unparse(node) and "device" in ast.unparse(node):
            found.add("device.type")
        if isinstance(node, ast.Constant) and node.value == "triton":
            found.add("triton")
        if isinstance(node, ast.Compare) and any(f"torch.{x}float16" in ast.unparse(node) for x in ("b", "")):
            found.add("half precision")
    return found


def test_only_paths_depend_on_the_machine() -> None:
    package = ROOT / "megatron_spec"
    wrong: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        name = file.relative_to(package).as_posix()
        if name.startswith(("ops/kernels/", "serving/", "planning/")) or name in ASKS or name == "config/machine.py":
            continue
        found = asked(ast.parse(file.read_text()))
        if found:
            wrong[name] = found
    assert not wrong, f"ask planning/paths.py instead: {wrong}"
    kept = {name for name in ASKS if asked(ast.parse((package / name).read_text()))}
    assert kept == set(ASKS), f"these ask no more, take them off the list: {set(ASKS) - kept}"


ENGINE_FP8 = ENGINE.replace(fp8_format="e4m3", fp8_recipe="blockwise")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("te_attention", {"machine": Machine()}, "no GPU"),
        ("te_attention", {"dtype": "float32"}, "not in half precision"),
        ("te_attention", {"parallel": ParallelConfig(context_parallel_size=2)}, "ranks share the sequence"),
        ("te_attention", {"parallel": ParallelConfig(tensor_model_parallel_size=4)}, "fewer key/value heads"),
        ("te_attention", {"base": BASE.replace(head_dim=12)}, r"\(12, 12\) dimensions"),
        ("te_experts", {"base": BASE}, "no experts"),
        ("te_experts", {"plain": True}, "--plain"),
        ("te_fp8", {"dtype": "float16"}, "float16, not in bf16"),
        ("te_fp8", {"machine": Machine(True, (8, 0), "triton")}, "no fp8 tensor cores"),
        ("te_fp8", {"quant": QuantConfig(draft="none")}, "the base is fake-quantised"),
        ("te_fp8", {"base": None}, "layers do not run"),
        (
            "te_fp8",
            {
                "layers": ENGINE.replace(fp8_format="e4m3"),
                "draft_fp8_recipe": "tensorwise",
                "parallel": ParallelConfig(context_parallel_size=2),
            },
            "would wait for one another",
        ),
        ("te_fp8", {"layers": ENGINE_FP8, "base": BASE.replace(hidden_size=192)}, "not all multiples of 128"),
        ("te_fp8", {"layers": LOCAL}, "local builds the base"),
        ("cuda_graphs", {}, "transformer_engine builds the base"),
    ],
)
def test_when_paths_of_transformer_engine_are_off(name: str, changes: dict[str, Any], reason: str) -> None:
    wide = BASE.replace(hidden_size=256, intermediate_size=128, head_dim=64, moe=MOE.replace(intermediate_size=128))
    setting = replace(GPU, base=wide, layers=ENGINE_FP8, wanted=("te_fp8",))
    assert Paths(setting).blocked.keys().isdisjoint({"te_attention", "te_experts", "te_fp8"})
    assert re.search(reason, Paths(replace(setting, **changes)).blocked[name])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": Machine(True, (9, 0), "triton", False)}, "torch has no grouped products"),
        ({"dtype": "float16"}, "float16, not in bf16"),
        ({"parallel": ParallelConfig(tensor_model_parallel_size=4)}, r"\(64, 12\), not multiples of 8"),
        ({"quant": QuantConfig(draft="none")}, "fake-quantised"),
        ({"layers": ENGINE}, "transformer_engine"),
        ({"machine": Machine()}, "no GPU"),
    ],
)
def test_when_experts_are_not_grouped(changes: dict[str, Any], reason: str) -> None:
    base = BASE.replace(moe=MOE)
    assert {"grouped_experts", "base_direct", "cuda_graphs"} & Paths(replace(GPU, base=base)).blocked.keys() == set()
    blocked = Paths(replace(GPU, base=base, **changes)).blocked
    assert re.search(reason, blocked["grouped_experts"]) and "cuda_graphs" in blocked


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": Machine(True, (10, 0), "triton")}, "compute capability 9.0"),
        ({"machine": Machine(True, (9, 0), "triton", tile_products=False)}, "Triton is older than 3.6"),
        ({"dtype": "float32"}, "float32, not in half precision"),
        ({"machine": Machine()}, "no GPU"),
    ],
)
def test_when_products_compute_nothing_else(changes: dict[str, Any], reason: str) -> None:
    assert Paths(GPU).on("product_epilogues")
    assert reason in Paths(replace(GPU, **changes)).blocked["product_epilogues"]
