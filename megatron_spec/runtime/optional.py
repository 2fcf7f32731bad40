"""Packages that megatron-core uses where they are installed. Standard library, and torch where apex is installed.

Importing Transformer Engine takes longer than all other imports of a run together, and megatron-core imports it
whenever it can. Without a flag that names it, its Adam and gradient norm would be all that a run computes with it,
Adam in the first step alone where the path `optimizer_pass` is on. Such a run leaves it out.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_spec.config import Config, UserError

log = logging.getLogger(__name__)

APEX = ("amp_C", "apex.optimizers", "apex.multi_tensor_apply")
"""What megatron-core imports of apex; the extension comes first, because the packages import without it."""
APEX_REMEDY = "build it from source with its CUDA extensions (docs/install.md#apex) or remove it"

ENGINE = "transformer_engine"
USER = "megatron.core.extensions.transformer_engine"
"""The module of megatron-core that is made of Transformer Engine's."""

unusable: dict[str, str] = {}
"""Package that is installed, but not used -> why."""


def check_optional_packages(run: Config) -> None:
    """Import Transformer Engine for a run that computes with it, hide it from others, and an apex that does not work.

    megatron-core uses both if they import. A partial installation (a core without its torch extension, a library for
    another CUDA version) fails later with an unrelated message, or silently loses the fused path. Call it before
    megatron-core is imported. For programs of our own: it changes what others find.

    Args:
        run: flags of the program.

    Raises:
        UserError: Transformer Engine is asked for, but does not import, or not with this megatron-core; states what
            failed and what to do.
    """
    wanted = names_engine(run)
    if not wanted:
        leave_out_engine()
    elif importlib.util.find_spec(ENGINE) is not None:
        _import_engine()
    leave_out_broken_apex()
    if wanted and ENGINE in sys.modules:
        _import_its_user()


def leave_out_engine() -> None:
    """Hide Transformer Engine from megatron-core, unless it is loaded already."""
    if ENGINE not in sys.modules and importlib.util.find_spec(ENGINE) is not None:
        unusable[ENGINE] = "no flag names it"
        _hide(ENGINE)


def names_engine(run: Config) -> bool:
    """True if a flag has the value `transformer_engine`; whatever computes with it needs one that does."""
    values = [getattr(run, field.name) for field in dataclasses.fields(run)]
    return any(names_engine(value) if isinstance(value, Config) else value == ENGINE for value in values)


def _import_engine() -> None:
    try:
        with _without("transformer_engine.jax"):  # tried where jax is installed, which takes seconds to import
            importlib.import_module("transformer_engine.pytorch")
    except Exception as e:
        raise UserError(
            "transformer_engine is installed, but transformer_engine.pytorch does not import "
            f"({type(e).__name__}: {_one_line(e)}): complete it (pip install 'transformer-engine[pytorch]'), or leave "
            "out the flags that name it; it is optional"
        ) from e


def _import_its_user() -> None:
    """megatron-core imports parts of Transformer Engine that versions unlike its own lack."""
    try:
        importlib.import_module(USER)
    except Exception as e:
        raise UserError(
            "megatron-core does not import with the installed transformer_engine "
            f"({type(e).__name__}: {_one_line(e)}): install versions that fit (docs/install.md#tested-combinations), "
            "or leave out the flags that name it; it is optional"
        ) from e


@contextmanager
def _without(name: str) -> Iterator[None]:
    """A block in which a module that is not loaded does not import."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def leave_out_broken_apex() -> None:
    """Hide an apex that cannot be used from megatron-core, which then takes torch's kernels, and say so in one line."""
    if importlib.util.find_spec("apex") is None:
        return
    import torch  # its libraries must be there before an extension loads

    if not torch.cuda.is_available():
        unusable["apex"] = "there is no GPU"
    else:
        problem = apex_problem()
        if problem is None:
            return
        unusable["apex"] = problem
        log.warning("apex is not used: %s; %s", problem, APEX_REMEDY)
    _hide("apex")


def _hide(package: str) -> None:
    """An import of it is an ImportError from now on."""
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]


def apex_problem() -> str | None:
    """Why an installed apex does not work; None if it does."""
    try:
        for name in APEX:
            importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name == "amp_C":
            return "it was built without its CUDA extensions (there is no amp_C)"
        if (e.name or "").startswith("apex"):
            return f"it is not NVIDIA's (there is no {e.name}; PyPI has another package of that name)"
        return f"it needs {e.name}, which is not installed"
    except Exception as e:
        message = _one_line(e)
        if "undefined symbol" in message:
            return f"it was built for another torch ({message})"
        if "lib" in message and ".so" in message:
            return f"it was built for another CUDA version ({message})"
        return f"it does not import ({type(e).__name__}: {message})"
    return None


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())
