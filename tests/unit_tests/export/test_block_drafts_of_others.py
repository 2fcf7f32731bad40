"""DFlash and DSpark in the formats of speculators, SpecForge and ModelOpt: read as the same draft, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec import api
from megatron_spec.build import load_checkpoint
from megatron_spec.commands.convert import convert
from megatron_spec.config import UserError
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export.check import check_folder
from megatron_spec.export.load import load_draft, open_draft
from megatron_spec.export.rewrite import rewrite
from megatron_spec.export.served import check_exportable
from megatron_spec.serving.draft import exported
from megatron_spec.serving.sglang import sglang_command
from megatron_spec.serving.vllm import speculative_config
from tests.unit_tests.export.test_drafts_of_others import IDS, Change, Home, Json, Tensors, drop, same, write
from tests.unit_tests.export.test_drafts_of_others import home as home

MASK, BLOCK = 3, 4
FEW = range(0, 64, 2)
SHAPE: Json = {
    "mask_token_id": MASK, "block_size": BLOCK, "num_hidden_layers": 2, "capture_layer_ids": list(IDS),
}  # fmt: skip
KINDS: dict[str, tuple[str, Json]] = {
    "dflash": ("dflash", SHAPE),
    "dflash, window": ("dflash", {**SHAPE, "sliding_window": 5, "causal": True}),
    "dflash, open window": ("dflash", {**SHAPE, "sliding_window": 5}),
    "mixed": ("dflash", {**SHAPE, "sliding_window": 3, "causal": True, "full_attention_layers": (1,)}),
    "mixed, open": ("dflash", {**SHAPE, "sliding_window": 5, "full_attention_layers": (0,)}),
    "dspark": ("dspark", SHAPE),
    "dspark, plain confidence": ("dspark", {**SHAPE, "confidence_reads_markov": False}),
    "few tokens": ("dflash", {**SHAPE, "tokens": FEW}),
    "dspark, few tokens": ("dspark", {**SHAPE, "tokens": FEW}),
    "dspark, no confidence": ("dspark", {**SHAPE, "confidence_head": False}),
    "gated": ("dspark", {**SHAPE, "markov_head_type": "gated"}),
    "rnn": ("dspark", {**SHAPE, "markov_head_type": "rnn"}),
}
_LAYER = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "layer_types",
    "use_sliding_window", "sliding_window",
)  # fmt: skip
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def of_speculators(c: Json, t: Tensors, **more: Any) -> tuple[Json, Tensors]:
    """As speculators 0.9.0 saves a draft of the whole vocabulary: without embedding and LM head."""
    kind = "dspark" if "markov_rank" in c else "dflash"
    layer = {k: c.get(k) for k in _LAYER} | {
        "model_type": "qwen3", "attention_dropout": 0.0, "initializer_range": 0.02, "max_window_layers": 28,
        "rope_parameters": {"rope_type": "default", "rope_theta": c["rope_theta"]}, "use_cache": True,
        "flex_attention_backend": "FLASH", "tie_word_embeddings": False, "pad_token_id": None,
    }  # fmt: skip
    proposal = {"proposal_type": "greedy", "speculative_tokens": BLOCK - (kind == "dflash"), "accept_tolerance": 0.0}
    raw: Json = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "auto_map": {"": "config.SpeculatorConfig"}, "aux_hidden_state_layer_ids": [j + 1 for j in IDS],
        "block_size": BLOCK, "draft_vocab_size": c["draft_vocab_size"], "dtype": "float32", "mask_token_id": MASK,
        "sample_from_anchor": kind == "dspark", "speculators_model_type": kind, "speculators_version": "0.9.0",
        "sliding_window_non_causal": bool(c.get("sliding_window")) and not c["dflash_config"].get("causal", True),
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "base"},
        },
        "target_hidden_size": None, "tie_word_embeddings": False, "transformer_layer_config": layer,
        "transformers_version": "5.14.1", **{k: c[k] for k in _HEADS if k in c},
    }  # fmt: skip
    return {**raw, **more}, t


def shuffled(c: Json, t: Tensors) -> tuple[Json, Tensors]:
    """With the draft vocabulary in another order."""
    order = torch.randperm(len(FEW), generator=torch.Generator().manual_seed(0))
    rows = {n: t[n][order] for n in ("lm_head.weight", "markov_head.markov_w2.weight")}
    return of_speculators(c, {**t, **rows, "d2t": torch.tensor(FEW)[order] - torch.arange(len(FEW))})


def of_specforge(c: Json, t: Tensors, **inside: Any) -> tuple[Json, Tensors]:
    """As SpecForge 0.2.0 exports DSpark with --to hf."""
    nested = {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "projector_type": "dspark"}
    heads = {k: c[k] for k in _HEADS if k in c}
    nested |= {"mask_token_id": MASK, "target_layer_ids": list(IDS), **heads, **inside}
    raw = drop(c, *_HEADS, "is_causal", "target_layer_ids", "mask_token_id", "draft_vocab_size")
    auto = {"auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "target_hidden_size": None}
    return {**raw, **auto, "architectures": ["DSparkDraftModel"], "dflash_config": nested}, t


def of_modelopt(c: Json, t: Tensors, **inside: Any) -> tuple[Json, Tensors]:
    """As ModelOpt 0.47.0 exports DSpark."""
    raw, _ = of_specforge(c, t)
    nested = {
        "mask_token_id": MASK, "target_layer_ids": list(IDS), "projector_type": "dspark", "shift_label": True,
        "markov_rank": c["markov_rank"], "markov_head_type": c["markov_head_type"],
        "use_confidence_head": c["enable_confidence_head"],
    } | inside  # fmt: skip
    renamed = {
        n.replace("confidence_head.proj", "confidence_proj").removeprefix("markov_head."): x for n, x in t.items()
    }
    return {**drop(raw, "auto_map"), "architectures": ["DFlashDraftModel"], "dflash_config": nested}, renamed


def logit_heads(c: Json, t: Tensors) -> tuple[Json, Tensors]:
    raw, tensors = of_specforge(c, t)
    return raw, {f"logit_head.{n}" if "_head." in n else n: x for n, x in tensors.items()}


READ: dict[str, tuple[str, Change]] = {
    "speculators, dflash": ("dflash", of_speculators),
    "speculators, window": ("dflash, window", of_speculators),
    "speculators, open window": ("dflash, open window", of_speculators),
    "speculators, mixed": ("mixed", of_speculators),
    "speculators, mixed, open": ("mixed, open", of_speculators),
    "z-lab, mixed": ("mixed", lambda c, t: ({**c, "dflash_config": drop(c["dflash_config"], "use_swa")}, t)),
    "speculators, dspark": ("dspark", of_speculators),
    "speculators, other confidence": ("dspark, plain confidence", of_speculators),
    "speculators, gated": ("gated", of_speculators),
    "speculators, class name": (
        "dflash", lambda c, t: of_speculators(c, t, architectures=["DFlashSpeculator"], target_hidden_size=32)
    ),
    "specforge": ("dspark", of_specforge),
    "specforge, rnn": ("rnn", of_specforge),
    "specforge, both places": ("gated", lambda c, t: ({**of_specforge(c, t)[0], **{k: c[k] for k in _HEADS}}, t)),
    "specforge, old names": ("gated", logit_heads),
    "specforge, all at the top": ("dspark", lambda c, t: ({**c, "architectures": ["DSparkDraftModel"]}, t)),
    "modelopt": ("dspark", of_modelopt),
    "speculators, no confidence": (
        "dspark, no confidence", lambda c, t: of_speculators(c, t, confidence_head_with_markov=True)
    ),
    "speculators, few tokens": ("few tokens", of_speculators),
    "speculators, dspark, few tokens": ("dspark, few tokens", of_speculators),
    "speculators, another order": ("dspark, few tokens", shuffled),
    "z-lab, few tokens": ("few tokens", lambda c, t: (c, drop(t, "t2d"))),
    "specforge, no confidence": ("dspark, no confidence", of_specforge),
    "modelopt, no confidence": ("dspark, no confidence", of_modelopt),
    "no word of a confidence head": ("dspark, no confidence", lambda c, t: (drop(c, "enable_confidence_head"), t)),
    "modelopt, gated": ("gated", of_modelopt),
    "modelopt, rnn": ("rnn", of_modelopt),
}  # fmt: skip


SMALL = [name for name, (kind, _) in READ.items() if "few tokens" in kind]


def ours(home: Home, kind: str) -> tuple[Json, Tensors]:
    algorithm, overrides = KINDS[kind]
    return home.export(kind, algorithm, **overrides)


@pytest.mark.parametrize("name", READ)
def test_drafts_of_others_load_unchanged(home: Home, tmp_path: Path, name: str) -> None:
    """Read, without and with the target, and rewritten by --fix without a rule broken that ours does not break."""
    kind, change = READ[name]
    folder = write(tmp_path / "d", *change(*ours(home, kind)))
    read = load_draft(open_draft(folder, home.reference), home.world)
    same(read, home.drafts[kind])
    for field in (
        "causal",
        "sliding_window",
        "full_attention_layers",
        "capture_layer_ids",
        "block_size",
        "mask_token_id",
        "rope",
        "draft_vocab_size",
    ):
        assert getattr(read.config, field) == getattr(home.drafts[kind].config, field), field
    rewrite(folder, home.reference, tmp_path / "fixed")
    again: Any = load_draft(open_draft(tmp_path / "fixed", home.reference), home.world)
    same(again, home.drafts[kind])
    told = [(f.rule, f.engines) for f in check_folder(tmp_path / "fixed", base=home.base)]
    assert told == [(f.rule, f.engines) for f in check_folder(home.root / kind, base=home.base)]


@pytest.mark.parametrize("name", ["speculators, dspark", "specforge", "modelopt", "modelopt, no confidence", *SMALL])
def test_training_from_a_draft_of_others(home: Home, tmp_path: Path, name: str) -> None:
    kind, change = READ[name]
    folder = write(tmp_path / "d", *change(*ours(home, kind)))
    convert(str(home.base), str(tmp_path / "checkpoint"), draft=str(folder))
    same(load_checkpoint(tmp_path / "checkpoint", home.world).draft, home.drafts[kind])
    model = api.convert(home.ends, base_path=home.base, draft=folder)
    same(model.draft, home.drafts[kind])


def test_copies_of_the_target(home: Home, tmp_path: Path) -> None:
    """Earlier speculators saved the target's embedding and LM head: they are compared, then left out."""
    c, t = ours(home, "dflash")
    raw, tensors = of_speculators(c, t)
    head = home.ends.head_weight[: c["vocab_size"]].detach().clone()
    ends = {"embed_tokens": home.embedding, "lm_head": head, "verifier_lm_head": head, "verifier_norm": torch.ones(32)}
    tensors |= {f"{n}.weight": x.bfloat16() for n, x in ends.items()}
    same(load_draft(open_draft(write(tmp_path / "d", raw, tensors), home.reference), home.world), home.drafts["dflash"])
    for name, said in (("embed_tokens", "embedding"), ("lm_head", "LM head")):
        changed = {**tensors, f"{name}.weight": ends[name].flip(0)}
        folder = write(tmp_path / name, raw, changed)
        with pytest.raises(UserError, match=f"{name}.weight is not the target's {said}"):
            open_draft(folder, home.reference)
        assert "copies" in {f.rule for f in check_folder(folder, base=home.base) if not f.warning}


REFUSED: dict[str, tuple[str, Change, str]] = {
    "no map": (
        "few tokens", lambda c, t: of_speculators(c, drop(t, "d2t", "t2d")), "draft_vocab_size 32 < vocab_size 64, but"
    ),
    "no LM head": ("few tokens", lambda c, t: of_speculators(c, drop(t, "lm_head.weight")), "missing lm_head.weight"),
    "a map of other tokens": (
        "few tokens", lambda c, t: of_speculators(c, {**t, "d2t": torch.arange(32)[:, None] * 0 + 1}), "d2t is I64"
    ),
    "another size": (
        "few tokens", lambda c, t: of_speculators(c, t, draft_vocab_size=64), r"d2t is I64 \[32\]"
    ),
    "a map of all tokens": (
        "dflash", lambda c, t: of_speculators(c, {**t, "d2t": 63 - 2 * torch.arange(64)}), "reorders the whole"
    ),
    "another width": ("dflash", lambda c, t: of_speculators(c, t, target_hidden_size=48), "target_hidden_size of 48"),
    "no layers": (
        "dflash", lambda c, t: of_speculators(c, t, aux_hidden_state_layer_ids=None), "layer_ids is None, expected"
    ),
    "the embedding as a layer": (
        "dflash", lambda c, t: of_speculators(c, t, aux_hidden_state_layer_ids=[0, 4, 5]), r"is \[0, 4, 5\], expected"
    ),
    "an old DSpark": (
        "dspark", lambda c, t: of_speculators(c, t, sample_from_anchor=None),
        "sample_from_anchor is missing: speculators before 0.7.0 trained with false .* with false it is not supported",
    ),
    "another anchor": (
        "dspark", lambda c, t: of_speculators(c, t, sample_from_anchor=False), "found sample_from_anchor False"
    ),
    "DFlash with DSpark's anchor": (
        "dflash", lambda c, t: of_speculators(c, t, sample_from_anchor=True), "found sample_from_anchor True"
    ),
    "a window of unknown direction": (
        "dflash, window", lambda c, t: of_speculators(c, t, sliding_window_non_causal=None), "write true or false"
    ),
    "full layers of earlier slots": (
        "mixed", lambda c, t: ({**c, "is_causal": True}, t), "found full attention to earlier slots alone"
    ),
    "a type too few": (
        "mixed", lambda c, t: ({**c, "num_hidden_layers": 3}, t), "layer_types has 2 entries for 3"
    ),
    "a key of another kind": ("dflash", lambda c, t: of_speculators(c, t, conv_kernel_size=2), "conv_kernel_size"),
    "another kind": (
        "dflash", lambda c, t: of_speculators(c, t, speculators_model_type="dflash2"), "'dflash2' is not supported"
    ),
    "a confidence head that should not be there": (
        "dspark", lambda c, t: of_modelopt(c, t, use_confidence_head=False), "says that there is no confidence head"
    ),
    "no confidence head": (
        "dspark, no confidence", lambda c, t: of_modelopt(c, t, use_confidence_head=True), "confidence_head.proj.bias"
    ),
    "an unshifted label": ("dspark", lambda c, t: of_modelopt(c, t, shift_label=False), "shift_label is not true"),
    "two ranks": (
        "dspark", lambda c, t: ({**of_specforge(c, t)[0], "markov_rank": 2}, t), "markov_rank is 2 at the top level"
    ),
    "a head of a DeepSeek base": (
        "dspark", lambda c, t: ({**of_specforge(c, t)[0], "model_type": "deepseek_v4"}, t),
        r"\['DSparkDraftModel'\] with model_type 'deepseek_v4', a block draft of a kind that is not supported",
    ),
    "Domino": ("dflash", lambda c, t: ({**c, "architectures": ["DominoDraftModel"]}, t), "of a kind that is not supp"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_certain_is_refused(home: Home, tmp_path: Path, name: str) -> None:
    kind, change, message = REFUSED[name]
    folder = write(tmp_path / "d", *change(*ours(home, kind)))
    with pytest.raises(UserError, match=message):
        open_draft(folder, home.reference)


def test_engines_of_the_forms_of_others(home: Home, tmp_path: Path) -> None:
    """A full block in the form of speculators is made causal by vLLM; heads of others are not found."""
    expected: dict[str, dict[str, set[str]]] = {
        "speculators, dflash": {"causal": {"vllm"}},
        "speculators, window": {},
        "speculators, open window": {},
        "speculators, mixed": {"causal": {"vllm"}},
        "speculators, mixed, open": {},
        "z-lab, mixed": {},
        "speculators, dspark": {},
        "speculators, gated": {"served": {"vllm"}},
        "speculators, few tokens": {"causal": {"vllm"}},
        "speculators, dspark, few tokens": {},
        "z-lab, few tokens": {},
        "specforge": {"form": {"vllm"}},
        "no word of a confidence head": {},
        "modelopt, no confidence": {"form": {"vllm", "sglang", "trtllm"}},
        "modelopt": {"form": {"vllm", "sglang", "trtllm"}},
    }
    for name, rules in expected.items():
        kind, change = READ[name]
        folder = write(tmp_path / name, *change(*ours(home, kind)))
        found = [f for f in check_folder(folder, "vllm", home.base) if not f.warning]
        assert {f.rule for f in found} == rules.keys(), (name, found)
        broken = [f for f in check_folder(folder, base=home.base) if f.rule == "form"]
        assert {e for f in broken for e in f.engines} == rules.get("form", set()), name
        assert ("vllm" in exported(folder).unserved) == bool(rules), name
        if name == "z-lab, mixed":
            assert not exported(folder).unserved
        if name.startswith("speculators") or "few tokens" in name:
            assert {"sglang", "trtllm"} <= exported(folder).unserved.keys()
    plan = exported(tmp_path / "speculators, dspark", base=home.base)
    assert (plan.method, plan.max_draft_len) == ("dspark", BLOCK)
    assert speculative_config(plan)["method"] == "dspark"
    sglang_command(exported(tmp_path / "specforge", base=home.base), "/b")


def test_a_new_draft_of_few_tokens(home: Home, tmp_path: Path) -> None:
    """Its head has the base's rows, frozen, and comes back from a checkpoint; a size without its tokens is refused."""
    vocab = DraftVocab(torch.tensor(FEW), 64)
    vocab.save(tmp_path / "vocab.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"mask_token_id": MASK, "capture_layer_ids": IDS}))
    asked = {"algorithm": "dspark", "draft_config": str(tmp_path / "config.json")}
    convert(str(home.base), str(tmp_path / "new"), draft_vocab=str(tmp_path / "vocab.safetensors"), **asked)
    loaded = load_checkpoint(tmp_path / "new", home.world)
    head, w2 = loaded.draft.lm_head.weight, loaded.draft.markov_head.markov_w2.weight
    assert loaded.vocab == vocab and not head.requires_grad and w2.shape[0] == len(FEW)
    assert torch.equal(head, home.ends.head_weight[list(FEW)])
    pair = ("dspark", {"mask_token_id": MASK, "capture_layer_ids": IDS})
    model = api.convert(home.ends, [pair], base_path=home.base, vocab=vocab)
    assert torch.equal(model.draft.lm_head.weight, head)
    limits = check_exportable(loaded.draft.config, home.reference.config)
    assert [engine for engine in ("vllm", "sglang", "trtllm") if engine in " ".join(limits)] == ["sglang", "trtllm"]
    (tmp_path / "config.json").write_text(json.dumps({"mask_token_id": MASK, "draft_vocab_size": 32}))
    with pytest.raises(UserError, match="draft_vocab_size is 32, but no calibrated vocabulary was given"):
        convert(str(home.base), str(tmp_path / "refused"), **asked)
    with pytest.raises(UserError, match="--draft-vocab contradict each other"):
        convert(str(home.base), str(tmp_path / "refused"), algorithm="medusa", draft_vocab="x")
    with pytest.raises(UserError, match="draft_vocab_size 65 must be between 1 and the base's vocabulary 64"):
        home.drafts["dflash"].config.replace(draft_vocab_size=65)
