"""Figures of benchmarks/ablate_drafts.py on disk, a line each, as soon as they are there."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError

log = logging.getLogger("megatron_spec.ablate_drafts")

HIDDEN = ("sets", "costs", "few", "few_tokens", "few_steps")
"""What is too long for a line of the log."""


class Results:
    """results.jsonl: the settings, then one line per figure. Raises UserError when it is of another run."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.start, self.lines = path, time.monotonic(), []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the last one may be half-written
                    self.lines.append(json.loads(line))
            path.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        settings = json.loads(json.dumps(settings))
        if not self.lines:
            self.add("settings", **settings)
        changed = [k for k, v in settings.items() if self.lines[0].get(k) != v]
        if changed:
            found = ", ".join(f"{k}: found {self.lines[0].get(k)!r}, now {settings[k]!r}" for k in changed)
            raise UserError(f"{path} is of a run with other settings ({found}): use another --output")

    def add(self, kind: str, **values: Any) -> None:
        """One line more."""
        line = {"kind": kind, "at": round(time.monotonic() - self.start, 1), **values}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        log.info("%s", {k: v for k, v in line.items() if k not in HIDDEN})

    def has(self, kind: str, name: str | None = None) -> bool:
        """True when that figure is there."""
        return any(line["kind"] == kind and line.get("name") == name for line in self.lines)
