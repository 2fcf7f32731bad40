"""Decoding through the commands: checkpoints and exported folders, high precision and fp8, and mismatches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_spec import api
from megatron_spec.commands import decode as chain
from megatron_spec.config import DecodeConfig, ParallelConfig, QuantConfig, UserError
from megatron_spec.decoding.engine import decode, two_best
from megatron_spec.export.base import export_base
from megatron_spec.export.load import (
    inspect_exported_base,
    load_exported_base,
    load_exported_draft,
)
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.tiny_models import CONFIG

FEW = DecodeConfig(max_draft_len=2, max_new_tokens=6, batch_size=3)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A chat base with tokenizer, and for each kind of draft: checkpoint, exported draft, exported fp8 base."""
    from megatron_spec.data.loader import BatchLoader

    here = Path(tmp_path_factory.mktemp("shipped"))
    save_tiny(here / "base", seed=2, vocab_size=261, max_position_embeddings=256, initializer_range=0.3)
    tiny_models.chat_tokenizer().save_pretrained(here / "base")
    questions = tiny_models.write_questions(here / "questions.jsonl")
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "word " * i}]})
        for i in range(1, 7)
    ]
    (here / "train.jsonl").write_text("\n".join(lines))
    world = api.initialize()
    base = tiny_models.load(here / "base", world)
    from megatron_spec.commands.data import open_dataset

    loader = BatchLoader(open_dataset(str(here / "train.jsonl"), str(here / "base"), 96), 2, 2, device="cpu")
    for name, draft in (
        ("eagle3", ("eagle", {"capture_layer_ids": list(tiny_models.CAPTURES)})),
        ("medusa", ("medusa", {"num_heads": 2})),
    ):
        model = api.convert(base, [draft], base_path=here / "base")
        api.save(model, here / name)
        api.export_draft(model, here / f"{name}-export", dtype="float32")
    model = api.load(here / "eagle3")
    api.quantize(model, [loader.step(0)], QuantConfig(kv_cache="fp8"))
    api.save(model, here / "fp8")
    api.export_draft(model, here / "fp8-export", dtype="float32")
    export_base(model.base, model.reference, here / "fp8-base", model.quant, model.world, dtype="float32")
    return here, str(questions), model


def measure(shipped: Any, output: Path, **options: Any) -> dict[str, Any]:
    chain.validate(shipped[1], output=str(output), num_prompts=3, **{"decode": FEW, **options})
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_exported_draft_has_the_acceptance_of_its_checkpoint(shipped: Any, tmp_path: Path, kind: str) -> None:
    here = shipped[0]
    first = measure(shipped, tmp_path / "a.json", load=str(here / kind), draft_lens=(1, 2))
    exported = FEW.replace(speculative_model=str(here / f"{kind}-export"))
    again = measure(shipped, tmp_path / "b.json", base=str(here / "base"), decode=exported, draft_lens=(1, 2))
    assert first["text_identical"] and again["text_identical"]
    assert [r["acceptance"] for r in first["sweep"]] == [r["acceptance"] for r in again["sweep"]]
    assert again["about"]["decoding_type"] == {"eagle3": "Eagle3", "medusa": "Medusa"}[kind]


def test_a_length_that_is_not_given_is_no_more_than_the_draft_proposes(shipped: Any, tmp_path: Path) -> None:
    here, questions, _ = shipped
    unset = DecodeConfig(max_new_tokens=6, batch_size=3)
    found = measure(shipped, tmp_path / "a.json", load=str(here / "medusa"), decode=unset)
    assert [run["max_draft_len"] for run in found["sweep"]] == [2] == [found["decode"]["max_draft_len"]]
    exported = unset.replace(speculative_model=str(here / "medusa-export"))
    assert chain.generate(questions, str(tmp_path / "g.jsonl"), base=str(here / "base"), decode=exported) > 0
    with pytest.raises(UserError, match="--max-draft-len 3: the draft has 2 Medusa heads"):
        measure(shipped, tmp_path / "b.json", load=str(here / "medusa"), decode=unset, draft_lens=(3,))
    model = api.load(here / "medusa")
    assert len(api.decode(model, [[5, 6, 7]])) == 1
    with pytest.raises(UserError, match="--max-draft-len 3: the draft has 2 Medusa heads"):
        api.decode(model, [[5, 6, 7]], unset)


def test_exported_fp8_base_equals_the_quantised_one(shipped: Any) -> None:
    here, _, model = shipped
    reference = inspect_exported_base(here / "fp8-base")
    base = load_exported_base(reference, model.world, tiny_models.CAPTURES)
    draft = load_exported_draft(here / "fp8-export", base.config, model.world)
    prompts = [[t % 261 for t in p] for p in tiny_models.prompts()[:3]]
    expected = decode(model.base, prompts, CONFIG, set(), draft=model.draft)
    found = decode(base, prompts, CONFIG, set(), draft=draft)
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    assert [g.accepted_lengths for g in found] == [g.accepted_lengths for g in expected]
    plain = tiny_models.load(here / "base", model.world)
    assert two_best(base, prompts[1]) == two_best(model.base, prompts[1]) != two_best(plain, prompts[1])


def test_other_decoding_types(shipped: Any, tmp_path: Path) -> None:
    here = shipped[0]
    for options in (
        dict(decoding_type="NGram"),
        dict(decoding_type="DraftTarget", speculative_model=str(here / "base")),
    ):
        found = measure(shipped, tmp_path / "o.json", base=str(here / "base"), decode=FEW.replace(**options))
        assert found["text_identical"] and found["about"]["draft"] in ("NGram", str(here / "base"))
        (tmp_path / "o.json").unlink()
    assert found["acceptance_length"] > 2  # the base drafts for itself
    ngram = FEW.replace(decoding_type="NGram")  # the base of a checkpoint, whose draft is not what is measured
    found = measure(shipped, tmp_path / "o.json", load=str(here / "eagle3"), decode=ngram)
    assert found["about"]["draft"] == "NGram"
    done = chain.generate(
        shipped[1], str(tmp_path / "g.jsonl"), base=str(here / "base"), decode=FEW.replace(decoding_type="NGram"),
        num_prompts=2,
    )  # fmt: skip
    assert done == 2


def test_options_without_effect_on_a_base_alone_are_refused(
    shipped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "load_models", lambda *_: pytest.fail("weights were read"))
    base, output = str(shipped[0] / "base"), tmp_path / "g.jsonl"
    undrafted = FEW.replace(max_draft_len=DecodeConfig().max_draft_len, temperature=1.0)
    for name, value in (
        ("max_draft_len", 7), ("use_dynamic_tree", True), ("dynamic_tree_max_topK", 2), ("medusa_choices", "[[0]]"),
        ("max_matching_ngram_size", 3), ("is_keep_all", False), ("drafter", "a:B"), ("use_rejection_sampling", True),
        ("typical_acceptance", True), ("posterior_alpha", 0.5), ("relaxed_topk", 2), ("begin_thinking_phase_token", 5),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} needs a draft, but none is given"):
            chain.generate(shipped[1], str(output), base=base, decode=undrafted.replace(**{name: value}))
    with pytest.raises(UserError, match="--max-draft-len 0 drafts nothing"):
        none = FEW.replace(max_draft_len=0, use_dynamic_tree=True)
        chain.generate(shipped[1], str(output), load=str(shipped[0] / "eagle3"), decode=none)
    output.write_text("notes\n")
    with pytest.raises(UserError, match="already exists"):
        chain.generate(shipped[1], str(output), base=base)


def test_mismatches_are_refused_before_loading(shipped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = shipped[0]
    monkeypatch.setattr(chain, "load_models", lambda *_: pytest.fail("weights were read"))
    base, medusa = str(here / "base"), str(here / "medusa-export")
    other = tmp_path / "other"
    save_tiny(other, seed=2, vocab_size=262)
    tokenizer = tiny_models.chat_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    for options, changes, message in (
        ({}, {}, "give --load"),
        (dict(load=str(here / "eagle3")), dict(speculative_model=medusa), "are two drafts"),
        (dict(load=str(here / "eagle3")), dict(decoding_type="Medusa"), "the draft is eagle3, which decodes as Eagle3"),
        (dict(base=base), {}, "needs a draft"),
        (dict(base=base), dict(speculative_model=medusa, decoding_type="Eagle3"), "which decodes as Medusa"),
        (dict(base=base), dict(speculative_model=str(tmp_path)), "config.json"),
        (dict(base=base), dict(speculative_model=base), f"{base}: .* expected a draft"),
        (dict(base=base), dict(speculative_model=medusa, decoding_type="NGram"), "is an option of .* not of NGram"),
        (dict(base=base, draft_lens=(2, 2)), dict(decoding_type="NGram"), r"--max-draft-len: found \[2, 2\]"),
        (dict(base=base), dict(decoding_type="DraftTarget", speculative_model=str(other)), "its tokenizer differs"),
        (dict(base=base), dict(decoding_type="NGram", use_relaxed_acceptance_for_thinking=True), "no <think>"),
        (dict(base=base, bf16=True, fp64=True), dict(decoding_type="NGram"), "--bf16 and --fp64"),
        (dict(base=base, parallel=ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
         dict(decoding_type="NGram"), "sequence-parallel"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            chain.validate(shipped[1], output=str(tmp_path / "x.json"), decode=FEW.replace(**changes), **options)
    for options in (dict(base=base), dict(load=str(here / "eagle3"))):  # the report of a draft is not that of NGram
        with pytest.raises(UserError, match="--output"):
            chain.validate(shipped[1], decode=FEW.replace(decoding_type="NGram"), **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="would be overwritten"):
        chain.validate(shipped[1], base=base, output=shipped[1], decode=FEW.replace(decoding_type="NGram"))
    (thesis := tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(UserError, match=r"output .*thesis.tex exists and is not a report"):
        api.validate(shipped[2], shipped[1], output=thesis)
    for output, page, message in (
        (tmp_path, None, r"--output .* is a folder"),
        (thesis, None, r"--output .*thesis.tex exists and is not a report of validate.py"),
        (tmp_path / "x.json", thesis, r"--html .*thesis.tex exists and is not a page of reports"),
        (tmp_path / "x.json", tmp_path, r"--html .* is a folder"),
        (tmp_path / "x.json", tmp_path / "x.json", "is also the report's file"),
    ):
        files = {"output": str(output), "html_output": page and str(page)}
        with pytest.raises(UserError, match=message):
            chain.validate(shipped[1], base=base, decode=FEW.replace(decoding_type="NGram"), **files)
