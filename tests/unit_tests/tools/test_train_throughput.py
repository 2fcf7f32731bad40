"""The throughput benchmark in miniature: it runs, and reports every figure it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import fake_quant, flops, measure_training, train_throughput
from benchmarks.shapes import SHAPES, base_shape
from megatron_spec.config import UserError, presets


def fake_quant_run() -> None:
    fake_quant.main(fake_quant.make_parser().parse_args([]))


def test_counts_the_plain_algorithm() -> None:
    """Per token: base forward 16.08 GFLOP, seven draft steps 16.73 GFLOP at S = 4096 and D = 32000."""
    base = base_shape("llama-3.1-8b")
    draft = presets.eagle_config(base, overrides={"draft_vocab_size": 32000})
    found = flops.standard_flops(base, draft, 4096, 7)
    assert found["base"] / 1e9 == pytest.approx(16.08, abs=0.01)
    assert found["draft"] / 1e9 == pytest.approx(16.73, abs=0.01)


def test_counts_block_drafts() -> None:
    """Five layers, 512 blocks of 8 in 4096 tokens: as many slots as tokens, so products are easily counted by hand."""
    base = base_shape("llama-3.1-8b")
    draft = presets.block_config(base, "dflash", {"mask_token_id": 0, "num_hidden_layers": 5, "block_size": 8})
    found = flops.block_flops(base, draft, 512, 4096, 0.5)
    H, V, keys = 4096, 128256, 2 * 1024
    layer = 2 * H * (2 * H + 2 * keys + 3 * 14336) + 4 * H * (2048 + 8)
    head = 7 / 8 * 4 * H * V  # forward and the gradient of its input
    assert found["draft"] == 15 * layer + 2 * 2 * 5 * H * H + head
    assert found["base"] / 1e9 == pytest.approx(16.08 - 0.5 * 2 * H * V / 1e9, abs=0.01)


def test_every_shape_is_a_base() -> None:
    """And as large as its name says."""
    for name in SHAPES.keys() - {"tiny", "tiny-moe"}:
        c = base_shape(name)
        if c.moe is not None:  # 30b-a3b: 3 billion of them for a token
            assert flops.base_flops(c, 0) / 2e9 == pytest.approx(3, rel=0.1)
            c, name = c.replace(moe=None, intermediate_size=c.moe.num_experts * c.moe.intermediate_size), name[:-4]
        qkv = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        layer = c.hidden_size * (qkv + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
        billions = (c.num_layers * layer + c.vocab_size * c.hidden_size) / 1e9
        size = name.split("-")[-1]
        assert billions == pytest.approx(float(size[:-1]) / (1000 if size.endswith("m") else 1), rel=0.1), name


def test_half_supervised() -> None:
    config = base_shape("tiny")
    batch = measure_training.supervised_batch(config, 2, 10, torch.device("cpu"), 0.5)
    assert batch.turns_BS.tolist() == [[0] * 5 + [1] * 5] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for a CPU")
@pytest.mark.parametrize("draft", ["eagle3", "dspark"])
def test_tiny_run(tmp_path: Path, draft: str) -> None:
    options = ["--draft", draft] + (["--block-size", "2", "--draft-layers", "1"] if draft == "dspark" else [])
    report = train_throughput.main(["--tiny", "--only", "32x2", *options, "--output", str(tmp_path / "bench.json")])
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["tokens_per_second"] == report["tokens_per_second"] > 0
    assert (written["seq_length"], written["ttt_steps"], written["card"]) == (32, 2, "CPU")
    assert written["shape"] == "tiny"
    assert {"mfu", "peak_gib", "versions", "shares_ms"} <= written.keys()
    parts = {"head_forward", "head_input_gradient", "head_weight_gradient"}
    whole = {"base", "teacher", "head", "optimizer", "draft_layer"}
    assert set(written["shares_ms"]) - set(measure_training.HEAD) == whole
    assert draft != "eagle3" or parts <= set(written["shares_ms"])
    assert written["shares_ms"]["head"] > 0 and written["loss"] > 0
    assert written["loss_kind"] == ("ce_l1" if draft == "dspark" else "soft_ce")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for a CPU")
def test_tiny_run_of_a_loss() -> None:
    options = [
        "--draft",
        "dspark",
        "--block-size",
        "2",
        "--draft-layers",
        "1",
        "--without",
        "loss_kernel",
        "draft_layer",
    ]
    options += ["--loss", "hard_ce", "--block-weights", "d-pace", "--backbone-weight", "0.5"]
    report = train_throughput.main(["--tiny", "--only", "32x2", *options])
    assert (report["loss_kind"], report["block_weights"], report["loss"] > 0) == ("hard_ce", "d-pace", True)
    assert report["without"] == ["loss_kernel", "draft_layer"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for a CPU")
def test_tiny_takes_what_is_given() -> None:
    words = "--tiny --iters 2 --warmup 0 --repeats 2 --seq-length 80 16 --ttt-steps 2 --draft-vocab-size 64"
    report = train_throughput.main(words.split())
    assert [(run["seq_length"], run["ttt_steps"]) for run in report["runs"]] == [(80, 2), (16, 2)]
    assert all(len(run["step_ms_all"]) == 2 for run in report["runs"])
    usual = train_throughput.parse(["--tiny"])
    assert (usual.iters, usual.warmup, usual.seq_length, usual.shape) == (1, 1, [64], "tiny")
    assert train_throughput.parse([]).iters == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for a CPU")
def test_tiny_run_of_paced_steps() -> None:
    reports = [
        train_throughput.main(["--tiny", "--only", "32x2", *options]) for options in (["--step-weights", "decay"], [])
    ]
    assert [report["step_weights"] for report in reports] == ["decay", "d-pace"]
    assert reports[0]["loss"] != reports[1]["loss"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--block-weights d-pace", "--block-weights does nothing with --draft eagle3"),
        ("--anchors 8", "--anchors does nothing with --draft eagle3"),
        ("--draft dspark --step-weights d-pace", "--step-weights does nothing with --draft dspark"),
        ("--fp8-recipe delayed", "--fp8-recipe needs --transformer-engine"),
        ("--draft dflash --ttt-steps 7", "--ttt-steps does nothing with --draft dflash"),
        ("--tiny --shape qwen3-8b", "--tiny has a shape of its own: leave --shape out"),
        ("--only 64x2 --ttt-steps 3", "--only has the lengths and steps: leave --seq-length and --ttt-steps out"),
        ("--store here", "--store needs --offline"),
    ],
)
def test_flags_without_effect_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        train_throughput.parse(words.split())
    assert left.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        ("--only 4096", "--only 4096: expected a length and a number of steps, such as 4096x7"),
        ("--only 64x0", "--only 64x0: expected"),
        ("--iters 0", "--iters 0: expected at least 1"),
        ("--seq-length 0", "--seq-length 0: expected at least 1"),
        ("--profile x", "--profile lists the kernels of a GPU"),
        ("--supervised-share 2", "--supervised-share 2: expected above 0, at most 1"),
        ("--output nowhere/x.json", "its folder does not exist"),
        ("--draft dflash --block-size 0", "block_size must be at least 2, found 0"),
    ],
)
def test_wrong_input_is_one_error(words: str, said: str) -> None:
    command = [sys.executable, "benchmarks/train_throughput.py", "--tiny", *words.split()]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"train_throughput.py: error: {said}" in done.stderr or said in done.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("run", [lambda: train_throughput.main(["--only", "64x2"]), fake_quant_run])
def test_without_a_gpu_only_the_miniature_runs(run: Callable[[], object]) -> None:
    """Nothing is allocated: an 8B model does not fit a laptop."""
    with pytest.raises(UserError, match="no GPU was found, expected one: --tiny"):
        run()
