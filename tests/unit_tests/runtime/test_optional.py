"""An apex that is complete, absent, half-installed or built for something else; a Transformer Engine that is asked for,
and one that is not."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_spec import cli
from megatron_spec.commands.runs import ConvertRun, ExportRun, FinetuneRun
from megatron_spec.config import BaseLayers, Config, TrainConfig, UserError
from megatron_spec.runtime import optional

PYTHON = {"optimizers": "class FusedAdam: ...", "multi_tensor_apply": "multi_tensor_applier = None"}
SYMBOL = "amp_C.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"
LIBRARY = "libcudart.so.11.0: cannot open shared object file: No such file or directory"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def ours(name: str) -> bool:
        return name == "amp_C" or name.partition(".")[0] in ("apex", "transformer_engine")

    before = {n: m for n, m in sys.modules.items() if ours(n)}
    monkeypatch.setattr(optional, "unusable", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    for name in [n for n in sys.modules if ours(n)]:
        del sys.modules[name]
    sys.modules.update(before)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, extension: str | None, parts: dict[str, str]) -> None:
    """Put an apex on the search path; `extension`: what amp_C.py says."""
    for name, text in parts.items():
        (folder / "apex" / name).mkdir(parents=True)
        (folder / "apex" / name / "__init__.py").write_text(text)
    (folder / "apex").mkdir(exist_ok=True)
    (folder / "apex" / "__init__.py").write_text("")
    if extension is not None:
        (folder / "amp_C.py").write_text(extension)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_a_complete_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, "", PYTHON)
    optional.leave_out_broken_apex()
    assert not optional.unusable and not caplog.records
    assert importlib.import_module("apex.optimizers").FusedAdam


@pytest.mark.parametrize(
    ("extension", "parts", "reason"),
    [
        (None, PYTHON, "it was built without its CUDA extensions (there is no amp_C)"),
        (f"raise ImportError({SYMBOL!r})", PYTHON, f"it was built for another torch ({SYMBOL})"),
        (f"raise ImportError({LIBRARY!r})", PYTHON, f"it was built for another CUDA version ({LIBRARY})"),
        ("", {}, "it is not NVIDIA's (there is no apex.optimizers"),
        ("", {**PYTHON, "optimizers": "import nowhere"}, "it needs nowhere, which is not installed"),
        ("", {**PYTHON, "optimizers": "raise RuntimeError('a\\nb')"}, "it does not import (RuntimeError: a b)"),
    ],
)
def test_others_are_left_out_with_one_line(
    extension: str | None, parts: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    install(tmp_path, monkeypatch, extension, parts)
    caplog.set_level(logging.WARNING)
    optional.leave_out_broken_apex()
    [record] = caplog.records
    said = record.getMessage()
    assert said.startswith(f"apex is not used: {reason}") and said.endswith(optional.APEX_REMEDY) and "\n" not in said
    assert reason in optional.unusable["apex"]
    for name in ("apex", "apex.optimizers", "apex.multi_tensor_apply"):
        with pytest.raises(ImportError):
            importlib.import_module(name)


def test_without_a_gpu_it_is_left_out_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, "", PYTHON)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    optional.leave_out_broken_apex()
    assert optional.unusable == {"apex": "there is no GPU"} and not caplog.records
    with pytest.raises(ImportError):
        importlib.import_module("apex.optimizers")


def test_nothing_happens_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optional.leave_out_broken_apex()
    assert not optional.unusable and "apex" not in sys.modules


UNNAMED = FinetuneRun("draft", save="run", data="x.jsonl", train=TrainConfig(train_iters=1))
NAMED: list[Config] = [
    UNNAMED.replace(layers=BaseLayers("transformer_engine")),
    UNNAMED.replace(draft_transformer_impl="transformer_engine"),
    UNNAMED.replace(train=TrainConfig(train_iters=1, optimizer_impl="transformer_engine")),
    ConvertRun("base", "draft", layers=BaseLayers("transformer_engine")),
]


def install_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, pytorch: str = "", user: str = "") -> None:
    """Put a Transformer Engine on the search path that imports its part for JAX where it can; `user`: what stands for
    megatron-core's part that imports it."""
    (folder / "core_of_engine.py").write_text(user)
    monkeypatch.delitem(sys.modules, "core_of_engine", raising=False)
    monkeypatch.setattr(optional, "USER", "core_of_engine")
    top = "from . import pytorch\ntry:\n    from . import jax\nexcept ImportError: ..."
    parts = {"": top, "pytorch": pytorch, "jax": ""}
    for name, text in parts.items():
        (folder / "transformer_engine" / name).mkdir(parents=True)
        (folder / "transformer_engine" / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


@pytest.mark.parametrize("run", NAMED)
def test_an_engine_that_a_flag_names_is_loaded(run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(tmp_path, monkeypatch)
    optional.check_optional_packages(run)
    assert "transformer_engine.pytorch" in sys.modules and not optional.unusable
    assert "transformer_engine.jax" not in sys.modules
    assert importlib.import_module("transformer_engine.jax")  # a program may import it later


@pytest.mark.parametrize("run", [UNNAMED, ConvertRun("base", "draft"), ExportRun("draft", "out")])
def test_another_is_hidden(run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(tmp_path, monkeypatch, "raise OSError('imported')")
    optional.check_optional_packages(run)
    assert optional.unusable == {"transformer_engine": "no flag names it"}
    assert importlib.util.find_spec("transformer_engine") is None
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine.pytorch.optimizers")


def test_a_program_without_flags_for_it_hides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark of training takes the same optimizer as finetune.py."""
    install_engine(tmp_path, monkeypatch, "raise OSError('imported')")
    found: list[bool] = []
    with pytest.raises(SystemExit):
        cli.run(cli.Parser("test"), lambda _: found.append(importlib.util.find_spec("transformer_engine") is None), [])
    assert found == [True]


def test_one_that_is_loaded_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(tmp_path, monkeypatch)
    importlib.import_module("transformer_engine")
    optional.check_optional_packages(UNNAMED)
    assert not optional.unusable and sys.modules["transformer_engine.pytorch"] is not None


def test_a_broken_one_is_an_error_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(tmp_path, monkeypatch, "raise OSError('libcudart.so.99:\\ncannot open')")
    with pytest.raises(UserError, match=r"libcudart.so.99: cannot open.*pip install 'transformer-engine"):
        optional.check_optional_packages(NAMED[0])


def test_one_that_megatron_core_cannot_use_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an older version than megatron-core knows."""
    install_engine(tmp_path, monkeypatch, user="from transformer_engine.pytorch.tensor import QuantizedTensor")
    expected = (
        r"megatron-core does not import with .*no module named 'transformer_engine.pytorch.tensor'.*install.md#tested"
    )
    with pytest.raises(UserError, match=f"(?i){expected}") as raised:
        optional.check_optional_packages(NAMED[0])
    assert "\n" not in str(raised.value)
    optional.unusable.clear()
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    optional.check_optional_packages(UNNAMED)  # a run that does not name it is not concerned
