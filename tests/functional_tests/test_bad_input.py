"""Every mistake of a user ends in one clear line and exit code 2: nothing loaded, nothing half-written."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.script_helpers import SCRIPTS, refuse, run_script, succeed, write_inputs
from tests.held import held
from tests.worlds import run_world


def make_draft(root: str) -> None:
    from megatron_spec.commands.convert import convert

    convert(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, conversations and a fresh draft."""
    root = write_inputs(tmp_path_factory.mktemp("bad"))
    run_world(1, make_draft, str(root))
    return root


def test_an_unknown_flag_is_named_with_a_suggestion(place: Path) -> None:
    message = refuse("finetune", "--load", place, "--save", place, "--data", place, "--train-iters", 1, "--ttt-step", 3)
    assert "--ttt-step" in message and "--ttt-steps" in message


def test_half_written_checkpoint(place: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(place / "draft", broken)
    (broken / "iter_0000000" / "dist" / "metadata.json").unlink()
    message = refuse(
        "finetune", "--load", broken, "--save", tmp_path / "s", "--data", place / "train.jsonl", "--train-iters", 1
    )
    assert "incomplete" in message and "metadata.json" in message
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("script", "flags"), [("generate", []), ("validate", ["--decoding-type", "NGram"])], ids=["generate", "validate"]
)
def test_a_second_run_into_a_file_is_refused(place: Path, tmp_path: Path, script: str, flags: list[str]) -> None:
    output = tmp_path / "out.jsonl"
    with held(output, file=True) as other:
        data = ["--data", place / "train.jsonl", "--num-prompts", 1, "--max-new-tokens", 2]
        message = refuse(script, "--base", place / "base", "--output", output, *data, *flags)
        assert f"{output} is in use by process {other.pid}" in message
        assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl.lock"]
    succeed(script, "--base", place / "base", "--output", output, *data, *flags)
    assert output.is_file() and not list(tmp_path.glob("*.lock"))


def in_process(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Message of the UserError that a chain function raises before anything is loaded."""
    from megatron_spec.config import UserError

    with pytest.raises(UserError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


def convert(place: Path, save: Path, eagle: dict[str, Any], **kwargs: Any) -> str:
    from megatron_spec.commands.convert import convert as run

    config = save.parent / "eagle.json"
    config.write_text(json.dumps(eagle))
    message = in_process(run, str(place / "base"), str(save), eagle_config=str(config), **kwargs)
    assert not save.exists()
    return message


@pytest.mark.parametrize(
    ("eagle", "expected"),
    [
        ({"capture_layer_id": [0, 1, 2]}, "did you mean 'capture_layer_ids'"),
        ({"capture_layer_ids": [0, 3, 8]}, "0..7"),
        ({"capture_layer_ids": [3, 3, 6]}, "distinct and ascending"),
        ({"hidden_size": "big"}, "expected int"),
        ({"draft_vocab_size": 100_000}, "draft_vocab_size"),
        ({"draft_vocab_size": 32}, "calibrate_draft_vocab"),
        ({"vocab_size": 7}, "the base has"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"capture_layer_ids": []}, "capture_layer_ids is empty"),
    ],
)
def test_wrong_draft_configuration(place: Path, tmp_path: Path, eagle: dict[str, Any], expected: str) -> None:
    assert expected in convert(place, tmp_path / "out", eagle)


def test_a_key_that_is_there_twice(place: Path, tmp_path: Path) -> None:
    from megatron_spec.commands.convert import convert as run

    config = tmp_path / "draft.json"
    config.write_text('{"hidden_size": 32, "hidden_size": 64}')
    for kind in {"eagle_config": str(config)}, {"algorithm": "dflash", "draft_config": str(config)}:
        said = in_process(run, str(place / "base"), str(tmp_path / "out"), **kind)
        assert f"{config} is not valid JSON ('hidden_size' is there twice)" in said


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"tensor_model_parallel_size": 3},
            "tensor_model_parallel_size 3 does not divide the base's num_attention_heads 4",
        ),
        ({"pipeline_model_parallel_size": 9}, "pipeline_model_parallel_size 9 is greater than the base's 8 layers"),
    ],
)
def test_mismatched_layouts_are_refused(place: Path, tmp_path: Path, sizes: dict[str, int], expected: str) -> None:
    from megatron_spec.config import ParallelConfig

    message = convert(place, tmp_path / "out", {"capture_layer_ids": [0, 3, 6]}, parallel=ParallelConfig(**sizes))
    assert expected in message


def test_indivisible_draft_keys_are_refused(place: Path) -> None:
    from megatron_spec.config import ParallelConfig
    from megatron_spec.config.presets import eagle_config
    from megatron_spec.families import read_base_config
    from megatron_spec.planning.layouts import check_draft_parallel

    base = read_base_config(place / "base").replace(vocab_size=96)
    sizes = {"capture_layer_ids": [0], "num_attention_heads": 3, "num_key_value_heads": 1}
    message = in_process(
        check_draft_parallel, eagle_config(base, overrides=sizes), ParallelConfig(tensor_model_parallel_size=3)
    )
    assert "num_key_value_heads 1 x head_dim 8" in message
    check_draft_parallel(
        eagle_config(base, overrides={**sizes, "head_dim": 6}), ParallelConfig(tensor_model_parallel_size=3)
    )


def finetune(place: Path, tmp_path: Path, **changes: Any) -> str:
    from megatron_spec.commands.finetune import FinetuneRun
    from megatron_spec.commands.finetune import finetune as run
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    values: dict[str, Any] = dict(
        load=str(place / "draft"), save=str(tmp_path / "run"), data=str(place / "train.jsonl"),
        train=TrainConfig(train_iters=1), objective=ObjectiveConfig(), parallel=ParallelConfig(), seq_length=64,
    )  # fmt: skip
    return in_process(run, FinetuneRun(**{**values, **changes}))


def test_missing_checkpoint_and_data(place: Path, tmp_path: Path) -> None:
    assert "no such folder" in finetune(place, tmp_path, load=str(tmp_path / "nothing"))
    assert "no such file" in finetune(place, tmp_path, data=str(tmp_path / "nothing.jsonl"))
    assert "is a folder, expected a file" in finetune(place, tmp_path, data=str(tmp_path))


def test_sequence_beyond_the_base(place: Path, tmp_path: Path) -> None:
    assert "max_position_embeddings 256" in finetune(place, tmp_path, seq_length=512)


def test_another_base_is_refused(place: Path, tmp_path: Path) -> None:
    from tests.tiny import save_llama

    shutil.copytree(place / "base", tmp_path / "other")
    config = json.loads((place / "base" / "config.json").read_text())
    save_llama(tmp_path / "other", vocab_size=config["vocab_size"], initializer_range=0.05)
    message = run_world(1, finetune_message, str(place), str(tmp_path))[0]
    assert "is not the base this draft was made for" in message


def finetune_message(place: str, tmp_path: str) -> str:
    return finetune(Path(place), Path(tmp_path), base=f"{tmp_path}/other")


def test_output_of_another_run_is_not_overwritten(place: Path, tmp_path: Path) -> None:
    from megatron_spec.commands.convert import convert as run

    assert "not empty" in in_process(run, str(place / "base"), str(place / "draft"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("do not lose me")
    assert "not empty" in finetune(place, tmp_path)
    assert (tmp_path / "run" / "thesis.tex").read_text() == "do not lose me"


def test_quantising_twice_is_refused(place: Path, tmp_path: Path) -> None:
    from megatron_spec.commands.quantize import quantize

    shutil.copytree(place / "draft", tmp_path / "quantised")
    path = tmp_path / "quantised" / "iter_0000000" / "spec.json"
    spec = json.loads(path.read_text())
    spec["quant"] = {"base": "fp8", "draft": "fp8"}
    path.write_text(json.dumps(spec))
    message = in_process(quantize, str(tmp_path / "quantised"), str(tmp_path / "q"), str(place / "train.jsonl"))
    assert "quantised already" in message
    assert "did you mean 'fp8'" in in_process(
        quantize, str(place / "draft"), str(tmp_path / "q"), str(place / "train.jsonl"), policy="fp88"
    )


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        ("generate", ("--base", "b", "--output", "o", "--batch-size", 0), "batch_size must be at least 1, found 0"),
        ("generate", ("--base", "b", "--output", "o", "--temperature", -1), "temperature must be at least 0"),
        ("generate", ("--base", "b", "--output", "o", "--max-draft-len", 5), "without --load there is none"),
        ("validate", ("--load", "d", "--num-prompts", 0), "--num-prompts: must be at least 1, found 0"),
        ("validate", ("--load", "d", "--max-draft-len", "2,x"), "expected numbers separated by commas, found '2,x'"),
        (
            "offline_feature_extract",
            ("--load", "d", "--output-dir", "o", "--part", "3"),
            "expected I/N with 0 <= I < N",
        ),
        ("offline_feature_extract", ("--load", "d", "--output-dir", "o", "--micro-batch-size", 0), "at least 1"),
        ("quantize", ("--load", "d", "--save", "o", "--calib-samples", -5), "must be at least 1, found -5"),
        ("quantize", ("--load", "d", "--save", "o", "--loss", "kl"), "unknown argument --loss"),
        ("finetune", ("--load", "d", "--save", "o", "--train-iters", 1, "--save-interval", -1), "save_interval"),
        ("finetune", ("--load", "d", "--save", "o"), "give one of --train-iters and --train-epochs: found neither"),
        ("finetune", ("--load", "d", "--save", "o", "--train-iters", 1, "--train-epochs", 1), "epochs: found both"),
    ],
)
def test_invalid_numbers_and_flags_are_refused(script: str, flags: tuple[object, ...], expected: str) -> None:
    assert expected in refuse(script, "--data", "x.jsonl", *flags)


def test_quantisation_policy_from_a_file(tmp_path: Path) -> None:
    from megatron_spec.commands.quantize import PRESETS, quant_policy

    file = tmp_path / "quant.json"

    def policy(fields: Any) -> Any:
        file.write_text(json.dumps(fields))
        return quant_policy(str(file))

    found = policy({"base": "none", "exclude": ["*lm_head*", "*down_proj"], "clipped_ste": True})
    assert (found.base, found.draft, found.clipped_ste) == ("none", "fp8", True)
    assert found.exclude == ("*lm_head*", "*down_proj")
    assert policy({}) == PRESETS["fp8"] == quant_policy("fp8")
    assert "did you mean 'exclude'" in in_process(policy, {"exclud": []})
    assert str(file) in in_process(policy, {"exclude": "*fc"})
    for name, text in (
        ("q.json", '{"exclude_base": ["*a"], "exclude_base": ["*b"]}'),
        ("q.yaml", 'exclude_base: ["*a"]\nexclude_base: ["*b"]\n'),
    ):  # what the first of them excludes was quantised
        (tmp_path / name).write_text(text)
        assert "'exclude_base' is there twice" in in_process(quant_policy, str(tmp_path / name))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "2"),
        ('{"conversations": [{"role": "user", "content": "hi"}', "JSON"),
        ('{"conversations": [{"role": "user", "content": "hi"}]}', "assistant"),
        ('{"conversations": [{"role": "usr", "content": "hi"}]}', "usr"),
        ('{"chat": []}', "conversations"),
    ],
)
def test_bad_data_names_file_and_line(place: Path, tmp_path: Path, line: str, expected: str) -> None:
    from megatron_spec.commands.data import open_dataset

    good = (place / "train.jsonl").read_text().splitlines()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([good[0], line, good[1]]) + "\n")
    message = in_process(open_dataset, str(data), str(place / "base"), 64)
    assert str(data) in message and "2" in message and expected in message


def test_a_failing_rank_is_an_error_not_a_hang(place: Path, tmp_path: Path) -> None:
    flags = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    sizes = ("--load", place / "base", "--save", tmp_path / "x", *flags)
    done = run_script("convert_model", *sizes, processes=2, timeout=120, fresh=True)
    assert done.returncode != 0
    assert done.stderr.count("2 processes cannot hold") == 1, "both ranks know it, one says it"


def one_step(place: Path, save: Path) -> tuple[object, ...]:
    """A run of finetune.py that ends after its first step."""
    return (
        "finetune", "--load", place / "draft", "--save", save, "--data", place / "train.jsonl", "--train-iters", 1,
        "--micro-batch-size", 1, "--global-batch-size", 1, "--seq-length", 64,
    )  # fmt: skip


def test_transformer_engine_is_imported_only_where_a_flag_names_it(place: Path, tmp_path: Path) -> None:
    inner = tmp_path / "transformer_engine" / "pytorch"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("raise OSError('libcudart.so.99:\\ncannot open')")
    flags = one_step(place, tmp_path / "s")
    done = run_script(*flags, "--optimizer-impl", "transformer_engine", search_path=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "libcudart.so.99: cannot open" in done.stderr and "pip install 'transformer-engine" in done.stderr
    done = run_script(*flags, search_path=tmp_path)
    assert done.returncode == 0, done.stderr
    order = "the first of Transformer Engine (not loaded: no flag names it), apex ("
    assert order in done.stderr and "optimizer: Adam of torch, gradient norm of torch" in done.stderr


def test_an_apex_that_cannot_run_is_refused_only_where_it_is_asked_for(place: Path, tmp_path: Path) -> None:
    """A package without its extension: megatron-core's import of it succeeds, and its first use fails."""
    parts = {"optimizers": "class FusedAdam: ...\nclass FusedSGD: ...", "multi_tensor_apply": ""}
    for name, text in parts.items():
        (tmp_path / "apex" / name).mkdir(parents=True)
        (tmp_path / "apex" / name / "__init__.py").write_text(text)
    (tmp_path / "apex" / "__init__.py").write_text("")
    flags = one_step(place, tmp_path / "s")
    done = run_script(*flags, "--optimizer-impl", "apex", search_path=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--optimizer-impl apex: apex cannot be used here: " in done.stderr
    done = run_script(*flags, search_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Adam of torch, gradient norm of torch, weight gradients of torch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--basemodel", "x"], "unknown option --basemodel"),
        (["--base_model"], "needs a value"),
        (["--base_model", "nowhere"], "no such folder"),
        (["--data", "nowhere.jsonl"], "no such file"),
        (["--tp", "2"], "needs at least 2 GPUs"),
        (["--algorithm", "eagle2"], "train eagle1, decode with validate.py --use-dynamic-tree"),
        (["--algorithm", "eagle4"], "expected eagle3, eagle3.1, eagle1, eagle-mtp, mtp-from-base, p-eagle, medusa"),
        (["--algorithm", "mtp-from-base", "--draft_vocab", "64"], "--draft_vocab with --algorithm mtp-from-base"),
        (["--algorithm", "medusa", "--draft_vocab", "64"], "--draft_vocab with --algorithm medusa"),
        (["--algorithm", "dspark", "--step_decay", "0.5"], "--step_decay with --algorithm dspark"),
        (["--eagle_config", "nowhere.json"], "nowhere.json: no such file"),
        (["--recipe", "short"], "--recipe needs --base_model"),
        (["--base_model", "x", "--recipe", "long"], "--recipe long: expected paper or short"),
        (
            ["--base_model", "x", "--recipe", "short", "--algorithm", "medusa"],
            "--recipe short is for --algorithm eagle3",
        ),
        (["--synthesize", "9", "--num_prompts", "9"], "leave --num_prompts out, or give --prompts"),
        (["--data", "x.jsonl", "--synthesize", "9"], "leave --synthesize and --prompts out"),
        (["--data", "x.jsonl", "--num_prompts", "9"], "--data is read whole: leave --num_prompts out"),
        (["--data", "x.jsonl", "--temperature", "1"], "--data has answers: leave --temperature and"),
        (["--data", "x.jsonl", "--max_new_tokens", "9"], "and --max_new_tokens out"),
        (["--data", ""], "--data needs a value"),
        (["--base_model", "x", "--recipe", "short", "--num_prompts", "9"], "says how many questions are written"),
        (["--ttt_steps", "1", "--step_decay", "0.5"], "--step_decay does nothing with --ttt_steps 1"),
        (["--algorithm", "p-eagle", "--ttt_steps", "1"], "--ttt_steps 1: p-eagle proposes several tokens"),
        (["--loss", "ce_l1"], "--loss ce_l1 is for dflash and dspark, found eagle3"),
        (["--qat_iters", "some"], "--qat_iters some: expected a number"),
        (
            ["--base_model", ".", "--recipe", "short", "--synthesize", "x"],
            "--synthesize x: expected a positive integer",
        ),
        (["--num_gpu", "x"], "--num_gpu x: expected a positive integer"),
        (["--train_iters", "0"], "--train_iters 0: expected a positive integer"),
        (["--draft_len", "three"], "--draft_len three: expected a positive integer"),
        (["--lr", "1e-"], "--lr 1e-: expected a number"),
        (["--output", "/dev/null"], "--output /dev/null cannot be written"),
    ],
)
def test_one_command_chain_refuses_before_setup(arguments: list[str], expected: str) -> None:
    script = SCRIPTS / "train_eagle3_and_export.sh"
    done = subprocess.run(["bash", str(script), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and expected in done.stderr


def test_fast_paths_that_need_a_gpu(place: Path, tmp_path: Path) -> None:
    flags = ("--load", place / "draft", "--save", tmp_path / "s", "--data", place / "train.jsonl", "--train-iters", 1)
    assert "there is no GPU" in refuse("finetune", *flags, "--seq-length", 64, "--draft-fp8")
    message = refuse("finetune", *flags, "--seq-length", 64, "--transformer-impl", "transformer_engine")
    assert "Transformer Engine is not installed" in message or "needs a GPU" in message
    assert not (tmp_path / "s").exists()
