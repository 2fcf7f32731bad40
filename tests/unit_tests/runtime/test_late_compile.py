"""megatron-core's compiled functions cost nothing until one is called, and are then what `torch.compile` makes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_spec.runtime.late_compile import compiled_when_called
from tests.functional_tests.script_helpers import environment

PROGRAM = """
import sys
from megatron_spec.runtime import late_compile
import torch
compiler = torch.compile
late_compile.install()
late_compile.install()
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron_spec.commands import decode, finetune
from megatron.core import jit
print(sorted({"torch._dynamo", "torch._inductor.compile_fx"} & set(sys.modules)), swiglu.__name__)
print(torch.compile is compiler, any(type(finder).__module__ == late_compile.__name__ for finder in sys.meta_path))
"""


def test_importing_megatron_core_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines() == ["[] swiglu", "True False"], done.stderr[-2000:]


def test_a_function_is_compiled_once_and_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compiler(function: Any, dynamic: bool | None = None) -> Any:
        compiled.append((function.__name__, dynamic))
        return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))

    decorate = compiled_when_called(compiler)

    class Module:
        @decorate
        def scaled(self, x: int, by: int = 2) -> int:
            return x * by

        @decorate(dynamic=True)
        def doubled(self, x: int) -> int:
            return 2 * x

    assert not compiled
    assert Module().scaled(3) == ("compiled", 6) and Module().scaled(3, by=5) == ("compiled", 15)
    assert compiled == [("scaled", None)]
    assert Module().doubled(3) == ("compiled", 6) and compiled[1:] == [("doubled", True)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert Module().scaled(3) == 6


def test_torch_compiles_through_it() -> None:
    eager = compiled_when_called(lambda function: torch.compile(function, backend="eager", fullgraph=True))
    inner = eager(lambda x: x + 1)
    outer = eager(lambda x: inner(x) * 2)
    assert outer(torch.ones(2)).tolist() == [4.0, 4.0]
