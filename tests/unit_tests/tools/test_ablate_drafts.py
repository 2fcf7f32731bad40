"""Drafts compared on a tiny base: a deadline, going on, every row; and the page that is made of it."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ablate_drafts, acceptance_page, compare_data, comparison, draft_kinds
from megatron_spec.config import UserError
from megatron_spec.config.machine import Machine
from megatron_spec.runtime import platform
from megatron_spec.training.optimizer import wrap_ddp
from tests.functional_tests.script_helpers import make_base, write_conversations


def write_questions(path: Path) -> str:
    lines = [{"question_id": i, "turns": ["red sky " * (i + 1)] * (1 + i % 2)} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def results(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def measured(output: Path) -> dict[str, dict]:
    lines = results(output)
    names = [line["name"] for line in lines if line["kind"] == "measured"]
    assert len(names) == len(set(names))
    return {line["name"]: line for line in lines if line["kind"] == "measured"}


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when a draft is prepared for training while an earlier one still holds its gradients."""
    made: list[weakref.ref] = []

    def watched(*args: Any) -> Any:
        assert not [ref for ref in made if ref() is not None]
        ddp = wrap_ddp(*args)
        made.append(weakref.ref(ddp))
        return ddp

    monkeypatch.setattr(comparison, "wrap_ddp", watched)


def test_a_run_that_was_cut_off_goes_on_and_fills_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_at_a_time(monkeypatch)
    monkeypatch.setattr(ablate_drafts, "THRESHOLDS", (3, 5))
    monkeypatch.setattr(ablate_drafts, "WEIGHTS", (1.0, 4.0))
    drafts = ["eagle3", "medusa", "dspark 2 x 5"]
    ablations = ["detached", "late captures, frozen head"]
    base, output = make_base(tmp_path / "base"), tmp_path / "out"
    sets = [write_questions(tmp_path / f"{name}.jsonl") for name in ("qa", "sum")]

    def start(*more: str) -> None:
        flags = [
            "--base", str(base), "--prompts", *sets, "--data", str(write_conversations(tmp_path / "d.jsonl", 12)),
            "--output", str(output), "--seconds", "0.05", "--ablation-seconds", "0.05", "--qat-seconds", "0.05",
            "--few-questions", "2", "--max-new-tokens", "6", "--max-draft-len", "2", "--batch-size", "4",
            "--global-batch-size", "4", "--seq-length", "96", "--draft-vocab-size", "64", "--mask-token-id", "5",
            "--drafters", *drafts, "--ablations", *ablations, *more,
        ]  # fmt: skip
        ablate_drafts.main(ablate_drafts.make_parser().parse_args(flags))

    start("--deadline", "0")
    assert list(measured(output)) == ["NGram"]
    with (output / "results.jsonl").open("a") as file:
        file.write('{"half')
    start("--parts", "drafters", "lengths", "fp8")
    assert not any(name.startswith(("ablation", "equal")) for name in measured(output))
    start("--ablation-seeds", "2")
    found = measured(output)
    wanted = {"NGram", *drafts, "eagle3 tree", "medusa tree", "eagle3 length 4"}
    wanted |= {f"ablation {name}{seed}" for name in ["defaults", *ablations] for seed in ("", " seed 1")}
    wanted |= {f"equal steps {name}" for name in drafts[1:]}
    wanted |= {f"{name} + SA {k}" for name in [*drafts, "equal steps medusa"] for k in ablate_drafts.THRESHOLDS}
    wanted |= {f"replay weight {w}{seed}" for w in (1, 4) for seed in ("", " seed 1")}
    wanted |= {f"{name} fp8 {form}" for name in drafts for form in ("PTQ", "QAT")}
    wanted |= {f"{name} without QAT" for name in drafts}
    assert wanted <= set(found)
    assert all(found[f"{n} without QAT"]["steps"] == found[f"{n} fp8 QAT"]["steps"] for n in drafts)
    assert all(line["identical"] == 1.0 for name, line in found.items() if "fp8" not in name)
    assert len({line["steps"] for name, line in found.items() if name.startswith(("ablation", "equal"))}) == 1
    assert found["replay weight 1"]["steps"] == found["replay weight 4"]["steps"] == found["ablation defaults"]["steps"]
    one, four = (torch.load(output / "drafts" / f"replay_weight_{w}.pt")["weights"] for w in (1, 4))
    assert any(not torch.equal(one[name], four[name]) for name in one)
    [longer] = [line["steps"] for name, line in found.items() if name.startswith("replay none") and "seed" not in name]
    assert longer >= found["replay weight 1"]["steps"]
    assert all(set(line["single_speedup"]) == {"qa", "sum"} for line in found.values())
    assert {found[f"ablation detached{s}"]["seed"] for s in ("", " seed 1")} == {0, 1}
    assert found["ablation defaults"]["accuracy"] != found["ablation defaults seed 1"]["accuracy"]
    with pytest.raises(UserError, match=r"other settings \(lr: found 0.001, now 0.5\)"):
        start("--lr", "0.5")
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{acceptance_page.BEGIN}\nold\n{acceptance_page.END}\nrest\n")
    acceptance_page.write_page([str(output / "results.jsonl")], page)
    text = page.read_text()
    assert text.startswith("# Title\n") and text.endswith("rest\n") and "old" not in text
    for word in (
        "| eagle3 fp8 QAT |",
        "| eagle3 without QAT |",
        "| detached |",
        "each of 2 seeds",
        "**Equal steps**",
        "| medusa tree |",
        "| SA |",
        "| equal steps medusa + SA 5 |",
        "| NGram | none |",
        "| weight 4 |",
        "qa | sum |",
    ):
        assert word in text, word

    acceptance_page.write_page([f"{output / 'results.jsonl'}:ablations"], page)
    assert "| detached |" in page.read_text() and "qa | sum |" not in page.read_text()
    with pytest.raises(UserError, match="no table is called speed; there are drafters, sets"):
        acceptance_page.write_page([f"{output / 'results.jsonl'}:ablations,speed"], page)


def flags_of(tmp_path: Path, *more: str) -> list[str]:
    """A small run."""
    base, data = make_base(tmp_path / "base"), write_conversations(tmp_path / "d.jsonl", 12)
    return [
        "--base", str(base), "--prompts", write_questions(tmp_path / "qa.jsonl"), "--data", str(data),
        "--output", str(tmp_path / "out"), "--few-questions", "2", "--max-new-tokens", "6", "--max-draft-len", "2",
        "--batch-size", "4", "--global-batch-size", "4", "--seq-length", "96", "--draft-vocab-size", "64",
        "--mask-token-id", "5", "--drafters", "medusa", "dspark 1 x 2 kv 4", "dflash 1 x 3", "--ablations", "detached",
        *more,
    ]  # fmt: skip


def test_settings_of_training_and_sampled_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting changes what is trained; sampled figures join the greedy ones of an earlier call."""
    monkeypatch.setitem(draft_kinds.ABLATIONS, "D = 32", {"vocab": 32})
    changed = ["decay 0.8", "loss lk_hybrid", "weight decay 0.1", "D = 32", "five captures"]
    output, flags = tmp_path / "out", ["--parts", "ablations", "steps", "--steps", "3", "--drafters", "medusa"]

    def start(*more: str) -> None:
        given = flags_of(tmp_path, *flags, "--ablations", *changed, *more)
        ablate_drafts.main(ablate_drafts.make_parser().parse_args(given))

    start()
    greedy = measured(output)
    defaults = greedy["ablation defaults"]
    assert {n for n in changed if greedy[f"ablation {n}"]["parameters"] != defaults["parameters"]} == {
        "D = 32", "five captures"
    }  # fmt: skip
    losses = [greedy[f"ablation {n}"]["loss"] for n in ["defaults", *changed]]
    assert len(set(losses)) == 1 + len(changed)
    start("--temperature", "1", "--rejection")
    start("--temperature", "1", "--rejection")
    start("--temperature", "0.5")
    assert measured(output) == greedy
    sampled = [x for x in results(output) if x["kind"] == "sampled"]
    assert [(x["temperature"], x["rejection"]) for x in sampled] == [(1.0, True)] * 7 + [(0.5, False)] * 7
    assert all({x["name"] for x in part} == set(greedy) for part in (sampled[:7], sampled[7:]))
    for line in sampled:
        assert len(line["few_steps"]) == len(defaults["few_steps"])
        assert sum(line["few_tokens"]) / sum(line["few_steps"]) == pytest.approx(line["few"]["acceptance_length"])
    with pytest.raises(UserError, match="trained for 3 steps, now 4 are asked for"):
        start("--steps", "4")
    other = write_conversations(tmp_path / "other.jsonl", 8)
    with pytest.raises(UserError, match=r"other settings \(data: found 'd.jsonl \w+', now 'other.jsonl \w+'\)"):
        start("--data", str(other))
    (tmp_path / "sets").mkdir()
    with pytest.raises(UserError, match="2 files are called qa"):
        start("--prompts", str(tmp_path / "qa.jsonl"), write_questions(tmp_path / "sets" / "qa.jsonl"))
    page = (output / "acceptance.md").read_text()
    assert "At temperature 1 with rejection sampling, 4 answers to each question" in page
    assert "At temperature 0.5 where a draft token is right" in page and page.count("| decay 0.8 |") == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rejection"], "--rejection needs --temperature"),
        (["--temperature", "0"], "--temperature 0: expected above 0"),
        (["--answer-temperature", "0", "1"], "--answer-temperature does nothing with --data"),
        (["--user-questions", "x.jsonl"], "--user-questions does nothing with --data"),
    ],
)
def test_flags_without_effect_are_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ablate_drafts.main(ablate_drafts.make_parser().parse_args(flags_of(tmp_path, *flags)))
    assert not (tmp_path / "out").exists()


def test_training_data_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of several temperatures, and users' questions instead of drawn ones; the runs side by side."""
    users = tmp_path / "users.jsonl"
    users.write_text("".join(json.dumps({"question_id": i, "turns": [f"blue sea\u2028{i}"]}) + "\n" for i in range(4)))

    def start(name: str, *more: str) -> Path:
        given = flags_of(tmp_path, "--parts", "ablations", "--steps", "2", "--conversations", "8", *more)
        at = given.index("--data")
        del given[at : at + 2]
        flags = [*given, "--output", str(tmp_path / name), "--answer-tokens", "8", "--max-draft-len", "2"]
        ablate_drafts.main(ablate_drafts.make_parser().parse_args(flags))
        return tmp_path / name

    greedy = start("greedy", "--answer-temperature", "0")
    mixed = start("mixed seed 1", "--answer-temperature", "0", "1")
    asked = start("asked", "--user-questions", str(users), "--answer-temperature", "0", "1")

    def answers(folder: Path) -> dict[str, str]:
        lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().split("\n")[:-1]]
        return {line["conversation_id"]: json.dumps(line["conversations"]) for line in lines}

    base, half, other = answers(greedy), answers(mixed), answers(asked)
    assert 0 < sum(half[name] != text for name, text in base.items()) <= 4 and base.keys() == half.keys()
    assert sum("blue sea" in text for text in other.values()) == 4 and len(other) == 8
    folders = [str(greedy), str(mixed), str(asked)]
    compare_data.main(compare_data.make_parser().parse_args(folders))
    shown = capsys.readouterr().out
    assert shown.startswith("Greedy answers") and "Sampled" not in shown
    assert all(f"| {folder} |" in shown for folder in folders)
    with pytest.raises(UserError, match=r"another lr than .*greedy"):
        compare_data.read_runs([str(greedy), str(start("lr", "--lr", "0.5"))])


def test_equal_seconds_by_the_step_times_of_a_quiet_call(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    start = lambda *more: ablate_drafts.main(  # noqa: E731
        ablate_drafts.make_parser().parse_args(flags_of(tmp_path, "--step-times", str(times), *more))
    )
    start("--parts", "step_times")
    names = ["eagle3", "medusa", "dspark 1 x 2 kv 4", "dflash 1 x 3"]
    written = json.loads(times.read_text())
    assert list(written) == names and all(ms > 0 for ms in written.values())
    times.write_text(json.dumps({**dict(zip(names, (100.0, 50.0, 25.0, 1e6), strict=True)), "other": 1.0}))
    start("--parts", "seconds", "ablations", "drafters", "--ablation-seconds", "0.3", "--seconds", "0.2")
    found = measured(tmp_path / "out")
    assert [found[f"equal seconds {n}"]["steps"] for n in names[1:]] == [6, 12, 1]
    assert [found[n]["steps"] for n in names[1:]] == [4, 8, 1]
    assert found["ablation defaults"]["steps"] == found["ablation detached"]["steps"] == 3
    page = (tmp_path / "out" / "acceptance.md").read_text()
    assert "**Equal seconds**: as many steps as fit 0.3 s." in page and "| dspark 1 x 2 kv 4 | 0.0 M, 12 steps" in page


@pytest.mark.parametrize(
    ("content", "parts", "message"),
    [
        (None, ["seconds"], "--parts seconds: give --step-times FILE"),
        ("{}", ["seconds"], "has no eagle3, medusa, dspark 1 x 2 kv 4, dflash 1 x 3"),
        ('{"eagle3": 0}', ["steps"], "milliseconds above 0"),
        ("[", ["steps"], "cannot be read"),
        ("{}", ["step_times", "steps"], "choose it alone"),
    ],
)
def test_step_times_that_do_not_fit_are_refused(
    tmp_path: Path, content: str | None, parts: list[str], message: str
) -> None:
    (tmp_path / "times.json").write_text(content or "")
    given = [] if content is None else ["--step-times", str(tmp_path / "times.json")]
    with pytest.raises(UserError, match=message):
        ablate_drafts.main(ablate_drafts.make_parser().parse_args(flags_of(tmp_path, *given, "--parts", *parts)))
    assert not (tmp_path / "out").exists()


def test_names_of_block_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    kind = ablate_drafts.kind_of("dspark 2 x 5 kv 14")
    assert kind.algorithm == "dspark"
    assert kind.fields == {"num_hidden_layers": 2, "block_size": 5, "num_key_value_heads": 14}
    late = ablate_drafts.kind_of("dspark 2 x 5 kv 14 late").fields
    assert late == {**kind.fields, "capture_layer_ids": "late", "fc_init": "average", "init_from_base_layer": True}
    assert ablate_drafts.kind_of("dflash 5 x 8").fields == {"num_hidden_layers": 5, "block_size": 8}
    for wrong in ("dflash 2", "dflash 0 x 8", "dflash 2 x 8 kv", "eagle 3"):
        with pytest.raises(SystemExit):
            ablate_drafts.make_parser().parse_args(
                ["--base", "b", "--prompts", "p", "--output", "o", "--drafters", wrong]
            )
        assert f"no drafter is called '{wrong}'" in capsys.readouterr().err


def test_a_longer_name_is_no_way_of_decoding_a_shorter_one() -> None:
    stats = {"acceptance_length": 2.0, "acceptance_length_ci95": None, "acceptance_per_position": []}
    whole = {"few": stats, "identical": 1.0, "speedup": 1.5}
    part = {**whole, "speedup": None}
    names = {"dflash 2 x 8": whole, "dflash 2 x 8 kv 4": whole, "dflash 2 x 8 length 4": part}
    text = acceptance_page._lengths_and_trees({**names, "dflash 2 x 8 kv 4 length 4": part})
    first, second = text.split("\n\n")
    assert "dflash 2 x 8 length 4" in first and "kv 4" not in first and "dflash 2 x 8 kv 4 length 4" in second


def test_the_order_of_the_batches() -> None:
    """As they come, or another order for every seed and pass; every pass sees each batch once."""
    passes = {
        seed: [[comparison.order_of(7, 7 * p + i, seed) for i in range(7)] for p in range(2)] for seed in (0, 1, 2)
    }
    assert passes[0] == [list(range(7))] * 2
    others = [tuple(order) for seed in (1, 2) for order in passes[seed]]
    assert len(set(others)) == 4 and all(sorted(order) == list(range(7)) for order in others)


def line(tokens: list[int], steps: list[int], **more: object) -> dict:
    few = {"acceptance_length": sum(tokens) / sum(steps), "acceptance_length_ci95": None, "acceptance_per_position": []}
    return {"few": few, "few_tokens": tokens, "few_steps": steps, "identical": 1.0, "steps": 9, **more}


def test_seeds_are_pooled_question_by_question() -> None:
    """(10 + 12) / (5 + 7) and (20 + 12) / (5 + 7); the change is that of the same questions."""
    found = {
        "ablation defaults": line([4, 6], [2, 3]), "ablation defaults seed 1": line([4, 8], [3, 4]),
        "ablation detached": line([8, 12], [2, 3]), "ablation detached seed 1": line([4, 8], [3, 4]),
        "ablation late": line([4, 6], [2, 3]), "ablation late seed 1": line([4, 8], [3, 4]),
    }  # fmt: skip
    rows = [[x.strip() for x in row.split("|")[1:-1]] for row in acceptance_page.ablations(found).splitlines()[2:]]
    assert rows[0][0] == "defaults" and rows[0][1].startswith("1.833 (") and rows[0][2:] == ["-", "2.000 1.714"]
    # question 1: 12/5 - 8/5, question 2: 20/7 - 14/7
    assert rows[1][:1] + rows[1][2:] == ["detached", "+0.833 (+0.800 to +0.857)", "+2.000 +0.000"]
    assert rows[2][2:] == ["+0.000 (+0.000 to +0.000)", "+0.000 +0.000"]


def test_a_change_of_an_older_run_has_no_interval() -> None:
    old = {k: v for k, v in line([4], [2]).items() if not k.startswith("few_")}
    assert acceptance_page.change(line([6], [2]), old) == "+1.000"


def test_seeds_of_an_older_and_a_newer_run_are_pooled_without_interval() -> None:
    """(4 + 8) / (2 + 4) against (8 + 8) / (2 + 4): a resumed run has lines of both kinds."""
    found = {
        "ablation defaults": line([4], [2]), "ablation detached": line([8], [2]),
        "ablation defaults seed 1": line([8], [4]), "ablation detached seed 1": line([8], [4]),
    }  # fmt: skip
    for name in ("ablation defaults", "ablation detached"):
        found[name]["few"]["steps"] = 2
        found[name] = {k: v for k, v in found[name].items() if not k.startswith("few_")}
        found[f"{name} seed 1"]["few"]["steps"] = 4
    rows = acceptance_page.ablations(found).splitlines()[2:]
    assert rows == ["| defaults | 2.000 | - | 2.000 2.000 |", "| detached | 2.667 | +0.667 | +2.000 +0.000 |"]


def test_the_longest_comes_first() -> None:
    """By number, not by text: 10 is more than 9."""
    found = {f"equal steps {n}": line([n], [1], parameters=1, passes=1, seconds=1) for n in (9, 10, 2)}
    rows = acceptance_page._steps(found).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["10", "9", "2"]


def test_the_schedule_goes_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step takes, the rate is where the time is, and the schedule ends with it."""
    clock, steps = [50.0], []
    monkeypatch.setattr(comparison.time, "monotonic", lambda: clock[0])
    schedule = comparison.ByTheClock(SimpleNamespace(step=lambda increment: steps.append(increment)), 20.0)
    for taken in (1.0, 0.5, 8.5, 10.0, 3.0):
        clock[0] += taken
        schedule.step(1)
    assert steps == [50, 25, 425, 500, 0]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "measured"}\n')
    with pytest.raises(UserError, match="has no settings"):
        acceptance_page.render(path)


def test_trainings_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over plain twins of the kernels; each trains otherwise than the defaults, and all decode the base's own text."""
    flags = [*flags_of(tmp_path, "--parts", "ablations", "--steps", "3"), "--ablations", "draft in fp8", "base in fp8"]
    start = lambda: ablate_drafts.main(ablate_drafts.make_parser().parse_args(flags))  # noqa: E731
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--draft-fp8 cannot run here: there is no GPU"):
            start()
    monkeypatch.setattr(platform, "machine", lambda: Machine(kernels="plain"))
    start()
    found = measured(tmp_path / "out")
    names = ["ablation defaults", "ablation draft in fp8", "ablation base in fp8"]
    assert set(names) == set(found) and len({str(found[n]["accuracy"] + [found[n]["loss"]]) for n in names}) == 3
    assert all(line["identical"] == 1.0 for line in found.values())
