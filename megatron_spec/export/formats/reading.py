"""Types shared by all formats: the folder on disk, the result of reading it, and its problems. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megatron_spec.checkpoint.spec import is_draft_checkpoint
from megatron_spec.config import BaseConfig, DraftConfig, EagleConfig, UserError
from megatron_spec.config.structure import draft_tensors
from megatron_spec.export.tensor_files import Entry, read_entries
from megatron_spec.runtime.files import model_json

SCALES = ("weight_scale", "input_scale", "weight_scale_2")
"""Tensors of a quantised linear."""
KV_SCALES = ("k_scale", "v_scale")
"""Ranges of an fp8 KV cache, which have no effect when the cache is not in fp8."""
_NUMBERS = ("BF16", "F16", "F32", "F64")
_CODES = ("F8_E4M3", "U8")
"""dtypes of quantised weights: fp8, and two nvfp4 codes per byte."""
_BUFFERS = re.compile(r"rotary_emb\.|\.inv_freq$")


@dataclass(frozen=True)
class Problem:
    """One reason why a folder cannot be read.

    Attributes:
        rule: short name, as tools/check_export.py prints it.
    """

    rule: str
    found: str
    fix: str


class DraftProblems(UserError):
    """A folder that cannot be read as a draft, with all its problems."""

    def __init__(self, folder: Path, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__(f"{folder}: " + "; ".join(f"{p.found} ({p.fix})" for p in problems[:4]))


def refuse_checkpoint(folder: Path) -> None:
    """Raise UserError for a draft checkpoint of this package, where an exported draft is expected."""
    if is_draft_checkpoint(folder):
        raise UserError(f"{folder} is a draft checkpoint, expected an exported draft: run export.py --load {folder}")


@dataclass
class Source:
    """A folder on disk: its config.json without nulls, and its tensors by name."""

    folder: Path
    raw: dict[str, Any]
    entries: dict[str, Entry]

    @staticmethod
    def open(folder: Path) -> Source:
        """Open a folder. Raises UserError when config.json or all tensor files are missing, or a file is damaged."""
        if not (folder / "config.json").is_file() and (folder / "draft" / "config.json").is_file():
            raise UserError(f"{folder} is a folder of export.py with the draft in it: give {folder / 'draft'}")
        refuse_checkpoint(folder)
        raw = model_json(folder)
        if not isinstance(raw, dict):
            raise UserError(f"{folder / 'config.json'}: expected a JSON object, found {type(raw).__name__}")
        names = raw.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            found = f"{folder / 'config.json'}: architectures is {names!r}"
            raise UserError(f"{found}, expected a list of names; copy it from the trained configuration")
        return Source(folder, {k: v for k, v in raw.items() if v is not None}, read_entries(folder))

    @property
    def architectures(self) -> str:
        """All names in `architectures`, in one string."""
        return " ".join(self.raw.get("architectures") or [])

    def problem(self, rule: str, found: str, fix: str) -> DraftProblems:
        """An error with one problem."""
        return DraftProblems(self.folder, [Problem(rule, found, fix)])


@dataclass
class Reading:
    """The result of reading a draft.

    Attributes:
        config: configuration of the draft.
        names: name of a parameter (as in the draft's module) -> name of its tensor in the folder; None: zeros.
        unused: tensors without effect on the draft -> reason.
        d2t: name of the vocabulary map in the folder, or None.
        copies: tensors that must be the target's, which engines use -> 'embed_tokens' or 'lm_head'.
    """

    source: Source
    config: DraftConfig
    names: dict[str, str | None]
    unused: dict[str, str] = field(default_factory=dict)
    d2t: str | None = None
    copies: dict[str, str] = field(default_factory=dict)

    @property
    def target_ids(self) -> list[int] | None:
        """Target id of every draft id, in the order of the folder; None for the identity map."""
        if self.d2t is None:
            return None
        return [i + offset for i, offset in enumerate(self.source.entries[self.d2t].integers())]

    def quantised(self) -> dict[str, str]:
        """Linears of the draft stored in fp8 or nvfp4: name of the module -> stem of its tensors in the folder."""
        found = {}
        for name, stored in self.names.items():
            if stored is None or not stored.endswith(".weight"):
                continue
            entry = self.source.entries.get(stored)
            if entry is not None and entry.dtype in _CODES:
                found[name.removesuffix(".weight")] = stored.removesuffix(".weight")
        return found

    def copy_of(self, name: str, stored: str) -> None:
        """Mark a tensor as a copy of the target's 'embed_tokens' or 'lm_head'."""
        self.copies[stored] = name
        self.unused[stored] = f"engines use the target's {name}"

    def without_embedding(self, why: str) -> None:
        """Mark the embedding in the folder as the target's: the draft has none of its own."""
        assert isinstance(self.config, EagleConfig)
        stored = self.names.pop("embed_tokens.weight")
        assert stored is not None
        self.unused[stored] = why
        self.config = self.config.replace(own_embed_tokens=False)


class Format(Protocol):
    """Reader of one published format."""

    def matches(self, source: Source) -> bool:
        """True when the folder has this format."""
        ...

    def read(self, source: Source, base: BaseConfig | None) -> Reading:
        """Read the draft. Raises DraftProblems naming every tensor and option that cannot be read."""
        ...


def checked(
    reading: Reading, base: BaseConfig | None, reasons: Mapping[str, str] = MappingProxyType({}),
    problems: Sequence[Problem] = (),
) -> Reading:  # fmt: skip
    """The reading, if it is complete and fits the target.

    Args:
        base: the target, if known.
        reasons: part of a tensor's name -> why the draft has no such tensor.
        problems: those found before.

    Raises DraftProblems with all of them.
    """
    found = [*problems, *_check_tensors(reading, reasons)]
    if base is not None and not found:
        found = _check_fits(reading, base)
    if found:
        raise DraftProblems(reading.source.folder, found)
    return reading


def _check_tensors(reading: Reading, reasons: Mapping[str, str]) -> list[Problem]:
    """Problems: tensors that are missing, have the wrong shape, or are unread."""
    entries, table = reading.source.entries, draft_tensors(reading.config)
    problems = []
    lost = [stored or name for name in table for stored in [reading.names.get(name, name)] if _lost(reading, name)]
    if lost:
        problems.append(
            Problem(
                "missing", f"missing {', '.join(sorted(lost)[:8])} ({len(lost)})", "they are parameters of the draft"
            )
        )
    for name, stored in reading.names.items():
        if stored is None or stored not in entries or name not in table:
            continue
        shape = logical_shape(entries[stored])
        if name == "mask_hidden" and prod(shape) == table[name].size:  # one vector, in whatever shape
            continue
        if shape != table[name].shape:
            problems.append(
                Problem(
                    "shape", f"{stored} is {list(shape)}, config.json says {list(table[name].shape)}",
                    "make config.json and the tensor agree; rows that only pad the vocabulary must be cut off",
                )
            )  # fmt: skip
    return problems + _dtypes(reading) + _scales(reading) + _unread(reading, reasons)


def _dtypes(reading: Reading) -> list[Problem]:
    """Parameters stored as anything but numbers or codes with a scale: read as numbers, codes are another draft."""
    problems = []
    for stored in filter(None, reading.names.values()):
        entry = reading.source.entries.get(stored)
        allowed = _NUMBERS + (_CODES if stored.endswith(".weight") else ())
        if entry is not None and entry.dtype not in allowed:
            found = f"{stored} is {entry.dtype}, expected {', '.join(allowed)}"
            problems.append(Problem("dtype", found, "write it in the dtype that it was trained in"))
    return problems


def _lost(reading: Reading, name: str) -> bool:
    if name not in reading.names:
        return True
    stored = reading.names[name]
    return stored is not None and stored not in reading.source.entries


def logical_shape(entry: Entry) -> tuple[int, ...]:
    """Shape in elements (nvfp4 packs two per byte)."""
    return (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.dtype == "U8" and entry.shape else entry.shape


def _scales(reading: Reading) -> list[Problem]:
    entries, problems = reading.source.entries, []
    for stem in reading.quantised().values():
        four_bits = entries[f"{stem}.weight"].dtype == "U8"
        needed = ("weight_scale", "weight_scale_2") if four_bits else ("weight_scale", "input_scale")
        missing = [f"{stem}.{kind}" for kind in needed if f"{stem}.{kind}" not in entries]
        if missing:
            problems.append(
                Problem("fp8", f"{stem}.weight is quantised, but {', '.join(missing)} is missing", "write amax / 448")
            )
        wide = [f"{stem}.{k}" for k in needed if f"{stem}.{k}" in entries and not four_bits]
        if any(entries[name].shape not in ((), (1,)) for name in wide):
            problems.append(Problem("fp8", f"scales of {stem} are not one number", "quantise with per-tensor scales"))
    return problems


def _unread(reading: Reading, reasons: Mapping[str, str]) -> list[Problem]:
    used = {stored for stored in reading.names.values() if stored is not None} | reading.unused.keys()
    if reading.d2t is not None:
        used.add(reading.d2t)
    used |= {f"{stem}.{kind}" for stem in reading.quantised().values() for kind in SCALES}
    unread = sorted(reading.source.entries.keys() - used)
    if not unread:
        return []
    known = [f"{n}: {why}" for n in unread for part, why in reasons.items() if part in n]
    fix = known[0] if known else "a draft of this kind has no such tensor; ignoring it would measure a different draft"
    return [Problem("unknown", f"found {', '.join(unread[:8])} ({len(unread)}), which cannot be read", fix)]


def meaningless(names: Iterable[str]) -> dict[str, str]:
    """Buffers and ranges without effect here -> reason."""
    found = {name: "a buffer, computed from config.json" for name in names if _BUFFERS.search(name)}
    return found | {n: "a range of an fp8 KV cache" for n in names if n.rpartition(".")[2] in KV_SCALES}


def integer(raw: dict[str, Any], key: str, source: Source, default: int | None = None) -> int:
    """A positive integer in config.json. Raises DraftProblems when it is missing or anything else."""
    value = raw.get(key, default)
    if value is None:
        raise source.problem("config", f"config.json lacks {key}", "copy it from the trained configuration")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise source.problem("config", f"config.json: {key} is {value!r}, expected a positive integer", "correct it")
    return value


def _check_fits(reading: Reading, base: BaseConfig) -> list[Problem]:
    """Problems: properties of the draft that do not fit the target."""
    config, problems = reading.config, []
    pairs = (
        ("hidden size", config.target_hidden_size, base.hidden_size),
        ("vocabulary", config.vocab_size, base.vocab_size),
    )
    for what, found, expected in pairs:
        if found != expected:
            rule = "vocab_size" if what == "vocabulary" else "target_hidden_size"
            fix = "use a draft of this target, or the target of this draft"
            problems.append(Problem(rule, f"the draft is for a {what} of {found}, the target has {expected}", fix))
    outside = [j for j in config.capture_layer_ids if not 0 <= j < base.num_layers]
    if outside:
        found_ids = f"layer outputs {list(config.capture_layer_ids)} do not all exist: the target has {base.num_layers}"
        problems.append(Problem("capture_ids", f"{found_ids} layers", "use a draft of this target"))
    return problems
