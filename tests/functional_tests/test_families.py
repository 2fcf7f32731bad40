"""Every base family with every kind of draft through the chain on tiny models.

EAGLE-3, and one other kind of each sort: convert -> finetune -> quantise -> export -> validate; the rest goes straight
from finetune to export.

In one process and through the functions behind the scripts, so that a family costs seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_spec.runtime import distributed
from tests.functional_tests.script_helpers import run_here, write_conversations
from tests.support_results import same_as_committed
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer
from tests.unit_tests.families.families import MODELS, save

FAMILIES = [name for name in MODELS if " " not in name]
ALGORITHMS = ("eagle1", "eagle3", "eagle-mtp", "medusa")
WHOLE_CHAIN = {("qwen2", "medusa"), ("mixtral", "eagle1"), ("deepseek_v3", "eagle-mtp")}
"""Beside EAGLE-3 of every family; the others go without quantise and validate."""
OUTCOME: dict[str, dict[str, list[str]]] = {}


def make_base(name: str, folder: Path) -> Path:
    """A random base with a byte tokenizer and a chat template."""
    tokenizer = make_tokenizer(CHATML_MARKED)
    save(name, folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids("<|end|>"),
         max_position_embeddings=512)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def processes() -> Any:
    yield
    distributed.shutdown()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The base of a family, made once."""
    root = tmp_path_factory.mktemp("bases")
    return functools.cache(lambda name: make_base(name, root / name))


def draft_flags(algorithm: str, root: Path) -> list[object]:
    """Flags of convert_model.py."""
    if algorithm == "medusa":
        return ["--export-algorithm", "medusa", "--export-num-medusa-heads", 2]
    config = {"capture_layer_ids": [0, 1, 2]} if algorithm == "eagle3" else {}
    (root / "eagle.json").write_text(json.dumps(config))
    return ["--export-algorithm", "eagle", "--export-eagle-algorithm", algorithm, "--eagle-config", root / "eagle.json"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_through_the_chain(name: str, algorithm: str, bases: Callable[[str], Path], tmp_path: Path) -> None:
    base, data = bases(name), write_conversations(tmp_path / "train.jsonl", 6)
    run_here("convert_model", "--load", base, "--save", tmp_path / "draft", *draft_flags(algorithm, tmp_path))
    common = ("--data", data, "--seq-length", 64, "--ttt-steps", 2)
    run_here(
        "finetune", "--load", tmp_path / "draft", "--save", tmp_path / "tuned", *common, "--train-iters", 2,
        "--micro-batch-size", 1, "--global-batch-size", 2, "--lr", 1e-3,
    )  # fmt: skip
    whole = algorithm == "eagle3" or (name, algorithm) in WHOLE_CHAIN
    last, steps = tmp_path / ("fp8" if whole else "tuned"), ["convert", "finetune", "export"]
    if whole:
        run_here("quantize", "--load", tmp_path / "tuned", "--save", last, *common, "--calib-samples", 4)
    run_here("export", "--load", last, "--export-dir", tmp_path / "out", "--export-extra-modules")
    assert (tmp_path / "out" / "draft" / "config.json").is_file()
    if whole:
        check_fp8(tmp_path / "out" / "base", name)
        prompts = ("--data", data, "--num-prompts", 2, "--max-new-tokens", 6, "--max-draft-len", 2)
        run_here("validate", "--load", last, "--fp64", *prompts, "--output", tmp_path / "validate.json")
        report = json.loads((tmp_path / "validate.json").read_text())
        assert report["text_identical"] and report["acceptance_length"] >= 1.0
        steps += ["fp8", "validate"]
    OUTCOME.setdefault(name, {})[algorithm] = steps


def check_fp8(folder: Path, name: str) -> None:
    """Every product of the layers is in fp8 with its scales, experts and latent projections included; no router is."""
    found = load_file(folder / "model.safetensors")
    matrices = {n for n, t in found.items() if n.startswith("model.layers.") and t.dim() > 1}
    plain = {n for n in matrices if "float8" not in str(found[n].dtype)}
    routers = {n for n in matrices if n.endswith((".gate.weight", ".router.weight"))}
    stacked = {n for n in matrices if name == "gpt_oss" and ".experts." in n}
    assert plain == routers | stacked
    for matrix in matrices - plain:
        stem = matrix.removesuffix(".weight")
        assert {f"{stem}.weight_scale", f"{stem}.input_scale"} <= found.keys()


def test_readme_states_what_ran() -> None:
    """Runs last: the table's source is what the tests above found."""
    if sum(len(found) for found in OUTCOME.values()) < len(FAMILIES) * len(ALGORITHMS):
        pytest.skip("not everything ran")
    assert same_as_committed("chain", OUTCOME), "run with MEGATRON_SPEC_WRITE_SUPPORT=1"
