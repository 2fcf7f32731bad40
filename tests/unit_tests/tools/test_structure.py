"""Code structure as stated in docs/architecture.md and CONTRIBUTING.md, checked on syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_spec"


@cache
def trees() -> dict[str, ast.Module]:
    """Module name ("base.model") -> syntax tree."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a module imports when it is loaded; names for types alone do not count."""
    nodes = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_spec"):
            module = (node.module or "").removeprefix("megatron_spec").lstrip(".")
            for alias in node.names:
                inside = f"{module}.{alias.name}".lstrip(".")
                yield inside if inside in trees() else module


def circle(graph: dict[str, set[str]]) -> list[str]:
    """An import cycle, or []."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        """The first cycle on a path from `name`."""
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            found = visit(other, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_import_cycles() -> None:
    files = {name: {i for i in imports(name, tree) if i != name} for name, tree in trees().items()}
    assert circle(files) == []
    folders: dict[str, set[str]] = {}
    for name, others in files.items():
        own = name.split(".")[0]
        folders.setdefault(own, set()).update(o.split(".")[0] for o in others if o.split(".")[0] != own)
    assert sum(map(len, folders.values())) > 40 and circle(folders) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_functions_and_classes_are_small() -> None:
    long = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            kinds = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60, ast.ClassDef: 200}
            lines = (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1
            if type(node) in kinds and lines > kinds[type(node)]:  # type: ignore[index]
                long.append(f"{name}.{node.name}: {lines} lines")  # type: ignore[attr-defined]
    assert long == []


def test_files_are_small() -> None:
    files = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    sizes = {name: len(text.splitlines()) for name, text in files.items()}
    assert len(sizes) > 100 and {name: lines for name, lines in sizes.items() if lines > 400} == {}


def test_every_configuration_field_is_documented() -> None:
    """By a docstring under the field, or under the same field of a class it derives from."""
    bare, fields = [], 0
    for module, tree in trees().items():
        if not module.startswith(("config", "commands.runs")):
            continue
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and derives_config(n)):
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                    fields += 1
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    if not documented:
                        bare.append(f"{module}.{node.name}.{ast.unparse(field.target)}")
    assert fields > 150 and bare == []


def derives_config(node: ast.ClassDef) -> bool:
    """Its fields are settings."""
    return any(ast.unparse(base).endswith(("Config", "Run")) for base in node.bases)


def test_only_base_uses_megatron_cores_model_class() -> None:
    found = [
        name
        for name, tree in trees().items()
        if not name.startswith("base.")
        and any(isinstance(node, ast.Attribute) and node.attr == "gpt" for node in ast.walk(tree))
    ]
    assert found == []
