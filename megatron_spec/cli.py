"""The shared start of all scripts: flags made from the configuration classes, logging, and how errors end a run.

The parsing half imports neither torch nor megatron-core: `--help` and a misspelt flag answer at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import errno
import inspect
import logging
import os
import sys
import textwrap
import time
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from megatron_spec.config import Config, UserError, suggest

C = TypeVar("C", bound=Config)
log = logging.getLogger(__name__)

MENDABLE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
)
"""Errors of the system that say what to do: no space, no permission, a file in place of a folder. No traceback."""
OTHERS_WAIT = 3.0
"""Seconds for which a rank keeps a message back that the first rank of its machine is likely to print."""

_ALIASES = {"tensor_model_parallel_size": ["--tp"], "pipeline_model_parallel_size": ["--pp"]}


class Once(argparse.Action):
    """Stores a value, and refuses to be given twice (argparse would forget the first)."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Called by argparse for each occurrence."""
        given = namespace.__dict__.setdefault("_given", set())
        if self.dest in given:
            raise argparse.ArgumentError(self, "given twice: one run makes one draft, start another for the other")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """argparse with exact flags only, exit code 2, and a suggestion for an unknown flag."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2 and one line."""
        # Every rank parses the same words: one of each machine says it.
        self.exit(2, f"{self.prog}: error: {message}\n" if local_rank() == 0 else None)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse; an unknown flag ends the program with a suggestion."""
        words = sys.argv[1:] if args is None else list(args)
        dry_run = "--dry-run" in words and "--dry-run" in self._option_string_actions
        required = [a for a in self._actions if a.required and a.dest != "load"] if dry_run else []
        for action in required:
            action.required = False
        found, unknown = self.parse_known_args(words, namespace)
        for action in required:
            action.required = True
        if not dry_run and any(getattr(found, name, None) for name in ("num_nodes", "gpus_per_node", "gpu_memory_gib")):
            self.error(
                "--num-nodes, --gpus-per-node and --gpu-memory-gib belong to --dry-run; torchrun starts processes"
            )
        if unknown:
            name = unknown[0].split("=")[0]
            self.error(f"unknown argument {name}{suggest(name, self._option_string_actions)}; see --help")
        return found

    def add_dry_run(self) -> None:
        """--dry-run and the machines it plans for; with it no other flag is required."""
        group = self.add_argument_group("plan, without weights or GPUs")
        group.add_argument(
            "--dry-run", action="store_true",
            help="print layout, placement, memory and work, and end; --load may be a folder with a config.json alone",
        )  # fmt: skip
        group.add_argument("--num-nodes", type=at_least_one, metavar="N", help="machines of the plan (default: 1)")
        group.add_argument("--gpus-per-node", type=at_least_one, metavar="N", help="of the plan (default: 8)")
        group.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="of the plan (default: 80)")

    def add_model_flags(
        self, tokenizer: bool = True, base: str = "the base's place, when it moved since convert_model.py"
    ) -> None:
        """Where base and tokenizer are, and the precision: what every script over a checkpoint asks.

        Args:
            base: what --base is for.
        """
        self.add_argument("--base", metavar="DIR", help=base)
        if tokenizer:
            self.add_argument("--tokenizer", metavar="DIR", help="tokenizer folder (default: the base's)")
        self.add_argument("--bf16", action="store_true", help="bfloat16 weights (default: float32)")

    def add_config(self, cls: type[Config], skip: Sequence[str] = (), **defaults: Any) -> None:
        """One flag per field of a configuration class: `train_iters` becomes --train-iters.

        Args:
            skip: fields that get no flag.
            defaults: other defaults than those of the class.
        """
        group = self.add_argument_group(cls.__name__)
        hints, docs = typing.get_type_hints(cls), field_docs(cls)
        for field in dataclasses.fields(cls):
            if field.name in skip:
                continue
            default = defaults.get(field.name, field.default)
            required = default is dataclasses.MISSING
            flags = ["--" + field.name.replace("_", "-"), *_ALIASES.get(field.name, [])]
            kwargs: dict[str, Any] = _argument(hints[field.name])
            kwargs.update(
                dest=field.name, help=docs.get(field.name, " ") + ("" if required else f" (default: {default})")
            )
            kwargs.update({"required": True} if required else {"default": default})
            group.add_argument(*flags, **kwargs)


def _argument(hint: Any) -> dict[str, Any]:
    options = [h for h in typing.get_args(hint) if h is not type(None)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = options[0]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    return {"type": hint, "metavar": getattr(hint, "__name__", "VALUE").upper()}


def field_docs(cls: type) -> dict[str, str]:
    """The strings written below the fields of a dataclass, by field name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, str):
            docs[node.target.id] = " ".join(text.split()).replace("%", "%%")
    return docs


def at_least_one(text: str) -> int:
    """An argparse type: a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def at_least_zero(text: str) -> int:
    """An argparse type: a whole number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, found {value}")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers from 1, separated by commas."""
    try:
        return tuple(at_least_one(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}") from None


def config_from(cls: type[C], args: argparse.Namespace, **fixed: Any) -> C:
    """The configuration that parsed flags describe."""
    names = {f.name for f in dataclasses.fields(cls)}
    values = {k: v for k, v in vars(args).items() if k in names}
    return cls(**{**values, **fixed})


def rank() -> int:
    """Rank of this process as torchrun set it."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank of this process among those of its machine, as torchrun set it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def setup_logging() -> None:
    """Progress on rank 0 to stderr; warnings and errors from every rank, with their rank."""
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
    """Parse, run and leave. Exit code 0: done; 2: user error (no traceback); 1: a bug (traceback), or what `main`
    returned."""
    args = parser.parse_args(argv)
    setup_logging()
    code: int | None = 0
    try:
        from megatron_spec.runtime.platform import check_optional_packages

        check_optional_packages()
        code = main(args)
    except UserError as e:
        _leave(2, f"{parser.prog}: error: {e}")
    except KeyboardInterrupt:
        _leave(130, f"{parser.prog}: interrupted")
    except Exception as e:
        if isinstance(e, OSError) and e.errno in MENDABLE:
            _leave(2, f"{parser.prog}: error: {e.filename or 'writing'}: {e.strerror}")
        log.exception("rank %d failed", rank())
        _leave(1, "", f"{type(e).__name__}: {e}")
    _leave(code or 0, "")


def _leave(code: int, message: str, error: str = "") -> NoReturn:
    if message:
        if code == 2 and local_rank() != 0:
            # Most mistakes are seen by every rank. The first of a machine says it, and its exit makes torchrun end the
            # others while they wait here; who is still here then knows something that the first does not.
            time.sleep(OTHERS_WAIT)
        print(message if rank() == 0 else f"[rank {rank()}] {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    watching = sys.modules.get("megatron_spec.runtime.failure")
    if watching is not None:
        watching.leave((error or message)[:300] or None if code else None)
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)  # do not wait in destructors for ranks that wait for us: torchrun ends them
    started = sys.modules.get("megatron_spec.runtime.distributed")
    if started is not None:
        started.shutdown()
    sys.exit(code)
