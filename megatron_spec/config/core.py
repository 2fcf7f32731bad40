"""What all configurations have in common: typed reading and writing, and errors that name what was expected."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

T = TypeVar("T", bound="Config")
LARGEST_SEED = 2**32 - 1
"""torch's generator on the CPU uses 32 bits of a seed: a larger one would draw what a smaller one draws."""


class UserError(ValueError):
    """A mistake of the user: scripts print its message and exit with code 2, without traceback."""


def option(
    default: Any = dataclasses.MISSING,
    metavar: str | None = None,
    *,
    flag: str | None = None,
    least: int | None = None,
    most: int | None = None,
    parse: Callable[[str], Any] | None = None,
    once: bool = False,
    hidden: bool = False,
    unlisted: bool = False,
    title: str | None = None,
) -> Any:
    """A field of a configuration whose flag needs more than its name, type and docstring.

    Args:
        metavar: of the value in the help text.
        flag: without the dashes; default: the name of the field.
        least, most: smallest and largest allowed number.
        parse: text of the flag -> value; default: the type of the field.
        once: refuse the flag when it is given twice; default: the last one counts.
        hidden: no flag is made.
        unlisted: `--help` does not show the flag.
        title: of the group of flags in which `--help` shows it; default: with the others of its class.
    """
    about = {
        "metavar": metavar, "flag": flag, "least": least, "most": most, "parse": parse, "once": once, "hidden": hidden,
        "unlisted": unlisted, "title": title,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata={k: v for k, v in about.items() if v is not None})


def group(cls: type[Any], *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Any:
    """A field that holds a configuration of its own, which becomes a group of flags.

    Args:
        only: fields that get a flag; default: all of them
        skip: but these.
    """
    return dataclasses.field(default_factory=cls, metadata={"only": only, "skip": skip})


def suggest(name: str, known: typing.Iterable[str]) -> str:
    """' (did you mean X?)' for the closest known name, or ''."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (tuple, list):
        inner = typing.get_args(hint)[0]
        return isinstance(value, (list, tuple)) and all(_fits(v, inner) for v in value)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type):
        return isinstance(value, hint)
    return True


def _readable(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


@dataclass(frozen=True)
class Config:
    """Common behaviour of all configurations: typed reading, writing, validation on construction."""

    SETTLED: ClassVar[dict[str, Any]] = {}
    """Keys of files that can have one value only: read, checked and not kept."""
    given: ClassVar[frozenset[str]] = frozenset()
    """Fields whose flags were on a command line, also with their default value; of an instance (`from_flags`)."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not _fits(value, hints[f.name]):
                raise UserError(f"{type(self).__name__}.{f.name}: found {value!r}, expected {_readable(hints[f.name])}")
            if isinstance(value, float) and not math.isfinite(value):  # a comparison with nan is always false
                raise UserError(f"{f.name} must be finite, found {value}")
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise UserError(f"{f.name} must fit into 64 bits, found {value}")
            if isinstance(value, list):
                object.__setattr__(self, f.name, tuple(value))
            for bound, low in ("least", True), ("most", False):
                limit = f.metadata.get(bound)
                if None not in (limit, value) and (value < limit if low else value > limit):
                    raise UserError(f"--{flag_name(f)} must be at {bound} {limit}, found {value}")
        self.validate()

    def validate(self) -> None:
        """Raise UserError when the fields contradict one another."""

    def sets(self, name: str) -> bool:
        """True if a field was given: by its flag, or as another value than its default."""
        return name in self.given or getattr(self, name) != self.__dataclass_fields__[name].default

    @classmethod
    def from_flags(cls: type[T], values: dict[str, Any], given: typing.Iterable[str]) -> T:
        """Build from the values of all flags, of which those of `given` were on the command line."""
        made = cls.__new__(cls)
        object.__setattr__(made, "given", frozenset(given))  # before the fields are validated
        made.__init__(**values)  # type: ignore[misc]
        return made

    @classmethod
    def from_dict(cls: type[T], values: dict[str, Any]) -> T:
        """Build from a dictionary (nested configurations as dictionaries). Raises UserError on unknown keys."""
        hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name in field_names(cls)}
        kwargs: dict[str, Any] = {}
        for key, value in values.items():
            if key in cls.SETTLED:
                if value != cls.SETTLED[key]:
                    raise UserError(f"{cls.__name__}: {key} {value!r} is not supported: use {cls.SETTLED[key]!r}")
                continue
            if key not in hints:
                raise UserError(f"{cls.__name__}: unknown key {key!r}{suggest(key, hints)}; known: {', '.join(hints)}")
            nested: list[type[Config]] = [
                h for h in (hints[key], *typing.get_args(hints[key])) if isinstance(h, type) and issubclass(h, Config)
            ]
            kwargs[key] = _tagged(nested, value).from_dict(value) if nested and isinstance(value, dict) else value
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.name not in kwargs and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise UserError(f"{cls.__name__}: missing {', '.join(missing)}")
        return cls(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary, ready for json."""
        return dataclasses.asdict(self)

    def replace(self: T, **changes: Any) -> T:
        """A copy with some fields changed, validated again."""
        made = dataclasses.replace(self, **changes)
        object.__setattr__(made, "given", self.given)
        return made


def _tagged(kinds: list[type[Config]], value: dict[str, Any]) -> type[Config]:
    """Of several configurations a key may hold, the one whose `algorithm` is that of the value."""
    for kind in kinds:
        if value.get("algorithm") in typing.get_args(typing.get_type_hints(kind).get("algorithm")):
            return kind
    return kinds[0]


def field_names(cls: type[Config]) -> list[str]:
    """Names of the fields of a configuration class; class variables are none."""
    return [field.name for field in dataclasses.fields(cls)]


def flag_name(field: dataclasses.Field[Any]) -> str:
    """The flag of a field, without its dashes."""
    return str(field.metadata.get("flag") or field.name.replace("_", "-"))


def expect(value: Any, kind: type, what: str, hint: str = "") -> None:
    """Raise UserError unless an argument of the library is of the class `kind`.

    Args:
        hint: where to get one.
    """
    if not isinstance(value, kind):
        found = f"{what}: found a {type(value).__name__}, expected {kind.__name__}"
        raise UserError(f"{found} ({hint})" if hint else found)


def expect_choice(value: Any, choices: Any, what: str) -> None:
    """Raise UserError unless an argument of the library is one of the values of a Literal."""
    if not _fits(value, choices):
        raise UserError(f"{what}: found {value!r}, expected {_readable(choices)}")


def require(condition: bool, message: str) -> None:
    """Raise UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)
