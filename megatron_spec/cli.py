"""Command-line framework of the scripts: flags from configuration classes, logging, exit codes.

Parsing imports neither torch nor megatron-core, so `--help` and flag errors answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import inspect
import io
import json
import logging
import math
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from megatron_spec.config import Config, UserError, flag_name, megatron_flags, suggest
from megatron_spec.config.help_text import LONG_CHOICES, HelpFormatter, field_docs, flag_text
from megatron_spec.runtime.files import unique_keys

log = logging.getLogger(__name__)

USER_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
     errno.ENAMETOOLONG, errno.ELOOP}
)  # fmt: skip
"""Operating system errors that need no traceback: no space, no permission, a file in place of a folder, ..."""
OTHERS_WAIT = 3.0
"""Seconds by which a rank delays a message that the first rank of its machine is likely to print."""

_ALIASES = {
    "tensor_model_parallel_size": ["--tp"],
    "pipeline_model_parallel_size": ["--pp"],
    "draft_lens": ["--num-nextn-predict-layers"],
}
"""Alternative flags of a field."""


class Once(argparse.Action):
    """Stores a value and refuses a second one (argparse would drop the first)."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the value; called by argparse for each occurrence."""
        given = namespace.__dict__.setdefault("_given", set())
        if self.dest in given:
            raise argparse.ArgumentError(self, "given twice: expected one value; start another run for the other")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations. All problems of a command line are reported at once, with exit code 2.

    Args:
        run: configuration class whose fields become flags; the parsed namespace has the instance as `run`.
    """

    def __init__(self, description: str | None, run: type[Config] | None = None) -> None:
        super().__init__(description=description, allow_abbrev=False, formatter_class=HelpFormatter)
        self.run_class, self.notes, self.refused = run, list[str](), set[str]()
        self.register("type", float, _finite)
        if run is not None:
            self._add_fields(run, self, "")

    def format_usage(self) -> str:
        """The required arguments only: some scripts have a hundred options, which follow with their explanations."""
        formatter = self._get_formatter()
        formatter.add_usage(None, [a for a in self._actions if a.required or not a.option_strings], [])
        return f"{formatter.format_help().rstrip()} [options]\n"

    def format_help(self) -> str:
        """Usage, description and all options."""
        self.usage = self.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and the message."""
        # All ranks parse the same flags, so one rank of each machine reports.
        self.exit(2, f"{self.prog}: error: {message}\n" if local_rank() == 0 else None)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse; reports all unknown and missing flags, invalid values and conflicts together, and exits."""
        words, problems, shapes = self._sort_out(sys.argv[1:] if args is None else list(args))
        helped = any(word in ("-h", "--help") for word in words)  # then all flags are shown as they are
        required = [a for a in self._actions if a.required and a.option_strings and not helped]
        for action in required:
            action.required = False
        found, unknown = self.parse_known_args(words, namespace)
        missing = [a for a in required if getattr(found, a.dest, None) is None]
        named = [a.option_strings[0] for a in missing if a.dest not in self.refused]
        for action in required:
            action.required = True
        problems += [f"unexpected argument {word!r}" for word in unknown]
        if named and not (problems and not words):
            problems.append(f"the following arguments are required: {', '.join(named)}")
        if self.run_class is not None:
            found.base_shapes = shapes
            flags = self._option_string_actions
            given = {flags[name].dest for name in (word.partition("=")[0] for word in words) if name in flags}
            found.run = _build(self.run_class, found, "", given, problems, complete=not missing)
        if problems:
            self.error(problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems:", *problems]))
        return found

    def _sort_out(self, words: list[str]) -> tuple[list[str], list[str], tuple[tuple[str, str], ...]]:
        """(words of valid flags, problems of the others, base sizes given by Megatron's flags)."""
        good: list[str] = []
        problems: list[str] = []
        shapes: list[tuple[str, str]] = []
        before: dict[str, tuple[str, Any]] = {}
        start = next((i for i, word in enumerate(words) if _is_flag(word)), len(words))
        good += words[:start]
        while start < len(words):
            end = next((i for i in range(start + 1, len(words)) if _is_flag(words[i])), len(words))
            name, equals, value = words[start].partition("=")
            values = ([value] if equals else []) + words[start + 1 : end]
            action = self._option_string_actions.get(name) or self._option_string_actions.get(_dashes(name))
            problem = self._unknown(name, values, shapes) if action is None else self._wrong_value(action, values)
            if problem is None and action is not None:
                known = name if name in self._option_string_actions else _dashes(name)
                good += [known + equals + value, *words[start + 1 : end]]
                taken = values if isinstance(action.nargs, str) else values[: action.nargs is None]
                now = " ".join([known, *taken]), (taken, known.startswith("--no-"))
                if before.setdefault(action.dest, now)[1] != now[1]:
                    self.notes.append(f"{now[0]} replaces {before[action.dest][0]}, given before it")
                before[action.dest] = now
            elif problem:
                problems.append(problem)
                self.refused |= {action.dest} if action else set()
            start = end
        return good, problems, tuple(shapes)

    def _unknown(self, name: str, values: list[str], shapes: list[tuple[str, str]]) -> str | None:
        flag = _dashes(name)
        known = megatron_flags.FLAGS.get(flag) or megatron_flags.opposite(flag)
        if known is not None and self.run_class is not None:
            return self._answer(flag, known, values, shapes)
        return f"unknown argument {name}{suggest(name, self._option_string_actions)}; see --help"

    def _answer(
        self, name: str, flag: megatron_flags.MegatronFlag, values: list[str], shapes: list[tuple[str, str]]
    ) -> str | None:
        """The error message for a flag of Megatron-LM; None if it is accepted."""
        if flag.verdict == "renamed":
            here = flag.text in self._option_string_actions
            return f"{name} is {flag.text} here" if here else f"{name}: this script has no such option ({flag.text})"
        if flag.verdict == "refused":
            return f"{name} is not supported: {flag.text}"
        if len(values) != flag.takes_value:
            return f"{name}: expected {'one value' if flag.takes_value else 'no value'}, found {values}"
        if flag.verdict == "fixed" and values[0] not in flag.values:
            return f"{name} {values[0]} is not supported, only {' or '.join(flag.values)}: {flag.text}"
        if flag.verdict == "checked":
            shapes.append((name, values[0]))
        else:
            self.notes.append(f"{name}{' is not needed' if flag.verdict == 'not needed' else ''}: {flag.text}")
        return None

    def _wrong_value(self, action: argparse.Action, values: list[str]) -> str | None:
        if action.nargs is not None:
            return None
        if not values or not values[0]:
            found = ", found an empty one" if values else ""
            return f"argument {'/'.join(action.option_strings)}: expected one argument{found}"
        try:
            self._get_values(action, values[:1])
        except argparse.ArgumentError as e:
            hint = megatron_flags.VALUES.get(values[0].lower())
            return f"{e}{': ' + hint if hint else ''}"
        return None

    def add_fields(self, cls: type[Config], *only: str) -> None:
        """Flags for some fields of a configuration class, stored in the parsed namespace by field name."""
        self._add_fields(cls, self, "", only)

    def _add_fields(self, cls: type[Config], to: Any, path: str, only: Sequence[str] = (), skip: Any = ()) -> None:
        """One flag per field of a configuration class: `train_iters` becomes --train-iters. Groups nest."""
        hints, docs = typing.get_type_hints(cls), field_docs(cls)
        own = inspect.get_annotations(cls)
        for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in own):  # inherited ones last
            if field.name in skip or (only and field.name not in only) or field.metadata.get("hidden"):
                continue
            hint = hints[field.name]
            if isinstance(hint, type) and issubclass(hint, Config):
                title = self.add_argument_group(docs[field.name].rstrip("."))
                about = field.metadata
                self._add_fields(hint, title, f"{path}{field.name}.", about.get("only", ()), about.get("skip", ()))
            else:
                named = field.metadata.get("title")
                self._add_flag(field, hint, docs[field.name], self._titled(named) if named else to, path + field.name)

    def _titled(self, title: str) -> argparse._ArgumentGroup:
        known = (group for group in self._action_groups if group.title == title)
        return next(known, None) or self.add_argument_group(title)

    def _add_flag(self, field: dataclasses.Field[Any], hint: Any, text: str, to: Any, dest: str) -> None:
        options = _argument(hint)
        about = field.metadata
        if "parse" in about:
            options = {"type": about["parse"]}
        elif "least" in about:
            options["type"] = functools.partial(_bounded, options["type"], about["least"])
        if "metavar" in about:
            options["metavar"] = about["metavar"]
        if about.get("once"):
            options["action"] = Once
        optional = type(None) in typing.get_args(hint)
        default = None if field.default is dataclasses.MISSING else field.default
        required = field.default is dataclasses.MISSING and not optional
        choices = options.get("choices", ())
        if len(",".join(choices)) > LONG_CHOICES:
            options["metavar"] = "NAME"
        flags = ["--" + flag_name(field), *_ALIASES.get(field.name, [])]
        action = to.add_argument(*flags, dest=dest, default=default, required=required, **options)
        action.help = argparse.SUPPRESS if about.get("unlisted") else flag_text(text, default, choices)


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not re.fullmatch(r"-\.?\d.*", word)


def _dashes(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # a comparison with nan is always false
        raise argparse.ArgumentTypeError(f"must be finite, found {text}")
    return value


def _bounded(kind: Callable[[str], Any], least: float, text: str) -> Any:
    try:
        value = _finite(text) if kind is float else kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid {kind.__name__} value: {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, found {value}")
    return value


def _build(
    cls: type[Config], found: argparse.Namespace, path: str, given: set[str], problems: list[str],
    complete: bool = True,
) -> Config | None:  # fmt: skip
    """The configuration from parsed flags; its errors are appended to `problems`."""
    hints, values = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        hint, dest = hints[field.name], path + field.name
        if isinstance(hint, type) and issubclass(hint, Config):
            values[field.name] = _build(hint, found, f"{dest}.", given, problems)
            complete = complete and values[field.name] is not None
        elif hasattr(found, dest):
            values[field.name] = getattr(found, dest)
    try:
        return cls.from_flags(values, (name for name in values if path + name in given)) if complete else None
    except UserError as e:
        problems.append(str(e))
        return None


def _argument(hint: Any) -> dict[str, Any]:
    options = [h for h in typing.get_args(hint) if h is not type(None)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = options[0]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    return {"type": hint, "metavar": getattr(hint, "__name__", "VALUE").upper()}


def at_least_one(text: str) -> int:
    """An argparse type: a positive integer."""
    return int(_bounded(int, 1, text))


def at_least_zero(text: str) -> int:
    """An argparse type: a non-negative integer."""
    return int(_bounded(int, 0, text))


def numbers(text: str) -> tuple[int, ...]:
    """An argparse type: '1,2,4' -> (1, 2, 4)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}") from None


def check_urls(*urls: str) -> None:
    """Raise UserError for the URL of a server that lacks its scheme."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: expected the URL of a server, http://HOST:PORT or http://HOST:PORT/v1")


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r} ({e})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r}")
    return found


def rank() -> int:
    """Rank of this process, set by torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank of this process on its machine, set by torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def setup_logging() -> None:
    """Log to stderr: progress on rank 0, warnings and errors on every rank, prefixed with the rank."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that is not in UTF-8 shows \xe9, not a traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    level = logging.INFO if rank() == 0 else logging.WARNING
    prefix = "" if int(os.environ.get("WORLD_SIZE", "1")) == 1 else f"[rank {rank()}] "
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("megatron_spec").setLevel(level)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    warnings.filterwarnings("ignore", message=r"(?s).*(Transformer Engine|Apex|apex).*not installed.*")


def run(
    parser: Parser, main: Callable[[argparse.Namespace], int | None], argv: Sequence[str] | None = None
) -> NoReturn:
    """Parse, run and exit. Exit code 0: success; 2: user error (no traceback); 1: bug (traceback); or the code that
    `main` returned."""
    args = parser.parse_args(argv)
    setup_logging()
    code: int | None = 0
    for note in parser.notes:
        log.info(note)
    try:
        from megatron_spec.runtime import optional

        if parser.run_class is None:  # no flag of it names Transformer Engine
            optional.leave_out_engine()
        elif not getattr(args.run, "dry_run", False):  # it computes with megatron-core
            from megatron_spec.runtime import late_compile

            late_compile.install()
            optional.check_optional_packages(args.run)
        code = main(args)
    except UserError as e:
        _leave(2, f"{parser.prog}: error: {e}")
    except KeyboardInterrupt:
        _leave(130, f"{parser.prog}: interrupted")
    except Exception as e:
        if isinstance(e, OSError) and e.errno in USER_ERRORS:
            _leave(2, f"{parser.prog}: error: {e.filename or 'writing'}: {e.strerror}")
        log.exception("rank %d failed", rank())
        _leave(1, "", f"{type(e).__name__}: {e}")
    _leave(code or 0, "")


def _leave(code: int, message: str, error: str = "") -> NoReturn:
    if message:
        if code == 2 and local_rank() != 0:
            # Most user errors occur on every rank. The first rank of a machine reports them, and its exit makes
            # torchrun end the others while they wait here; a rank that is still alive then has an error of its own.
            time.sleep(OTHERS_WAIT)
        print(message if rank() == 0 else f"[rank {rank()}] {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    watching, quiet = sys.modules.get("megatron_spec.runtime.failure"), True
    if watching is not None:
        quiet = watching.leave((error or message)[:300] or None if code else None)
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)  # destructors could wait for ranks that wait for this one: torchrun ends them
    started = sys.modules.get("megatron_spec.runtime.distributed")
    if started is not None:
        started.shutdown()
    if not quiet:
        os._exit(code)
    sys.exit(code)
