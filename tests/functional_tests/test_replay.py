"""generate.py --save-rejections records where the base rejected a draft; finetune.py --replay-weight trains on it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron_spec.commands.convert import convert
from megatron_spec.commands.decode import generate
from megatron_spec.commands.export import export
from megatron_spec.commands.features import extract_features
from megatron_spec.commands.finetune import finetune
from megatron_spec.commands.runs import FinetuneRun, GenerateRun
from megatron_spec.config import DecodeConfig, ObjectiveConfig, TrainConfig, UserError
from megatron_spec.planning.paths import OF_DECODING
from tests.functional_tests.script_helpers import make_base, write_conversations


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    make_base(folder / "base")
    write_conversations(folder / "questions.jsonl", 4)
    convert(str(folder / "base"), str(folder / "draft"))
    generate(asked(folder))
    return folder


def asked(root: Path, output: str = "train.jsonl", **changes: Any) -> GenerateRun:
    decode = DecodeConfig(max_new_tokens=24, **changes.pop("decode", {}))
    values: dict[str, Any] = {"load": str(root / "draft"), "save_rejections": True, "decode": decode, **changes}
    return GenerateRun(str(root / "questions.jsonl"), str(root / output), **values)


def trained(root: Path, save: str, weight: float, **changes: Any) -> Any:
    """Metrics of a run of two steps."""
    train = TrainConfig(train_iters=2, global_batch_size=4, lr=1e-2)
    source = {} if "offline_data" in changes else {"data": str(root / "train.jsonl"), "seq_length": 128}
    objective = ObjectiveConfig(ttt_steps=2, replay_weight=weight)
    values = {"load": str(root / "draft"), "train": train, "objective": objective, **source, **changes}
    finetune(FinetuneRun(save=str(root / save), **values))
    return [json.loads(line) for line in (root / save / "metrics.jsonl").read_text().splitlines()]


def test_recorded_rejections_weigh_more(root: Path) -> None:
    lines = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
    assert all(len(line["rejected"]["turns"]) == 2 for line in lines if not line["truncated"])
    assert any(places for line in lines for places in line["rejected"]["turns"])
    plain, replayed = trained(root, "plain", 1.0), trained(root, "replayed", 4.0)
    assert replayed[0]["loss"] > plain[0]["loss"] and replayed[0]["loss_per_step"] == plain[0]["loss_per_step"]
    assert replayed[1]["loss_per_step"] != plain[1]["loss_per_step"]


def test_fast_paths_are_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At start-up, as in training, each with the reason why it is off."""
    with caplog.at_level(logging.INFO):
        generate(asked(root, "said.jsonl", decode={"cuda_graphs": False}))
        generate(asked(root, "alone.jsonl", load=None, base=str(root / "base"), save_rejections=False, plain=True))
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("fast path")]
    with_draft, alone = said[:8], said[8:]
    assert [line.split()[2] for line in with_draft] == [*OF_DECODING, "draft_decode"]
    assert with_draft[0].endswith(" on") and "off: turned off" in with_draft[6]
    assert [line.split()[2] for line in alone] == list(OF_DECODING)
    assert all(line.endswith("off: --plain turns it off") for line in alone)


def test_refusals(root: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "needs a trained draft": {"load": None, "base": str(root / "base")},
        "those of the lookup": {"decode": {"sa_threshold": 2}},
        "answered with other settings": {"decode": {"max_draft_len": 1}},
    }
    for expected, changes in cases.items():
        with pytest.raises(UserError, match=expected):
            generate(asked(root, **changes) if "answered" in expected else asked(root, "other.jsonl", **changes))
    with pytest.raises(UserError, match=r"answered with other settings \(rejections: found .*, now None\)"):
        generate(asked(root, save_rejections=False))
    assert not (root / "other.jsonl").exists()
    with pytest.raises(UserError, match=r"no line of .* has rejections; write them with generate.py"):
        trained(root, "refused", 2.0, data=str(write_conversations(root / "plain.jsonl", 4)))
    with pytest.raises(UserError, match="--replay-weight with --offline-data"):
        extract_features(str(root / "draft"), str(root / "features"), str(root / "train.jsonl"), seq_length=128)
        trained(root, "refused", 2.0, offline_data=str(root / "features"))
    (root / "block.json").write_text(json.dumps({"mask_token_id": 3, "block_size": 3}))
    convert(str(root / "base"), str(root / "block"), algorithm="dflash", draft_config=str(root / "block.json"))
    with pytest.raises(UserError, match=r"--replay-weight: no effect on dflash"):
        trained(root, "refused", 2.0, load=str(root / "block"))


def test_another_draft_of_the_same_name_is_noticed(root: Path) -> None:
    """Rejections, and lossy text, are the draft's: what another one wrote is not continued."""
    export(str(root / "draft"), str(root / "exported"), extra_modules=True)
    weights, draft = root / "exported" / "draft" / "model.safetensors", str(root / "exported" / "draft")
    given: dict[str, Any] = {"load": None, "base": str(root / "base")}
    lossy = {"speculative_model": draft, "temperature": 1.0, "typical_acceptance": True}
    runs = [
        asked(root, "rejections.jsonl", **given, decode={"speculative_model": draft}),
        asked(root, "lossy.jsonl", **given, decode=lossy, save_rejections=False),
    ]
    for run in runs:
        assert generate(run) == 4 and generate(run) == 0
    save_file({name: value * 2 for name, value in load_file(weights).items()}, weights)
    for run, message in zip(runs, ("rejections: found", "draft: found"), strict=True):
        with pytest.raises(UserError, match=message):
            generate(run)
    alone = asked(root, "lossless.jsonl", decode={}, save_rejections=False)
    generate(alone)
    assert generate(alone.replace(load=None, base=str(root / "base"))) == 0  # its text is the base's, whatever drafts


def test_questions_do_not_depend_on_the_draft(root: Path) -> None:
    """They are drawn by the base alone; only the answers are drafted."""
    alone = {"load": None, "base": str(root / "base"), "save_rejections": False}
    for name, changes in (("with", {}), ("without", alone)):
        given = asked(root, f"{name}.jsonl", **changes)
        generate(given.replace(data=None, synthesize=3))
    found = [(root / f"{name}.jsonl.questions.jsonl").read_bytes() for name in ("with", "without")]
    assert found[0] == found[1]
