"""DFlash and DSpark equal a dense-mask reference in fp64: losses and the gradient of every parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_spec.batch import Batch, Features
from megatron_spec.config import BlockConfig, ObjectiveConfig, UserError, presets
from megatron_spec.drafts.anchors import BlockPlan, draw, supervised_slots
from megatron_spec.drafts.linear import Placement
from tests.unit_tests.drafts.plain_blocks import plain_loss
from tests.unit_tests.drafts.plain_eagle3 import SMALL_VOCAB, StandInEnds, V, draft_vocab

H, S = 16, 22
FEW = SMALL_VOCAB


def block_config(**changes: Any) -> BlockConfig:
    values: dict[str, Any] = dict(
        algorithm="dflash", hidden_size=H, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=V, max_position_embeddings=64, num_target_layers=8, mask_token_id=7,
        capture_layer_ids=(1, 3, 5), block_size=4, num_hidden_layers=2,
    )  # fmt: skip
    if changes.get("algorithm") == "dspark":
        values["markov_rank"] = 3
    return BlockConfig(**{**values, **changes})


def batch() -> Batch:
    """A turn from row 0 on, two documents in a row, turns shorter than a block, padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (2, S), generator=generator)
    turns, documents = torch.zeros(2, S, dtype=torch.int32), torch.zeros(2, S, dtype=torch.int32)
    positions = torch.arange(S).repeat(2, 1)
    turns[0, 0:6], turns[0, 9:20] = 1, 2
    turns[1, 3:9], turns[1, 12:15], turns[1, 16:19] = 1, 2, 3
    documents[1, 10:] = 1
    documents[1, 19:] = -1
    positions[1, 10:] -= 10
    return Batch(tokens, positions, turns, documents)


def features(dtype: torch.dtype = torch.float64) -> Features:
    generator = torch.Generator().manual_seed(2)
    captures = torch.randn(S, 2, 3 * H, generator=generator, dtype=torch.float64)
    state = torch.randn(S, 2, H, generator=generator, dtype=torch.float64)
    return Features(batch(), captures.to(dtype), state.to(dtype))


def made(config: BlockConfig, group: Any, dtype: torch.dtype = torch.float64, **place: Any) -> Any:
    """A draft with every parameter changed from its initial value."""
    from megatron_spec.drafts.dflash import DFlashDraft
    from megatron_spec.drafts.dspark import DSparkDraft

    kind = DSparkDraft if config.algorithm == "dspark" else DFlashDraft
    draft = kind(config, draft_vocab(config), Placement(group, dtype=dtype, **place))
    ends = StandInEnds(H, dtype, group if group.size() > 1 else None, place.get("sequence_parallel", False), padding=1)
    draft.initialize(ends, seed=5)
    for name, p in draft.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        shape = list(p.shape)
        if getattr(p, "tensor_model_parallel", False):
            shape[p.partition_dim] *= group.size()
        noise = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
        if list(p.shape) != shape:
            noise = noise.chunk(group.size(), p.partition_dim)[group.rank()]
        p.data.add_(noise.to(dtype))
    return draft, ends


@pytest.fixture(scope="module", autouse=True)
def alone() -> Any:
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if started:
        dist.destroy_process_group()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole block": ({}, {}),
    "causal, kl": ({"causal": True}, {"loss": "kl"}),
    "window": ({"sliding_window": 5, "causal": True}, {"loss": "hard_ce"}),
    "window and full": (
        {"sliding_window": 5, "causal": True, "num_hidden_layers": 3, "full_attention_layers": (1,)},
        {},
    ),
    "few anchors, d-pace": ({"block_size": 5}, {"anchors": 3, "block_weights": "d-pace", "loss": "hard_ce"}),
    "other heads": ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4}, {}),
    "dspark": ({"algorithm": "dspark"}, {"block_gamma": 3.0}),
    "dspark, gated": ({"algorithm": "dspark", "markov_head_type": "gated"}, {}),
    "dspark, rnn": ({"algorithm": "dspark", "markov_head_type": "rnn"}, {"block_weights": "d-pace"}),
    "dspark, curriculum": (
        {"algorithm": "dspark", "confidence_reads_markov": False},
        {"backbone_weight": 0.4, "block_weights": "d-pace", "confidence_weight": 0.5},
    ),
    "few tokens": ({"draft_vocab_size": len(FEW)}, {}),
    "few tokens, all rows": ({"draft_vocab_size": len(FEW)}, {"in_vocab_only": False, "loss": "hard_ce"}),
    "dspark, few tokens": ({"algorithm": "dspark", "draft_vocab_size": len(FEW)}, {"backbone_weight": 0.3}),
    "dspark, few tokens, d-pace": (
        {"algorithm": "dspark", "draft_vocab_size": len(FEW), "markov_head_type": "rnn"},
        {"block_weights": "d-pace", "loss": "kl"},
    ),
    "dspark, few tokens, all rows, d-pace": (
        {"algorithm": "dspark", "draft_vocab_size": len(FEW)},
        {"block_weights": "d-pace", "in_vocab_only": False},
    ),
    "dspark, no confidence head": ({"algorithm": "dspark", "confidence_head": False}, {"backbone_weight": 0.4}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_dense_mask(name: str, alone: Any) -> None:
    config, goal = block_config(**CASES[name][0]), ObjectiveConfig(**CASES[name][1])
    goal = presets.objective_for(config, goal)
    draft, ends = made(config, alone)
    f = features()
    torch.manual_seed(11)
    plan = BlockPlan.of(f.batch, config, goal.anchors)
    anchors = [sorted((plan.layout.anchor_P[plan.layout.anchor_P // S == b] % S).tolist()) for b in range(2)]
    assert sum(map(len, anchors)) == int(plan.supervision.rows[0].numel())
    losses = draft(f, ends, goal)
    losses.total.backward()
    w = {n: p.detach().clone().requires_grad_() for n, p in draft.named_parameters()}
    expected = plain_loss(w, config, goal, f, anchors, ends.table, ends.head, draft.vocab.target_ids.tolist())
    expected.backward()
    torch.testing.assert_close(losses.total, expected, rtol=1e-12, atol=1e-12)
    if config.own_head:
        inside = [t in FEW for t in f.batch.tokens_BS[f.batch.turns_BS > 0].tolist()]
        assert any(inside) and not all(inside)
        assert (losses.counted is not None) == goal.in_vocab_only
        assert losses.counted is None or 0 < int(losses.counted) < int(losses.rows_T[0])
    for n, p in draft.named_parameters():
        if n == "lm_head.weight":
            assert p.grad is None  # frozen
            continue
        assert w[n].grad is not None and w[n].grad.abs().max() > 0, n
        torch.testing.assert_close(p.grad, w[n].grad, rtol=1e-9, atol=1e-11, msg=n)


def test_anchors_need_the_next_token_in_the_same_turn() -> None:
    mask_TBS = supervised_slots(batch(), 3)
    assert mask_TBS[0, 0].nonzero().flatten().tolist() == [*range(5), *range(9, 19)]
    assert mask_TBS[2, 1].nonzero().flatten().tolist() == [3, 4, 5]
    assert mask_TBS[1, 1].nonzero().flatten().tolist() == [3, 4, 5, 6, 12, 16]


def test_anchors_depend_only_on_seed_and_content() -> None:
    one = batch()
    eligible = supervised_slots(one, 1)[0]
    torch.manual_seed(3)
    first = draw(eligible, one, 4)
    assert first.sum(1).tolist() == [4, 4 + 4]  # four of each document
    torch.manual_seed(3)
    rows = Batch(*(x.flip(0) for x in (one.tokens_BS, one.positions_BS, one.turns_BS, one.documents_BS)))
    assert torch.equal(draw(eligible.flip(0), rows, 4), first.flip(0))
    alone = slice(10, 19)  # the second document of the second row, in a row of its own, with padding
    parts = [x[1:, alone] for x in (one.tokens_BS, one.positions_BS, one.turns_BS, one.documents_BS)]
    parts = [torch.cat([x, torch.zeros_like(x[:, :3])], 1) for x in parts]
    parts[3] = torch.where(torch.arange(12) < 9, 0, -1)[None]
    torch.manual_seed(3)
    two = draw(eligible, one, 2)
    assert torch.equal(draw(supervised_slots(Batch(*parts), 1)[0], Batch(*parts), 2)[0, :9], two[1, alone])
    assert int(two[1, alone].sum()) == 2 < int(eligible[1, alone].sum())
    torch.manual_seed(4)
    assert not torch.equal(draw(eligible, one, 4), first)
    assert torch.equal(draw(eligible, one, 100), eligible)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(UserError, match="markov_rank is an option of dspark"):
        block_config(markov_rank=4)
    with pytest.raises(UserError, match="dspark needs markov_rank"):
        block_config(algorithm="dspark", markov_rank=0)
    with pytest.raises(UserError, match="confidence_head is an option of dspark"):
        block_config(confidence_head=False)
    bare = {"algorithm": "dspark", "confidence_head": False}
    with pytest.raises(UserError, match="an option of the confidence head, found with confidence_head false"):
        block_config(**bare, confidence_reads_markov=False)
    with pytest.raises(UserError, match="--confidence-weight: the draft has no confidence head; leave it out"):
        presets.objective_for(block_config(**bare), ObjectiveConfig(confidence_weight=0.5))
    with pytest.raises(UserError, match="--ce-weight, --l1-weight are all 0, so nothing is trained"):
        presets.objective_for(block_config(**bare), ObjectiveConfig(ce_weight=0.0, l1_weight=0.0))
    with pytest.raises(UserError, match=r"ascending and in 0\.\.7"):
        block_config(capture_layer_ids=(3, 8))
    for full, window in (((0, 1), 5), ((2,), 5), ((1, 0), 5), ((0,), None)):
        with pytest.raises(UserError, match=r"full_attention_layers must be some of 0\.\.1"):
            block_config(num_hidden_layers=2, full_attention_layers=full, sliding_window=window)
    with pytest.raises(UserError, match=r"--ttt-steps 5, but a block of 4 proposes 3"):
        presets.objective_for(block_config(), ObjectiveConfig(ttt_steps=5))
    with pytest.raises(UserError, match="--step-decay, --confidence-weight: no effect on dflash"):
        presets.objective_for(block_config(), ObjectiveConfig(step_decay=0.5, confidence_weight=0.5))


def test_a_batch_without_any_block_has_zero_gradients(alone: Any) -> None:
    config = block_config(algorithm="dspark")
    draft, ends = made(config, alone)
    f = features()
    f.batch.turns_BS.zero_()
    losses = draft(f, ends, presets.objective_for(config, ObjectiveConfig()))
    losses.total.backward()
    assert float(losses.total) == 0 and int(losses.rows_T.sum()) == 0
    assert all(p.grad is None or not p.grad.any() for p in draft.parameters())
