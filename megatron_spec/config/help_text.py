"""Help text: docstrings of the fields of configuration classes, and how `--help` is laid out."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import textwrap

LONG_CHOICES = 56
"""Characters of a list of choices above which it is shown in the text, not beside the flag."""


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs to the width of the terminal, but not commands, which are indented."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            if not any(line.startswith(" ") for line in paragraph.splitlines()):
                paragraphs[i] = super()._fill_text(paragraph, width, indent)
        return "\n\n".join(paragraphs)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """X for a float, N for other numbers, not the name of the flag again."""
        if action.type is None:
            return super()._get_default_metavar_for_optional(action)
        return "X" if action.type is float else "N"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = super()._format_action_invocation(action)
        if isinstance(action, argparse.BooleanOptionalAction) and len(shown) > self._width - 2:
            return action.option_strings[0]  # argparse would not wrap the line
        return shown


def flag_text(text: str, default: object, choices: tuple[str, ...]) -> str:
    """The help text of a flag: the docstring of its field, its default, and choices too long to stand beside it."""
    if len(",".join(choices)) > LONG_CHOICES:
        text += f" One of {', '.join(choices)}."
    if default in (None, "") or "default:" in text.lower():
        return text
    shown = ("off", "on")[default] if isinstance(default, bool) else str(default)
    return f"{text} (default: {shown.replace('%', '%%')})"


def field_docs(cls: type) -> dict[str, str]:
    """Docstrings of the fields of a dataclass and its parents, by field name."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if dataclasses.is_dataclass(part):
            docs.update(_own_field_docs(part))
    return docs


@functools.cache
def _own_field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, str):
            docs[node.target.id] = " ".join(text.split()).replace("%", "%%")
    return docs
