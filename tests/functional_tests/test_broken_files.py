"""Every file that a script reads, broken in every way: one line that names it and exit code 2, never a traceback."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.functional_tests.script_helpers import ROOT, SCRIPTS, make_base, write_conversations
from tests.worlds import run_world

KINDS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "huge": lambda path: os.truncate(path, 2**27 if path.suffix == ".jsonl" else 2**36),  # data is hashed whole
    "unreadable": lambda path: (path.unlink(), path.mkdir()),
    "of another type": lambda path: path.write_text('["x"]' if path.suffix in (".json", ".jsonl", ".yaml") else "{}"),
}
"""What is done to a file; the tests run as root, to whom every file is readable, but not a folder in its place."""
AGAIN = ("empty", "of another type")
"""What is done to a file that an earlier script has refused in every kind: one function reads it for all of them."""

FLAGS = ("--seq-length", "64", "--micro-batch-size", "1")


def cases(root: Path, out: Path) -> list[tuple[str, list[Any], list[str]]]:
    """(script, arguments, the files it reads); paths below `root`."""
    base, draft, data = root / "base", root / "draft", root / "train.jsonl"
    model = ["base/config.json", "base/model.safetensors", "base/tokenizer.json"]
    iteration = "draft/iter_0000000"
    saved = [f"{iteration}/{name}" for name in ("spec.json", "vocab.safetensors", "dist/metadata.json")]
    saved += ["draft/latest_checkpointed_iteration.txt"]
    quantize = ["--load", draft, "--save", out, "--data", data, *FLAGS, "--calib-samples", 1]
    finetune = ["--load", draft, "--save", out, "--data", data, *FLAGS, "--train-iters", 1, "--global-batch-size", 1]
    short = ["--max-new-tokens", 2, "--num-prompts", 1]
    vocab = ["--draft-vocab", root / "vocab"]
    return [
        ("calibrate_draft_vocab", ["--model", base, "--data", data, "--save-dir", out, "--draft-vocab-size", 64],
         [*model[:1], "base/tokenizer.json", "train.jsonl"]),
        ("convert_model", ["--load", base, "--save", out, "--eagle-config", root / "eagle.json", *vocab],
         [*model[:2], "eagle.json", "vocab/draft_vocab.safetensors"]),
        ("export", ["--load", draft, "--export-dir", out, "--export-extra-modules"], saved),
        ("quantize", [*quantize, "--export-quant-cfg", root / "policy.json"], [*saved, "policy.json", "train.jsonl"]),
        ("quantize", [*quantize, "--export-quant-cfg", root / "policy.yaml"], ["policy.yaml"]),
        ("finetune", finetune, [*saved, *model, "train.jsonl"]),
        ("finetune", [*finetune, "--eval-acceptance-interval", 1, "--eval-data", root / "eval.jsonl"], ["eval.jsonl"]),
        ("offline_feature_extract", ["--load", draft, "--data", data, *FLAGS, "--output-dir", out],
         [*saved[:1], "train.jsonl"]),
        ("validate", ["--load", draft, "--data", data, "--output", out, *short],
         [*saved[:1], "base/generation_config.json"]),
        ("generate", ["--base", base, "--data", data, "--output", out, "--max-new-tokens", 2],
         ["base/generation_config.json", "train.jsonl"]),
        ("check_export", [root / "exported"], ["exported/config.json", "exported/model.safetensors"]),
        ("make_serving_config", [root / "exported", "--engine", "vllm", "--base", base], ["exported/config.json"]),
        ("compare_reports", [root / "report.json", root / "report.json", "--html", out], ["report.json"]),
        ("plot_run", [root / "metrics.jsonl", "--output", out], ["metrics.jsonl"]),
        ("inspect_data", ["--data", data, "--tokenizer", base], ["train.jsonl", "base/tokenizer.json"]),
    ]  # fmt: skip


ALLOWED = {
    ("plot_run", "metrics.jsonl", "truncated"): "its whole lines are plotted",
    ("export", "draft/latest_checkpointed_iteration.txt", "truncated"): "without its line end it still has the number",
}
"""What may end well although a file is broken."""


def call(script: str, arguments: list[Any], parsed: list[bool] | None = None) -> None:
    """What the script does after its start-up, in this process.

    Args:
        parsed: receives True once the command line is read.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if (SCRIPTS / f"{script}.py").is_file():
        spec = importlib.util.spec_from_file_location(f"script_{script}", SCRIPTS / f"{script}.py")
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parser = module.parser()
    else:
        module = importlib.import_module(f"tools.{script}")
        parser = module.make_parser()
    main = getattr(module, {"calibrate_draft_vocab": "calibrate", "inspect_data": "inspect_data"}.get(script, "main"))
    args = parser.parse_args([str(x) for x in arguments])
    if parsed is not None:
        parsed.append(True)
    main(args)


def outcome(script: str, arguments: list[Any]) -> str:
    """'' for a refusal as a script must make it, else what happened."""
    from megatron_spec.cli import USER_ERRORS
    from megatron_spec.config import UserError

    parsed: list[bool] = []
    try:
        call(script, arguments, parsed)
    except UserError:
        return ""
    except SystemExit as e:
        return "" if parsed and e.code in (1, 2) else f"exit code {e.code}{'' if parsed else ' for its command line'}"
    except OSError as e:
        return "" if e.errno in USER_ERRORS and e.filename else f"{type(e).__name__}: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:200]}"
    return "it ended well"


def own_copy(path: Path) -> Path:
    """The file itself in place of a link to it."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return path


def sweep(place: str) -> list[str]:
    root, problems, seen = Path(place), list[str](), set[str]()
    os.chdir(ROOT)
    for index, (script, _, files) in enumerate(cases(root, root)):
        for name in files:
            kinds = AGAIN if name in seen else KINDS
            seen.add(name)
            for kind in kinds:
                here = root.with_name("broken")
                out = here / "out"
                shutil.copytree(root, here, symlinks=True, copy_function=os.link)
                own_copy(here / name)
                KINDS[kind](here / name)
                if name.startswith("base/") and script != "convert_model":  # the draft must still find it
                    spec = own_copy(here / "draft/iter_0000000/spec.json")
                    spec.write_text(spec.read_text().replace(str(root / "base"), str(here / "base")))
                found = outcome(script, cases(here, out)[index][1])
                if found and (script, name, kind) not in ALLOWED:
                    problems.append(f"{script}, {name} {kind}: {found}")
                shutil.rmtree(here)
    return problems


def prepare(place: str) -> None:
    root = Path(place)
    call("convert_model", ["--load", root / "base", "--save", root / "draft", "--eagle-config", root / "eagle.json"])
    call("export", ["--load", root / "draft", "--export-dir", root / "new", "--export-extra-modules"])
    (root / "new" / "draft").rename(root / "exported")
    sizes = ["--draft-vocab-size", 64]
    call("calibrate_draft_vocab", ["--model", root / "base", "--data", root / "train.jsonl", "--save-dir",
                                   root / "vocab", *sizes])  # fmt: skip


def everything(place: str) -> list[str]:
    prepare(place)
    return sweep(place)


def test_every_file_of_every_script(tmp_path: Path) -> None:
    root = tmp_path / "whole"
    root.mkdir()
    make_base(root / "base")
    write_conversations(root / "train.jsonl", 2)
    write_conversations(root / "eval.jsonl", 2)
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    (root / "policy.json").write_text('{"draft": "none", "clipped_ste": false}')
    (root / "policy.yaml").write_text("draft: none\nkv_cache: none\n")
    (root / "report.json").write_text(json.dumps({"answers": []}))
    (root / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": 1.0}) + "\n")
    problems = run_world(1, everything, str(root))[0]
    assert problems == [], "\n".join(problems)
