"""Drafts in other formats: one of ours, rewritten by hand, is read as the same draft, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spec import api
from megatron_spec.build import load_checkpoint
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.commands import convert as commands
from megatron_spec.commands.convert import convert
from megatron_spec.config import MedusaConfig, QuantConfig, RopeConfig, UserError, presets
from megatron_spec.config.rope import mscale
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export.check import check_folder
from megatron_spec.export.draft import export_draft
from megatron_spec.export.load import load_draft, open_draft
from megatron_spec.export.rewrite import rewrite
from megatron_spec.export.served import check_exportable, lost_engines
from megatron_spec.export.verify import STARTING_POINT
from megatron_spec.quantization import nvfp4
from megatron_spec.quantization.attach import attach_quantizers
from megatron_spec.runtime import distributed
from tests.unit_tests.base.tiny import save_tiny

Tensors = dict[str, Tensor]
Json = dict[str, Any]
V = 64
IDS = (1, 3, 4)
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
MODELOPT = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}  # fmt: skip


class Home:
    """A tiny base, and our export of each kind of draft with every parameter changed from its initial value."""

    def __init__(self, root: Path) -> None:
        self.root, self.base = root, root / "base"
        save_tiny(self.base, seed=2, num_hidden_layers=8, vocab_size=V, head_dim=8)
        self.reference = inspect_base(self.base)
        self.world = distributed.initialize()
        self.ends = load_base(self.reference, self.world, IDS)
        self.drafts: dict[str, Any] = {}
        self.embedding = self.ends.embedding_weight[:V].detach().clone()

    def export(self, name: str, algorithm: str, **overrides: Any) -> tuple[Json, Tensors]:
        """config.json and tensors of a draft."""
        if name not in self.drafts:
            ids = (
                torch.arange(0, V, 2)
                if algorithm in ("eagle3", "p-eagle") and not overrides.pop("full", False)
                else torch.arange(V)
            )
            vocab = DraftVocab(ids, V)
            config: Any = presets.medusa_config(self.reference.config, 3)
            if algorithm in ("dflash", "dspark"):
                vocab = DraftVocab(torch.tensor(overrides.pop("tokens", range(V))), V)
                overrides["draft_vocab_size"] = len(vocab)
                config = presets.block_config(self.reference.config, algorithm, overrides)
            elif algorithm != "medusa":
                asked = {"draft_vocab_size": len(vocab), **overrides}
                config = presets.eagle_config(self.reference.config, algorithm, asked)
            draft = build_draft(config, vocab, self.world, torch.float32)
            draft.initialize(self.ends, seed=4)
            with torch.no_grad():
                for i, p in enumerate(draft.parameters()):
                    p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            export_draft(draft, self.reference, self.root / name, None, self.world, dtype="float32", ends=self.ends)
            self.drafts[name] = draft
        file = "medusa_lm_head.safetensors" if algorithm == "medusa" else "model.safetensors"
        raw = json.loads((self.root / name / "config.json").read_text())
        return raw, load_file(self.root / name / file)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("drafts"))


def write(folder: Path, raw: Json, tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    stored = {n: t.clone().contiguous() for n, t in tensors.items()}
    if file.endswith("safetensors"):
        save_file(stored, folder / file)
    else:
        torch.save(stored, folder / file)
    return folder


def drop(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {n: x for n, x in values.items() if n not in names}


def numbered(tensors: Tensors) -> Tensors:
    return {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}


def prefixed(tensors: Tensors) -> Tensors:
    return {n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}": t for n, t in tensors.items()}


def shuffled(tensors: Tensors) -> Tensors:
    """The same draft with its vocabulary in another order."""
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
    targets = tensors["d2t"] + torch.arange(len(order))
    d2t = targets[order] - torch.arange(len(order))
    return {**tensors, "lm_head.weight": tensors["lm_head.weight"][order], "d2t": d2t}


def speculators(raw: Json) -> Json:
    layer = {k: raw[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                                 "head_dim", "num_hidden_layers", "rms_norm_eps", "vocab_size")}  # fmt: skip
    layer |= {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": raw["rope_theta"]},
    }
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "norm_before_residual": False,
        "draft_vocab_size": raw["draft_vocab_size"], "target_hidden_size": None, "transformer_layer_config": layer,
    }  # fmt: skip


def more_blocks(tensors: Tensors) -> Tensors:
    """A second block for every head."""
    return {n.replace(".0.linear", ".1.linear"): t for n, t in tensors.items() if ".linear." in n}


def speculators_eagle1(raw: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """One layer, although the configuration of the layer may be the target's."""
    layer = {**speculators(raw)["transformer_layer_config"], "num_hidden_layers": 12}
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer", "transformer_layer_config": layer, "layernorms": False,
        "fusion_bias": False, "speculators_config": {"algorithm": "eagle"},
    }  # fmt: skip
    return config, {
        n.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): t
        for n, t in tensors.items() if n != "fc.bias"
    }  # fmt: skip


def inside(raw: Json, tensors: Tensors, **keys: Any) -> tuple[Json, Tensors]:
    """More keys in `dflash_config`."""
    return {**raw, "dflash_config": {**raw["dflash_config"], **keys}}, tensors


Change = Callable[[Json, Tensors], tuple[Json, Tensors]]
READ: dict[str, tuple[str, Change, str]] = {
    # name: (kind, what others write, file)
    "no t2d, any order": ("eagle3", lambda c, t: (c, drop(shuffled(t), "t2d")), ""),
    "modelopt": (
        "eagle3",
        lambda c, t: ({**c, "eagle_config": MODELOPT, "pretraining_tp": None}, drop(numbered(shuffled(t)), "t2d")), "",
    ),
    "specforge": ("eagle3", lambda c, t: (drop(c, "head_dim", "draft_vocab_size"), t), ""),
    "safeailab eagle3": (
        "eagle3", lambda c, t: ({**drop(c, "head_dim"), "architectures": ["LlamaForCausalLM"]}, t), "pytorch_model.bin"
    ),
    "layers of the base": (
        "eagle3", lambda c, t: ({**c, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}, t), ""
    ),
    "angelslim": ("eagle3", lambda c, t: ({**c, "architectures": ["Eagle3LlamaForCausalLM"]}, t), ""),
    "prefix": ("eagle3", lambda c, t: (c, prefixed(t)), ""),
    "nulls": ("eagle3", lambda c, t: ({**c, "rope_scaling": None, "head_dim": None, "eagle_config": None}, t), ""),
    "rope_parameters": (
        "eagle3", lambda c, t: ({**drop(c, "rope_theta"), "rope_parameters": {"rope_theta": c["rope_theta"]}}, t), ""
    ),
    "buffers": ("eagle3", lambda c, t: (c, {**t, "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2)}), ""),
    "zero fc bias": ("eagle3", lambda c, t: (c, {**t, "fc.bias": torch.zeros(c["hidden_size"])}), ""),
    "speculators": ("eagle3", lambda c, t: (speculators(c), numbered(t)), ""),
    "full, no key": ("full", lambda c, t: (drop(c, "draft_vocab_size"), t), ""),
    "full, zero d2t": ("full", lambda c, t: (c, {**t, "d2t": torch.zeros(V, dtype=torch.int64)}), ""),
    "two, input_layernorm": ("two", lambda c, t: (c, drop(t, "layers.1.hidden_norm.weight")), ""),
    "two, hidden_norm": ("two", lambda c, t: (c, drop(t, "layers.1.input_layernorm.weight")), ""),
    "two, midlayer": ("two", lambda c, t: (c, {n.replace("layers.", "midlayer."): x for n, x in t.items()}), ""),
    "narrow, no key": ("narrow", lambda c, t: (drop(c, "target_hidden_size"), numbered(t)), ""),
    "eagle1": (
        "eagle1", lambda c, t: ({**c, "architectures": ["LlamaForCausalLM"]}, drop(t, "fc.bias")), "pytorch_model.bin"
    ),
    "eagle1 of vllm": (
        "eagle1", lambda c, t: ({"architectures": ["EAGLEModel"], "model": drop(c, "architectures")}, t), ""
    ),
    "medusa, no sizes": (
        "medusa", lambda c, t: ({"medusa_num_heads": 3, "medusa_num_layers": 1}, t), "medusa_lm_head.pt"
    ),
    "medusa of vllm": (
        "medusa",
        lambda c, t: (
            {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1},
            {**{f"blocks.{h}.layers.0.{x}": t[f"{h}.0.linear.{x}"] for h in range(3) for x in ("weight", "bias")},
             **{f"lm_heads.{h}.weight": t[f"{h}.1.weight"] for h in range(3)}},
        ), "",
    ),
    "dflash, sizes inside": (
        "dflash",
        lambda c, t: inside(drop(c, "block_size", "num_target_layers"), t, block_size=3, num_target_layers=8), "",
    ),
    "housekeeping": (
        "eagle3", lambda c, t: ({**c, "use_cache": True, "initializer_range": 0.02, "id2label": {"0": "x"}}, t), ""
    ),
    "medusa, prefix": ("medusa", lambda c, t: (c, {f"medusa_heads.{n}": x for n, x in t.items()}), ""),
    "medusa, prefix and no type": (
        "medusa",
        lambda c, t: ({"medusa_num_heads": 3, "medusa_num_layers": 1}, {f"medusa_head.{n}": x for n, x in t.items()}),
        "",
    ),
    "eagle1 of speculators": ("eagle1", lambda c, t: speculators_eagle1(c, t), ""),
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}), "full": ("eagle3", {"full": True}), "two": ("eagle3", {"num_hidden_layers": 2}),
    "narrow": ("eagle3", {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}),
    "p-eagle": ("p-eagle", {"mask_token_id": 3}), "eagle1": ("eagle1", {}), "medusa": ("medusa", {}),
    "mtp": ("eagle-mtp", {}),
    "dflash": ("dflash", {"mask_token_id": 3, "block_size": 3, "num_hidden_layers": 1,
                          "capture_layer_ids": list(IDS)}),
    "dspark": ("dspark", {"mask_token_id": 3, "block_size": 3, "num_hidden_layers": 1,
                          "capture_layer_ids": list(IDS)}),
    "heads": ("dflash", {"mask_token_id": 3, "block_size": 3, "num_attention_heads": 6, "num_key_value_heads": 6,
                         "head_dim": 16, "capture_layer_ids": list(IDS)}),
    "options": ("eagle3", {"qk_norm": True, "attention_bias": True, "norm_before_residual": True,
                           "own_embed_tokens": True}),
    "yarn": ("eagle3", {"rope_scaling": YARN}), "window": ("eagle3", {"sliding_window": 16}),
}  # fmt: skip


def same(found: Any, expected: Any) -> None:
    assert found.vocab == expected.vocab
    names = dict(expected.named_parameters())
    assert names.keys() == dict(found.named_parameters()).keys()
    for name, p in found.named_parameters():
        torch.testing.assert_close(p, names[name], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", READ)
def test_drafts_in_other_formats_load_unchanged(home: Home, tmp_path: Path, name: str) -> None:
    """Read, and written again by --fix, which breaks no rule of any engine that loads its kind."""
    kind, change, file = READ[name]
    algorithm, overrides = KINDS[kind]
    raw, tensors = home.export(kind, algorithm, **overrides)
    folder = write(tmp_path / "d", *change(raw, tensors), file or "model.safetensors")
    same(load_draft(open_draft(folder, home.reference), home.world), home.drafts[kind])
    rewrite(folder, home.reference, tmp_path / "fixed")
    again = load_draft(open_draft(tmp_path / "fixed", home.reference), home.world)
    same(again, home.drafts[kind])
    assert [f for f in check_folder(tmp_path / "fixed", base=home.base) if not f.warning] == []
    assert json.loads((tmp_path / "fixed" / "config.json").read_text())["architectures"] == (raw["architectures"]), (
        "our own spelling"
    )


@pytest.mark.parametrize("kind", ["options", "yarn", "window", "heads"])
def test_options_round_trip(home: Home, kind: str) -> None:
    algorithm, overrides = KINDS[kind]
    home.export(kind, algorithm, **overrides)
    found = load_draft(open_draft(home.root / kind, home.reference), home.world)
    same(found, home.drafts[kind])
    changes = {*STARTING_POINT, "max_position_embeddings"}
    one, two = (drop(x.config.to_dict(), *changes) for x in (found, home.drafts[kind]))
    assert one == two
    if kind == "options":
        broken = {f.rule: f.engines for f in check_folder(home.root / kind, base=home.base) if not f.warning}
        assert broken["qk_norm"] == ("trtllm", "sglang") and "norm_before_residual" in broken


def test_yarn_keeps_its_attention_factor(home: Home, tmp_path: Path) -> None:
    raw, tensors = home.export("eagle3", "eagle3")
    folder = write(tmp_path / "d", {**raw, "rope_scaling": YARN}, tensors)
    draft = load_draft(open_draft(folder, home.reference), home.world)
    assert draft.config.rope == RopeConfig(  # type: ignore[union-attr]
        theta=raw["rope_theta"], type="yarn", factor=32.0, original_max_position_embeddings=64,
        attention_factor=mscale(32.0),
    )  # fmt: skip
    cos, sin = draft.rotary(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1))  # type: ignore[operator]
    assert float(cos.max()) == pytest.approx(mscale(32.0)) and not sin.any()


def test_target_embedding_is_not_an_own_embedding(home: Home, tmp_path: Path) -> None:
    raw, tensors = home.export("eagle3", "eagle3")
    folder = write(tmp_path / "copy", raw, {**tensors, "embed_tokens.weight": home.embedding.bfloat16()})
    same(load_draft(open_draft(folder, home.reference), home.world), home.drafts["eagle3"])
    other = torch.randn(home.embedding.shape, generator=torch.Generator().manual_seed(9))
    folder = write(tmp_path / "own", raw, {**tensors, "embed_tokens.weight": other})
    draft: Any = load_draft(open_draft(folder, home.reference), home.world)
    assert draft.config.own_embedding and torch.equal(draft.embed_tokens.weight, other)
    raw, tensors = home.export("eagle1", "eagle1")
    folder = write(tmp_path / "one", raw, {**tensors, "embed_tokens.weight": home.embedding})
    same(load_draft(open_draft(folder, home.reference), home.world), home.drafts["eagle1"])
    folder = write(tmp_path / "two", raw, {**tensors, "embed_tokens.weight": other})
    with pytest.raises(UserError, match="is not the target's embedding"):
        open_draft(folder, home.reference)


ONE = torch.ones
REFUSED: dict[str, tuple[str, Change, str]] = {
    "second layer": (
        "eagle3", lambda c, t: (c, t | {n.replace("midlayer", "layers.1"): x for n, x in t.items() if "mid" in n}),
        "layers.1",
    ),
    "input norm of EAGLE-1": ("eagle1", lambda c, t: (c, {**t, "layers.0.input_layernorm.weight": ONE(32)}), "no norm"),
    "parallel heads": ("eagle3", lambda c, t: ({**c, "eagle_config": {"parallel_draft_step": 3}}, t), "parallel draft"),
    "no captures": ("eagle3", lambda c, t: ({**c, "eagle_config": {"use_aux_hidden_state": False}}, t), "last state"),
    "unknown option": ("eagle3", lambda c, t: ({**c, "eagle_config": {"new": 1}}, t), "has eagle_config.new"),
    "unknown key": ("eagle3", lambda c, t: ({**c, "post_fc_norm": True}, t), r"post_fc_norm \(True\)"),
    "key of another kind": ("eagle1", lambda c, t: ({**c, "norm_before_fc": True}, t), "norm_before_fc"),
    "nested, of another kind": ("eagle1", lambda c, t: ({**c, "eagle_config": {"has_lm_head": True}}, t), "lm_head"),
    "vocabulary of EAGLE-1": ("eagle1", lambda c, t: ({**c, "draft_vocab_size": 32}, t), "draft_vocab_size is 32"),
    "key inside speculators' layer": (
        "eagle3", lambda c, t: (
            {**(s := speculators(c)), "transformer_layer_config": {**s["transformer_layer_config"], "logit_cap": 30.0}},
            numbered(t)), "logit_cap",
    ),
    "biases of the MLP announced": ("eagle3", lambda c, t: ({**c, "mlp_bias": True}, t), "no such biases"),
    "unknown key of Medusa": ("medusa", lambda c, t: ({**c, "medusa_residual_scale": 0.5}, t), "medusa_residual_scale"),
    "dflash, projector": ("dflash", lambda c, t: inside(c, t, projector_type="domino"), "projector_type 'domino'"),
    "dflash, selector": ("dflash", lambda c, t: inside(c, t, selector_rank=8), "dflash_config.selector_rank"),
    "dflash, soft cap": ("dflash", lambda c, t: inside(c, t, final_logit_softcapping=20.0), "final_logit_softcapping"),
    "dflash, key": ("dflash", lambda c, t: ({**c, "output_multiplier": 0.2}, t), "output_multiplier"),
    "dflash, two sizes": ("dflash", lambda c, t: inside(c, t, block_size=9), "block_size is 3 at the top level and 9"),
    "dflash, two windows": (
        "dflash", lambda c, t: inside({**c, "sliding_window": 8}, t, use_swa=True, swa_window_size=9), "window_size 9"
    ),
    "dflash, interleaved rotary": ("dflash", lambda c, t: ({**c, "is_neox_style": False}, t), "interleaved pairs"),
    "dflash, anchor": ("dflash", lambda c, t: inside(c, t, sample_from_anchor=True), "sample_from_anchor True"),
    "dspark, anchor": ("dspark", lambda c, t: ({**c, "sample_from_anchor": False}, t), "sample_from_anchor False"),
    "dflash, no object": ("dflash", lambda c, t: ({**c, "dflash_config": 3}, t), "dflash_config is 3"),
    "activation": ("eagle3", lambda c, t: ({**c, "hidden_act": "gelu"}, t), "hidden_act"),
    "window": ("eagle3", lambda c, t: ({**c, "sliding_window": 8}, t), "sliding_window"),
    "biases announced": ("eagle3", lambda c, t: ({**c, "attention_bias": True}, t), "no such biases"),
    "no head": ("eagle3", lambda c, t: (c, drop(t, "lm_head.weight")), "missing lm_head.weight"),
    "no map": ("eagle3", lambda c, t: (c, drop(t, "d2t", "t2d")), "d2t is missing"),
    "width": ("eagle3", lambda c, t: ({**c, "intermediate_size": 40}, t), "gate_proj.weight is"),
    "captures": (
        "eagle3", lambda c, t: ({**c, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, t), "2 layer"
    ),
    "text for a number": ("eagle3", lambda c, t: ({**c, "hidden_size": "32"}, t), 'hidden_size is "32"'),
    "many layers": ("eagle3", lambda c, t: ({**c, "num_hidden_layers": 10**12}, t), "num_hidden_layers is 10000"),
    "text for the epsilon": ("eagle3", lambda c, t: ({**c, "rms_norm_eps": "x"}, t), 'rms_norm_eps is "x"'),
    "text for a window": ("eagle3", lambda c, t: ({**c, "sliding_window": "x"}, t), 'sliding_window is "x"'),
    "text inside speculators' layer": (
        "eagle3", lambda c, t: (
            {**(s := speculators(c)), "transformer_layer_config": {**s["transformer_layer_config"], "head_dim": "8"}},
            numbered(t)), 'head_dim is "8"',
    ),
    "text for theta": ("dflash", lambda c, t: ({**c, "rope_theta": "x"}, t), 'rope_theta is "x"'),
    "theta of 0": ("eagle3", lambda c, t: ({**c, "rope_theta": 0}, t), "rope_theta is 0, expected a positive"),
    "a rotary share below 0": ("eagle3", lambda c, t: ({**c, "partial_rotary_factor": -1}, t), "factor is -1, expect"),
    "a rotary share above 1": ("eagle3", lambda c, t: ({**c, "partial_rotary_factor": 2}, t), "expected at most 1"),
    "text for a switch": (
        "eagle3", lambda c, t: ({**c, "norm_before_residual": "false"}, t), "norm_before_residual is 'false'"
    ),
    "text for a nested switch": ("eagle3", lambda c, t: ({**c, "eagle_config": {"fc_norm": 1}}, t), "fc_norm is 1"),
    "layers of another type": (
        "eagle3", lambda c, t: ({**c, "layer_types": ["chunked_attention"]}, t), "layer_types has 'chunked_attention'"
    ),
    "dflash, layers of another type": (
        "dflash", lambda c, t: ({**c, "layer_types": ["linear_attention"]}, t), "layer_types has 'linear_attention'"
    ),
    "a factor without a type": (
        "eagle3", lambda c, t: ({**c, "rope_scaling": {"factor": 4.0}}, t), "but no rope_type"
    ),
    "a list for the mask token": ("p-eagle", lambda c, t: ({**c, "ptd_token_id": [1]}, t), "found mask tokens"),
    "rope of another type": ("eagle3", lambda c, t: ({**c, "rope_scaling": "yarn"}, t), 'rope_scaling is "yarn"'),
    "narrow, no embedding": ("narrow", lambda c, t: (c, drop(t, "embed_tokens.weight")), "missing embed_tokens"),
    "heads in config": ("medusa", lambda c, t: ({**c, "medusa_num_heads": 2}, t), "the tensors hold 3"),
    "more heads": ("medusa", lambda c, t: ({**c, "medusa_num_heads": 5}, t), "the tensors hold 3"),
    "codes without a scale": (
        "eagle3", lambda c, t: (c, {**t, "fc.weight": t["fc.weight"].to(torch.float8_e5m2)}), "fc.weight is F8_E5M2"
    ),
    "whole numbers": (
        "eagle1", lambda c, t: (c, {**t, "fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight is I8"
    ),
    "a bias of codes": (
        "options",
        lambda c, t: (c, {**t, "midlayer.self_attn.q_proj.bias": t["midlayer.self_attn.q_proj.bias"].byte()}),
        "q_proj.bias is U8",
    ),
    "a head of one number": ("medusa", lambda c, t: (c, {**t, "0.1.weight": torch.tensor(1.0)}), "0.1.weight is"),
    "blocks in config": (
        "medusa", lambda c, t: (c, {n.replace(".1.weight", ".2.weight"): x for n, x in t.items()} | more_blocks(t)),
        "config.json says 1 blocks per head, the tensors hold 2",
    ),
    "more blocks": (
        "medusa", lambda c, t: ({**c, "medusa_num_layers": 2}, t), "says 2 blocks per head, the tensors hold 1"
    ),
    "eagle1 of speculators, another layer": (
        "eagle1",
        lambda c, t: ({**(s := speculators_eagle1(c, t))[0], "transformer_layer_architecture": "GPTBlock"}, s[1]),
        "transformer_layer_architecture is 'GPTBlock'",
    ),
    "norms before fc": ("eagle1", lambda c, t: (c, {**t, "enorm.weight": ONE(8)}), "norms before fc of an EAGLE-1"),
    "mtp of another base": (
        "mtp", lambda c, t: (c, {n.replace("layers.0.", "model.mtp_layers.0."): x for n, x in t.items()}),
        "a prediction module under other names: found model.mtp_layers.0",
    ),
    "mtp with a norm": ("mtp", lambda c, t: (c, {**t, "layers.0.more_norm.weight": ONE(8)}), "of this kind has no"),
    "token map": ("medusa", lambda c, t: (c, {**t, "token_map": ONE(3)}), "token_map"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_drafts_are_refused_by_reader_and_checker(home: Home, tmp_path: Path, name: str) -> None:
    kind, change, message = REFUSED[name]
    algorithm, overrides = KINDS[kind]
    folder = write(tmp_path / "d", *change(*home.export(kind, algorithm, **overrides)))
    with pytest.raises(UserError, match=message):
        open_draft(folder, home.reference)
    assert [f for f in check_folder(folder, base=home.base) if not f.warning]


def test_a_mask_embedding_is_not_lost(home: Home, tmp_path: Path) -> None:
    kind, overrides = KINDS["dflash"]
    folder = write(tmp_path / "d", *home.export("dflash", kind, **overrides))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"mask_embedding\.pt holds an embedding"):
        open_draft(folder, home.reference)


@pytest.mark.parametrize("found", ["LlamaForCausalLMEagle3", 1, [1], {"a": 1}])
def test_architectures_that_are_no_list_of_names(home: Home, tmp_path: Path, found: Any) -> None:
    raw, tensors = home.export("eagle3", "eagle3")
    folder = write(tmp_path / "d", {**raw, "architectures": found}, tensors)
    for read in (lambda: open_draft(folder, home.reference), lambda: check_folder(folder)):
        with pytest.raises(UserError, match=r"architectures is .* expected a list of names"):
            read()


@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_two_files_with_one_tensor(home: Home, tmp_path: Path, end: str) -> None:
    """Without an index nothing says which of them is the draft's."""
    raw, tensors = home.export("eagle3", "eagle3")
    name = "model" if end == "safetensors" else "pytorch_model"
    folder = write(tmp_path / "d", raw, tensors, f"{name}.{end}")
    write(tmp_path / "other", raw, {"norm.weight": 2 * tensors["norm.weight"]}, f"{name}_old.{end}")
    (tmp_path / "other" / f"{name}_old.{end}").rename(folder / f"{name}_old.{end}")
    with pytest.raises(UserError, match=r"norm.weight .1 in all. is in both"):
        open_draft(folder, home.reference)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers(home: Home, tmp_path: Path, value: float) -> None:
    raw, tensors = home.export("eagle3", "eagle3")
    folder = write(tmp_path / "d", raw, {**tensors, "norm.weight": torch.full_like(tensors["norm.weight"], value)})
    with pytest.raises(UserError, match=r"norm.weight has values that are NaN or infinite"):
        load_draft(open_draft(folder, home.reference), home.world)


def test_unknown_harmless_keys_give_one_warning(home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw, tensors = home.export("eagle3", "eagle3")
    folder = write(tmp_path / "d", {**raw, "zebra": 1, "use_cache": True, "new_norm": False}, tensors)
    for _ in range(2):
        open_draft(folder, home.reference)
    assert [r.getMessage() for r in caplog.records if "unknown keys" in r.getMessage()] == [
        f"{folder}: unknown keys in config.json are ignored: new_norm, zebra; make sure that the draft does not need "
        "them"
    ]


def test_draft_with_another_base(home: Home, tmp_path: Path) -> None:
    home.export("eagle3", "eagle3")
    save_tiny(tmp_path / "wide", seed=2, num_hidden_layers=8, vocab_size=V, hidden_size=48)
    with pytest.raises(UserError, match="hidden size of 32, the target has 48"):
        open_draft(home.root / "eagle3", inspect_base(tmp_path / "wide"))
    save_tiny(tmp_path / "more", seed=2, num_hidden_layers=8, vocab_size=V + 2)
    with pytest.raises(UserError, match=f"vocabulary of {V}, the target has {V + 2}"):
        open_draft(home.root / "eagle3", inspect_base(tmp_path / "more"))


def test_shards_and_both_files(home: Home, tmp_path: Path) -> None:
    """An index names the files; a file it does not name, or a .bin beside safetensors, is not read."""
    raw, tensors = home.export("eagle3", "eagle3")
    names = sorted(tensors)
    folder = write(tmp_path / "d", raw, {n: tensors[n] for n in names[:5]}, "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[5:]}, folder / "model-00002-of-00002.safetensors")
    save_file({"spare": ONE(2)}, folder / "optimizer.safetensors")
    weight_map = {n: f"model-0000{1 if n in names[:5] else 2}-of-00002.safetensors" for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same(load_draft(open_draft(folder, home.reference), home.world), home.drafts["eagle3"])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="named in model"):
        open_draft(folder, home.reference)


def test_medusa_sizes_come_from_tensors(home: Home, tmp_path: Path) -> None:
    _, tensors = home.export("medusa", "medusa")
    config = open_draft(write(tmp_path / "d", {}, tensors, "medusa_lm_head.pt"), home.reference).config
    assert config == MedusaConfig(num_heads=3, hidden_size=home.reference.config.hidden_size, vocab_size=V)
    shutil.rmtree(tmp_path / "d")


def test_training_from_a_published_draft(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """convert_model.py --draft and convert(draft=...) load the draft from its folder, opened once, and export it."""
    raw, tensors = home.export("eagle3", "eagle3")
    folder = write(tmp_path / "d", raw, drop(numbered(shuffled(tensors)), "t2d"))
    opened: list[Path] = []
    monkeypatch.setattr(commands, "open_draft", lambda place, ref: opened.append(place) or open_draft(place, ref))
    convert(str(home.base), str(tmp_path / "checkpoint"), draft=str(folder))
    loaded = load_checkpoint(tmp_path / "checkpoint", home.world)
    same(loaded.draft, home.drafts["eagle3"])
    model = api.convert(home.ends, base_path=home.base, draft=folder)
    same(model.draft, home.drafts["eagle3"])
    assert opened == [str(folder), folder]  # once per conversion
    api.export_draft(model, tmp_path / "out", dtype="float32")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[n], tensors[n]) for n in tensors)
    with pytest.raises(UserError, match="leave --draft-vocab out"):
        convert(str(home.base), str(tmp_path / "other"), draft=str(folder), draft_vocab="x")
    with pytest.raises(UserError, match="draft= takes the draft as it is: leave drafts out"):
        api.convert(home.ends, [("eagle", {})], base_path=home.base, draft=folder)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rope": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}}, "engines use 1.13863 for factor 4.0"),
        ({"fc_bias": True, "qk_norm": True}, "qk_norm with fc_bias: no engine"),
        ({"rope_scaling": {"rope_type": "yarn", "factr": 4.0}}, "did you mean 'factor'"),
    ],
)  # fmt: skip
def test_unexportable_options_are_refused_at_convert(home: Home, tmp_path: Path, asked: Json, message: str) -> None:
    (tmp_path / "draft.json").write_text(json.dumps(asked))
    with pytest.raises(UserError, match=message):
        convert(str(home.base), str(tmp_path / "c"), eagle_config=str(tmp_path / "draft.json"))


def test_no_engine_loads_eagle1_of_speculators(home: Home, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", *speculators_eagle1(*home.export("eagle1", "eagle1")))
    [wrong] = [f for f in check_folder(folder, base=home.base) if not f.warning]
    assert wrong.rule == "speculators" and "vllm" in wrong.engines and "--fix" in wrong.fix


def test_a_complete_configuration_is_of_the_kind_and_of_the_base(home: Home) -> None:
    base, whole = home.reference.config, DraftVocab.full(V)
    eagle1, wide = presets.eagle_config(base, "eagle1"), base.replace(hidden_size=2 * base.hidden_size)
    assert commands.requested_config([("eagle", eagle1)], home.reference, whole) is eagle1
    more = presets.medusa_config(base.replace(vocab_size=V + 1))
    for kind, config, said in (
        ("eagle-mtp", eagle1, "kind 'eagle-mtp' cannot have the algorithm 'eagle1'"),
        ("eagle1", presets.eagle_config(wide, "eagle1"), f"target_hidden_size of the draft is {wide.hidden_size}"),
        ("medusa", more, f"vocab_size of the draft is {V + 1}, but the base has {V}"),
    ):
        with pytest.raises(UserError, match=said):
            commands.requested_config([(kind, config)], home.reference, whole)


def test_engine_limits_are_reported_at_convert(home: Home) -> None:
    base = home.reference.config
    last = presets.eagle_config(base, "eagle3", {"capture_layer_ids": [1, 7]})
    assert "SGLang never delivers" in check_exportable(last, base)[0]
    assert check_exportable(last, base.replace(family="gpt_oss")) == check_exportable(
        presets.eagle_config(base, "eagle3", {"capture_layer_ids": [1, 6]}), base
    )
    biased = presets.eagle_config(base, "eagle1", {"attention_bias": True})
    assert set(lost_engines(biased, base)) == set() and "sglang" in check_exportable(biased, base)[0]
    assert "no engine loads an eagle-mtp" in check_exportable(presets.eagle_config(base, "eagle-mtp"), base)[0]
    assert check_exportable(presets.eagle_config(base), base) == []
    own = presets.eagle_config(base, overrides={"own_embed_tokens": True})
    assert "own_embed_tokens: only vllm can serve" in check_exportable(own, base)[0]
    five = presets.eagle_config(base, "eagle3", {"capture_layer_ids": "five"})
    assert check_exportable(five, base) == [
        "this draft has 5 capture_layer_ids, and engines were only tested with 3: try yours before a long training"
    ]
    gated = presets.block_config(base, "dspark", {"mask_token_id": 1, "markov_head_type": "gated"})
    said = check_exportable(gated, base)
    assert [s.split()[0] for s in said] == ["vllm", "trtllm"] and "no gated Markov head" in said[0]
    assert check_exportable(presets.block_config(base, "dflash", {"mask_token_id": 1}), base) == []
    nobody = gated.replace(sliding_window=64)
    assert "no engine serves such a draft" in check_exportable(nobody, base)[-1]
    assert "only vllm can serve" in check_exportable(presets.eagle_config(base, "eagle3", {"qk_norm": True}), base)[0]
    mixtral, qwen, deep = (base.replace(family=name) for name in ("mixtral", "qwen2", "deepseek_v3"))
    assert [s.split()[0] for s in check_exportable(presets.eagle_config(mixtral), mixtral)] == [
        "vllm", "sglang", "trtllm", "no",
    ]  # fmt: skip
    flash = presets.block_config(qwen, "dflash", {"mask_token_id": 1})
    assert [s.split()[0] for s in check_exportable(flash, qwen)] == ["sglang", "trtllm"]
    assert check_exportable(presets.eagle_config(deep), deep) == []
    other = presets.eagle_config(deep, "eagle3", {"capture_layer_ids": [2, 4, 5]})
    assert "sglang will not serve this draft with this base" in check_exportable(other, deep)[0]


def test_a_causal_block_is_told_to_every_engine_that_listens(home: Home) -> None:
    kind, overrides = KINDS["dflash"]
    assert "is_causal" not in home.export("dflash", kind, **overrides)[0]
    raw, _ = home.export("causal", kind, **overrides, causal=True)
    assert raw["is_causal"] is True and raw["dflash_config"]["causal"] is True
    lost = [f.engines for f in check_folder(home.root / "causal") if f.rule == "served"]
    assert lost == [("trtllm",)]


def test_a_base_that_was_changed_after_training(home: Home, tmp_path: Path) -> None:
    home.export("eagle3", "eagle3")
    shutil.copytree(home.base, tmp_path / "rotated")
    file = tmp_path / "rotated" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"].flip(1)}, file)
    assert [f.rule for f in check_folder(home.root / "eagle3", base=tmp_path / "rotated")] == ["base"]
    assert check_folder(home.root / "eagle3", base=home.base) == []


def quantised(folder: Path, form: str) -> dict[str, Tensor]:
    """Rewrite a base in ModelOpt's format; returns its dequantised weights."""
    tensors = load_file(folder / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        stem, weight, scale = name.removesuffix(".weight"), tensors[name], tensors[name].abs().max() / 448
        stored[f"{stem}.input_scale"] = torch.tensor(0.05)
        if form == "FP8":
            stored[name], stored[f"{stem}.weight_scale"] = (weight / scale).to(torch.float8_e4m3fn), scale
            meant[name] = stored[name].float() * scale
        else:
            codes, blocks = nvfp4.encode(weight, weight.abs().max())
            whole = nvfp4.global_scale(weight.abs().max())
            stored |= {name: nvfp4.pack(codes), f"{stem}.weight_scale": blocks, f"{stem}.weight_scale_2": whole}
            meant[name] = nvfp4.decode(codes, blocks, whole)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    sidecar = {"quantization": {"quant_algo": form, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(sidecar))
    return meant


@pytest.mark.parametrize("form", ["FP8", "NVFP4"])
def test_quantised_bases_convert_and_load(home: Home, tmp_path: Path, form: str) -> None:
    """An fp8 base computes as served, with rounded inputs; an nvfp4 base is dequantised."""
    base = tmp_path / "base"
    shutil.copytree(home.base, base)
    meant = quantised(base, form)
    convert(str(base), str(tmp_path / "c"), eagle_algorithm="eagle3")
    loaded = load_checkpoint(tmp_path / "c", home.world)
    down = dict(loaded.base.named_parameters())["model.decoder.layers.0.mlp.linear_fc2.weight"]
    torch.testing.assert_close(down, meant["model.layers.0.mlp.down_proj.weight"], rtol=1e-6, atol=1e-7)
    rounding = [m for m in loaded.base.modules() if getattr(m, "input_quantizer", None) is not None]
    assert bool(rounding) == (form == "FP8") == loaded.base.quantised_on_disk
    ends = load_checkpoint(tmp_path / "c", home.world, ends_only=True).base
    assert torch.equal(ends.head_weight[:V], home.ends.head_weight[:V])
    if form == "FP8":
        with pytest.raises(UserError, match="fp8_draft_only"):
            attach_quantizers(loaded.base, QuantConfig(), "base")
