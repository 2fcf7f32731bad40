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

MODULE = "megatron.core.jit"


def compiled_when_called(compiler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The decorator `compiler`, applied to a function at its first call."""

    def decorate(function: Any) -> Any:
        """`function`, not compiled yet."""
        compiled = functools.cache(lambda: compiler(function))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Compiled; as part of a caller that is being compiled, the function as it stands."""
            import torch

            return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

        return call

    return decorate


class _Finder(MetaPathFinder):
    """Finds megatron-core's module of the decorator, and replaces the decorator when it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called for every import."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                """As the module's own loader does."""
                load(module)
                module.jit_fuser = compiled_when_called(module.jit_fuser)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """From now on, an import of megatron-core does this. For programs of our own: it changes a package of others."""
    if MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
