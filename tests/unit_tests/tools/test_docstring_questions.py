"""Questions from the docstrings of a package that is only parsed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import docstring_questions
from megatron_spec.config import UserError

TEXT = "This paragraph is long enough to be asked about, and it says what the thing is for. " * 3
MODULE = f'''
raise RuntimeError("imported")


def area(width, height=2):
    """Area of a rectangle with these sides, in square metres.

    {TEXT}
    """
    return width * height


class Shape:
    """A shape.

    {TEXT}
    """

    def _hidden(self):
        """Nothing that anybody would ask about, since it is private."""
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "shapes_to_ask"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "flat.py").write_text(MODULE)
    (folder / "test_flat.py").write_text(MODULE.replace("area", "tested"))
    (folder / "broken.py").write_text("def (:")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return folder.name


def run(*flags: str) -> None:
    docstring_questions.main(docstring_questions.make_parser().parse_args(flags))


def test_code_and_text_in_turn(package: str, tmp_path: Path) -> None:
    output = tmp_path / "asked.jsonl"
    run("--packages", package, "--count", "3", "--output", str(output))
    asked = [json.loads(line)["turns"][0] for line in output.read_text().splitlines()]
    assert len(set(asked)) == 3 and not any("_hidden" in text or "tested" in text for text in asked)
    assert asked[0].startswith('Complete the code I provided.\n\ndef area(width, height=2):\n    """Area of')
    assert sum(TEXT.strip() in text for text in asked) == 2
    run("--packages", package, "--count", "3", "--output", str(tmp_path / "again.jsonl"))
    assert (tmp_path / "again.jsonl").read_text() == output.read_text()


def test_too_few_and_no_package(package: str, tmp_path: Path) -> None:
    output = tmp_path / "asked.jsonl"
    with pytest.raises(UserError, match="have docstrings for 3 questions"):
        run("--packages", package, "--count", "9", "--output", str(output))
    with pytest.raises(UserError, match="no such package is installed"):
        run("--packages", "no_such_package", "--count", "1", "--output", str(output))
    assert not output.exists()
