"""README.md and docs/ against the repository: length, links, named files, citations in docstrings, commands, words."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_spec import cli
from tests.unit_tests.planning.test_dry_run import LLAMA_405B

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/post_training/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCES = [p for folder in ("megatron_spec", "tools", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
FOLDERS = ("tools", "benchmarks", "examples/post_training")
"""Where scripts are."""
ROOTS = ("", "megatron_spec", "tests", "docs")
"""Folders that a named file may be relative to."""
UNWANTED = re.compile(r"\b(mend|mends|mended|behind|nobody|turned|speaks? through|the house)\b", re.IGNORECASE)
"""Words that docs/glossary.md has better ones for; see CONTRIBUTING.md, Language."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@functools.cache
def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.S)
    titles = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 170


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|sh|sbatch|json|md))`", text_of(page)):
        assert any((ROOT / root / name).exists() for root in ROOTS), f"{page.name} names {name}"


def test_cited_sections_exist() -> None:
    cited = 0
    for path in SOURCES:
        for name, anchor in re.findall(r"docs/(\w+\.md)(?:#([\w-]+))?", text_of(path)):
            page = ROOT / "docs" / name
            assert page.exists() and (not anchor or anchor in anchors(page)), f"{path.name} cites docs/{name}#{anchor}"
            cited += 1
    assert cited > 10


def commands(page: Path) -> Iterator[list[str]]:
    """Commands of the page's shell blocks, as words; variables that a block sets are put in."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.S | re.M):
        if language not in ("", "bash"):
            continue
        lines = block.replace("\\\n", " ")
        for name, value in re.findall(r"(?:^|; )(\w+)=(\"[^\"]*\"|[^\s;]+)", lines, re.M):
            lines = lines.replace(f"${name}", value.strip('"').replace("\n", " "))
        for line in re.sub(r'^\w+="[^"]*"[ ]*(#.*)?$', "", lines, flags=re.M).splitlines():
            if re.match(r"\s*(python|torchrun|bash|\.venv)\b.*\.(py|sh)", line):
                yield shlex.split(line, comments=True)


def named_commands(page: Path) -> Iterator[list[str]]:
    """Commands in the page's running text and tables, as words: a script and what follows it."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.S | re.M)
    for code in re.findall(r"`([^`]+)`", prose):
        found = re.search(r"([\w-]+\.(?:py|sh))\s(.*--\w.*)", code, re.S)
        script = found and next((p for folder in FOLDERS if (p := ROOT / folder / found[1]).exists()), None)
        if found and script:
            yield [str(script.relative_to(ROOT)), *re.findall(r"(?<![\w-])--\w[\w-]*", found[2])]


@functools.cache
def known_flags(script: Path) -> frozenset[str]:
    """Flags in a script's help; for shell scripts and writers of tables, those in the source."""
    if script.suffix == ".sh" or script.stem.endswith("_table"):
        text = text_of(script)
    else:
        text = subprocess.run(
            [sys.executable, str(script), "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    return frozenset(re.findall(r"--[\w-]+", text))


def test_documented_commands_use_flags_that_exist() -> None:
    checked = 0
    for page in PAGES:
        for words in itertools.chain(commands(page), named_commands(page)):
            at = next((i for i, word in enumerate(words) if re.search(r"/.*\.(py|sh)$", word)), None)
            if at is None:
                continue
            flags = {word.split("=")[0] for word in words[at + 1 :] if word.startswith("--")}
            known = known_flags(ROOT / words[at])
            if "--" in flags:  # what follows goes to finetune.py as it is
                known |= known_flags(ROOT / "examples/post_training/finetune.py") | {"--"}
            unknown = flags - known
            assert not unknown, f"{page.name}: {words[at]} has no {', '.join(sorted(unknown))}"
            checked += 1
    assert checked > 70


class Parsed(BaseException):
    """The command line was accepted; nothing more runs."""


def test_documented_commands_parse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each by the script's own parser: required flags, values and conflicts."""
    for kind in (argparse.ArgumentParser, cli.Parser):
        parse = kind.parse_args

        def taken(self: Any, *args: Any, kind: type = kind, parse: Callable[..., Any] = parse) -> Any:
            found = parse(self, *args)
            if type(self) is not kind:  # the caller has more to check
                return found
            raise Parsed

        monkeypatch.setattr(kind, "parse_args", taken)
    checked = 0
    for page in PAGES:
        for words in commands(page):
            at = next(
                (i for i, word in enumerate(words) if re.search(r"(examples|tools|benchmarks)/.*\.py$", word)), None
            )
            if at is None or "..." in words:
                continue
            end = next((i for i, word in enumerate(words) if word in ("|", "&&", "&", ">", "2>", ";")), len(words))
            monkeypatch.setattr(sys, "argv", words[at:end])
            try:
                runpy.run_path(str(ROOT / words[at]), run_name="__main__")
            except Parsed:
                checked += 1
            except SystemExit:
                pytest.fail(f"{page.name}: {' '.join(words)}\n{capsys.readouterr().err}")
    assert checked > 50


def test_the_readmes_training_command_plans(tmp_path: Path) -> None:
    """`finetune.py` as in README.md, with --dry-run in place of eight GPUs."""
    words = next(w for w in commands(ROOT / "README.md") if any("finetune.py" in x for x in w))
    at = next(i for i, word in enumerate(words) if word.endswith("finetune.py"))
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_405B, **shape}))
    arguments = [str(tmp_path) if before == "--load" else word for before, word in itertools.pairwise(words[at:])]
    done = subprocess.run(
        [sys.executable, words[at], *arguments, "--dry-run", "--num-nodes", "1"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "DP 8" in done.stdout + done.stderr and "does not fit" not in done.stdout + done.stderr


def test_few_unwanted_words() -> None:
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in [*SOURCES, *PAGES] for m in UNWANTED.finditer(text_of(p))]
    assert len(found) <= ALLOWED, "\n".join(found)


ALLOWED = 20
"""The rest are idioms (to turn something off)."""


def test_layers_match_the_contract() -> None:
    contract = text_of(ROOT / "pyproject.toml").split('name = "imports go down only"')[1].split("layers = [")[1]
    layers = [{part.strip() for part in line.split("|")} for line in re.findall(r'"([^"]+)"', contract.split("\n]")[0])]
    chain = re.search(r"```\n(api -> .*?)```", text_of(ROOT / "CONTRIBUTING.md"), re.S).group(1)  # type: ignore[union-attr]
    assert [{part.strip() for part in layer.split("|")} for layer in chain.split("->")] == layers
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text_of(ROOT / "docs" / "architecture.md"), re.M)
    assert [set(re.findall(r"\w+", row)) for row in rows] == layers
