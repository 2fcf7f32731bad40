"""Flags from configuration classes, and error messages when several ranks fail alike."""

from __future__ import annotations

import errno
import io
from dataclasses import dataclass

import pytest

from megatron_spec import cli
from megatron_spec.commands.runs import ValidateRun
from megatron_spec.config import Config, DecodeConfig, UserError, group


@dataclass(frozen=True)
class Some(Config):
    """A run."""

    decode: DecodeConfig = group(DecodeConfig, skip=("seed",))
    """Decoding."""


def parser() -> cli.Parser:
    p = cli.Parser("test", Some)
    p.add_argument("--count", type=cli.at_least_one, default=1)
    p.add_argument("--share", type=float)
    p.add_argument("--urls", nargs="+")
    return p


def leave(argv: list[str], error: str | Exception | None = None) -> int:
    def main(_: object) -> None:
        if error:
            raise UserError(error) if isinstance(error, str) else error

    with pytest.raises(SystemExit) as left:
        cli.run(parser(), main, argv)
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--count", "0"], "must be at least 1, found 0"),
        (["--count", "-5"], "must be at least 1, found -5"),
        (["--seed", "3"], "unknown argument --seed"),
        (["--batch-siz", "3"], "did you mean '--batch-size'"),
        (["--speculative-model", ""], "--speculative-model: expected one argument, found an empty one"),
        (["--relaxed-delta", "inf"], "--relaxed-delta: must be finite, found inf"),
        (["--share", "nan"], "--share: must be finite, found nan"),
    ],
)
def test_refused_flags(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(argv) == 2
    assert expected in capsys.readouterr().err


def test_a_value_that_is_replaced_is_named() -> None:
    p = parser()
    again = ["--count", "1", "--urls", "a", "b", "--cuda-graphs", "--count=2", "--no-cuda-graphs", "--urls", "c"]
    assert p.parse_args([*again, "--count", "2"]).count == 2
    assert p.notes == [
        "--count 2 replaces --count 1, given before it", "--no-cuda-graphs replaces --cuda-graphs, given before it",
        "--urls c replaces --urls a b, given before it",
    ]  # fmt: skip


def test_help_fits_80_columns_and_shows_each_default_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    about = "A sentence longer than a line of the terminal, which is wrapped, unlike commands: " + "word " * 9
    with pytest.raises(SystemExit):
        cli.Parser(f"{about}\n\n    python command.py {'--flag ' * 20}", ValidateRun).parse_args(["--help"])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].endswith(" --data JSONL [options]")  # what is required, not a hundred flags
    assert all(len(line) <= 80 for line in shown.splitlines() if "command.py" not in line)
    assert shown.count("--flag") == 20 and "default: off) (default" not in shown
    assert "--num-virtual-stages-per-pipeline-rank" not in shown  # accepted, to say that it is not supported
    assert "One of Eagle3, " in " ".join(shown.split())


def test_output_that_a_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(cli.sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))

    def main(_: object) -> None:
        cli.sys.stdout.write("é")

    with pytest.raises(SystemExit) as left:
        cli.run(parser(), main, [])
    assert not left.value.code and shown.getvalue() == rb"\xe9"


def test_full_disk_and_missing_permission_are_user_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for error, said in (
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "xxx: File name too long"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: writing: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "error: out: Permission denied"),
    ):
        assert leave([], error) == 2
        shown = capsys.readouterr().err
        assert said in shown and "Traceback" not in shown
    assert leave([], OSError(errno.EIO, "Input/output error")) == 1


def test_one_rank_of_a_machine_names_a_wrong_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert leave(["--nonsense"]) == 2
    assert capsys.readouterr().err == ""


def test_other_ranks_delay_their_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    assert leave([], "sky is down") == 2
    assert waited == [] and capsys.readouterr().err == f"{parser().prog}: error: sky is down\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    assert leave([], "sky is down") == 2
    assert waited == [cli.OTHERS_WAIT]
    assert capsys.readouterr().err.startswith("[rank 1] ")
