"""EAGLE-1, EAGLE-3.1, MTP and Medusa against plain versions in fp64: losses of every step, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_spec.config import BaseConfig, DraftConfig, MedusaConfig, ObjectiveConfig, UserError, presets
from megatron_spec.config.structure import draft_tensors
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.eagle1 import feature_noise
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.runtime import distributed
from tests.unit_tests.drafts.plain_drafts import VOCAB, PlainDraft, plain_medusa
from tests.unit_tests.drafts.plain_eagle3 import (
    SMALL_VOCAB,
    StandInEnds,
    assert_same,
    conversations,
    eagle_config,
    features,
)  # fmt: skip

SHARED_HEAD: dict[str, Any] = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB, "capture_layer_ids": ()}
QUIET = {"feature_noise": 0.0}


def medusa(**changes: Any) -> MedusaConfig:
    return MedusaConfig(**{"num_heads": 3, "hidden_size": 16, "vocab_size": VOCAB, **changes})


def three_one(**options: bool) -> DraftConfig:
    return eagle_config(algorithm="eagle3.1", vocab_size=VOCAB, **options)


CASES: dict[str, tuple[DraftConfig, dict[str, Any]]] = {
    "eagle1": (eagle_config(algorithm="eagle1", **SHARED_HEAD), QUIET),
    "eagle1, one step": (eagle_config(algorithm="eagle1", **SHARED_HEAD), {"ttt_steps": 1, **QUIET}),
    "eagle1, noise": (eagle_config(algorithm="eagle1", **SHARED_HEAD), {"feature_noise": 0.3, "feature_weight": 2.0}),
    "eagle1, two layers": (
        eagle_config(algorithm="eagle1", num_hidden_layers=2, **SHARED_HEAD),
        {"loss": "tv", "token_weight": 0.7, "step_decay": 0.5, **QUIET},
    ),
    "eagle1, replay": (eagle_config(algorithm="eagle1", **SHARED_HEAD), {"replay_weight": 3.0, **QUIET}),
    "mtp, replay": (eagle_config(algorithm="eagle-mtp", **SHARED_HEAD), {"replay_weight": 3.0}),
    "medusa, replay": (medusa(), {"replay_weight": 3.0}),
    "mtp": (eagle_config(algorithm="eagle-mtp", **SHARED_HEAD), {}),
    "mtp, normed": (eagle_config(algorithm="eagle-mtp", norm_output=True, **SHARED_HEAD), {"loss": "lk"}),
    "3.1 fc_norm": (three_one(fc_norm=True), {}),
    "3.1 norm_output": (three_one(norm_output=True), {}),
    "3.1 all": (three_one(fc_norm=True, norm_output=True, norm_before_fc=True), {}),
    "medusa": (medusa(), {}),
    "medusa, hard labels": (medusa(num_layers=2), {"loss": "hard_ce", "step_decay": 0.6}),
    "medusa, base head": (medusa(share_base_head=True, num_heads=2), {"alignment": "target"}),
}


def vocabulary(config: DraftConfig) -> DraftVocab:
    if config.draft_vocab_size == VOCAB:
        return DraftVocab.full(VOCAB)
    return DraftVocab(torch.tensor(SMALL_VOCAB), VOCAB)


def goal_of(config: DraftConfig, changes: dict[str, Any]) -> ObjectiveConfig:
    if isinstance(config, MedusaConfig):
        return presets.objective_for(config, ObjectiveConfig(**changes))
    return ObjectiveConfig(**{"ttt_steps": 3, **changes})


def batch_features(config: DraftConfig, dtype: torch.dtype) -> Any:
    return features(conversations(), eagle_config(capture_layer_ids=config.capture_layer_ids), dtype)


def make(config: DraftConfig, dtype: torch.dtype) -> tuple[Any, StandInEnds]:
    """A draft with parameters changed from their initial values and norms that are not 1."""
    ends = StandInEnds(16, dtype, vocab_size=VOCAB)
    draft = build_draft(config, vocabulary(config), distributed.initialize(), dtype)
    draft.initialize(ends, seed=13)
    with torch.no_grad():
        for i, (_, p) in enumerate(sorted(draft.named_parameters())):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(dtype)
            p += noise * (0.3 if p.dim() == 2 else 0.1)
    return draft, ends


@pytest.mark.parametrize("name", list(CASES))
def test_losses_and_gradients(name: str) -> None:
    config, changes = CASES[name]
    goal = goal_of(config, changes)
    draft, ends = make(config, torch.float64)
    f = batch_features(config, torch.float64)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in draft.named_parameters()}
    if isinstance(config, MedusaConfig):
        total, stats = plain_medusa(config, parameters, ends, f, goal)
    else:
        noisy = config.algorithm == "eagle1" and goal.feature_noise > 0
        noise = feature_noise(f.batch, f.state_SBH, goal.feature_noise) if noisy else None
        total, stats = PlainDraft(config, parameters, ends, draft.vocab.target_ids)(f, goal, noise)
    losses = draft(f, ends, goal)
    assert_same(draft, losses, total, stats, parameters)


OVERFITTED = ("eagle1", "mtp", "3.1 full", "medusa", "medusa, hard labels", "medusa, base head")


@pytest.mark.parametrize("name", OVERFITTED)
def test_overfits_a_fixed_batch(name: str) -> None:
    """The draft learns the base's argmax; with hard labels, the tokens of the data."""
    if name == "3.1 full":
        options: dict[str, Any] = {"fc_norm": True, "norm_output": True, "draft_vocab_size": VOCAB}
        config: DraftConfig = eagle_config(algorithm="eagle3.1", vocab_size=VOCAB, **options)
    else:
        config = CASES[name][0]
    hard = name == "medusa, hard labels"
    goal = goal_of(config, {} if isinstance(config, MedusaConfig) else {"ttt_steps": 2, "feature_noise": 0.0})
    goal = goal.replace(loss="hard_ce" if hard else "kl")
    draft, ends = make(config, torch.float32)
    f = batch_features(config, torch.float32)
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    first = draft(f, ends, goal)
    for _ in range(150):
        optimizer.zero_grad()
        draft(f, ends, goal).total.backward()
        optimizer.step()
    last = draft(f, ends, goal)
    assert (last.loss_T < 0.25 * first.loss_T).all(), (first.loss_T, last.loss_T)
    if not hard and name != "medusa, base head":
        assert (last.correct_T >= 0.9 * last.rows_T).all(), (last.correct_T, last.rows_T)


def test_new_medusa_heads_equal_the_base() -> None:
    ends, f = StandInEnds(16, torch.float32, vocab_size=VOCAB), batch_features(medusa(), torch.float32)
    for config in (medusa(num_layers=2), medusa(share_base_head=True)):
        draft = build_draft(config, DraftVocab.full(VOCAB), distributed.initialize(), torch.float32)
        assert all(p.isnan().all() for p in draft.parameters())
        draft.initialize(ends)
        for i in range(3):
            torch.testing.assert_close(draft.logits(f.state_SBH, i, ends), f.state_SBH @ ends.head.T)


def test_a_new_draft_depends_mostly_on_the_feature() -> None:
    ends = StandInEnds(16, torch.float32, vocab_size=VOCAB)
    base = {"norm.weight": torch.rand(16), "input_layernorm.weight": torch.rand(16)}
    for algorithm in ("eagle1", "eagle-mtp"):
        config = eagle_config(algorithm=algorithm, init_from_base_layer=True, **SHARED_HEAD)
        draft = build_draft(config, DraftVocab.full(VOCAB), distributed.initialize(), torch.float32)
        draft.initialize(ends, base, seed=1)
        found = dict(draft.named_parameters())
        assert all(p.isfinite().all() for p in found.values())
        projection = found["fc.weight" if algorithm == "eagle1" else "layers.0.eh_proj.weight"]
        assert (projection[:, 16:] - torch.eye(16)).abs().max() < 0.1 and projection[:, :16].abs().max() < 0.1
    assert torch.equal(found["layers.0.shared_head.norm.weight"], base["norm.weight"])
    assert torch.equal(found["layers.0.input_layernorm.weight"], base["input_layernorm.weight"])


@pytest.mark.parametrize(("algorithm", "layer"), [("eagle1", "layers.0"), ("eagle-mtp", "layers.0")])
def test_attention_may_start_from_the_base(algorithm: str, layer: str) -> None:
    config = eagle_config(algorithm=algorithm, init_from_base_layer=True, init_attention=True, **SHARED_HEAD)
    draft = build_draft(config, DraftVocab.full(VOCAB), distributed.initialize(), torch.float32)
    found = dict(draft.named_parameters())
    base = {f"self_attn.{x}_proj.weight": torch.rand(found[f"{layer}.self_attn.{x}_proj.weight"].shape) for x in "qkvo"}
    draft.initialize(StandInEnds(16, torch.float32, vocab_size=VOCAB), base, seed=1)
    assert all(torch.equal(found[f"{layer}.{name}"], value) for name, value in base.items())


@pytest.mark.parametrize("algorithm", ["eagle1", "eagle-mtp"])
def test_what_is_not_copied_from_the_base_is_named(algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    """Attention without its biases, or no MLP at all, is another start than the one asked for."""
    options = {"init_from_base_layer": True, "init_attention": True}
    config = eagle_config(algorithm=algorithm, **options, **SHARED_HEAD)
    table = {str(s.base): s.shape for s in draft_tensors(config).values() if s.base is not None}
    base = {name: torch.rand(shape) for name, shape in table.items()}
    biases = {f"self_attn.{x}_proj.bias": torch.rand(base[f"self_attn.{x}_proj.weight"].shape[0]) for x in "qkv"}
    without = {name: x for name, x in base.items() if "mlp." not in name}
    for found, said in ((base, ""), (base | biases, "self_attn.v_proj.bias"), (without, "mlp.down_proj.weight")):
        caplog.clear()
        draft = build_draft(config, DraftVocab.full(VOCAB), distributed.initialize(), torch.float32)
        draft.initialize(StandInEnds(16, torch.float32, vocab_size=VOCAB), found, seed=1)
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert (len(warned) == 1 and said in warned[0]) if said else not warned, warned
    caplog.clear()
    biased = eagle_config(algorithm=algorithm, attention_bias=True, **options, **SHARED_HEAD)
    draft = build_draft(biased, DraftVocab.full(VOCAB), distributed.initialize(), torch.float32)
    draft.initialize(StandInEnds(16, torch.float32, vocab_size=VOCAB), base | biases, seed=1)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    assert torch.equal(
        dict(draft.named_parameters())["layers.0.self_attn.k_proj.bias"], biases["self_attn.k_proj.bias"]
    )


def test_noise() -> None:
    """Uniform in its range; a function of seed, tokens and position only; off without gradients and in eval mode."""
    batch = conversations()
    like = torch.zeros(18, 2, 64)
    torch.manual_seed(5)
    noise = feature_noise(batch, like, 0.2)
    assert noise.abs().max() <= 0.2 and abs(float(noise.mean())) < 0.01
    assert float(noise.std()) == pytest.approx(0.2 / 3**0.5, rel=0.05)
    assert len(noise.unique()) > 0.99 * noise.numel()
    rows = [feature_noise(batch, like[:9], 0.2, torch.arange(first, first + 9)) for first in (0, 9)]
    assert torch.equal(torch.cat(rows), noise)
    alone = type(batch)(*(x[1:] for x in (batch.tokens_BS, batch.positions_BS, batch.turns_BS, batch.documents_BS)))
    assert torch.equal(feature_noise(alone, like[:, 1:], 0.2), noise[:, 1:])
    padded = type(batch)(*(
        torch.nn.functional.pad(x, (0, 3), value=v)
        for x, v in ((batch.tokens_BS, 7), (batch.positions_BS, 0), (batch.turns_BS, 0), (batch.documents_BS, -1))
    ))  # fmt: skip
    assert torch.equal(feature_noise(padded, torch.zeros(21, 2, 64), 0.2)[:18], noise)
    torch.manual_seed(6)
    assert not torch.allclose(feature_noise(batch, like, 0.2), noise, atol=0.01)


def test_noise_is_added_only_in_training() -> None:
    config, _ = CASES["eagle1, noise"]
    goal = ObjectiveConfig(ttt_steps=2, feature_noise=0.5)
    draft, ends = make(config, torch.float64)
    f = batch_features(config, torch.float64)
    quiet = float(draft(f, ends, goal.replace(feature_noise=0.0)).total)
    assert float(draft(f, ends, goal).total) != quiet
    with torch.no_grad():
        assert float(draft(f, ends, goal).total) == quiet
    assert float(draft.eval()(f, ends, goal).total) == quiet


BASE = BaseConfig("llama", 16, 24, 8, 4, 2, 4, VOCAB, 64)


def test_presets() -> None:
    assert presets.eagle_config(BASE, "eagle1").capture_layer_ids == ()
    assert presets.eagle_config(BASE, "eagle-mtp").num_hidden_layers == 1
    newer = presets.eagle_config(BASE, "eagle3.1", {"norm_before_fc": True, "capture_layer_ids": [0, 1, 2]})
    assert newer.norm_before_fc and newer.fc_norm and newer.norm_output
    config = presets.medusa_config(BASE, num_heads=5)
    assert (config.num_heads, config.num_layers, config.hidden_size, config.vocab_size) == (5, 1, 16, VOCAB)
    assert presets.objective_for(config, ObjectiveConfig()).ttt_steps == 5


def test_refusals() -> None:
    for algorithm, overrides, message in (
        ("eagle1", {"draft_vocab_size": 12}, "base's own head"),
        ("eagle1", {"capture_layer_ids": [1]}, "final state"),
        ("eagle-mtp", {"num_hidden_layers": 2}, "one module"),
        ("eagle-mtp", {"hidden_size": 8}, "hidden_size must be"),
        ("eagle3", {"fc_norm": True}, "options of eagle3.1"),
        ("eagle3.1", {"fc_norm": False, "norm_output": False}, "is eagle3"),
    ):
        with pytest.raises(UserError, match=message):
            presets.eagle_config(BASE.replace(num_layers=12), algorithm, overrides)
    with pytest.raises(UserError, match="num_heads"):
        medusa(num_heads=0)
    with pytest.raises(UserError, match="3 Medusa heads"):
        presets.objective_for(medusa(), ObjectiveConfig(ttt_steps=4))
    with pytest.raises(UserError, match="--feature-noise"):
        presets.objective_for(CASES["mtp"][0], ObjectiveConfig(feature_noise=0.2))
    with pytest.raises(UserError, match="whole vocabulary"):
        build_draft(medusa(), DraftVocab(torch.tensor(SMALL_VOCAB), VOCAB), distributed.initialize(), torch.float32)
