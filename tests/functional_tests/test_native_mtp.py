"""A base's own prediction module (DeepSeek-V3): loaded exactly, trained, measured, exported in the base's own names.

S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import megatron_spec
from megatron_spec.base.schedule import run_base
from megatron_spec.batch import Batch
from megatron_spec.build import load_checkpoint
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.commands.convert import convert, first_draft
from megatron_spec.config import UserError, presets
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export.check import check_folder
from megatron_spec.export.load import load_exported_draft
from megatron_spec.families import read_base_config
from megatron_spec.ops.attention import attend
from megatron_spec.ops.visibility import Visibility
from megatron_spec.runtime import distributed
from tests.functional_tests.script_helpers import run_here, write_conversations
from tests.unit_tests.checkpoint.test_block_fp8 import to_fp8
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer
from tests.unit_tests.families.families import PredictionModule, save, tokens, with_module

ASKED = dict(eagle_algorithm="eagle-mtp", mtp_from_base=True)


@pytest.fixture(scope="module")
def world() -> Any:
    yield distributed.initialize()
    distributed.shutdown()


@torch.no_grad()
def expected_logits(model: Any, module: PredictionModule, ids_BS: Tensor) -> list[Tensor]:
    """[B, S', V] of two draft steps on transformers' layers: row j reads token j+1, at the second step token j+2."""
    state = model.model(ids_BS).last_hidden_state
    found = []
    for step in range(2):
        length = ids_BS.shape[1] - 2
        embedding = model.model.embed_tokens(ids_BS[:, 1 + step : 1 + step + length])
        state = module(embedding, state[:, :length], torch.arange(length) + step)
        found.append(model.lm_head(module.norm(state)))
    return found


@torch.no_grad()
def found_logits(base: Any, draft: Any, ids_BS: Tensor) -> list[Tensor]:
    zeros, length = torch.zeros_like(ids_BS, dtype=torch.int32), ids_BS.shape[1] - 2
    [(_, state)] = run_base(base, [Batch(ids_BS, torch.arange(length + 2).expand_as(ids_BS), zeros, zeros)])
    hidden, visibility, found = draft.start(None, state)[:length], Visibility.causal(), []
    for step in range(2):
        positions = (torch.arange(length) + step).expand(len(ids_BS), -1)
        embedding = base.embed(ids_BS[:, 1 + step : 1 + step + length])
        hidden, normed = draft.layer_step(
            hidden, embedding, positions, lambda layer, q, k, v: attend(q, k, v, visibility, layer)
        )
        found.append(draft.logits(normed, base).transpose(0, 1))
    return found


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3 plain"])
def test_logits_of_the_module(name: str, tmp_path: Path, world: Any) -> None:
    model, module = with_module(tmp_path, name)
    ref, ids = inspect_base(tmp_path), tokens(model.config.vocab_size)[0]
    base, config = load_base(ref, world), presets.own_mtp_config(ref.config)
    draft = first_draft(base, ref, config, DraftVocab.full(ref.config.vocab_size), world, torch.float32, 0)
    for found, expected in zip(found_logits(base, draft, ids), expected_logits(model, module, ids), strict=True):
        assert float(expected.std()) > 0.5
        assert float((found - expected).abs().max()) < 1e-4


def test_the_module_through_the_chain(tmp_path: Path, world: Any) -> None:
    tokenizer = make_tokenizer(CHATML_MARKED)
    base, data = tmp_path / "base", write_conversations(tmp_path / "train.jsonl", 6)
    with_module(base, vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids("<|end|>"),
                max_position_embeddings=512)  # fmt: skip
    tokenizer.save_pretrained(base)
    asked = ("--export-eagle-algorithm", "eagle-mtp", "--mtp-from-base")
    run_here("convert_model", "--load", base, "--save", tmp_path / "draft", *asked)
    check_library(tmp_path, base, world)
    common = ("--data", data, "--seq-length", 64)
    run_here(
        "finetune", "--load", tmp_path / "draft", "--save", tmp_path / "tuned", *common, "--train-iters", 2,
        "--micro-batch-size", 1, "--global-batch-size", 2, "--lr", 1e-3, "--ttt-steps", 2,
    )  # fmt: skip
    prompts = ("--data", data, "--num-prompts", 2, "--max-new-tokens", 6, "--max-draft-len", 2)
    run_here("validate", "--load", tmp_path / "tuned", "--fp64", *prompts, "--output", tmp_path / "validate.json")
    report = json.loads((tmp_path / "validate.json").read_text())
    assert report["text_identical"] and report["acceptance_length"] >= 1.0
    for name in ("draft", "tuned"):
        out = tmp_path / f"out {name}"
        run_here("export", "--load", tmp_path / name, "--export-dir", out, "--export-extra-modules", "--export-base")
    check_names_and_values(tmp_path, base)
    with pytest.raises(UserError, match="quantise the base alone"):
        run_here("quantize", "--load", tmp_path / "tuned", "--save", tmp_path / "fp8", "--data", data)
    check_fp8_base(tmp_path, data)
    # The exported base ships the trained module: it can be taken from there again.
    run_here("convert_model", "--load", tmp_path / "out tuned" / "base", "--save", tmp_path / "again", *asked)
    again = load_checkpoint(tmp_path / "again", world).draft
    tuned = load_checkpoint(tmp_path / "tuned", world)
    same = zip(tuned.draft.named_parameters(), again.named_parameters(), strict=True)
    assert all(torch.equal(p.bfloat16(), q.bfloat16()) for (_, p), (_, q) in same)
    exported = load_exported_draft(tmp_path / "out tuned" / "draft", read_base_config(base), world)
    pairs = zip(tuned.draft.named_parameters(), exported.named_parameters(), strict=True)
    assert all(torch.equal(p.bfloat16(), q.bfloat16()) for (_, p), (_, q) in pairs)


def check_library(root: Path, base: Path, world: Any) -> None:
    """megatron_spec.convert(mtp_from_base=True) gives the draft of convert_model.py --mtp-from-base, and exports it."""
    loaded = load_base(inspect_base(base), world)
    model = megatron_spec.convert(loaded, mtp_from_base=True)
    script = load_checkpoint(root / "draft", world).draft
    pairs = zip(script.named_parameters(), model.draft.named_parameters(), strict=True)
    assert all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)
    megatron_spec.export_draft(model, root / "out library")
    assert json.loads((root / "out library" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for asked, message in (
        ({"drafts": [("eagle-mtp", {})]}, "leave drafts out"),
        ({"vocab": DraftVocab.full(9), "seed": 1}, "leave vocab, seed out"),
        ({"draft": root / "out library"}, "two drafts"),
    ):
        with pytest.raises(UserError, match=message):
            megatron_spec.convert(loaded, mtp_from_base=True, **asked)
    with pytest.raises(UserError, match="mtp_from_base=True"):
        megatron_spec.convert(loaded, draft=root / "out library")


def check_fp8_base(root: Path, data: Path) -> None:
    """The trained module is in the fp8 base, in high precision."""
    quantise(root, "tuned", data, "fp8_base_only")
    run_here("export", "--load", root / "tuned fp8", "--export-dir", root / "out fp8", "--export-extra-modules")
    module, base = (load_file(root / "out fp8" / part / "model.safetensors") for part in ("draft", "base"))
    assert module and all(torch.equal(base[name], tensor) for name, tensor in module.items())
    assert base["model.layers.3.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    check_ignored(root / "out fp8" / "base", base)


def quantise(root: Path, load: str, data: Path, policy: str) -> None:
    run_here(
        "quantize", "--load", root / load, "--save", root / f"{load} fp8", "--data", data, "--seq-length", 64,
        "--calib-samples", 2, "--micro-batch-size", 1, "--export-quant-cfg", policy,
    )  # fmt: skip


def check_ignored(folder: Path, tensors: dict[str, Tensor]) -> None:
    """`ignore` names every matrix in high precision, and no other."""
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"] == ignored
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dim() == 2:
            listed = any(fnmatch.fnmatchcase(name.removesuffix(".weight"), pattern) for pattern in ignored)
            assert listed == (tensor.dtype != torch.float8_e4m3fn), name
    assert "model.layers.1.mlp.gate" in ignored


def test_three_modules_of_an_fp8_base_are_exported_beside_another_draft(
    tmp_path: Path, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(CHATML_MARKED)
    data = write_conversations(tmp_path / "train.jsonl", 2)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with_module(tmp_path / "source", modules=3, vocab_size=len(tokenizer), eos_token_id=end,
                max_position_embeddings=512)  # fmt: skip
    to_fp8(tmp_path / "source", tmp_path / "base", tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "base")
    medusa = ("--export-algorithm", "medusa", "--export-num-medusa-heads", 1)
    run_here("convert_model", "--load", tmp_path / "base", "--save", tmp_path / "draft", *medusa)
    quantise(tmp_path, "draft", data, "fp8_base_only")
    out = tmp_path / "out"
    run_here("export", "--load", tmp_path / "draft fp8", "--export-dir", out, "--export-extra-modules")
    original, found = (load_file(f / "model.safetensors") for f in (tmp_path / "plain", out / "base"))
    assert original.keys() == {n for n in found if not n.endswith(("weight_scale", "input_scale"))}
    for name in (n for n in original if n.startswith(("model.layers.4.", "model.layers.5.", "model.layers.6."))):
        wide = name.endswith("e_score_correction_bias")
        assert torch.equal(found[name], original[name] if wide else original[name].bfloat16()), name
    assert json.loads((out / "base" / "config.json").read_text())["num_nextn_predict_layers"] == 3
    check_ignored(out / "base", found)
    assert "ships 3 prediction modules" not in caplog.text
    presets.own_mtp_config(inspect_base(tmp_path / "base").config)
    assert "ships 3 prediction modules: the first one is trained" in caplog.text


def check_names_and_values(root: Path, base: Path) -> None:
    """The module comes out as it came in, in the same names; training moves every matrix and leaves the bias alone."""
    stored = {n: t for n, t in load_file(base / "model.safetensors").items() if n.startswith("model.layers.4.")}
    untrained = load_file(root / "out draft" / "draft" / "model.safetensors")
    assert untrained.keys() == stored.keys()
    for name, tensor in stored.items():
        wide = name.endswith("e_score_correction_bias")
        assert torch.equal(untrained[name], tensor if wide else tensor.bfloat16()), name
    trained = load_file(root / "out tuned" / "draft" / "model.safetensors")
    moved = {n for n, t in trained.items() if not torch.equal(t, untrained[n])}
    still = {n for n in trained if n.endswith(("e_score_correction_bias", "embed_tokens.weight", "head.head.weight"))}
    assert moved & still == set()
    assert {n for n in trained.keys() - moved - still if ".experts." not in n and "norm" not in n} == set()
    config = json.loads((root / "out tuned" / "draft" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["num_nextn_predict_layers"] == 1
    assert [f for f in check_folder(root / "out tuned" / "draft", base=base) if not f.warning] == []


def edit(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        name = "model.layers.4." + name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_invalid_dumps_are_named(tmp_path: Path, world: Any) -> None:
    def message(**more: Any) -> str:
        with pytest.raises(UserError) as error:
            convert(str(tmp_path / "base"), str(tmp_path / "draft"), **{**ASKED, **more})
        return str(error.value)

    save("deepseek_v3", tmp_path / "base", num_nextn_predict_layers=0)
    assert "ships no prediction module" in message()
    save("deepseek_v3", tmp_path / "base", num_nextn_predict_layers=1)
    assert "transformers drops it on saving" in message()
    with_module(tmp_path / "base")
    assert "leave --eagle-config out" in message(eagle_config="x.json")
    assert "add --export-eagle-algorithm eagle-mtp" in message(eagle_algorithm="eagle1")
    assert "belongs to --export-algorithm eagle" in message(algorithm="medusa", eagle_algorithm=None)
    edit(tmp_path / "base", enorm__weight=None, mlp__extra=torch.ones(1), eh_proj__weight=torch.ones(2, 2))
    text = message()
    assert "3 tensors" in text and "missing model.layers.4.enorm.weight" in text
    assert "unexpected model.layers.4.mlp.extra" in text and "eh_proj.weight: found shape [2, 2]" in text
    with_module(tmp_path / "base")
    edit(tmp_path / "base", embed_tokens__weight=torch.zeros(84, 32))
    assert "embed_tokens.weight is not a copy of model.embed_tokens.weight" in message()
