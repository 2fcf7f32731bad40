"""`--help`, a wrong flag and a plan need no heavy package. No clock: what takes the time is an import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("examples/post_training", "tools", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)
HEAVY = ("torch", "megatron.core", "transformers", "tokenizers", "safetensors", "datasets", "huggingface_hub", "pandas",
         "matplotlib", "gguf", "openai", "triton")  # fmt: skip
RUN = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
script, codes = sys.argv[1], []
for words in sys.argv[2:]:
    sys.argv = [script, *words.split()]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leave:
        codes.append(leave.code)
print(codes, [name for name in {HEAVY!r} if name in sys.modules])
"""


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A script in a new interpreter, once for each command line."""
    command = [sys.executable, "-c", RUN, script, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_a_wrong_flag_import_nothing_heavy(script):
    done = run(script, "--help", "--no-such-flag")
    assert done.stdout.splitlines()[-1] == "[0, 2] []", done.stderr
    assert "usage:" in done.stdout and "error:" in done.stderr


def test_a_plan_imports_nothing_heavy(tmp_path, monkeypatch):
    """Nor Transformer Engine or apex where they are installed: here an import of them would be an error."""
    for name in ("transformer_engine", "apex"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shape = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "vocab_size": 512, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags = f"--load {tmp_path} --save out --data x --train-iters 9 --seq-length 64 --bf16 --dry-run --num-nodes 1"
    done = run("examples/post_training/finetune.py", flags)
    assert done.stdout.splitlines()[-1] in ("[0] []", "[None] []"), done.stderr
    assert "GiB" in done.stdout
