"""The whole chain through its scripts, each step from what the step before saved, in different parallel layouts.

Scripts that no other test starts in a new interpreter run in one once, which an import that is missing would stop.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_spec.checkpoint.sharded import read_extra
from megatron_spec.checkpoint.spec import resolve as resolve_folder
from megatron_spec.config.rope import read_rope
from tests.functional_tests.script_helpers import make_base, refuse, succeed, write_conversations

TP2 = ("--tensor-model-parallel-size", 2)
TP2_PP2 = (*TP2, "--pipeline-model-parallel-size", 2)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """convert (TP 2 x PP 2) -> finetune (TP 2) -> quantise (plain) -> QAT (PP 2) -> export (plain)."""
    root = tmp_path_factory.mktemp("chain")
    base, data = make_base(root / "base", initializer_range=0.4), write_conversations(root / "train.jsonl", 24)
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6], "init_from_base_layer": True}))
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    succeed(
        "tools/calibrate_draft_vocab.py", "--model", base, "--data", data, "--draft-vocab-size", 64, "--save-dir",
        root / "vocab", fresh=True,
    )  # fmt: skip
    assert size > 64
    succeed(
        "convert_model", "--load", base, "--save", root / "draft", "--draft-vocab", root / "vocab", "--eagle-config",
        root / "eagle.json", "--export-algorithm", "eagle", "--export-eagle-algorithm", "eagle3", *TP2_PP2, processes=4,
    )  # fmt: skip
    common = ("--data", data, "--seq-length", 96, "--ttt-steps", 3)
    succeed(
        "finetune", "--load", root / "draft", "--save", root / "tuned", *common, "--train-iters", 24,
        "--micro-batch-size", 2, "--global-batch-size", 4, "--lr", 1e-2, "--feature-cache", root / "features", *TP2,
        processes=2,
    )  # fmt: skip
    quantise = ("--load", root / "tuned", "--save", root / "quantized", *common, "--calib-samples", 8)
    succeed("quantize", *quantise, fresh=True)
    succeed(
        "finetune", "--load", root / "quantized", "--save", root / "qat", *common, "--train-iters", 6,
        "--micro-batch-size", 1, "--global-batch-size", 4, "--lr", 1e-3, "--pipeline-model-parallel-size", 2,
        processes=2,
    )  # fmt: skip
    succeed("export", "--load", root / "qat", "--export-dir", root / "fp8", "--export-extra-modules", fresh=True)
    return root


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def mean_loss(lines: list[dict[str, object]]) -> float:
    """Over whole epochs: single batches differ too much to compare."""
    return sum(float(line["loss"]) for line in lines) / len(lines)  # type: ignore[arg-type]


def test_training_learns_and_reports(chain: Path) -> None:
    lines = metrics(chain / "tuned")  # four epochs of six steps
    assert [line["iteration"] for line in lines] == list(range(1, 25))
    assert len(lines[0]["loss_per_step"]) == 3  # type: ignore[arg-type]
    assert mean_loss(lines[-6:]) < 0.85 * mean_loss(lines[:6])
    assert (chain / "tuned" / "latest_checkpointed_iteration.txt").read_text() == "24\n"
    run = json.loads((chain / "tuned" / "iter_0000024" / "run.json").read_text())
    assert run["config"]["train"]["train_iters"] == 24 and run["versions"]["torch"]


def test_quantised_training_starts_where_training_ended(chain: Path) -> None:
    tuned, qat = metrics(chain / "tuned"), metrics(chain / "qat")
    assert len(qat) == 6
    # Of the same samples: fp8 changes a random teacher, and the loss by up to a fifth; that of an untrained draft is
    # far above, but falls fast.
    assert float(qat[0]["loss"]) < 0.75 * float(tuned[0]["loss"])  # type: ignore[arg-type]


def test_a_quantised_checkpoint_says_how_its_draft_was_trained(chain: Path) -> None:
    tuned, quantised = (read_extra(resolve_folder(chain / name))["objective"] for name in ("tuned", "quantized"))
    assert quantised == tuned and tuned["ttt_steps"] == 3


def test_exported_fp8_draft_and_base(chain: Path) -> None:
    draft = load_file(chain / "fp8" / "draft" / "model.safetensors")
    assert str(draft["midlayer.self_attn.q_proj.weight"].dtype) == "torch.float8_e4m3fn"
    assert {"midlayer.mlp.down_proj.weight_scale", "midlayer.mlp.down_proj.input_scale", "d2t", "t2d"} <= draft.keys()
    assert str(draft["fc.weight"].dtype) == "torch.bfloat16" and str(draft["lm_head.weight"].dtype) == "torch.bfloat16"
    config = json.loads((chain / "fp8" / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 64
    base = load_file(chain / "fp8" / "base" / "model.safetensors")
    assert str(base["model.layers.0.mlp.gate_proj.weight"].dtype) == "torch.float8_e4m3fn"
    assert (chain / "fp8" / "base" / "tokenizer.json").is_file()
    assert "eagle3_layers_to_capture" in (chain / "fp8" / "trtllm.yaml").read_text()


def test_a_draft_is_exported_with_yarn(chain: Path) -> None:
    """What was written is what the verification computed: read back, the frequencies and their scale are YaRN's."""
    yarn = ("--export-yarn-factor", 4, "--export-yarn-original", 96)
    said = succeed("export", "--load", chain / "tuned", "--export-dir", chain / "yarn", "--export-extra-modules", *yarn)
    assert "the draft was trained without YaRN" in said
    config = json.loads((chain / "yarn" / "draft" / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "yarn" and config["rope_scaling"]["factor"] == 4.0
    rope = read_rope(config, "config.json")
    assert rope.original_max_position_embeddings == 96 and rope.attention_factor == pytest.approx(1 + 0.1 * math.log(4))


def test_validate_finds_identical_text_in_every_layout(chain: Path) -> None:
    prompts = ("--data", chain / "train.jsonl", "--num-prompts", 4, "--max-new-tokens", 12, "--max-draft-len", 3)
    succeed("validate", "--load", chain / "tuned", *prompts, "--output", chain / "one.json", fresh=True)
    succeed("validate", "--load", chain / "tuned", *prompts, "--output", chain / "four.json", *TP2_PP2, processes=4)
    one, four = (json.loads((chain / name).read_text()) for name in ("one.json", "four.json"))
    assert one["text_identical"] and four["text_identical"]
    assert one["acceptance_length"] == four["acceptance_length"] >= 1.0
    assert one["acceptance_per_position"] == four["acceptance_per_position"]


def test_validate_in_float64_finds_identical_text_with_an_fp8_base(chain: Path) -> None:
    prompts = ("--data", chain / "train.jsonl", "--num-prompts", 4, "--max-new-tokens", 12)
    succeed("validate", "--load", chain / "qat", *prompts, "--fp64", "--output", chain / "fp8.json")
    assert json.loads((chain / "fp8.json").read_text())["text_identical"]
    assert "contradict each other" in refuse("validate", "--load", chain / "qat", *prompts, "--fp64", "--bf16")


def test_generate_writes_equal_text_with_and_without_a_draft(chain: Path) -> None:
    prompts = ("--data", chain / "train.jsonl", "--num-prompts", 4, "--max-new-tokens", 12)
    succeed("generate", "--base", chain / "base", *prompts, "--output", chain / "alone.jsonl")
    succeed("generate", "--load", chain / "tuned", *prompts, "--output", chain / "drafted.jsonl", fresh=True)
    alone, drafted = ((chain / n).read_text().splitlines() for n in ("alone.jsonl", "drafted.jsonl"))
    assert len(alone) == 4
    answers = [[json.loads(line)["conversations"] for line in lines] for lines in (alone, drafted)]
    assert answers[0] == answers[1]
