"""Print every source file with the first sentence of its docstring: python tools/file_tree.py."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megatron_spec", "examples/post_training", "tools", "benchmarks")


def summary(path: Path) -> str:
    """First sentence of a module's docstring, or of a shell script's comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        return text.splitlines()[1].lstrip("# ").split(": ")[0].rstrip(".")
    first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    return " ".join(first.split()).rstrip(".")


def tree() -> str:
    """Source files of package, scripts and tools by folder, without empty modules."""
    lines: list[str] = []
    for folder in FOLDERS:
        paths = [p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".py", ".sh")]
        parents = dict.fromkeys(p.parent for p in paths)
        for parent in sorted(parents, key=lambda p: (len(p.parts), p)):
            lines.append(f"{parent.relative_to(ROOT)}/")
            for path in paths:
                if path.parent == parent and (text := summary(path)):
                    lines.append(f"  {path.name:<26} {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(tree())
