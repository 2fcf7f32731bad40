"""What ran: implementation x script x family x layout, for docs/transformer_engine.md (`tools/te_table.py`).

On CPUs, with stand-ins, tests/functional_tests/test_te_matrix.py compares its findings with tests/support_results.json.
On a GPU the tests add theirs to the file that MEGATRON_SPEC_TE_RESULTS names, with the card and the versions; it is
committed as tests/te_gpu_results.json.
"""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

LOCAL, BASE, DRAFT = "local", "transformer_engine base", "transformer_engine draft"
Ran = dict[str, dict[str, dict[str, list[str]]]]
"""{implementation: {script: {family: layouts}}}."""

_PACKAGES = ("torch", "megatron-core", "transformer-engine")


def add(ran: Ran, implementations: tuple[str, ...], script: str, family: str, layout: str) -> None:
    """Note that a script ran and agreed with local modules on one rank."""
    for implementation in implementations:
        layouts = ran.setdefault(implementation, {}).setdefault(script, {}).setdefault(family, [])
        if layout not in layouts:
            layouts.append(layout)
            layouts.sort()


def add_on_gpu(implementations: tuple[str, ...], script: str, family: str, layout: str) -> None:
    """Note it in the file that MEGATRON_SPEC_TE_RESULTS names, if it does."""
    place = os.environ.get("MEGATRON_SPEC_TE_RESULTS")
    if not place:
        return
    path, here = Path(place), _machine()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {**here, "ran": {}}
    assert {name: found[name] for name in here} == here, f"{path} is of another machine: {found}"
    add(found["ran"], implementations, script, family, layout)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _machine() -> dict[str, Any]:
    import torch

    return {
        "card": torch.cuda.get_device_name(),
        "versions": {name: torch.__version__ if name == "torch" else metadata.version(name) for name in _PACKAGES},
    }
