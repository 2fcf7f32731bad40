"""A tiny base with a tokenizer, conversations, and a way to run the scripts as users do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_spec.data.tokenizer import vocabulary_hash
from tests import warm
from tests.tiny import save_llama
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "post_training"
WORDS = [
    f"{colour} {thing}"
    for colour in ("red", "green", "blue")
    for thing in ("sky", "sea", "rain", "snow", "wind", "sun")
]


def make_base(folder: Path, **overrides: object) -> Path:
    """A random Llama with a byte-level tokenizer and a chat template; 261 tokens, which no number of ranks divides."""
    tokenizer = make_tokenizer(CHATML_MARKED)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    save_llama(folder, vocab_size=len(tokenizer), eos_token_id=end, bos_token_id=0, **overrides)
    tokenizer.save_pretrained(folder)
    return folder


def conversation(number: int) -> dict[str, object]:
    """Two turns of words, different for every number."""
    word = [WORDS[(number * 7 + i * 3) % len(WORDS)] for i in range(8)]
    turns = [
        ("user", " ".join(word[:2])),
        ("assistant", " ".join(word[2:5])),
        ("user", word[5]),
        ("assistant", word[6]),
    ]
    return {
        "conversation_id": f"c{number}",
        "conversations": [{"role": role, "content": text} for role, text in turns],
    }


def write_inputs(root: Path, conversations: int = 4) -> Path:
    """root/base, root/train.jsonl and root/eagle.json: what a chain of scripts starts from."""
    make_base(root / "base")
    write_conversations(root / "train.jsonl", conversations)
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    return root


def write_conversations(path: Path, count: int, rejected: bool = False) -> Path:
    """A JSON lines file.

    Args:
        rejected: every second line has such a record, different for every number.
    """
    lines = [conversation(i) for i in range(count)]
    for i in range(0, count if rejected else 0, 2):
        turns = [[i % 3, 5], [2]] if i % 4 else [None, [0, 1]]
        lines[i]["rejected"] = {"tokenizer": vocabulary_hash(make_tokenizer(CHATML_MARKED)), "turns": turns}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def environment(**more: str) -> dict[str, str]:
    """For a process of a test: one thread, this repository, no warnings of other packages, no rank of this process."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}
    return {**{name: value for name, value in os.environ.items() if name not in ranks}, **own, **more}


def run_script(
    name: str, *arguments: object, processes: int = 0, timeout: float = 300, search_path: Path | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a script of the chain: alone, or with `processes` ranks.

    Args:
        search_path: a folder of packages, which a new interpreter then finds.
        fresh: a new interpreter, which imports everything itself, under torchrun when there are ranks; else a process
            that is forked with everything imported (`tests/warm.py`).
    """
    path, words = name if "/" in name else str(SCRIPTS / f"{name}.py"), [str(x) for x in arguments]
    if not (fresh or search_path):
        return warm.run_script(str(ROOT / path), words, processes, environment(), ROOT, timeout)
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = environment(PYTHONPATH=os.pathsep.join(map(str, [ROOT, *([search_path] if search_path else [])])))
    return subprocess.run([*start, path, *words], capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env)


def succeed(name: str, *arguments: object, processes: int = 0, fresh: bool = False) -> str:
    """Run a script that must work; its output."""
    done = run_script(name, *arguments, processes=processes, fresh=fresh)
    assert done.returncode == 0, f"{name} {arguments}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def refuse(name: str, *arguments: object) -> str:
    """Run a script that must refuse its input: exit code 2, one message, no traceback."""
    done = run_script(name, *arguments)
    assert done.returncode == 2, f"{name} {arguments}: exit code {done.returncode}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr
    assert "error:" in done.stderr
    return done.stderr


def run_here(name: str, *arguments: object) -> None:
    """What a script does, in this process: no start-up to wait for."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(module.parser().parse_args([str(x) for x in arguments]))
