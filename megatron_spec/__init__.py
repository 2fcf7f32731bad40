"""Draft models for speculative decoding on megatron-core.

The names below are the library API; they are resolved on first use, so that importing the package
(and therefore `--help` of every script) costs no import of torch or megatron-core.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "convert": "megatron_spec.api",
    "save": "megatron_spec.api",
    "load": "megatron_spec.api",
    "load_optimizer": "megatron_spec.api",
    "quantize": "megatron_spec.api",
    "export_draft": "megatron_spec.api",
    "export_base": "megatron_spec.api",
    "validate": "megatron_spec.api",
    "decode": "megatron_spec.api",
    "initialize": "megatron_spec.api",
    "SpecModel": "megatron_spec.api",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
