"""Journal of a validation: a killed run resumes after its last finished window of prompts.

One file per data-parallel rank: a line with the settings of the measurement, then a line per finished window.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_spec.evaluation.report import Answer, Part
from megatron_spec.generation.parts import parts
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import append_text, drop_half_line, write_text

log = logging.getLogger(__name__)


class Journal:
    """Finished windows of this data-parallel rank.

    Attributes:
        part: all of them together; empty when no journal of these settings was found.
        windows: their number.
    """

    def __init__(self, output: Path | None, meta: dict[str, Any], runs: int, world: World) -> None:
        """Collective over all ranks. `meta` must contain everything the figures depend on."""
        self.output, self.first = output, world.dp_rank == 0
        self.path = None if output is None else output.with_name(f"{output.name}.part{world.dp_rank}")
        self.writes = self.path is not None and world.tp_rank == world.pp_rank == 0
        lines = self._read(meta) if self.writes else []
        if world.size > 1:  # the ranks of one replica must resume at the same window
            found: list[Any] = [None] * world.size
            dist.all_gather_object(found, (world.dp_rank, lines))
            lines = max((x for rank, x in found if rank == world.dp_rank), key=len)
        self.part, self.windows = Part([], [0.0] * (runs + 1), []), len(lines)
        for line in lines:
            self._take(Part([Answer.from_dict(a) for a in line["answers"]], line["seconds"], line["skipped"]))
        if self.writes and not lines:
            assert self.path is not None
            write_text(self.path, json.dumps(meta) + "\n")

    def _read(self, meta: dict[str, Any]) -> list[dict[str, Any]]:
        assert self.path is not None
        raw = self.path.read_bytes().split(b"\n") if self.path.is_file() else [b""]
        try:
            first, *lines = [json.loads(line) for line in raw[:-1]]  # what follows the last line end is half-written
        except ValueError:
            return []
        if first != json.loads(json.dumps(meta)):
            log.warning("%s comes from a run with other settings: starting over", self.path)
            return []
        if lines:
            log.info("%s: found %d answers", self.path, sum(len(x["answers"]) for x in lines))
        drop_half_line(self.path)
        return lines

    def _take(self, part: Part) -> None:
        self.part.answers += part.answers
        self.part.skipped += part.skipped
        self.part.seconds = [a + b for a, b in zip(self.part.seconds, part.seconds, strict=True)]

    def add(self, part: Part) -> None:
        """Append a finished window."""
        self._take(part)
        if self.writes:
            assert self.path is not None
            append_text(self.path, json.dumps(dataclasses.asdict(part)) + "\n")

    def remove(self) -> None:
        """Delete the journals once the report is written, also those of a killed run with more ranks."""
        if self.writes:
            assert self.output is not None and self.path is not None
            for path in parts(self.output) if self.first else [self.path]:
                path.unlink(missing_ok=True)
