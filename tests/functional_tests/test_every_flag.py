"""Every flag of every script changes what the script does, or is refused: nothing given is ignored.

A scenario is a real run on a tiny base during which every reading of a configuration's field is recorded, checks left
out. A flag whose field nothing read may not be given in that scenario: the run with another value must be refused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.commands import runs
from megatron_spec.commands.convert import convert
from megatron_spec.commands.decode import generate, validate
from megatron_spec.commands.export import export
from megatron_spec.commands.features import extract_features
from megatron_spec.commands.finetune import finetune
from megatron_spec.commands.quantize import quantize
from megatron_spec.config import Config, DecodeConfig, TrainConfig, UserError, flag_name
from tests.functional_tests.script_helpers import make_base, write_conversations

ONLY_CHECKS = {
    "__post_init__", "validate", "sets", "replace", "_replace", "_asdict_inner", "asdict", "to_dict", "__eq__",
    "_flags", "check_options", "check_undrafted", "_check_acceptance", "_given", "_refuse_unread",
    "_refuse_without_owner", "_refuse_idle", "_tree_depth", "objective_for", "_block_objective", "settings_of",
}  # fmt: skip
"""Functions that look at a field to refuse it, to copy it or to compare ranks."""
Read = set[tuple[type, str]]


@contextmanager
def recorded() -> Iterator[Read]:
    """Fields of configurations that something read, by class and name."""
    found: Read = set()

    def get(self: Config, name: str) -> Any:
        caller = sys._getframe(1).f_code
        own = caller.co_name == "validate" and caller.co_filename.endswith("commands/decode.py")
        if not name.startswith("__") and (own or caller.co_name not in ONLY_CHECKS):
            found.add((type(self), name))
        return object.__getattribute__(self, name)

    Config.__getattribute__ = get  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        del Config.__getattribute__


def flags(cls: type[Config], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Config], Any]]:
    """(path to a field, its class, the field) of everything that has a flag."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        about, hint = field.metadata, hints[field.name]
        if about.get("hidden"):
            continue
        if isinstance(hint, type) and issubclass(hint, Config):
            for deeper, owner, inner in flags(hint, (*path, field.name)):
                wanted = about.get("only") or [inner.name]
                if len(deeper) > len(path) + 2 or (inner.name in wanted and inner.name not in about.get("skip", ())):
                    yield deeper, owner, inner
        else:
            yield (*path, field.name), cls, field


def other(owner: type[Config], field: Any, value: Any) -> Any:
    """Another value that the field may have."""
    hint = typing.get_type_hints(owner)[field.name]
    kinds = [h for h in typing.get_args(hint) if h is not type(None)]
    kind = hint if isinstance(hint, type) or typing.get_origin(hint) is typing.Literal else (kinds or [hint])[0]
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != value)
    if kind is bool:
        return not value
    if kind is int:
        return 2 if value is None else value + 1
    if kind is float:
        return 0.25 if value != 0.25 else 0.5
    if typing.get_origin(kind) is tuple:
        return (0, 2) if field.name == "part" else (2,)
    return {"a": 1} if kind is dict or typing.get_origin(kind) is dict else "other"


def changed(run: Any, path: tuple[str, ...], owner: type[Config], field: Any) -> Any:
    """The run with one field changed."""
    if len(path) > 1:
        return run.replace(**{path[0]: changed(getattr(run, path[0]), path[1:], owner, field)})
    return run.replace(**{path[0]: other(owner, field, getattr(run, path[0]))})


@dataclasses.dataclass
class Home:
    """A base, conversations and drafts of it."""

    root: Path

    def __post_init__(self) -> None:
        self.base = str(make_base(self.root / "base"))
        self.data = str(write_conversations(self.root / "train.jsonl", 4))
        self.count = 0
        (self.root / "block.json").write_text(json.dumps({"mask_token_id": 3, "block_size": 3}))
        (self.root / "medusa.json").write_text("[[0], [1], [0, 0]]")
        self.drafts = {
            "eagle3": self.converted(),
            "eagle1": self.converted(eagle_algorithm="eagle1"),
            "medusa": self.converted(algorithm="medusa"),
            "dspark": self.converted(algorithm="dspark", draft_config=str(self.root / "block.json")),
        }
        self.exported = self.new()
        export(self.drafts["eagle3"], self.exported, extra_modules=True)
        self.features = self.new()
        extract_features(self.drafts["eagle3"], self.features, self.data, seq_length=64)

    def new(self) -> str:
        """A name for a folder that does not exist yet."""
        self.count += 1
        return str(self.root / f"d{self.count}")

    def converted(self, **fields: Any) -> str:
        """A checkpoint."""
        folder = self.new()
        convert(self.base, folder, **fields)
        return folder

    def train(self, kind: str, **fields: Any) -> Any:
        """A run of one step."""
        train = TrainConfig(train_iters=2, global_batch_size=1, save_interval=1)
        source = {} if "offline_data" in fields else {"data": self.data, "seq_length": 64}
        return runs.FinetuneRun(self.drafts[kind], self.new(), train=train, **{**source, **fields})

    def check(self, kind: str | None, **decode: Any) -> Any:
        """A run of validate.py."""
        decode.setdefault("max_new_tokens", 4)
        where = {"load": self.drafts[kind]} if kind else {"base": self.base}
        return runs.ValidateRun(
            self.data, output=self.new(), num_prompts=2, draft_lens=(2,), decode=DecodeConfig(**decode), **where
        )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("flags"))


Scenario = tuple[Callable[[Any], Any], Callable[[Home], Any]]
SCENARIOS: dict[str, Scenario] = {
    "convert eagle3": (convert, lambda h: runs.ConvertRun(h.base, h.new())),
    "convert medusa": (convert, lambda h: runs.ConvertRun(h.base, h.new(), algorithm="medusa")),
    "convert dspark": (
        convert,
        lambda h: runs.ConvertRun(h.base, h.new(), algorithm="dspark", draft_config=str(h.root / "block.json")),
    ),
    "convert --draft": (convert, lambda h: runs.ConvertRun(h.base, h.new(), draft=f"{h.exported}/draft")),
    "finetune eagle3": (finetune, lambda h: h.train("eagle3")),
    "finetune eagle1": (finetune, lambda h: h.train("eagle1")),
    "finetune medusa": (finetune, lambda h: h.train("medusa")),
    "finetune dspark": (finetune, lambda h: h.train("dspark")),
    "finetune offline": (finetune, lambda h: h.train("eagle3", offline_data=h.features)),
    "quantize": (quantize, lambda h: runs.QuantizeRun(h.drafts["eagle3"], h.new(), h.data, samples=2, seq_length=64)),
    **{
        f"quantize {policy}": (quantize, lambda h, policy=policy: runs.QuantizeRun(
            h.drafts["eagle3"], h.new(), h.data, samples=2, seq_length=64, policy=policy,
        ))
        for policy in ("fp8_base_only", "nvfp4_draft_only")
    },
    "export eagle3": (export, lambda h: runs.ExportRun(h.drafts["eagle3"], h.new(), extra_modules=True)),
    "export medusa": (export, lambda h: runs.ExportRun(h.drafts["medusa"], h.new(), extra_modules=True)),
    "export base": (export, lambda h: runs.ExportRun(h.drafts["eagle3"], h.new(), with_base=True)),
    "extract": (
        extract_features, lambda h: runs.ExtractRun(h.drafts["eagle3"], h.new(), h.data, seq_length=64)
    ),
    "validate eagle3": (validate, lambda h: h.check("eagle3")),
    "validate a tree": (validate, lambda h: h.check("eagle3", use_dynamic_tree=True)),
    "validate medusa's tree": (
        validate, lambda h: h.check("medusa", medusa_choices=str(h.root / "medusa.json"))
    ),
    "validate dspark": (validate, lambda h: h.check("dspark")),
    "validate NGram": (validate, lambda h: h.check(None, decoding_type="NGram")),
    "generate": (
        generate,
        lambda h: runs.GenerateRun(h.data, h.new(), base=h.base, num_prompts=2, decode=DecodeConfig(max_new_tokens=4)),
    ),
    "synthesize": (
        generate,
        lambda h: runs.GenerateRun(None, h.new(), base=h.base, synthesize=1, decode=DecodeConfig(max_new_tokens=4)),
    ),
}  # fmt: skip
SAME = {
    "dry_run": "read by finetune.py itself",
    "override_opt_param_scheduler": "counts when the run continues, which one command line may do or not",
    "use_checkpoint_opt_param_scheduler": "the same",
}
"""Field -> why it may be given where nothing reads it."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_unread_flags_are_refused(home: Home, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.root)  # where a run that ignores a flag may leave its files
    command, make = SCENARIOS[name]
    run = make(home)
    logging.disable(logging.CRITICAL)
    try:
        with recorded() as read:
            command(run)
        ignored = []
        for path, owner, field in flags(type(run)):
            if any(issubclass(cls, owner) and field.name == given for cls, given in read) or field.name in SAME:
                continue
            try:
                command(changed(make(home), path, owner, field))
            except UserError:
                continue
            ignored.append(f"--{flag_name(field)}")
    finally:
        logging.disable(logging.NOTSET)
    assert ignored == []
