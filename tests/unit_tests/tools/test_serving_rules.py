"""make_serving_config.py refuses an engine exactly where check_export.py finds an error for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_spec.config import UserError
from megatron_spec.export.check import check_folder
from tests.unit_tests.export.test_rules import BROKEN, OTHERS, base, good, other, write
from tools import make_serving_config

__all__ = ["base"]  # a fixture

ENGINES = ("vllm", "sglang", "trtllm")


def serves(draft: Path, base: Path, engine: str) -> bool:
    flags = [str(draft), "--engine", engine, "--base", str(base), "--output", str(draft.parent / f"{engine}.txt")]
    try:
        make_serving_config.main(make_serving_config.make_parser().parse_args(flags))
    except UserError:
        return False
    return True


@pytest.mark.parametrize("name", ["good", *BROKEN, *OTHERS])
def test_same_refusals(tmp_path: Path, base: Path, name: str) -> None:
    if name in BROKEN:
        contents = BROKEN[name][0](*good(BROKEN[name][3]))
    else:
        contents = OTHERS[name][1](*other(OTHERS[name][0])) if name in OTHERS else good()
    draft = write(tmp_path / "d", *contents)
    for engine in ENGINES:
        errors = [f for f in check_folder(draft, engine, base) if not f.warning]  # type: ignore[arg-type]
        assert serves(draft, base, engine) == (not errors), (engine, errors)
