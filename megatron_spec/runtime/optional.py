"""Packages that megatron-core uses where they are installed. Standard library, and torch where apex is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys

from megatron_spec.config import UserError

log = logging.getLogger(__name__)

APEX = ("amp_C", "apex.optimizers", "apex.multi_tensor_apply")
"""What megatron-core imports of apex; the extension comes first, because the packages import without it."""
APEX_REMEDY = "build it from source with its CUDA extensions (docs/install.md#apex) or remove it"

unusable: dict[str, str] = {}
"""Package that is installed, but not used -> why."""


def check_optional_packages() -> None:
    """Check that Transformer Engine is absent or complete, and leave out an apex that is neither.

    megatron-core uses both if they import. A partial installation (a core without its torch extension, a library for
    another CUDA version) fails later with an unrelated message, or silently loses the fused path. Call it before
    megatron-core is imported.

    Raises:
        UserError: Transformer Engine is installed but does not import; states what failed and what to do.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as e:
            raise UserError(
                "transformer_engine is installed, but transformer_engine.pytorch does not import "
                f"({type(e).__name__}: {_one_line(e)}): complete it (pip install 'transformer-engine[pytorch]') or "
                "remove it (pip uninstall transformer-engine); it is optional"
            ) from e
    leave_out_broken_apex()


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
    for name in [n for n in sys.modules if n == "apex" or n.startswith("apex.")]:
        del sys.modules[name]
    sys.modules["apex"] = None  # type: ignore[assignment]  # an import of it is an ImportError from now on


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
        said = _one_line(e)
        if "undefined symbol" in said:
            return f"it was built for another torch ({said})"
        if "lib" in said and ".so" in said:
            return f"it was built for another CUDA version ({said})"
        return f"it does not import ({type(e).__name__}: {said})"
    return None


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())
