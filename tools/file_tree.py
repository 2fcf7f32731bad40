"""The file tree of docs/architecture.md, from the modules' docstrings: python tools/file_tree.py [--write]."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!--tree-->", "<!--/tree-->"


def summary(path: Path) -> str:
    """First sentence of a module's docstring, or of a shell script's comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        return text.splitlines()[1].lstrip("# ").split(": ")[0].rstrip(".")
    first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    return " ".join(first.split()).rstrip(".")


def tree() -> str:
    """Every source file of the package, the scripts and the tools, folder by folder."""
    lines: list[str] = []
    for folder in ("megatron_spec", "examples/post_training", "tools", "benchmarks"):
        paths = [p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".py", ".sh")]
        parents = dict.fromkeys(p.parent for p in paths)
        for parent in sorted(parents, key=lambda p: (len(p.parts), p)):
            lines.append(f"{parent.relative_to(ROOT)}/")
            for path in paths:
                if path.parent == parent and (text := summary(path)):
                    lines.append(f"  {path.name:<26} {text}")
    lines += ["tests/unit_tests/", "  mirrors the package", "tests/functional_tests/"]
    lines.append(
        "  the chain by its scripts, parallel equality, resume, interruption, bad input, the library, the real model"
    )
    return "\n".join(lines)


def insert(page: str) -> str:
    """The page with the current tree between its marks."""
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n```\n{tree()}\n```\n{END}{after}"


def main() -> None:
    """Print the tree, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tree in docs/architecture.md")
    if parser.parse_args().write:
        PAGE.write_text(insert(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tree())


if __name__ == "__main__":
    main()
