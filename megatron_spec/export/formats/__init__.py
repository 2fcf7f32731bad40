"""Readers of published draft formats, which map them to one configuration and one naming scheme.

A format is a class with `matches` and `read` in `FORMATS`; adding one makes it readable by validate.py, generate.py,
convert_model.py --draft, make_serving_config.py and check_export.py. No torch here: names, shapes and small tensors
are enough to identify a folder. `export.load` fills a draft from the result.
"""

from __future__ import annotations

from pathlib import Path

from megatron_spec.config import BaseConfig, UserError
from megatron_spec.export.formats.block import Block
from megatron_spec.export.formats.eagle import Eagle, OwnModule
from megatron_spec.export.formats.keys import check_types
from megatron_spec.export.formats.medusa import Medusa
from megatron_spec.export.formats.reading import DraftProblems, Format, Problem, Reading, Source
from megatron_spec.runtime.hub import model_folder

__all__ = ["FORMATS", "DraftProblems", "Format", "Problem", "Reading", "Source", "open_source", "read_draft"]

FORMATS: list[Format] = [OwnModule(), Block(), Medusa(), Eagle()]
"""Formats in the order they are tried; the first that matches reads the folder."""


def open_source(folder: Path | str) -> Source:
    """Open config.json and the tensors of a folder or of a model on the hub.

    Raises UserError when either is missing or damaged.
    """
    return Source.open(model_folder(folder))


def read_draft(source: Source | Path | str, base: BaseConfig | None = None) -> Reading:
    """Read the draft in a folder; nothing in the folder is silently ignored.

    Args:
        base: the target: default captures depend on it, and the draft must fit it.

    Raises:
        DraftProblems: (a UserError) everything in the folder that cannot be read as a draft or does not fit.
        UserError: the folder is not a draft.
    """
    source = source if isinstance(source, Source) else open_source(source)
    for form in FORMATS:
        if form.matches(source):
            check_types(source)
            return form.read(source, base)
    raise UserError(
        f"{source.folder}: found architectures {source.raw.get('architectures')!r}, expected a draft: EAGLE-1, "
        "EAGLE-3, P-EAGLE, MTP, Medusa, DFlash or DSpark, as this package or another publishes them"
    )
