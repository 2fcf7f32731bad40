"""Packages that megatron-core uses where they are installed. Standard library only."""

from __future__ import annotations

import importlib
import importlib.util

from megatron_spec.config import UserError

_OPTIONAL = {
    "transformer_engine": ("transformer_engine.pytorch", "pip install 'transformer-engine[pytorch]'"),
    "apex": ("apex.optimizers", "build apex from source with its CUDA extensions"),
}


def check_optional_packages() -> None:
    """Check that Transformer Engine and apex are either absent or complete.

    megatron-core uses them if they import. A partial installation (a core without its torch extension, a library for
    another CUDA version) fails later with an unrelated message, or silently loses the fused path.

    Raises:
        UserError: a package is installed but does not import; states what failed and what to do.
    """
    for name, (module, remedy) in _OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as e:
            raise UserError(
                f"{name} is installed, but {module} does not import ({type(e).__name__}: {e}): complete it ({remedy}) "
                f"or remove it (pip uninstall {name.replace('_', '-')}); it is optional"
            ) from e
