"""Every base family through the chain on tiny models: convert -> finetune -> quantise -> export -> validate.

In one process and through the functions behind the scripts, so that a family costs seconds.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_spec import distributed
from tests.functional_tests.workshop import SCRIPTS, write_conversations
from tests.support_results import same_as_committed
from tests.unit_tests.base_models.families import MODELS, save
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer

FAMILIES = [name for name in MODELS if " " not in name]
ALGORITHM = {"qwen2": "medusa", "mixtral": "eagle1", "deepseek_v3": "eagle-mtp"}
"""Of a family; the others: EAGLE-3."""
OUTCOME: dict[str, dict[str, Any]] = {}


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


def step(script: str, *arguments: object) -> None:
    """What a script does, in this process."""
    spec = importlib.util.spec_from_file_location(f"script_{script}", SCRIPTS / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(module.parser().parse_args([str(x) for x in arguments]))


def draft_flags(name: str, root: Path) -> list[object]:
    """Flags of convert_model.py for the draft of a family."""
    kind = ALGORITHM.get(name, "eagle3")
    if kind == "medusa":
        return ["--export-algorithm", "medusa", "--export-num-medusa-heads", 2]
    (root / "eagle.json").write_text(json.dumps({} if kind != "eagle3" else {"capture_layer_ids": [0, 1, 2]}))
    return ["--export-algorithm", "eagle", "--export-eagle-algorithm", kind, "--eagle-config", root / "eagle.json"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_through_the_chain(name: str, tmp_path: Path) -> None:
    base, data = make_base(name, tmp_path / "base"), write_conversations(tmp_path / "train.jsonl", 6)
    step("convert_model", "--load", base, "--save", tmp_path / "draft", *draft_flags(name, tmp_path))
    common = ("--data", data, "--seq-length", 64, "--ttt-steps", 2)
    step(
        "finetune", "--load", tmp_path / "draft", "--save", tmp_path / "tuned", *common, "--train-iters", 2,
        "--micro-batch-size", 1, "--global-batch-size", 2, "--lr", 1e-3,
    )  # fmt: skip
    step("quantize", "--load", tmp_path / "tuned", "--save", tmp_path / "fp8", *common, "--calib-samples", 4)
    step("export", "--load", tmp_path / "fp8", "--export-dir", tmp_path / "out", "--export-extra-modules")
    prompts = ("--data", data, "--num-prompts", 2, "--max-new-tokens", 6, "--max-draft-len", 2)
    step("validate", "--load", tmp_path / "fp8", "--fp64", *prompts, "--output", tmp_path / "validate.json")
    report = json.loads((tmp_path / "validate.json").read_text())
    assert report["text_identical"] and report["acceptance_length"] >= 1.0
    check_fp8(tmp_path / "out" / "base", name)
    assert (tmp_path / "out" / "draft" / "config.json").is_file()
    OUTCOME[name] = {"algorithm": ALGORITHM.get(name, "eagle3"), "fp8": True, "export": True, "validate": True}


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


def test_the_readme_says_what_ran() -> None:
    """Runs last: the table's source is what the tests above found."""
    if OUTCOME.keys() != set(FAMILIES):
        pytest.skip("not every family ran")
    assert same_as_committed("chain", OUTCOME), "run with MEGATRON_SPEC_WRITE_SUPPORT=1"
