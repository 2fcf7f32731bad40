"""What the tests of the base families found, for the table of docs/families.md: written and compared by those tests.

With MEGATRON_SPEC_WRITE_SUPPORT=1 the tests write `support_results.json`; otherwise a run whose findings differ from
the file fails, so the file cannot be out of date while the tests pass. `tools/families_table.py` renders it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_suffix(".json")


def committed(part: str) -> dict[str, Any]:
    """What the file says of a part ("layouts", "chain")."""
    if not RESULTS.is_file():
        return {}
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")).get(part, {})
    return found


def same_as_committed(part: str, ran: dict[str, Any]) -> bool:
    """True when the file says what just ran; writes it first when asked to."""
    if os.environ.get("MEGATRON_SPEC_WRITE_SUPPORT") == "1":
        everything = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        everything[part] = ran
        RESULTS.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return committed(part) == ran
