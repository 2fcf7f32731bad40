"""launch_train.sh and train_eagle3_and_export.sh: the commands for each algorithm, with a stand-in for Python."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.script_helpers import make_base, succeed, write_conversations

SCRIPTS = Path(__file__).resolve().parents[3] / "examples" / "post_training"
STAND_IN = """#!/bin/bash
if [ "$1" = -c ]; then # the question whether torch sees a GPU, or flags to be checked
  [ -z "${CHECKS:-}" ] || [[ $2 != *parse_args* ]] || exec "$CHECKS" "$@"
  exit 0
fi
printf '%q ' "$@" >> "$STARTED"; echo >> "$STARTED"
"""
ALGORITHMS = {
    # --algorithm: (algorithm, eagle_algorithm, mtp_from_base) of convert_model.py, policy of quantize.py
    **{name: (("eagle", name, None), "fp8") for name in ("eagle1", "eagle3", "eagle3.1", "eagle-mtp", "p-eagle")},
    "mtp-from-base": (("eagle", "eagle-mtp", True), "fp8_base_only"),
    **{name: ((name, None, None), "fp8") for name in ("medusa", "dflash", "dspark")},
}


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Run one of the two scripts from another folder; returns (exit code, stderr, script -> its settings, parsed)."""
    for name in ("python3", "python"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    for name in ("base", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "train.jsonl").write_text("")

    def run(script: str, *arguments: str, data: str = "train.jsonl") -> tuple[int, str, list[tuple[str, Any]]]:
        log = tmp_path / "started"
        log.write_text("")
        found = {**os.environ, "STARTED": str(log), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        words = ["bash", str(SCRIPTS / script), *arguments, *(["--data", data] if data else []), "--num_gpu", "1"]
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, env={**found, "PYTHON": str(tmp_path / "python")}
        )
        run.started = started = [shlex.split(line) for line in log.read_text().splitlines()]  # type: ignore[attr-defined]
        settings = [(Path(w[0]).stem, settings_of(w)) for w in started if Path(w[0]).parent == SCRIPTS]
        return done.returncode, done.stderr, settings

    return run


def settings_of(words: list[str]) -> Any:
    """The settings that a script parses from its command line; the test fails if it refuses them."""
    spec = importlib.util.spec_from_file_location("script", words[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parser().parse_args(words[1:]).run


def kind(run: Any) -> tuple[Any, ...]:
    return run.algorithm, run.eagle_algorithm, run.mtp_from_base


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm(start: Any, tmp_path: Path, algorithm: str) -> None:
    asked, policy = ALGORITHMS[algorithm]
    code, said, started = start("launch_train.sh", "--model", "base", "--output_dir", "out", "--algorithm", algorithm)
    assert code == 0 and [name for name, _ in started] == ["convert_model", "finetune"], said
    assert kind(started[0][1]) == asked and started[1][1].load == "out/draft"
    chain = ("--base_model", "base", "--output", "chain", "--algorithm", algorithm)
    code, said, started = start("train_eagle3_and_export.sh", *chain)
    assert code == 0, said
    assert [name for name, _ in started] == [
        "convert_model", "finetune", "export", "validate", "quantize", "finetune", "export", "validate"
    ]  # fmt: skip
    assert kind(started[0][1]) == asked and started[4][1].policy == policy
    assert {run.draft_lens for name, run in started if name == "validate"} == {None}  # as the draft allows
    code, said, started = start("train_eagle3_and_export.sh", *chain, "--draft_len", "3")
    served = 3 if algorithm in ("eagle3", "eagle3.1", "p-eagle", "dflash", "dspark") else None  # export.py refuses more
    assert [run.max_draft_len for name, run in started if name == "export"] == [served] * 2, said
    assert f"python {SCRIPTS.parents[1]}/tools/prepare_conversations.py mt_bench" in said


def test_a_folder_keeps_its_draft(start: Any, tmp_path: Path) -> None:
    """When started again, equal options resume, others are refused; a given draft is used unchanged."""
    arguments = ("launch_train.sh", "--model", "base", "--output_dir", "out")
    assert start(*arguments)[0] == 0
    draft = tmp_path / "out" / "draft"
    draft.mkdir()
    (draft / "latest_checkpointed_iteration.txt").write_text("0")  # what convert_model.py would have left
    code, _, started = start(*arguments)
    assert code == 0 and [name for name, _ in started] == ["finetune"]
    (tmp_path / "other").mkdir()
    (tmp_path / "draft.json").write_text("{}")
    changed = (
        ("--algorithm", "medusa"),
        ("--model", "other"),
        ("--draft_vocab", "base"),
        ("--eagle_config", "draft.json"),
    )
    for words in changed:
        code, said, started = start(*arguments, *words)
        assert (
            code == 2
            and not started
            and "was made with other options (recorded " in said
            and "): choose another --output_dir" in said
        )
    (tmp_path / "out" / "draft.options").unlink()
    assert "--eagle_config and --draft_vocab do nothing" in start(*arguments, *changed[2])[1]
    code, said, started = start(*arguments)
    assert code == 0 and len(started) == 1 and "--model and --algorithm are not read" in said


def test_values_are_given_once(start: Any) -> None:
    """An empty value, of a variable that is not set, did not count; the first of two was dropped without a word."""
    for name in ("--data", "--draft_vocab", "--eagle_config"):
        code, said, started = start("launch_train.sh", "--model", "base", "--output_dir", "out", name, "")
        assert code == 2 and not started and f"{name} needs a value" in said
    model = ("--model", "base", "--output_dir", "out")
    code, said, _ = start("launch_train.sh", *model, "--num_epochs", "1", "--num_epochs", "2")
    assert code == 0 and "--num_epochs 2 replaces the one given before it" in said
    code, said, started = start(
        "train_eagle3_and_export.sh", "--ttt_steps", "1", "--base_model", "base", "--output", "o"
    )
    assert code == 0 and "replaces" not in said
    assert {run.objective.ttt_steps for name, run in started if name == "finetune"} == {1}


def test_chain_validates_again_with_other_settings(start: Any, tmp_path: Path) -> None:
    """When started again, only steps affected by new options run; other training options need another folder."""
    chain = ("train_eagle3_and_export.sh", "--base_model", "base", "--output", "chain")
    assert len(start(*chain)[2]) == 8
    assert start(*chain)[::2] == (0, [])
    code, _, started = start(*chain, "--eval_prompts", "5")
    assert code == 0 and [(name, run.num_prompts) for name, run in started] == [("validate", 5)] * 2
    code, _, started = start(*chain, "--eval_prompts", "5", "--draft_len", "5")
    assert code == 0 and [name for name, _ in started] == ["export", "validate"] * 2
    assert {run.max_draft_len for name, run in started if name == "export"} == {5}
    code, said, started = start(*chain, "--lr", "1e-3")
    assert code == 2 and not started
    assert "holds a run with other options (recorded lr=1e-4, given lr=1e-3): choose" in said
    asked = tmp_path / "asked.jsonl"
    for text in ("one", "two"):
        asked.write_text(text)
        code, _, started = start(*chain, "--heldout", str(asked))
        assert code == 0 and [name for name, _ in started if name == "validate"] == ["validate"] * 2
    (tmp_path / "train.jsonl").write_text("{}\n")
    code, said, started = start(*chain, "--heldout", str(asked))
    assert code == 2 and not started and "holds a run with other options" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--loss", "l2"), "finetune.py: error: argument --loss: invalid choice: 'l2'"),
        (("--step_decay", "2"), "step_decay must be in (0, 1], found 2.0"),
        (("--beta2", "1"), "adam_beta2 must be in [0, 1), found 1.0"),
        (("--lr", "0"), "lr must be positive, found 0.0"),
        (("--temperature", "1e400"), "generate.py: error: argument --temperature: must be finite"),
        (("--seq_length", "300"), "--seq_length 300: the base has 256 positions"),
        (("--algorithm", "medusa", "--draft_len", "5"), "this medusa draft proposes at most 4 tokens"),
        (("--algorithm", "p-eagle", "--draft_len", "8"), "this p-eagle draft proposes at most 7 tokens"),
    ],
)
def test_values_are_refused_before_anything_is_generated(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    """And before the options are recorded: the next command may give others."""
    monkeypatch.setenv("CHECKS", sys.executable)
    (tmp_path / "base" / "config.json").write_text('{"max_position_embeddings": 256}')
    length = () if "--seq_length" in words else ("--seq_length", "256")
    chain = ("train_eagle3_and_export.sh", "--base_model", "base", "--output", "new", *length)
    data = "" if "--temperature" in words else "train.jsonl"
    code, said, started = start(*chain, *words, data=data)
    assert code == 2 and not started and expected in said and "Traceback" not in said, said
    assert not (tmp_path / "new").exists()


def test_short_recipe(start: Any, tmp_path: Path) -> None:
    """Own questions, late captures, a frozen head, T = 4, a lookup, no fp8; given options count."""
    chain = ("train_eagle3_and_export.sh", "--base_model", "base", "--recipe", "short", "--output")
    code, said, started = start(*chain, "chain", data="")
    assert code == 0, said
    assert [name for name, _ in started] == [
        "generate", "convert_model", "finetune", "export", "validate", "validate"
    ]  # fmt: skip
    generate, convert, finetune, export, alone, lookup = (run for _, run in started)
    assert (generate.synthesize, generate.decode.max_new_tokens, generate.data) == (24576, 192, None)
    assert json.loads(Path(convert.eagle_config).read_text()) == {"capture_layer_ids": "late", "frozen_head": True}
    train, objective = finetune.train, finetune.objective
    assert (train.train_iters, train.global_batch_size, train.lr, train.packing) == (1997, 32, 1e-3, False)
    assert (objective.ttt_steps, objective.loss, finetune.seq_length) == (4, "soft_ce", 384)
    assert train.micro_batch_size == 32
    assert objective.step_weights is objective.step_decay is None
    assert export.max_draft_len == 4 and alone.draft_lens == lookup.draft_lens == (4,)
    assert (alone.decode.sa_threshold, lookup.decode.sa_threshold) == (None, 2)
    given = ("--train_iters", "7", "--qat_iters", "3", "--step_decay", "0.9")
    code, said, started = start(*chain, "other", *given, data="train.jsonl")
    assert code == 0, said
    assert {run.objective.step_decay for name, run in started if name == "finetune"} == {0.9}
    assert [name for name, _ in started if name in ("generate", "quantize")] == ["quantize"]
    assert started[1][1].train.train_iters == 7 and started[1][1].objective.ttt_steps == 4
    (tmp_path / "train.jsonl").write_text("{}\n" * 640)
    code, said, started = start(*chain, "third", data="train.jsonl")
    assert code == 0 and started[1][1].train.train_iters == 53, said  # 2.6 passes in steps of 32


def test_own_prompts_beside_made_up_questions(start: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}\n" * 320)
    chain = ("train_eagle3_and_export.sh", "--base_model", "base", "--recipe", "short", "--output")
    asked = str(tmp_path / "prompts.jsonl")
    for name, more, numbers in (
        ("both", ("--synthesize", "320"), (320, 1000000, 53)),
        ("some", ("--synthesize", "320", "--num_prompts", "160"), (320, 160, 40)),
        ("own", ("--temperature", "0.6"), (None, 1000000, 27)),
    ):
        code, said, started = start(*chain, name, "--prompts", asked, *more, data="")
        assert code == 0, said
        generate, _, finetune = (run for _, run in started[:3])
        assert generate.data == asked
        assert (generate.synthesize, generate.num_prompts, finetune.train.train_iters) == numbers
        assert generate.decode.temperature == (0.6 if more[:1] == ("--temperature",) else 0.0)


def test_short_recipe_on_a_tiny_base(start: Any, tmp_path: Path) -> None:
    """Its commands one after the other, with smaller numbers: each accepts what the last one wrote."""
    base = make_base(tmp_path / "tiny", num_hidden_layers=6)
    questions = write_conversations(tmp_path / "questions.jsonl", 3)
    small = [
        "--synthesize", 6, "--draft_vocab", 64, "--train_iters", 2, "--batch", 16, "--seq_length", 96,
        "--eval_tokens", 8, "--max_new_tokens", 16, "--heldout", questions,
    ]  # fmt: skip
    chain = (
        "train_eagle3_and_export.sh",
        "--base_model",
        str(base),
        "--recipe",
        "short",
        "--output",
        str(tmp_path / "o"),
    )
    code, said, _ = start(*chain, *map(str, small), data="")
    assert code == 0, said
    for script, *words in start.started:
        if Path(script).stem != "plot_run":
            said = succeed(script, *words)
    assert "acceptance length bf16" in said and "acceptance length with a lookup" in said
    draft = json.loads((tmp_path / "o" / "export_bf16" / "draft" / "config.json").read_text())
    assert draft["draft_vocab_size"] == 64


@pytest.mark.parametrize("name", ["vocab", "draft", "finetuned", "export"])
def test_folders_of_others_are_not_removed(start: Any, tmp_path: Path, name: str) -> None:
    """README's chain makes folders of these names; the stages remove theirs before they make them."""
    (tmp_path / "mine" / name).mkdir(parents=True)
    (tmp_path / "mine" / name / "weights").touch()
    code, said, started = start("train_eagle3_and_export.sh", "--base_model", "base", "--output", "mine")
    assert code == 2 and not started and f"error: mine/{name} is there, and no run of this script made it" in said
    assert [p.name for p in (tmp_path / "mine").rglob("*")] == [name, "weights"]
    code, said, started = start("train_eagle3_and_export.sh", "--base_model", "base", "--output", "")
    assert code == 2 and not started and "--output needs a value" in said


@pytest.mark.parametrize(
    ("recorded", "expected"), [(None, (True, False)), ("--bf16", (True, True)), ("", (False,) * 2)]
)
def test_a_run_on_a_cpu_keeps_its_arithmetic(tmp_path: Path, recorded: str | None, expected: tuple[bool, bool]) -> None:
    """On one with bf16 instructions, and on one without."""
    options = tmp_path / "options"
    if recorded is not None:
        options.write_text(f"algorithm=eagle3 recipe= half={recorded} files=\n")
    found, said = [], []
    for name, flags in (("new", "avx2 avx512_bf16 amx_tile"), ("old", "avx2")):
        (tmp_path / name).write_text(f"flags : {flags}\n")
        script = (
            f'set -euo pipefail; . {SCRIPTS}/algorithms.sh; half_of {options} {tmp_path}/{name}; echo "${{half[*]}}"'
        )
        *told, half = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=True
        ).stdout.splitlines()  # fmt: skip
        found.append(half == "--bf16")
        said.append(" ".join(told))
    assert tuple(found) == expected
    assert ("this CPU computes in bf16" in said[0]) == expected[0]
    assert ("began in bf16 and goes on in it" in said[1]) == expected[1]
