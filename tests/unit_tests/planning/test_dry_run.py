"""finetune.py --dry-run for runs too large for the test machine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.checkpoint.spec import BaseLink, CheckpointSpec
from megatron_spec.commands.plan import plan
from megatron_spec.commands.runs import EvalRequest, FinetuneRun
from megatron_spec.config import (
    ENGINE,
    BaseConfig,
    BaseLayers,
    ObjectiveConfig,
    ParallelConfig,
    QuantConfig,
    TrainConfig,
    UserError,
    presets,
)
from megatron_spec.config.machine import H100
from megatron_spec.planning.estimate import GIB, Place, draft_parameters, draft_passes, flops_per_token, memory
from megatron_spec.planning.paths import Paths, Setting

ROOT = Path(__file__).resolve().parents[3]
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_8B = BaseConfig(
    family="llama", hidden_size=4096, intermediate_size=14336, num_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    return str(tmp_path)


def plan_of(folder: str, nodes: int = 64, batch: int = 256, **parallel: int) -> str:
    sizes = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 8, "sequence_parallel": True, **parallel}
    train = TrainConfig(train_iters=10, bf16=True, global_batch_size=batch, use_distributed_optimizer=True)
    run = FinetuneRun(
        load=folder, train=train, parallel=ParallelConfig(**sizes), num_nodes=nodes, seq_length=8192, dry_run=True
    )  # fmt: skip
    return plan(run)


def test_405b_on_64_nodes(folder: str) -> None:
    text = plan_of(folder)
    assert "405.9 B parameters" in text and "captured layers 1, 62, 122" in text
    assert "TP 8, sequence parallel x CP 1 x DP 8 x PP 8" in text and "4 micro-batches of 1 on each of 64 ranks" in text
    assert "    7   111-125    122 / 1,62" in text and text.count("WARNING") == 0
    assert "WARNING: this does not fit" in plan_of(folder, pipeline_model_parallel_size=1)
    assert "does not stay inside a node" in plan_of(folder, tensor_model_parallel_size=16, batch=512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 3}, "24 processes cannot hold replicas of TP 8 x PP 8"),
        ({"batch": 100}, "must be a multiple of micro-batch size"),
        ({"expert_model_parallel_size": 2}, "the base has no experts"),
        ({"tensor_model_parallel_size": 7}, "does not divide"),
    ],
)
def test_dry_run_refuses_what_the_run_would_refuse(folder: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(folder, **changes)


@pytest.mark.parametrize(
    ("rows", "length", "measured"),
    [(1, 2048, 25.7), (1, 4096, 28.5), (1, 8192, 33.5), (1, 16384, 42.5), (1, 32768, 59.9), (2, 4096, 33.5)],
)
def test_memory_is_close_to_measurements(rows: int, length: int, measured: float) -> None:
    """docs/performance.md: one H100, bf16, T = 7, D = 32,000."""
    draft = presets.eagle_config(LLAMA_8B, overrides={"draft_vocab_size": 32000})
    train = TrainConfig(train_iters=1, bf16=True, micro_batch_size=rows)
    place = Place(LLAMA_8B, draft, ParallelConfig(), train, length, 7, 1, LLAMA_8B.num_layers)
    assert sum(memory(place).values()) / GIB == pytest.approx(measured, rel=0.1)


def block_place(anchors: int = 512, **setting: bool) -> Place:
    """DFlash for an 8B base as docs/performance.md measures it."""
    shape = {"mask_token_id": 1, "num_hidden_layers": 5, "block_size": 8}
    draft = presets.block_config(LLAMA_8B, "dflash", shape)
    train = TrainConfig(train_iters=1, bf16=True, micro_batch_size=2)
    paths = Paths(Setting(H100, "bfloat16", base=LLAMA_8B, draft=draft, **setting))
    return Place(
        LLAMA_8B, draft, ParallelConfig(), train, 4096, 7, 1, LLAMA_8B.num_layers, paths=paths, anchors=anchors
    )


def test_memory_of_block_drafts_is_close_to_a_measurement() -> None:
    """docs/performance.md: one H200, fused layers."""
    assert sum(memory(block_place()).values()) / GIB == pytest.approx(43.3, rel=0.1)


def test_memory_of_block_drafts_follows_layers_and_anchors() -> None:
    fused, plain, few = (
        memory(p)["draft steps"] for p in (block_place(), block_place(plain=True), block_place(anchors=64))
    )
    H, heads, kv, M = 4096, 4096, 2048, 14336
    slots, rows = 2 * 512 * 8, 2 * 4096
    assert fused == 2 * 5 * (slots * (4 * H + 3 * heads + 2 * kv + 2 * M) + rows * 2 * kv)
    assert plain > 1.5 * fused and few < fused / 5


def test_a_frozen_head_has_no_gradients_and_no_optimizer_state() -> None:
    whole = block_place()
    few = memory(dataclasses.replace(whole, draft=whole.draft.replace(draft_vocab_size=32000)))
    rows = 32000 * LLAMA_8B.hidden_size
    assert few["draft"] - memory(whole)["draft"] == rows * 2
    assert [few[n] for n in ("gradients (fp32)", "optimizer")] == [
        memory(whole)[n] for n in ("gradients (fp32)", "optimizer")
    ]


def test_work_equals_published_figures() -> None:
    draft = presets.eagle_config(LLAMA_8B, overrides={"draft_vocab_size": 32000})
    work = flops_per_token(LLAMA_8B, draft, 4096, 7)
    assert work["base"] / 1e9 == pytest.approx(16.08, rel=2e-3) and work["draft"] / 1e9 == pytest.approx(
        16.73, rel=2e-3
    )


def test_a_head_shared_with_the_base_has_no_weight_gradient() -> None:
    head, heads = 2.0 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size, 3
    eagle1 = presets.eagle_config(LLAMA_8B, "eagle1")
    linears = 2.0 * sum(draft_parameters(eagle1))
    scores = 4.0 * LLAMA_8B.num_attention_heads * LLAMA_8B.head_dim * 4096 / 2
    found = flops_per_token(LLAMA_8B, eagle1, 4096, 2)["draft"]
    assert found == pytest.approx(2 * (3 * (linears + scores) + 2 * head), rel=1e-9)
    medusa = presets.medusa_config(LLAMA_8B, heads, share_base_head=True)
    found = flops_per_token(LLAMA_8B, medusa, 4096, heads)["draft"]
    assert found == pytest.approx(3 * 2.0 * sum(draft_parameters(medusa)) + heads * 2 * head, rel=1e-9)


def test_a_draft_from_transformer_engine(folder: str) -> None:
    def planned(**fields: Any) -> str:
        train = TrainConfig(bf16=True, global_batch_size=8)
        return plan(FinetuneRun(load=folder, train=train, dry_run=True, **fields))

    text = planned(draft_transformer_impl="transformer_engine", draft_fp8_recipe="blockwise")
    assert "draft_fused       off: --draft-transformer-impl transformer_engine builds the draft" in text
    assert "draft_fused       on" in planned()
    with pytest.raises(UserError, match="Blackwell"):
        planned(draft_transformer_impl="transformer_engine", draft_fp8_recipe="mxfp8")
    with pytest.raises(UserError, match="add --draft-transformer-impl"):
        planned(draft_fp8_recipe="delayed")


def test_dropped_rows_of_p_eagle_are_not_counted() -> None:
    draft = presets.eagle_config(LLAMA_8B, "p-eagle", {"mask_token_id": 1})
    goal = ObjectiveConfig(ttt_steps=4, row_keep=0.5, row_keep_least=0.2)
    assert draft_passes(draft, goal) == pytest.approx(1 + 0.5 + 0.25 + 0.2)
    assert draft_passes(presets.eagle_config(LLAMA_8B), goal) == 4


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle1", "eagle-mtp", "medusa"])
def test_parameter_counts_are_exact(algorithm: str) -> None:
    import torch

    from megatron_spec.drafts import build_draft
    from megatron_spec.drafts.vocab import DraftVocab
    from megatron_spec.runtime import distributed

    base = LLAMA_8B.replace(
        hidden_size=32, intermediate_size=48, num_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=96,
    )  # fmt: skip
    config = presets.medusa_config(base) if algorithm == "medusa" else presets.eagle_config(base, algorithm)
    draft = build_draft(config, DraftVocab(torch.arange(96), 96), distributed.initialize(), torch.float32)
    real = sum(p.numel() for p in draft.parameters())
    split = sum(p.numel() for p in draft.parameters() if getattr(p, "tensor_model_parallel", False))
    assert draft_parameters(config)[0] == split and sum(draft_parameters(config)) == pytest.approx(real, rel=0.02)


def test_the_script_needs_neither_data_nor_weights(folder: str) -> None:
    start = [sys.executable, "examples/post_training/finetune.py", "--load", folder, "--bf16"]
    sizes = ["--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "8", "--global-batch-size", "256"]
    done = subprocess.run(
        [*start, *sizes, "--dry-run", "--num-nodes", "64"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "layout of the base" in done.stdout
    done = subprocess.run([*start, "--num-nodes", "64"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "required" in done.stderr


def test_flags_that_the_run_refuses(folder: str) -> None:
    """Sources of features that leave the base's layers, or their fp8, without effect."""
    fp8 = BaseLayers("transformer_engine", fp8_format="e4m3")
    held_out = EvalRequest(data="held_out.jsonl", interval=10)
    two = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    experts = ParallelConfig(expert_model_parallel_size=2)
    for fields, reason in (
        ({"layers": ENGINE, "offline_data": "f"}, "--transformer-impl with --offline-data: the base does not run"),
        ({"teacher": "original"}, "--teacher original: the base of this checkpoint is not quantised"),
        ({"seq_length": 200000}, "--seq-length 200000 must be between 1 and .* 131072"),
        ({"base_shapes": (("--num-layers", "80"),)}, "--num-layers 80, but the base has 126"),
        ({"evaluation": held_out, "parallel": two}, "--sequence-parallel does not work with validate.py"),
        ({"feature_cache": "f", "parallel": experts}, "--expert-model-parallel-size does not .* --feature-cache"),
        ({"layers": fp8, "feature_cache": "f"}, "--fp8-format is for features computed as training goes"),
        ({"base_fp8": True, "feature_cache": "f"}, "--base-fp8 is for features computed as training goes"),
        ({"layers": fp8, "evaluation": held_out}, "decodes with the base, which --fp8-format leaves out"),
        ({"offline_data": "f", "evaluation": held_out}, "decodes with the base, which --offline-data leaves out"),
        ({"offline_data": "f", "data": "d"}, "give one of --data and --offline-data .*: found both"),
        ({"train_epochs": 1}, "give one of --train-iters and --train-epochs: found both"),
    ):
        train = TrainConfig(bf16=True, global_batch_size=8, train_iters=1)
        with pytest.raises(UserError, match=reason):
            plan(FinetuneRun(load=folder, train=train, dry_run=True, **fields))  # type: ignore[arg-type]


def test_the_plan_follows_every_flag(folder: str, tmp_path: Path) -> None:
    """Length of stored features; micro-batches held ahead when features come from disk; steps if they are known."""
    train = TrainConfig(bf16=True, global_batch_size=8)

    def planned(**fields: Any) -> str:
        return plan(FinetuneRun(load=folder, dry_run=True, **{"train": train, **fields}))

    assert "a step of 16384 tokens" in planned() and " steps: " not in planned()
    assert "10 steps: " in planned(train=train.replace(train_iters=10))
    assert "features of 1 held ahead" in planned() and "features of 4 held ahead" in planned(feature_cache="f")
    store = {
        "base_fingerprint": "x", "capture_layer_ids": [1, 62, 122], "hidden_size": 16384, "dtype": "bfloat16",
        "template_hash": "", "num_samples": 3, "seq_length": 512,
    }  # fmt: skip
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(store))
    assert "a step of 4096 tokens" in planned(offline_data=str(tmp_path / "store"))
    with pytest.raises(UserError, match=r"--seq-length 64, but the features in .* were cut to 512"):
        planned(offline_data=str(tmp_path / "store"), seq_length=64)
    assert "a step of 16384 tokens" in planned(offline_data="later")


def test_the_plan_of_a_checkpoint(tmp_path: Path) -> None:
    """A quantised one has other fast paths when it is trained on the base as it was; layouts must fit its draft."""
    base = LLAMA_8B.replace(max_position_embeddings=4096)
    shape = {"draft_vocab_size": 32000, "intermediate_size": 4098}
    spec = CheckpointSpec(
        BaseLink("base", "hf", "sha256:x", base), presets.eagle_config(base, "eagle3", shape),
        QuantConfig(draft="none"),
    )  # fmt: skip
    for name in ("vocab.safetensors", "dist/metadata.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    tp = FinetuneRun(load=str(tmp_path), parallel=ParallelConfig(tensor_model_parallel_size=4), dry_run=True)
    with pytest.raises(UserError, match="does not divide the draft's intermediate_size 4098"):
        plan(tp)
    found = {}
    for teacher in ("quantised", "original"):
        run = FinetuneRun(
            load=str(tmp_path), train=TrainConfig(bf16=True), teacher=teacher, gpus_per_node=1, dry_run=True  # type: ignore[arg-type]
        )  # fmt: skip
        found[teacher] = [line for line in plan(run).splitlines() if line.startswith("  base_direct")]
    assert "fake-quantised" in found["quantised"][0] and found["original"][0].endswith(" on")
