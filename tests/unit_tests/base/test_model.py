"""The frozen base against transformers, over layouts, in a spawned world of four ranks and one of three.

S sequence, B micro-batch, H hidden, V vocabulary, K captures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from megatron_spec.config import ParallelConfig, UserError
from tests.unit_tests.base.tiny import LLAMA3, gap, save_tiny
from tests.worlds import gather_tp, run_world

CAPTURES = (0, 2, 5)
TOLERANCE = 1e-4

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 80, "head_dim": 8},
    "nine": {  # heads as in SmolLM2-135M, which only three ranks can share
        "hidden_size": 36,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "vocab_size": 80,
        "tie_word_embeddings": True,
    },
    "llama3": {"rope_parameters": dict(LLAMA3, rope_theta=500.0)},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 4},
    "tp2pp2sp": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    "pp4": {"pipeline_model_parallel_size": 4},  # 6 layers: 2, 2, 1, 1
    "tp4": {"tensor_model_parallel_size": 4},  # more ranks than key/value heads; 83 rows do not divide
}
LAYOUTS_OF_THREE: dict[str, dict[str, Any]] = {
    "tp3": {"tensor_model_parallel_size": 3},
    "tp3sp": {"tensor_model_parallel_size": 3, "sequence_parallel": True},
}
ONLY = {
    "nine": ("tp1", "pp2", "tp3", "tp3sp"),
    "gqa": tuple(LAYOUTS),
    "tied": ("tp2", "pp2", "tp2pp2sp", "pp4", "tp4"),
    "llama3": ("tp2sp",),
}


def _tokens(vocab: int) -> Tensor:
    return torch.randint(vocab, (2, 3, 12), generator=torch.Generator().manual_seed(7))  # [micro-batches, B, S]


@torch.no_grad()
def _reference(model: LlamaForCausalLM) -> dict[str, Tensor]:
    tokens = _tokens(model.config.vocab_size)
    final: list[Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda _m, _i, out: final.append(out))
    outputs = [model(batch, output_hidden_states=True) for batch in tokens]
    packed = [torch.cat([model(batch[:, :5]).logits, model(batch[:, 5:]).logits], dim=1) for batch in tokens]
    handle.remove()
    # hidden_states[-1] is after the final norm, so the last layer's own output is taken from a hook of its own.
    last: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _m, _i, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    for batch in tokens:
        model(batch)
    handle.remove()
    captures = [
        torch.cat([*(out.hidden_states[i + 1] for i in CAPTURES[:-1]), last[m]], dim=-1)
        for m, out in enumerate(outputs)
    ]
    return {
        "logits": torch.stack([out.logits for out in outputs]),
        "state": torch.stack(final[: len(outputs)]),
        "captures": torch.stack(captures),
        "packed": torch.stack(packed),
    }


def _forward_gaps(base: Any, world: Any, ref: dict[str, Tensor]) -> dict[str, float]:
    """Largest differences from transformers in this rank's results."""
    from megatron_spec.base.schedule import run_base, run_base_everywhere
    from megatron_spec.batch import Batch
    from megatron_spec.ops.visibility import Visibility

    sp = world.parallel.sequence_parallel
    tokens = _tokens(base.vocab_size).to(world.device)
    positions = torch.arange(tokens.shape[-1], device=world.device).expand(tokens.shape[1:])
    zeros = torch.zeros_like(positions, dtype=torch.int32)
    split = zeros + (positions >= 5).int()
    batches = [Batch(t, positions, zeros, zeros) for t in tokens]
    packed = [Batch(t, torch.where(split > 0, positions - 5, positions), zeros, split) for t in tokens]
    gaps: dict[str, float] = {}
    for case, work in (("logits", batches), ("packed", packed)):
        results = run_base(base, work)
        assert len(results) == (len(work) if world.is_last_stage else 0)
        for m, (captures, state) in enumerate(results):
            logits = gather_tp(base.logits(state), world)
            gaps[f"{case}{m}"] = gap(logits, ref[case][m])
            padding = logits[..., base.vocab_size :]
            assert bool((padding == float("-inf")).all())
            if case == "logits":
                whole = [(gather_tp(x, world, 0) if sp else x) for x in (captures, state)]
                gaps[f"captures{m}"] = gap(whole[0], ref["captures"][m])
                gaps[f"state{m}"] = gap(whole[1], ref["state"][m])
    captures, state = run_base_everywhere(base, batches[0], Visibility.causal())
    gaps["everywhere"] = gap(gather_tp(base.logits(state), world), ref["logits"][0])
    gaps["everywhere captures"] = gap(gather_tp(captures, world, 0) if sp else captures, ref["captures"][0])
    for outside in (-1, base.vocab_size, base.vocab_size + 40):  # ids of padding rows, and of no row at all
        with pytest.raises(UserError, match=f"found token id {outside}, expected ids from 0 to {base.vocab_size - 1}"):
            base.embed(torch.tensor([[0, 1, outside, 2] * 3]))
    return gaps


def _decode_gap(base: Any, world: Any, ref: dict[str, Tensor]) -> float:
    """Ragged decoding with a cache: rows start with 7, 4 and 5 tokens, then three steps of 2, 1 and 2 tokens."""
    from megatron_spec.base.schedule import run_base_everywhere
    from megatron_spec.batch import Batch
    from megatron_spec.ops.visibility import Visibility

    tokens = _tokens(base.vocab_size)[0].to(world.device)
    cache = base.new_cache(tokens.shape[0], 12)
    starts = torch.tensor([7, 4, 5], device=world.device)
    worst, done = 0.0, torch.zeros_like(starts)
    for count in (0, 2, 1, 2):
        new = starts if count == 0 else torch.full_like(starts, count)
        width = int(new.max())
        # Rows shorter than the widest are right-padded; the padding is overwritten by the next step.
        slots = done[:, None] + torch.arange(width, device=world.device)
        ids = tokens.gather(1, slots.clamp(max=11))
        zeros = torch.zeros_like(ids, dtype=torch.int32)
        batch = Batch(ids, slots, zeros, zeros)
        _, state = run_base_everywhere(base, batch, Visibility.cached(cache, slots))
        logits = gather_tp(base.logits(state), world).transpose(0, 1)[..., : base.vocab_size]
        for row in range(3):
            for j in range(int(new[row])):
                gap = (logits[row, j] - ref["logits"][0, row, int(done[row]) + j]).abs().max()
                worst = max(worst, float(gap))
        done = done + new
    return worst


def _world_cases(
    folder: str, references: dict[str, dict[str, Tensor]], layouts: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    from megatron.core import parallel_state

    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.runtime import distributed

    found: dict[str, dict[str, float]] = {}
    for layout, values in layouts.items():
        world = distributed.initialize(ParallelConfig(**values))
        for name in MODELS:
            if layout not in ONLY[name]:
                continue
            reference = inspect_base(Path(folder, name))
            base = load_base(reference, world, CAPTURES)
            expected = {key: value.to(world.device) for key, value in references[name].items()}
            gaps = _forward_gaps(base, world, expected)
            if not world.parallel.sequence_parallel:
                gaps["decode"] = _decode_gap(base, world, expected)
            found[f"{layout} {name}"] = gaps
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("bases")
    references = {
        name: _reference(save_tiny(folder / name, max_shard_size="20KB" if name == "gqa" else "50GB", **overrides))
        for name, overrides in MODELS.items()
    }
    four = run_world(4, _world_cases, str(folder), references, LAYOUTS)
    three = run_world(3, _world_cases, str(folder), references, LAYOUTS_OF_THREE)
    return [{**a, **b} for a, b in zip(four, [*three, {}], strict=True)]


@pytest.mark.parametrize("layout", [*LAYOUTS, *LAYOUTS_OF_THREE])
def test_equals_transformers(gaps: list[dict[str, dict[str, float]]], layout: str) -> None:
    cases = {(rank, case): g for rank, g_ in enumerate(gaps) for case, g in g_.items() if case.split()[0] == layout}
    assert len(cases) >= (3 if layout in LAYOUTS_OF_THREE else 4)
    bad = {(rank, case): g for (rank, case), g in cases.items() if not max(g.values()) < TOLERANCE}
    assert not bad


def test_every_kind_of_check_ran(gaps: list[dict[str, dict[str, float]]]) -> None:
    kinds = {"logits0", "logits1", "packed0", "captures0", "state0", "everywhere", "everywhere captures", "decode"}
    assert kinds <= set(gaps[3]["tp2 gqa"]) and kinds <= set(gaps[3]["pp4 tied"])
    assert kinds <= set(gaps[2]["tp3 nine"]) and "decode" in gaps[3]["pp2 nine"]
    assert "decode" in gaps[0]["pp4 gqa"] and "logits0" not in gaps[0]["pp4 gqa"]
