"""Training on stored features without base layers: equal to online, under any layout, refused when it does not fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from tests.functional_tests.script_helpers import ROOT, environment, make_base, write_conversations
from tests.worlds import run_world

STEPS = 4


def tune(
    root: str, save: str, iterations: int = STEPS, store: str | None = "store", tp: int = 1, pp: int = 1,
    packing: bool = False, cache: str | None = None,
) -> list[float]:  # fmt: skip
    """The losses of one run, on features from disk or (None) of the base."""
    from megatron.core import parallel_state

    import megatron_spec.build as build
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    parallel_state.destroy_model_parallel()
    train = TrainConfig(
        train_iters=iterations, global_batch_size=4, micro_batch_size=1, lr=3e-3, lr_decay_style="constant",
        packing=packing,
    )  # fmt: skip
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=tp > 1)
    data, offline = (f"{root}/train.jsonl", None) if store is None else (None, f"{root}/{store}")
    run = FinetuneRun(
        f"{root}/draft", f"{root}/{save}", data, train, ObjectiveConfig(ttt_steps=2), parallel=parallel,
        offline_data=offline, seq_length=96 if store is None else None, feature_cache=cache and f"{root}/{cache}",
    )  # fmt: skip
    original = build.load_exported_base
    if store is not None:
        build.load_exported_base = None  # type: ignore[assignment]  # the layers must not even be asked for
    try:
        assert finetune(run)
    finally:
        build.load_exported_base = original
    return [json.loads(line)["loss"] for line in Path(root, save, "metrics.jsonl").read_text().splitlines()]


def one_rank(root: str) -> dict[str, Any]:
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.features import extract_features

    convert(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")
    common: dict[str, Any] = dict(seq_length=96, micro_batch_size=2)
    extract_features(f"{root}/draft", f"{root}/begun", f"{root}/train.jsonl", part=(1, 2), **common)
    with pytest.raises(UserError, match="started with other settings"):
        extract_features(f"{root}/draft", f"{root}/begun", f"{root}/other.jsonl", **common)
    for i in (1, 0):  # two jobs of an array, in any order
        extract_features(f"{root}/draft", f"{root}/store", f"{root}/train.jsonl", part=(i, 2), **common)
    extract_features(
        f"{root}/draft", f"{root}/fp8", f"{root}/train.jsonl", features_dtype="float8_e4m3fn", **common
    )  # fmt: skip
    other = {**common, "features_dtype": "float8_e4m3fn", "bf16": True}
    with pytest.raises(UserError, match=r"other settings .computed: found 'float32', expected 'bfloat16'"):
        extract_features(f"{root}/draft", f"{root}/fp8", f"{root}/train.jsonl", **other)
    found = {
        "online": tune(root, "online", store=None), "offline": tune(root, "offline"),
        "fp8": tune(root, "fp8_run", store="fp8"),
    }  # fmt: skip
    found["packed online"] = tune(root, "packed_online", 2, store=None, packing=True)
    found["packed offline"] = tune(root, "packed_offline", 2, packing=True)
    found["packed cache"] = tune(root, "packed_cache", 2, store=None, packing=True, cache="cache")
    tune(root, "halves", STEPS // 2)
    found["halves"] = tune(root, "halves")
    return found


def four_ranks(root: str) -> dict[str, Any]:
    """Extraction and training under another layout each."""
    from megatron.core import parallel_state

    from megatron_spec.commands.features import extract_features
    from megatron_spec.config import ParallelConfig

    parallel_state.destroy_model_parallel()
    parallel = ParallelConfig(pipeline_model_parallel_size=2, context_parallel_size=2)
    extract_features(
        f"{root}/draft", f"{root}/spread", f"{root}/train.jsonl", seq_length=96, micro_batch_size=2, parallel=parallel
    )
    return {
        "tp2 pp2": tune(root, "tp2_pp2", store="spread", tp=2, pp=2),
        "packed tp2 pp2": tune(root, "packed_tp2_pp2", 2, store="spread", tp=2, pp=2, packing=True),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("offline")
    make_base(root / "base")
    long = write_conversations(root / "train.jsonl", 18).read_text(encoding="utf-8")
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"messages": [{**short[0], "content": f"{i}"}, short[1]]}) + "\n" for i in range(18)]
    (root / "train.jsonl").write_text(long + "".join(lines), encoding="utf-8")  # 36: three shards
    (root / "other.jsonl").write_text("".join(lines) + long, encoding="utf-8")  # as many
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    found = run_world(1, one_rank, str(root))[0]
    return root, {**found, **run_world(4, four_ranks, str(root))[0]}


def test_offline_equals_online(runs: tuple[Path, dict[str, list[float]]]) -> None:
    _, found = runs
    assert found["offline"] == pytest.approx(found["online"], rel=1e-5)
    assert found["halves"] == found["offline"], "resume is exact"
    assert found["tp2 pp2"] == pytest.approx(found["online"], rel=1e-5)


def test_packed_rows_of_stored_features_equal_online_ones(runs: tuple[Path, dict[str, list[float]]]) -> None:
    _, found = runs
    assert found["packed online"] != pytest.approx(found["online"][:2], rel=1e-3), "several conversations in a row"
    for name in ("packed offline", "packed cache", "packed tp2 pp2"):
        assert found[name] == pytest.approx(found["packed online"], rel=1e-5), name


def test_fp8_features_are_close(runs: tuple[Path, dict[str, list[float]]]) -> None:
    root, found = runs
    assert found["fp8"] == pytest.approx(found["online"], rel=2e-2) and found["fp8"] != found["offline"]
    sizes = [sum(p.stat().st_size for p in (root / n).glob("*.safetensors")) for n in ("fp8", "store")]
    assert sizes[0] < 0.4 * sizes[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offline_data": None}, "give one of --data and --offline-data .* found neither"),
        ({"data": "train.jsonl"}, "found both"),
        ({"seq_length": 32}, "were cut to 96"),
        ({"tokenizer": "base"}, "--tokenizer with --offline-data"),
        ({"offline_data": "draft"}, "has no features"),
    ],
)
def test_invalid_input_is_refused(
    runs: tuple[Path, dict[str, list[float]]], changes: dict[str, Any], message: str
) -> None:
    from megatron_spec.commands.finetune import FinetuneRun, resolve
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    root, _ = runs
    values: dict[str, Any] = {"data": None, "offline_data": "store", **changes}
    for name in ("data", "offline_data"):
        values[name] = values[name] and f"{root}/{values[name]}"
    with pytest.raises(UserError, match=message):
        resolve(FinetuneRun(
            f"{root}/draft", f"{root}/new", train=TrainConfig(train_iters=1), objective=ObjectiveConfig(),
            parallel=ParallelConfig(), **values,
        ))  # fmt: skip


def test_features_of_another_base_are_refused(runs: tuple[Path, dict[str, list[float]]]) -> None:
    from megatron_spec.features.store import FeatureStore

    root, _ = runs
    shutil.copytree(root / "store", root / "foreign")
    manifest = root / "foreign" / "manifest.json"
    fingerprint = json.loads(manifest.read_text())["base_fingerprint"]
    manifest.write_text(manifest.read_text().replace(fingerprint, "sha256:0"))
    with pytest.raises(UserError, match="do not match this run"):
        FeatureStore(root / "foreign", {"base_fingerprint": fingerprint})


def test_one_command_trains_on_either(runs: tuple[Path, dict[str, list[float]]]) -> None:
    """launch_train.sh: converts, counts the steps of an epoch, trains on stored features."""
    root, _ = runs
    script = ["bash", str(ROOT / "examples" / "post_training" / "launch_train.sh")]
    done = subprocess.run(
        [
            *script, "--model", f"{root}/base", "--offline-data", f"{root}/store", "--output_dir", f"{root}/launched",
            "--num_gpu", "0", "--num_epochs", "1", "--batch", "16", "--eagle_config", f"{root}/eagle.json",
            "--", "--ttt-steps", "2",
        ], capture_output=True, text=True, env=environment(PYTHON=sys.executable),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epochs: 1 of 36 rows, 16 a step: 3 steps" in done.stderr
    assert (root / "launched" / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    here = ["--model", str(root / "base"), "--output_dir", str(root / "never")]
    for flags, message in (
        (["--data", "d", "--offline-data", "f"], "includes its conversations: --data d is not read"),
        (["--offline-data", f"{root}/store", "--algorithm", "eagle2"], "EAGLE-2 is EAGLE-1 decoded"),
        (["--data", "d", "--algorithm", "eagle4"], "--algorithm eagle4: expected eagle3, eagle3.1"),
        (["--data", "d", "--algorithm", "mtp-from-base", "--draft_vocab", "v"], "takes the base's module unchanged"),
        (["--data", "d", "--algorithm", "medusa", "--eagle_config", "e"], "--eagle_config: Medusa heads have none"),
        (["--offline-data", f"{root}/store", "--eval_interval", "3"], "--eval_interval does nothing without"),
        (["--data", f"{root}/train.jsonl", "--eval_data", "no"], "--eval_data no: no such file"),
        ([], "give --data or --offline-data"),
        (["--data", "d"], "--data d: no such file"),
        (["--offline-data", str(root)], "has no features"),
        (["--data", "d", "--num_gpu", "two"], "--num_gpu two: expected a positive integer"),
        (["--data", "d", "--tp", "0"], "--tp 0: expected a positive integer"),
    ):
        refused = subprocess.run([*script, *here, *flags], capture_output=True, text=True)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert not (root / "never").exists()


def test_one_command_trains_a_block_draft_and_asks_held_out_prompts(runs: tuple[Path, dict[str, list[float]]]) -> None:
    """launch_train.sh --data with the command line of the page: no interpreter named, a hint where no prompts are."""
    root, _ = runs
    (root / "block.json").write_text(json.dumps({"mask_token_id": 3, "block_size": 3, "num_hidden_layers": 1}))
    done = subprocess.run(
        [
            "bash", str(ROOT / "examples" / "post_training" / "launch_train.sh"), "--model", f"{root}/base", "--data",
            f"{root}/train.jsonl", "--output_dir", f"{root}/blocks", "--num_gpu", "0", "--batch", "36", "--algorithm",
            "dflash", "--eagle_config", f"{root}/block.json", "--eval_data", f"{root}/train.jsonl", "--eval_interval",
            "1", "--", "--seq-length", "64", "--eval-prompts", "2", "--eval-tokens", "4", "--eval-draft-len", "2",
        ], capture_output=True, text=True, env=environment(), cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (root / "blocks" / "run" / "best").exists()
