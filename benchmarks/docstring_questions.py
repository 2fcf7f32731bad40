"""Questions like those that users of a code model ask, from the docstrings of installed packages.

    python benchmarks/docstring_questions.py --packages torch transformers numpy --count 8192 --output asked.jsonl

Half of them are about code: complete a function from its signature and docstring, write one that does what a docstring
says, explain one, test one. Half are instructions about a text, which is a paragraph of a docstring: summarise it,
rewrite it, answer what it is for. The package's source is parsed, never imported. The same packages and --seed give the
same questions; `ablate_drafts.py --user-questions` trains on them.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.runtime.files import write_text

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

CODE = (
    "Complete the code I provided.\n\n{stub}",
    "Write a Python function `{signature}`. {summary}",
    "Explain what this function does:\n\n```python\n{source}\n```",
    "Write unit tests for this function with pytest:\n\n```python\n{source}\n```",
)
TEXT = (
    "Summarize: {passage}",
    "Rewrite the following text so that a beginner understands it:\n\n{passage}",
    "List the main points of this text:\n\n{passage}",
    "What is {name} for? Use this description:\n\n{passage}",
)
PASSAGE = (200, 700)
"""Characters of a paragraph that is asked about."""
MOST_SOURCE = 700
"""Characters of a function that is asked about."""


@dataclass(frozen=True)
class Source:
    """A documented function or class."""

    node: Documented
    code: str
    doc: str

    @property
    def signature(self) -> str:
        """Its `name(arguments)`."""
        assert not isinstance(self.node, ast.ClassDef)
        return f"{self.node.name}({ast.unparse(self.node.args)})"

    @property
    def paragraphs(self) -> list[str]:
        """Prose of the docstring, a line each."""
        found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", self.doc)]
        return [text for text in found if not re.search(r">>>|::|\.\. |^[-=*]|`{3}|http|:(math|class|attr|func)", text)]

    def about_code(self) -> dict[str, str] | None:
        """What the templates `CODE` insert; None for classes, and for long functions."""
        prose = self.paragraphs
        if isinstance(self.node, ast.ClassDef) or not prose or len(prose[0]) < 40 or len(self.code) > MOST_SOURCE:
            return None
        stub = f'def {self.signature}:\n    """{prose[0]}"""\n'
        return {"stub": stub, "signature": self.signature, "summary": prose[0], "source": self.code}

    def about_text(self) -> dict[str, str] | None:
        """What the templates `TEXT` insert; None without a paragraph of their length."""
        fitting = [text for text in self.paragraphs if PASSAGE[0] <= len(text) <= PASSAGE[1]]
        return {"passage": fitting[0], "name": f"`{self.node.name}`"} if fitting else None


def sources(package: str) -> Iterator[Source]:
    """Public documented functions and classes of an installed package, file by file. Raises UserError without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"--packages {package}: no such package is installed")
    root = Path(spec.submodule_search_locations[0])
    for path in sorted(root.rglob("*.py")):
        if "test" in str(path.relative_to(root)).lower():
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):  # templates, other Python versions
            continue
        lines = text.split("\n")  # as Python counts them
        for node in ast.walk(tree):
            if isinstance(node, Documented) and not node.name.startswith("_") and (doc := ast.get_docstring(node)):
                yield Source(node, textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])), doc)


def questions(found: list[Source], count: int, seed: int) -> list[str]:
    """At most `count` distinct questions: of each kind in turn, in random order."""
    found = random.Random(seed).sample(found, len(found))
    code = (CODE[i % len(CODE)].format(**x) for i, x in enumerate(filter(None, (s.about_code() for s in found))))
    text = (TEXT[i % len(TEXT)].format(**x) for i, x in enumerate(filter(None, (s.about_text() for s in found))))
    both = itertools.chain.from_iterable(itertools.zip_longest(code, text))
    return list(itertools.islice(dict.fromkeys(q for q in both if q), count))


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--packages", required=True, nargs="+", metavar="NAME", help="installed packages")
    p.add_argument("--count", type=cli.at_least_one, required=True, help="questions")
    p.add_argument("--seed", type=int, default=0, help="of their order (default: 0)")
    p.add_argument("--output", required=True, metavar="JSONL", help="question file to write")
    return p


def main(args: argparse.Namespace) -> None:
    """Write the questions. Raises UserError if the packages have too few."""
    found = [source for package in args.packages for source in sources(package)]
    asked = questions(found, args.count, args.seed)
    if len(asked) < args.count:
        raise UserError(f"--count {args.count}: these packages have docstrings for {len(asked)} questions: name more")
    lines = (json.dumps({"question_id": i, "category": "user", "turns": [text]}) for i, text in enumerate(asked))
    write_text(Path(args.output), "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    cli.run(make_parser(), main)
