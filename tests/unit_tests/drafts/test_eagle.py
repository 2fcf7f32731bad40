"""EAGLE-3 against a plain version written from the paper: losses of every step, every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron_spec.batch import Batch, Features
from megatron_spec.config import EagleConfig, ObjectiveConfig, RopeConfig, UserError
from megatron_spec.config.machine import H100
from megatron_spec.drafts import build_draft, initial
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.linear import Placement
from megatron_spec.ops.ttt_attention import TrainingTimeTest
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from tests.unit_tests.drafts.plain_eagle3 import (
    PlainEagle,
    StandInEnds,
    V,
    assert_same,
    conversations,
    draft_vocab,
    eagle_config,
    features,
)  # fmt: skip

CASES = list(itertools.product(("serving", "paper", "target"), (True, False), (True, False), (12, V)))


def make(config: EagleConfig, dtype: torch.dtype = torch.float64) -> tuple[EagleDraft, StandInEnds]:
    world = distributed.initialize()
    ends = StandInEnds(config.target_hidden_size, dtype)
    draft = build_draft(config, draft_vocab(config), world, dtype)
    draft.initialize(ends, seed=11)
    with torch.no_grad():  # larger than usual, so that attention and MLP matter; norms that are not 1
        for i, (_, p) in enumerate(sorted(draft.named_parameters())):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p)
            p += noise * (0.3 if p.dim() == 2 else 0.1)
    return draft, ends


def compare(config: EagleConfig, objective: ObjectiveConfig, f: Features | None = None) -> None:
    draft, ends = make(config)
    f = f or features(conversations(), config, torch.float64)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in draft.named_parameters()}
    total, stats = PlainEagle(config, parameters, ends, draft.vocab)(f, objective)
    losses = draft(f, ends, objective)
    assert_same(draft, losses, total, stats, parameters)


@pytest.mark.parametrize(("alignment", "in_vocab_only", "detach", "draft_vocab_size"), CASES)
def test_losses_and_gradients(alignment: Any, in_vocab_only: bool, detach: bool, draft_vocab_size: int) -> None:
    objective = ObjectiveConfig(ttt_steps=3, alignment=alignment, in_vocab_only=in_vocab_only, detach=detach)
    compare(eagle_config(draft_vocab_size=draft_vocab_size), objective)


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "tv", "lk", "lk_hybrid", "hard_ce"])
def test_loss_kinds(loss: Any) -> None:
    compare(eagle_config(), ObjectiveConfig(ttt_steps=2, loss=loss, temperature=0.7, step_decay=0.5))


@pytest.mark.parametrize("alignment", ["serving", "paper", "target"])
def test_tokens_put_in_place_of_rejected_ones_weigh_more(alignment: Any) -> None:
    objective = ObjectiveConfig(ttt_steps=3, alignment=alignment, replay_weight=3.5)
    compare(eagle_config(), objective)
    draft, ends = make(eagle_config())
    f = features(conversations(), draft.config, torch.float64)
    replayed, plain = draft(f, ends, objective), draft(f, ends, objective.replace(replay_weight=1.0))
    assert replayed.total > plain.total and torch.equal(replayed.loss_T, plain.loss_T)
    f.batch.rejected_BS = None
    assert draft(f, ends, objective).total == plain.total


def test_two_layers_and_other_sizes() -> None:
    """Two layers; a draft narrower than the base; four draft steps."""
    compare(eagle_config(num_hidden_layers=2), ObjectiveConfig(ttt_steps=4))
    compare(eagle_config(hidden_size=8, num_key_value_heads=1), ObjectiveConfig(ttt_steps=2))


LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True, "fc_bias": True},
    "qk_norm, two layers": {"qk_norm": True, "num_hidden_layers": 2, "head_dim": 8},
    "norm_before_residual": {"norm_before_residual": True},
    "own embedding": {"own_embed_tokens": True},
    "partial rotary": {"rope": RopeConfig(partial_rotary_factor=0.5)},
    "sliding window": {"sliding_window": 4, "num_hidden_layers": 2},
    "attention factor": {"rope": RopeConfig(attention_factor=2.0)},
}


@pytest.mark.parametrize("name", LAYER_OPTIONS)
def test_options_of_the_layer(name: str) -> None:
    """Options of published drafts beyond a Llama layer, which the fused unroll does not support."""
    config = eagle_config(**LAYER_OPTIONS[name])
    compare(config, ObjectiveConfig(ttt_steps=2))
    usual = eagle_config(head_dim=16)
    assert Paths(Setting(H100, "bfloat16", draft=usual)).on("draft_fused")
    asked = usual.replace(**LAYER_OPTIONS[name]).replace(head_dim=16)
    assert not Paths(Setting(H100, "bfloat16", draft=asked)).on("draft_fused")


def test_documents_are_independent() -> None:
    """A packed document has the same loss as on its own."""
    config = eagle_config()
    draft, ends = make(config)
    f, objective = features(conversations(), config, torch.float64), ObjectiveConfig(ttt_steps=3)
    b = f.batch

    def part(rows: slice, row: int) -> torch.Tensor:
        batch = Batch(*(x[row : row + 1, rows] for x in (b.tokens_BS, b.positions_BS, b.turns_BS)),
                      torch.zeros_like(b.documents_BS[row : row + 1, rows]))  # fmt: skip
        alone = Features(batch, f.captures_SBC[rows, row : row + 1], f.state_SBH[rows, row : row + 1])
        return draft(alone, ends, objective).loss_T

    parts = part(slice(0, 15), 0) + part(slice(0, 8), 1) + part(slice(8, None), 1)
    torch.testing.assert_close(draft(f, ends, objective).loss_T, parts)


def test_no_supervised_rows_give_zero_loss_and_gradients() -> None:
    config = eagle_config()
    draft, ends = make(config)
    f = features(conversations(), config, torch.float64)
    f.batch.turns_BS.zero_()
    losses = draft(f, ends, ObjectiveConfig(ttt_steps=3))
    losses.total.backward()
    assert float(losses.total) == 0 and losses.rows_T.tolist() == [0, 0, 0]
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())


@pytest.mark.parametrize("window", [None, 4])
def test_decoding_equals_training(window: int | None) -> None:
    """Decoding step by step with a cache gives the hidden states of training, also after a rollback."""
    config, steps = eagle_config(num_hidden_layers=2, sliding_window=window), 3
    draft, ends = make(config)
    S = 12
    tokens = torch.randint(0, V, (1, S), generator=torch.Generator().manual_seed(1))
    positions, documents = torch.arange(S)[None], torch.zeros(1, S, dtype=torch.int32)
    captures = features(conversations(S + 6), config, torch.float64).captures_SBC[:S, :1]

    hidden = draft.project(captures)
    training, trained = TrainingTimeTest(Visibility(documents), window=window), []
    for k in range(steps):
        shifted = torch.cat([tokens[:, 1 + k :], tokens[:, : 1 + k]], 1)
        hidden, normed = draft.layer_step(hidden, ends.embed(shifted), positions + k, training)
        trained.append((hidden, normed))

    cache = draft.new_cache(1, S + steps)
    for j in range(S - steps - 1):  # row j enters the cache, then the draft runs ahead and is rolled back
        hidden = draft.project(captures[j : j + 1])
        for k in range(steps):
            slot = torch.tensor([[j + k]])
            visibility = Visibility.cached(cache, slot)
            embedding = ends.embed(tokens[:, j + 1 + k, None])
            hidden, normed = draft.layer_step(hidden, embedding, slot, draft.cached_attention(visibility))
            torch.testing.assert_close(hidden, trained[k][0][j : j + 1], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(normed, trained[k][1][j : j + 1], rtol=1e-9, atol=1e-9)


def test_overfits_a_fixed_batch() -> None:
    """Rows whose teacher is inside the draft vocabulary are learned: loss to the teacher's entropy, argmax equal."""
    config = eagle_config(draft_vocab_size=V)
    draft, ends = make(config, torch.float32)
    f, objective = features(conversations(), config, torch.float32), ObjectiveConfig(ttt_steps=2, loss="kl")
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    first = draft(f, ends, objective).loss_T
    for _ in range(200):
        optimizer.zero_grad()
        draft(f, ends, objective).total.backward()
        optimizer.step()
    last = draft(f, ends, objective)
    assert (last.loss_T < 0.1 * first).all(), (first, last.loss_T)
    assert (last.correct_T >= 0.9 * last.rows_T).all()


def test_initial_values() -> None:
    config = eagle_config(init_from_base_layer=True)
    world = distributed.initialize()
    ends = StandInEnds(16, torch.float32)
    draft = EagleDraft(config, draft_vocab(config), Placement(world.tp))
    assert all(p.isnan().all() for p in draft.parameters())
    base = {
        "mlp.gate_proj.weight": torch.rand(24, 16), "mlp.up_proj.weight": torch.rand(24, 16),
        "mlp.down_proj.weight": torch.rand(16, 24), "input_layernorm.weight": torch.rand(16),
        "post_attention_layernorm.weight": torch.rand(16), "norm.weight": torch.rand(16),
    }  # fmt: skip
    draft.initialize(ends, base, seed=1)
    found = dict(draft.named_parameters())
    assert all(p.isfinite().all() for p in found.values())
    assert torch.equal(found["lm_head.weight"], ends.head[draft.vocab.target_ids])
    assert torch.equal(found["norm.weight"], base["norm.weight"])
    assert torch.equal(found["midlayer.hidden_norm.weight"], base["input_layernorm.weight"])
    assert torch.equal(found["midlayer.input_layernorm.weight"], torch.ones(16))
    assert torch.equal(found["midlayer.mlp.down_proj.weight"], base["mlp.down_proj.weight"])
    captures = torch.randn(5, 48)
    for start, expected in (("last_capture", captures[:, 32:]), ("average", captures.view(5, 3, 16).mean(1))):
        other = EagleDraft(config.replace(fc_init=start), draft_vocab(config), Placement(world.tp))
        other.initialize(ends, base, seed=1)
        projected = captures @ other.fc.weight.T
        assert 0 < (projected - expected).norm() / expected.norm() < 0.2
    again = EagleDraft(config, draft_vocab(config), Placement(world.tp))
    again.initialize(ends, base, seed=1)
    assert all(torch.equal(p, found[n]) for n, p in again.named_parameters())
    again.initialize(ends, base, seed=2)
    drawn = {n for n, p in again.named_parameters() if not torch.equal(p, found[n])}
    attention = {f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"}
    assert drawn == {"fc.weight", *attention}


def test_what_does_not_fit_from_the_base_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = eagle_config(init_from_base_layer=True)
    draft = EagleDraft(config, draft_vocab(config), Placement(distributed.initialize().tp))
    base = {"mlp.gate_proj.weight": torch.rand(40, 16), "post_attention_layernorm.weight": torch.rand(16)}
    with caplog.at_level("INFO", logger="megatron_spec"):
        draft.initialize(StandInEnds(16, torch.float32), base, seed=1)
    shapes, missing = caplog.messages
    assert shapes.endswith("the base's last layer has other shapes: midlayer.mlp.gate_proj.weight")
    assert missing.endswith("midlayer.mlp.up_proj.weight, midlayer.mlp.down_proj.weight")


def test_init_attention_fills_the_feature_half() -> None:
    config = eagle_config(init_from_base_layer=True, init_attention=True)
    draft = EagleDraft(config, draft_vocab(config), Placement(distributed.initialize().tp))
    found = dict(draft.named_parameters())
    names = {x: f"self_attn.{x}_proj.weight" for x in "qkvo"}
    base = {n: torch.rand(found[f"midlayer.{n}"].shape[0], 16) for x, n in names.items() if x != "o"}
    base[names["o"]] = torch.rand(found["midlayer.self_attn.o_proj.weight"].shape)
    draft.initialize(StandInEnds(16, torch.float32), base, seed=1)
    for x, name in names.items():
        value = found[f"midlayer.{name}"]
        assert torch.equal(value if x == "o" else value[:, 16:], base[name])
        assert x == "o" or 0 < value[:, :16].abs().max() < 0.2
    without = EagleDraft(config.replace(init_attention=False), draft_vocab(config), Placement(draft.tp_group))
    without.initialize(StandInEnds(16, torch.float32), base, seed=1)
    assert not torch.equal(without.midlayer.self_attn.o_proj.weight, base[names["o"]])


def attention_of_a_base(draft: EagleDraft, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    shapes = {n.removeprefix("midlayer."): p.shape for n, p in draft.named_parameters() if ".self_attn." in n}
    generator = torch.Generator().manual_seed(3)
    widths = {n: (s[0], s[1] // (1 if "o_proj" in n else 2)) for n, s in shapes.items() if n.endswith("_proj.weight")}
    return {**{n: torch.randn(s, generator=generator) for n, s in widths.items()}, **more}


@pytest.mark.parametrize("tokens", [5, 8192])
def test_base_biases_are_fitted_through_the_embedding(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft without biases starts with approximately the base's q, k and v for every fitted token."""
    monkeypatch.setattr(initial, "CONSTANT_TOKENS", tokens)
    config = eagle_config(init_from_base_layer=True, init_attention=True, initializer_range=1e-9)
    draft = EagleDraft(config, draft_vocab(config), Placement(distributed.initialize().tp))
    ends, kv = StandInEnds(16, torch.float32), config.num_key_value_heads * config.head_dim
    bias = {"self_attn.k_proj.bias": torch.arange(1.0, kv + 1)}
    base = attention_of_a_base(draft, **bias)
    draft.initialize(ends, base, seed=1)
    ids = draft.vocab.target_ids[:tokens]
    embedding = torch.nn.functional.rms_norm(ends.embed(ids[None])[:, 0], (16,))
    feature = torch.randn(len(ids), 16)
    found = torch.cat([embedding, feature], 1) @ draft.midlayer.self_attn.k_proj.weight.t()
    added = found - feature @ base["self_attn.k_proj.weight"].t()
    ratio = (added / bias["self_attn.k_proj.bias"]).detach()
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), atol=1e-4)  # one number per token, near 1
    assert (ratio - 1).abs().max() < (0.02 if tokens == 5 else 0.9) and abs(float(ratio.mean()) - 1) < 0.1
    q = draft.midlayer.self_attn.q_proj.weight[:, :16]
    assert q.abs().max() < 1e-6  # this base has no bias there


def test_draft_with_biases_copies_those_of_the_base() -> None:
    config = eagle_config(init_from_base_layer=True, init_attention=True, attention_bias=True)
    draft = EagleDraft(config, draft_vocab(config), Placement(distributed.initialize().tp))
    kv = config.num_key_value_heads * config.head_dim
    base = attention_of_a_base(draft, **{"self_attn.v_proj.bias": torch.rand(kv)})
    draft.initialize(StandInEnds(16, torch.float32), base, seed=1)
    assert torch.equal(draft.midlayer.self_attn.v_proj.bias, base["self_attn.v_proj.bias"])
    assert draft.midlayer.self_attn.v_proj.weight[:, :16].abs().max() < 0.2
    assert not draft.midlayer.self_attn.q_proj.bias.any()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_init_attention_from_a_base_with_qk_norm(qk_norm: bool) -> None:
    """The draft norms its heads too, or its projection has the norm's average scale."""
    config = eagle_config(init_from_base_layer=True, init_attention=True, qk_norm=qk_norm)
    draft = EagleDraft(config, draft_vocab(config), Placement(distributed.initialize().tp))
    norm, inputs = 1 + torch.rand(config.head_dim), 0.1 + torch.rand(16)
    base = attention_of_a_base(draft, **{"self_attn.q_norm.weight": norm, "input_layernorm.weight": inputs})
    base["self_attn.q_proj.weight"] *= 7
    draft.initialize(StandInEnds(16, torch.float32), base, seed=1)
    weight = draft.midlayer.self_attn.q_proj.weight[:, 16:].detach()
    if qk_norm:
        assert torch.equal(draft.midlayer.self_attn.q_norm.weight, norm)
        assert torch.equal(weight, base["self_attn.q_proj.weight"])
        return
    rows = torch.randn(20000, 16) * inputs  # normed states are nearly of equal mean square in every dimension
    heads = (rows @ weight.t()).unflatten(-1, (-1, config.head_dim)) / norm
    assert torch.allclose(heads.pow(2).mean((0, 2)), torch.ones(config.num_attention_heads), atol=0.05)


def test_a_frozen_head_keeps_the_rows_of_the_base() -> None:
    config = eagle_config(frozen_head=True)
    draft, ends = make(config)
    f = features(conversations(), config, torch.float64)
    draft(f, ends, ObjectiveConfig(ttt_steps=2)).total.backward()
    assert {n for n, p in draft.named_parameters() if p.grad is None} == {"lm_head.weight"}
    with pytest.raises(UserError, match="frozen_head"):
        config.replace(hidden_size=8, head_dim=2)
    with pytest.raises(UserError, match="init_from_base_layer"):
        eagle_config(init_attention=True)


def test_refusals() -> None:
    world = distributed.initialize()
    with pytest.raises(UserError, match=r"12 of 31.*31 of 31"):
        EagleDraft(eagle_config(draft_vocab_size=V), draft_vocab(eagle_config()), Placement(world.tp))
    with pytest.raises(UserError, match="capture_layer_ids"):
        EagleDraft(eagle_config(capture_layer_ids=()), draft_vocab(eagle_config()), Placement(world.tp))
