"""Functions that megatron-core compiles are compiled when they are first called.

megatron-core decorates its fused functions with `torch.compile`. Decorating alone imports Dynamo and Inductor: two of
the five seconds of processor time that every rank needs for its imports, and few runs call one of these functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "megatron.core"


def compiled_when_called(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """`compiler`, which is `torch.compile` or is called like it, applied to a function at the function's first call."""

    def decorate(function: Any = None, **options: Any) -> Any:
        """`function`, not compiled yet; a decorator where there are only options."""
        if function is None:
            return functools.partial(decorate, **options)
        compiled = functools.cache(lambda: compiler(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Compiled; as part of a caller that is being compiled, the function as it stands."""
            import torch

            return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

        return call

    return decorate


def _load(load: Callable[[ModuleType], None], package: ModuleType) -> None:
    """Load megatron-core; its own name for `torch.compile`, `jit_fuser`, stays what it found here."""
    import torch

    compiler = torch.compile
    torch.compile = compiled_when_called(compiler)
    try:
        load(package)
    finally:
        torch.compile = compiler


class _Finder(MetaPathFinder):
    """Finds megatron-core once."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called for every import."""
        if name != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_load, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def install() -> None:
    """From now on, an import of megatron-core does this. For programs of our own: it changes a package of others."""
    if PACKAGE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
