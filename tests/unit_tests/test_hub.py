"""Hub names, against a local stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.runtime import hub
from tests.functional_tests.script_helpers import environment, make_base, write_conversations

SHA = "a" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
DRAFT = {"architectures": ["LlamaForCausalLMEagle3"]}
MODELS = {
    "org/base": {
        "config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"w", "original/model.safetensors": b"other",
    },
    "org/pickled": {"config.json": json.dumps(DRAFT).encode(), "pytorch_model.bin": b"w"},
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that huggingface_hub uses for a snapshot."""

    tokens: set[str | None] = set()
    folders: dict[str, Path] = {}
    """Models that are served as their folders stand."""

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        files = MODELS.get(name)
        if name in self.folders and self.folders[name].is_dir():
            files = {p.name: p.read_bytes() for p in self.folders[name].iterdir()}
        if files is None:
            gated = {"x_error_code": "GatedRepo"} if name == "org/gated" else {"x_error_code": "RepoNotFound"}
            return self.answer(403 if name == "org/gated" else 404, **gated)
        self.tokens.add(self.headers.get("authorization"))
        if parts[0] == "api" and "tree" in parts:
            tree = [{"type": "file", "path": n, "size": len(d), "oid": "x"} for n, d in files.items()]
            return self.answer(200, json.dumps(tree).encode(), content_type="application/json")
        if parts[0] == "api":
            about = {"id": name, "sha": SHA, "siblings": [{"rfilename": n} for n in files]}
            return self.answer(200, json.dumps(about).encode(), content_type="application/json")
        body = files["/".join(parts[4:])]
        return self.answer(200, body, etag=f'"{hash(body)}"', x_repo_commit=SHA)

    do_HEAD = do_GET


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ASK = """
import json, sys
from megatron_spec.config import UserError
from megatron_spec.families import read_base_config
from megatron_spec.runtime.hub import model_folder
from megatron_spec.serving.draft import exported

def names(name, **options):
    try:
        return sorted(p.name for p in model_folder(name, **options).iterdir())
    except UserError as e:
        return str(e)

found = {"small": names("org/base", weights=False), "hidden": read_base_config("org/base").hidden_size}
found |= {"whole": names("org/base"), "pickled": names("org/pickled"), "none": names("org/none")}
found |= {"gated": names("org/gated"), "draft": exported("org/pickled").model}
print(json.dumps(found))
"""


def ask(**environment: str) -> dict[str, Any]:
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "HF_TOKEN": "hf_of_the_test", **environment}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_names_on_the_hub(address: str, tmp_path: Path) -> None:
    whole = ["config.json", "model.safetensors"]  # not the same weights in `original/`
    found = ask(HF_ENDPOINT=address, HF_HOME=str(tmp_path))
    assert found["small"] == ["config.json"] and found["hidden"] == 8 and found["whole"] == whole
    assert found["pickled"] == ["config.json", "pytorch_model.bin"] and found["draft"] == "org/pickled"
    assert "no such model on the hub" in found["none"] and "accept its terms" in found["gated"]
    assert Hub.tokens == {"Bearer hf_of_the_test"}
    offline = ask(HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert offline["whole"] == whole and offline["pickled"] == found["pickled"]
    assert "HF_HUB_OFFLINE is set: run `hf download org/none`" in offline["none"]


CHAIN = """
import sys
from megatron_spec.commands.convert import convert
from megatron_spec.commands.decode import validate
from megatron_spec.commands.export import export
from megatron_spec.commands.finetune import finetune
from megatron_spec.config import DecodeConfig, ObjectiveConfig, TrainConfig

if __name__ == "__main__":
    data = "train.jsonl"
    if sys.argv[1] == "first":
        convert("org/tiny", "fresh")
        one = TrainConfig(train_iters=1, global_batch_size=2)
        finetune("fresh", "tuned", data, train=one, objective=ObjectiveConfig(ttt_steps=2), seq_length=64)
        export("tuned", "out", extra_modules=True)
        few = DecodeConfig(speculative_model="org/draft", max_new_tokens=4)
        report = validate(data, base="org/tiny", output="r.json", num_prompts=2, draft_lens=(2,), decode=few)
        print(report.first.text_identical, report.first.acceptance.acceptance_length >= 1)
    convert("org/tiny", sys.argv[1] + "_on", draft="org/draft")
"""


def test_chain_with_hub_names(address: str, tmp_path: Path) -> None:
    """convert, finetune, export; validate and convert --draft with a published draft, the latter again offline."""
    make_base(tmp_path / "tiny")
    write_conversations(tmp_path / "train.jsonl", 2)
    (tmp_path / "chain.py").write_text(CHAIN)
    Hub.folders = {"org/tiny": tmp_path / "tiny", "org/draft": tmp_path / "out" / "draft"}
    env = environment(HF_ENDPOINT=address, HF_HOME=str(tmp_path / "home"))
    for run, more in (("first", {}), ("again", {"HF_HUB_OFFLINE": "1"})):
        done = subprocess.run(
            [sys.executable, "chain.py", run], cwd=tmp_path, env={**env, **more}, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert run == "again" or done.stdout.splitlines()[-1] == "True True"
    assert (tmp_path / "again_on" / "latest_checkpointed_iteration.txt").is_file()


def test_missing_network_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **options: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"org/base: no such folder, .* the hub cannot be reached .*or give a folder"):
        hub.model_folder("org/base")


def test_folders_take_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.model_folder("org/base") == Path("org/base") and not hub.is_hub_name("org/base")
    for path in ("./runs/c0", "/models/llama", "runs/c0/iter_1", "base", "~/x", "../x"):
        assert hub.model_folder(path) == Path(path)
