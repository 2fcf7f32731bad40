"""Flags and files from the documentation of Megatron-LM and ModelOpt: accepted, or explained."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_spec import cli
from megatron_spec.checkpoint.spec import BaseLink, CheckpointSpec, recorded_objective
from megatron_spec.commands import runs
from megatron_spec.commands.checks import check_base_shapes, check_steps
from megatron_spec.config import (
    Config,
    DecodeConfig,
    MedusaConfig,
    ObjectiveConfig,
    QuantConfig,
    TrainConfig,
    UserError,
    megatron_flags,
    presets,
)
from megatron_spec.config.help_text import field_docs
from megatron_spec.config.modelopt import from_modelopt
from megatron_spec.decoding.options import (
    check_lengths,
    check_options,
    check_tree_depth,
    check_undrafted,
    default_length,
)
from tests.tiny import llama
from tools.megatron_flags_table import page

ROOT = Path(__file__).resolve().parents[2]
BASE = llama(num_layers=12)
SCRIPTS = sorted((ROOT / "examples" / "post_training").glob("*.py"))
RUNS = [c for c in vars(runs).values() if isinstance(c, type) and issubclass(c, runs.ScriptRun)]


def said(run: type[Config], capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.Parser("test", run).parse_args(words)
    assert left.value.code == 2
    return capsys.readouterr().err


def finetune(*words: str) -> tuple[Any, list[str]]:
    parser = cli.Parser("test", runs.FinetuneRun)
    return parser.parse_args(["--load", "d", "--save", "s", "--train-iters", "3", *words]).run, parser.notes


def test_the_page_is_that_of_the_table() -> None:
    text = (ROOT / "docs" / "megatron_flags.md").read_text(encoding="utf-8")
    assert text == page(), "run: python tools/megatron_flags_table.py --write"


def test_documented_megatron_arguments_are_accepted() -> None:
    words = [
        "--tokenizer-type", "HuggingFaceTokenizer", "--use-checkpoint-args", "--ckpt-format", "torch_dist",
        "--finetune", "--num-layers", "12", "--hidden-size", "32", "--num-query-groups", "2", "--overlap-grad-reduce",
        "--no-overlap-param-gather", "--distributed-backend", "gloo", "--micro_batch_size", "2", "--lr_decay_style",
        "cosine", "--no-masked-softmax-fusion", "--normalization", "RMSNorm",
    ]  # fmt: skip
    run, notes = finetune(*words)
    assert run.train.micro_batch_size == 2
    assert run.base_shapes == (("--num-layers", "12"), ("--hidden-size", "32"), ("--num-query-groups", "2"))
    assert len(notes) == 9 and notes[4].startswith("--overlap-grad-reduce is not needed: fast paths")
    check_base_shapes(run, BASE)
    with pytest.raises(UserError, match="--num-layers 12, but the base has 13"):
        check_base_shapes(run, BASE.replace(num_layers=13))


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        runs.FinetuneRun, capsys, "--load", "d", "--fp16", "--train-samples", "8", "--eval-interval", "10", "--lr", "x",
        "--finetune-hf-dataset", "nvidia/Daring-Anteater", "--offline-distillation-data", "f", "--ckpt-format", "torch",
        "--micro-bach-size", "2", "--eval-prompts", "3", "--hidden-dropout", "0.1", "--ttt-steps", "0",
    )  # fmt: skip
    for expected in (
        "11 problems", "--fp16 is not supported: half precision is --bf16", "--train-samples is not supported: give",
        "--eval-interval is --eval-acceptance-interval here", "--lr: invalid float value: 'x'", "prepare_conversations",
        "--offline-distillation-data is --offline-data here", "--ckpt-format torch is not supported, only torch_dist",
        "did you mean '--micro-batch-size'", "--eval-prompts does nothing without", "--hidden-dropout 0.1",
        "ttt_steps must be at least 1",
    ):  # fmt: skip
        assert expected in text, expected


def test_hints_for_names_in_other_frameworks(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_spec.commands.quantize import quant_policy

    convert = ("--load", "b", "--save", "s", "--export-eagle-algorithm", "eagle2")
    assert "decode with --use-dynamic-tree" in said(runs.ConvertRun, capsys, *convert)
    run = cli.Parser("x", runs.ExportRun).parse_args(["--load", "d", "--export_dir", "o", "-export-extra-modules"]).run
    assert run.extra_modules and run.export_dir == "o"
    with pytest.raises(UserError, match="FP8_DEFAULT_CFG is ModelOpt's: it is fp8 here"):
        quant_policy("FP8_DEFAULT_CFG")


def test_the_cache_of_the_flag_replaces_that_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megatron_spec.commands.quantize import quant_policy

    file = tmp_path / "policy.json"
    file.write_text('{"kv_cache": "fp8"}')
    with caplog.at_level("INFO"):
        assert quant_policy(str(file), "none").kv_cache == "none"
    assert f"--export-kv-cache-quant none replaces the kv_cache of {file}, fp8" in caplog.text


def test_own_flags_are_not_in_the_table() -> None:
    of_finetune_alone = {"--fp8-format", "--fp8-recipe"}  # the other scripts name it
    for run in RUNS:
        ours = cli.Parser("x", run)._option_string_actions
        known = of_finetune_alone if run is runs.FinetuneRun else set()
        assert {name for name in megatron_flags.FLAGS if name in ours} == known


def test_fp8_of_transformer_engine(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ("--transformer-impl", "transformer_engine")
    layers = finetune(*engine, "--fp8-format", "hybrid", "--fp8-recipe", "blockwise")[0].layers
    assert layers.engine and layers.recipe == "blockwise"
    assert "add --transformer-impl transformer_engine" in said(
        runs.FinetuneRun, capsys, "--load", "d", "--save", "s", "--train-iters", "3", "--fp8-format", "e4m3"
    )
    for run in RUNS:
        if run is runs.FinetuneRun or "layers" not in run.__dataclass_fields__:
            continue
        text = said(run, capsys, *engine, "--fp8-format", "e4m3")
        assert "--fp8-format is not supported: it is an option of finetune.py" in text
        assert "--transformer-impl" not in text.replace("with --transformer-impl", "")
    assert "does not compute in float64" in said(runs.ValidateRun, capsys, "--data", "d", *engine, "--fp64")


MODELOPT: dict[str, Any] = {
    "eagle_decoder_type": "llama", "eagle_freeze_base_model": True, "eagle_use_torch_compile": True,
    "eagle_architecture_config": {
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 4, 9], "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None, "has_lm_head": True, "intermediate_size": 64, "head_dim": None,
        "torch_dtype": "bfloat16", "rope_theta": 1e6,
    },
}  # fmt: skip


def test_modelopt_configuration_is_translated() -> None:
    config = presets.eagle_config(BASE, overrides=from_modelopt(MODELOPT, "eagle3"))
    assert (config.capture_layer_ids, config.intermediate_size, config.rope.theta) == ((0, 4, 9), 64, 1e6)
    assert from_modelopt({"capture_layer_ids": [1, 2]}, "eagle3") == {"capture_layer_ids": [1, 2]}
    assert from_modelopt({"algorithm": "eagle1", "rope_scaling": None}, "eagle1") == {"rope_scaling": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eagle_ttt_steps": 3, "eagle_loss_decay_factor": 0.9}, "finetune.py --ttt-steps; eagle_loss.* --step-decay"),
        ({"parallel_draft_step": 4}, "parallel_draft_step is 4: .* --export-algorithm medusa"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False with eagle3"),
        ({"algorithm": "eagle1"}, "algorithm is 'eagle1', but --export-eagle-algorithm is eagle3"),
        ({"eagle_architecture_config": [1]}, "expected an object"),
    ],
)
def test_unsupported_modelopt_keys_are_explained(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        from_modelopt(changes, "eagle3")


def test_impossible_trees_and_lengths_are_refused() -> None:
    heads = MedusaConfig(num_heads=2, hidden_size=8, vocab_size=96)
    tree = DecodeConfig(use_dynamic_tree=True, max_total_draft_tokens=2)
    with pytest.raises(UserError, match="--max-draft-len 3 with --max-total-draft-tokens 2"):
        check_lengths(tree, (1, 3), None)
    with pytest.raises(UserError, match="--max-draft-len 3: the draft has 2 Medusa heads"):
        check_lengths(DecodeConfig(), (3,), heads)
    for choices in ("[[0], [0, 0], [0, 0, 0]]", "[[96]]"):
        with pytest.raises(UserError, match="--medusa-choices: found a path"):
            check_lengths(DecodeConfig(medusa_choices=choices), (2,), heads)
    with pytest.raises(UserError, match="--max-draft-len 300, but the base has 256 positions"):
        check_lengths(DecodeConfig(), (3, 300), None, positions=256)
    check_lengths(tree, (2,), None)
    check_lengths(DecodeConfig(medusa_choices="[[0], [0, 95]]"), (2,), heads)
    check_lengths(DecodeConfig(medusa_choices="[[0], [0, 95]]"), (1, 2), heads)
    with pytest.raises(UserError, match="a path of 2 tokens, but at most 1 are drafted: give --max-draft-len 2"):
        check_lengths(DecodeConfig(medusa_choices="[[0], [0, 95]]"), (1,), heads)
    with pytest.raises(UserError, match="--max-draft-len 3: the longest path of --medusa-choices has 2 tokens"):
        check_tree_depth(DecodeConfig(medusa_choices="[[0], [0, 95]]"), 3)
    assert default_length(DecodeConfig(medusa_choices="[[0], [0, 95]]"), heads) == 2
    assert default_length(DecodeConfig(medusa_choices="[[0]]"), heads) == 1


def test_a_p_eagle_draft_proposes_what_it_was_trained_for() -> None:
    parallel = presets.eagle_config(BASE, "p-eagle", {"mask_token_id": 3})
    with pytest.raises(UserError, match=r"--max-draft-len 5: this p-eagle draft proposes 4 tokens at once"):
        check_lengths(DecodeConfig(), (2, 5), parallel, 4)
    check_lengths(DecodeConfig(), (4,), parallel, 4)
    check_lengths(DecodeConfig(), (9,), parallel, None)  # an exported draft does not say
    with pytest.raises(UserError, match="--max-draft-len 0: a p-eagle draft proposes at least one token"):
        check_lengths(DecodeConfig(), (0,), parallel)
    assert default_length(DecodeConfig(), parallel, 2) == 2 and default_length(DecodeConfig(), parallel, None) == 3
    assert default_length(DecodeConfig(use_dynamic_tree=True, max_total_draft_tokens=2), None) == 2
    assert default_length(DecodeConfig(), None, positions=1) == 1
    check_lengths(DecodeConfig(), (9,), presets.eagle_config(BASE), 4)


def test_a_block_draft_proposes_at_most_its_block() -> None:
    for algorithm, most in (("dflash", 3), ("dspark", 4)):
        block = presets.block_config(BASE, algorithm, {"mask_token_id": 3, "block_size": 4})
        check_lengths(DecodeConfig(), (1, most), block)
        with pytest.raises(UserError, match=f"--eval-draft-len {most + 1}, but the draft proposes blocks of {most}"):
            check_lengths(DecodeConfig(), (1, most + 1), block, flag="--eval-draft-len")


def test_options_of_an_ngram_pool_without_effect_are_refused() -> None:
    with pytest.raises(UserError, match="--no-is-use-oldest does nothing"):
        check_options(DecodeConfig(is_keep_all=False, is_use_oldest=False), "NGram")


def test_every_flag_is_read_by_something() -> None:
    """A field that only its own class names is an ignored flag."""
    named = {
        "backbone_iters",
        "row_keep",
        "row_keep_least",
        "transformer_impl",
        "fp8_recipe",
    }  # read by a method of their own class
    for path in (*(ROOT / "megatron_spec").rglob("*.py"), *SCRIPTS):
        if path.parent.name in ("config", "runs"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named |= {node.attr} if isinstance(node, ast.Attribute) else set()
            named |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    checked = 0
    for run in RUNS:
        for action in cli.Parser("x", run)._actions:
            name = action.dest.rpartition(".")[2]
            assert name == "help" or name in named, (run, name)
            checked += 1
    assert checked > 200


def test_every_flag_of_every_tool_is_read() -> None:
    checked = 0
    for path in (ROOT / "tools").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        if calls & {"vars", "getattr"}:  # by names in a list
            read |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            if getattr(call.func, "attr", "") != "add_argument":
                continue
            flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
            dest = next((k.value.value for k in call.keywords if k.arg == "dest" and isinstance(k.value, ast.Constant)),
                        max(flags, key=len, default="").lstrip("-").replace("-", "_"))  # fmt: skip
            assert dest in read, f"{path.name}: {flags}"
            checked += 1
    assert checked > 80


def spec(draft: Any, quant: QuantConfig | None = None) -> CheckpointSpec:
    return CheckpointSpec(BaseLink("base", "hf", "sha256:0", BASE), draft, quant)


@pytest.mark.parametrize(
    ("algorithm", "fields", "message"),
    [
        ("eagle1", {"max_draft_len": 4}, "--max-draft-len: no serving configuration is written for eagle1"),
        ("eagle3", {"max_draft_len": 4, "extra_modules": False}, "--max-draft-len concerns the draft"),
        ("eagle3", {"export_embeddings": True, "extra_modules": False}, "--export-embeddings concerns the draft"),
        ("eagle3", {"yarn_factor": 4.0}, "--export-yarn-original None: give both"),
        ("eagle3", {"yarn_factor": 0.5, "yarn_original": 9}, "a factor above 1"),
        ("eagle3", {"yarn_factor": 4.0, "yarn_original": 9, "format": "speculators"}, "needs --export-format hf"),
    ],
)
def test_export_options_without_effect_are_refused(algorithm: str, fields: dict[str, Any], message: str) -> None:
    from megatron_spec.commands.export import _check

    run = runs.ExportRun("d", "o", **{"extra_modules": True, "with_base": True, **fields})
    with pytest.raises(UserError, match=message):
        _check(run, spec(presets.eagle_config(BASE, algorithm)))


def test_no_yaml_for_what_tensorrt_llm_drops() -> None:
    from megatron_spec.commands.export import _check

    run = runs.ExportRun("d", "o", extra_modules=True, with_base=True, max_draft_len=4)
    assert _check(run, spec(presets.eagle_config(BASE)))
    with pytest.raises(UserError, match="--max-draft-len: no serving configuration is written"):
        _check(run, spec(presets.eagle_config(BASE, overrides={"sliding_window": 9})))
    block = presets.block_config(BASE, "dflash", {"mask_token_id": 3, "block_size": 4})
    with pytest.raises(UserError, match="--max-draft-len 4, but the draft proposes blocks of 3 tokens"):
        _check(run, spec(block))  # it was found when the draft had been written


def block_objective(algorithm: str = "dflash", **fields: Any) -> ObjectiveConfig:
    config = presets.block_config(BASE, algorithm, {"mask_token_id": 3})
    return presets.objective_for(config, ObjectiveConfig(**fields))


def eagle_objective(algorithm: str = "eagle3", **fields: Any) -> ObjectiveConfig:
    return presets.objective_for(presets.eagle_config(BASE, algorithm), ObjectiveConfig(**fields))


@pytest.mark.parametrize("length", [{"train_iters": 5}, {"train_epochs": 2}])
def test_learning_rates_that_are_never_reached_or_0_are_named(
    length: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_spec.commands.finetune import say_schedule, with_steps

    flags = [x for name, value in length.items() for x in (f"--{name.replace('_', '-')}", str(value))]

    def said(*more: str) -> str:
        caplog.clear()
        run = cli.Parser("test", runs.FinetuneRun).parse_args(["--load", "d", "--save", "s", *more, *flags]).run
        train = with_steps(run, rows=20)
        assert train.train_iters == 5
        say_schedule(train)
        return caplog.text

    with caplog.at_level("INFO"):
        ending = "--lr-warmup-iters 5: the run ends after 5 steps, so it never reaches --lr"
        assert ending in said("--lr-warmup-iters", "5")
        zero = "the learning rate is 0 after step 3 (--lr-decay-iters, --min-lr): the other 2 steps change nothing"
        assert zero in said("--lr-decay-iters", "3")
        for more in ["--lr-decay-iters", "5"], ["--lr-decay-iters", "3", "--min-lr", "1e-6"]:
            assert "change nothing" not in said(*more)


def test_settings_without_effect_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: QuantConfig(percentile=99.0), "percentile 99.0 does nothing with calibration 'max'"),
        (lambda: QuantConfig(base="none", exclude_base=("*x",)), "exclude_base does nothing"),
        (lambda: TrainConfig(lr_decay_style="constant", min_lr=1e-6), "min_lr does nothing with lr_decay_style"),
        (lambda: TrainConfig(lr_decay_style="constant", lr_decay_iters=3), "lr_decay_iters does nothing"),
        (lambda: runs.ConvertRun("b", "s", draft="d", seed=1), "--seed does nothing with --draft"),
        (lambda: runs.ConvertRun("b", "s", algorithm="medusa", seed=1), "--seed does nothing with --export-algorithm"),
        (lambda: runs.ConvertRun("b", "s", eagle_algorithm="eagle-mtp", mtp_from_base=True, seed=1), "--mtp-from-base"),
        (lambda: runs.GenerateRun(None, "o", base="b", synthesize=2, num_prompts=2), "--num-prompts is for --data"),
        (lambda: runs.GenerateRun("d", "o", base="b", decode=DecodeConfig(seed=3)), "--seed has no effect at temp"),
        (lambda: runs.ValidateRun("d", base="b", decode=DecodeConfig(seed=3)), "--seed has no effect at temp"),
        (lambda: presets.objective_for(
            presets.eagle_config(BASE, "p-eagle", {"sliding_window": 6, "mask_token_id": 3}),
            ObjectiveConfig(ttt_steps=7),
        ), "--ttt-steps 7: more than the draft's sliding_window, 6"),
        (lambda: block_objective(pace_alpha=0.3), "--pace-alpha: no effect without --block-weights d-pace"),
        (lambda: block_objective(block_weights="d-pace", block_gamma=3.0), "--block-gamma: no effect with"),
        (lambda: block_objective(l1_weight=0.3), "--l1-weight: only for --loss ce_l1"),
        (lambda: block_objective(algorithm="dspark", backbone_weight=1.0, backbone_iters=-3), "backbone_iters must"),
        (lambda: block_objective(algorithm="dspark", backbone_iters=3), "no effect without --backbone-weight"),
        (lambda: block_objective("dspark", ce_weight=0.0, l1_weight=0.0, confidence_weight=0.0), "nothing is trained"),
        (lambda: block_objective(in_vocab_only=False), "--no-in-vocab-only: no effect on dflash"),
        (lambda: block_objective(step_weights="d-pace"), "--step-weights: no effect on dflash"),
        (lambda: presets.objective_for(presets.medusa_config(BASE), ObjectiveConfig(step_weights="d-pace")),
         "--step-weights d-pace is for eagle3, eagle3.1, eagle-mtp, the draft is medusa"),
        (lambda: block_objective(step_weights="decay"), "--step-weights: no effect on dflash"),
        (lambda: eagle_objective(pace_alpha=0.3, step_decay=0.8), "--pace-alpha: no effect without --step-weights"),
        (lambda: eagle_objective("eagle-mtp", pace_alpha=0.3), "--pace-alpha: no effect without --step-weights"),
        (lambda: eagle_objective(step_weights="d-pace", step_decay=0.8), "--step-decay: no effect with --step-wei"),
        (lambda: eagle_objective(step_weights="d-pace", step_decay=0.5), "--step-decay: no effect with --step-wei"),
        (lambda: eagle_objective("eagle1", step_weights="d-pace"), "the draft is eagle1"),
        (lambda: runs.GenerateRun(None, "o", base="b", synthesize=10**10), "--synthesize must be at most 1000000000"),
        (lambda: check_steps(ObjectiveConfig(ttt_steps=65), 64), "--ttt-steps 65: rows have at most 64 tokens"),
        (lambda: check_undrafted(DecodeConfig(max_draft_len=4)), "--max-draft-len needs a draft"),
        (lambda: presets.objective_for(presets.medusa_config(BASE), ObjectiveConfig(in_vocab_only=False)),
         "--no-in-vocab-only: this draft has the whole vocabulary"),
    ]  # fmt: skip
    for make, message in cases:
        with pytest.raises(UserError, match=message):
            make()


def test_defaults_given_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag counts as given whatever its value is."""
    default, objective = finetune("--micro-batch-size", "1")[0].objective, finetune("--ttt-steps", "7")[0].objective
    assert objective == default and objective.sets("ttt_steps") and not default.sets("ttt_steps")
    assert objective.replace(temperature=2.0).sets("ttt_steps") and not objective.sets("temperature")
    blocks = presets.block_config(BASE, "dflash", {"mask_token_id": 3, "block_size": 5})
    heads = presets.medusa_config(BASE)
    parallel = presets.eagle_config(BASE, "p-eagle", {"mask_token_id": 3})
    for words, config, message in (
        (["--ttt-steps", "7"], heads, "--ttt-steps 7, but the draft has 4 Medusa heads"),
        (["--ttt_steps=7"], blocks, "--ttt-steps 7, but a block of"),
        (["--in-vocab-only"], blocks, "--in-vocab-only: no effect on dflash"),
        (["--anchors", "512"], heads, "--anchors: only for block drafts"),
        (["--feature-noise", "0.1"], heads, "--feature-noise belongs to eagle1"),
        (["--ttt-steps", "1", "--detach"], presets.eagle_config(BASE), "--detach: no effect with a single draft step"),
        (["--step-decay", "0.8"], presets.medusa_config(BASE, num_heads=1), "--step-decay: no effect with a single"),
        (["--token-weight", "0", "--loss", "kl"], presets.eagle_config(BASE, "eagle1"), "--loss: no effect with"),
        (["--row-keep", "0.1"], parallel, "--row-keep: no effect below --row-keep-least, which is 0.2"),
    ):
        with pytest.raises(UserError, match=message):
            presets.objective_for(config, finetune(*words)[0].objective)
        assert presets.objective_for(config, finetune()[0].objective)
    assert presets.objective_for(heads, finetune("--ttt-steps", "4")[0].objective).ttt_steps == 4
    decode = ("--data", "d", "--output", "o", "--base", "b")
    said_of = lambda *words: said(runs.GenerateRun, capsys, *decode, *words)  # noqa: E731
    assert "top_p needs a temperature above 0" in said_of("--top-p", "1")
    assert "--seed has no effect at temperature 0" in said_of("--seed", "0")
    assert "'a' is there twice" in said_of("--chat-template-kwargs", '{"a": 1, "a": 2}')
    run = cli.Parser("x", runs.GenerateRun).parse_args([*decode, "--max-draft-len", "3", "--relaxed-topk", "1"]).run
    with pytest.raises(UserError, match="--max-draft-len needs a draft"):
        check_undrafted(run.decode)
    with pytest.raises(UserError, match="--relaxed-topk does nothing"):
        check_options(run.decode, "Eagle3")
    for words in (
        ["--temperature", "1", "--seed", "0"],
        ["--decoding-type", "User", "--drafter", "m:C", "--seed", "0"],
    ):
        assert cli.Parser("x", runs.GenerateRun).parse_args([*decode, *words]).run
    made_up = ["--output", "o", "--base", "b", "--synthesize", "2", "--seed", "0"]
    assert cli.Parser("x", runs.GenerateRun).parse_args(made_up).run


def test_the_algorithm_of_a_published_draft_is_compared() -> None:
    """Also the default: `--export-algorithm eagle --draft MEDUSA` trained Medusa heads."""
    from megatron_spec.commands.convert import _check_algorithm

    words = ["--load", "b", "--save", "s", "--draft", "d"]
    for given in [], ["--export-algorithm", "eagle"]:
        request = cli.Parser("test", runs.ConvertRun).parse_args([*words, *given]).run
        _check_algorithm(request, presets.eagle_config(BASE, "eagle1"))
        if not given:
            _check_algorithm(request, presets.medusa_config(BASE))
    with pytest.raises(UserError, match="--export-algorithm eagle, but the draft of --draft is medusa"):
        _check_algorithm(request, presets.medusa_config(BASE))


def test_the_loss_that_is_asked_for_is_taken() -> None:
    """Also where it is the default of other drafts."""
    assert block_objective("dspark").loss == "ce_l1"
    assert block_objective("dspark", loss="soft_ce").loss == "soft_ce"
    assert block_objective("dflash").loss == eagle_objective().loss == "soft_ce"
    heads = presets.medusa_config(BASE)
    assert presets.objective_for(heads, ObjectiveConfig()).loss == "soft_ce"
    saved = block_objective("dspark", loss="soft_ce")
    assert presets.objective_for(presets.block_config(BASE, "dspark", {"mask_token_id": 3}), saved) == saved


def test_weights_of_steps() -> None:
    """D-PACE is the default of EAGLE-3 alone, and not beside --step-decay; what a run has resolved stays."""
    medusa = presets.objective_for(presets.medusa_config(BASE), ObjectiveConfig())
    for found, weights, decay in (
        (eagle_objective(), "d-pace", None),
        (eagle_objective(pace_alpha=0.3), "d-pace", None),
        (eagle_objective(step_decay=0.8), "decay", 0.8),
        (eagle_objective(step_decay=0.6), "decay", 0.6),
        (eagle_objective(step_weights="decay"), "decay", 0.8),
        (eagle_objective(step_weights="decay", step_decay=0.6), "decay", 0.6),
        (eagle_objective("eagle3.1"), "decay", 0.8),
        (eagle_objective("eagle1"), "decay", 0.8),
        (eagle_objective("eagle-mtp"), "decay", 0.8),
        (eagle_objective("eagle-mtp", step_weights="d-pace"), "d-pace", None),
        (medusa, "decay", 0.8),
        (block_objective(), None, None),
    ):
        assert (found.step_weights, found.step_decay) == (weights, decay)
    for algorithm in ("eagle3", "eagle1"):
        config = presets.eagle_config(BASE, algorithm)
        found = presets.objective_for(config, ObjectiveConfig())
        assert presets.objective_for(config, found) == recorded_objective(config, found.to_dict()) == found


def test_objectives_of_older_checkpoints() -> None:
    """They record step_decay in any case, and step_weights since there is a choice."""
    eagle, block = presets.eagle_config(BASE), presets.block_config(BASE, "dflash", {"mask_token_id": 3})
    before = {k: v for k, v in ObjectiveConfig(ttt_steps=3).to_dict().items() if k != "step_weights"}
    assert recorded_objective(eagle, before | {"step_decay": 0.8}) == eagle_objective(ttt_steps=3, step_decay=0.8)
    for weights, expected in (("decay", {"step_decay": 0.6}), ("d-pace", {"step_weights": "d-pace"})):
        found = recorded_objective(eagle, before | {"step_decay": 0.6, "step_weights": weights})
        assert found == eagle_objective(ttt_steps=3, **expected)
    known = before | {"step_decay": 0.8, "step_weights": "decay", "ttt_steps": block.num_steps}
    assert recorded_objective(block, known) == block_objective()


def test_every_field_of_every_configuration_is_documented() -> None:
    import megatron_spec.checkpoint.spec
    import megatron_spec.features.store  # noqa: F401

    kinds, seen = [Config], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("megatron_spec") and kind not in seen:
            seen.add(kind)
            missing = {f.name for f in dataclasses.fields(kind)} - field_docs(kind).keys()
            assert not missing, (kind, missing)
    assert len(seen) > 20


def test_help_imports_no_torch_and_few_modules() -> None:
    """Counts modules instead of seconds, as imports take the time."""
    code = "import sys, runpy\nfor s in sys.argv[1:]:\n    sys.argv = [s, '--help']\n"
    code += "    try: runpy.run_path(s, run_name='__main__')\n    except SystemExit as e: assert e.code == 0\n"
    code += "heavy = [m for m in ('torch', 'numpy', 'transformers', 'megatron.core', 'yaml', 'asyncio')]\n"
    code += "print([m for m in heavy if m in sys.modules], len(sys.modules) < 200)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *map(str, SCRIPTS)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[] True", done.stdout[-300:] + done.stderr[-2000:]


def load(path: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_is_made_from_its_run() -> None:
    assert all(load(path).parser().run_class in RUNS for path in SCRIPTS)


def parsers() -> list[argparse.ArgumentParser]:
    """Those of all scripts and of the tools that users run."""
    found: list[argparse.ArgumentParser] = [load(path).parser() for path in SCRIPTS]
    tools = [path for path in sorted((ROOT / "tools").glob("*.py")) if "def make_parser(" in path.read_text()]
    return found + [load(path).make_parser() for path in tools]


def test_help_describes_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has to be given is shown without brackets, also beside flags that are wrong."""
    monkeypatch.setenv("COLUMNS", "200")
    found = parsers()
    assert len(found) > 15
    for parser in found:
        with pytest.raises(SystemExit) as left:
            parser.parse_args(["--help"])
        text = capsys.readouterr().out
        assert left.value.code == 0 and "(default: )" not in text
        for action in parser._actions:
            assert action.help, (parser.prog, action.dest)
            if action.option_strings and action.required:
                assert f"[{action.option_strings[0]} " not in text, (parser.prog, action.dest)
                assert f" {action.option_strings[0]} " in text.partition("\n\n")[0], (parser.prog, action.dest)
    with pytest.raises(SystemExit):
        found[0].parse_args([])
    assert "the following arguments are required: --load, --save" in capsys.readouterr().err
