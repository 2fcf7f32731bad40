"""Layers of a draft for few rows over a cache (`drafts/few_rows.py`) against its modules, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.config import ParallelConfig, QuantConfig, presets
from megatron_spec.config.machine import H100, Machine
from megatron_spec.drafts import build_draft, few_rows
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from tests.tiny import llama

BASE = llama(num_layers=4, vocab_size=40, max_position_embeddings=64)
CAPTURES: dict[str, Any] = {"capture_layer_ids": [0, 1, 2]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "biases, norms of heads": ("eagle3", {"attention_bias": True, "mlp_bias": True, "qk_norm": True}),
    "two layers, norm before residual": ("eagle3", {"num_hidden_layers": 2, "norm_before_residual": True}),
    "eagle1": ("eagle1", {}),
    "eagle-mtp": ("eagle-mtp", {}),
}


def make(kind: str) -> Any:
    algorithm, fields = KINDS[kind]
    captures = CAPTURES if algorithm == "eagle3" else {}
    config = presets.eagle_config(BASE, algorithm, {**captures, **fields})
    setting = Setting(Machine(kernels="plain"), "float64", draft=config)
    draft = build_draft(config, DraftVocab.full(40), distributed.initialize(), torch.float64, Paths(setting))
    generator = torch.Generator().manual_seed(1)
    for _, p in sorted(draft.named_parameters()):
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3 + (p.dim() == 1)
    return draft


def steps(draft: Any) -> list[Tensor]:
    """States of a prefill, of one and of three rows after it, of a level of a tree; then the cache."""
    generator, cache, found = torch.Generator().manual_seed(2), draft.new_cache(2, 16), []

    def run(slots: Tensor, visibility: Visibility) -> None:
        shape = (slots.shape[1], 2, 32)
        hidden, embedding = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        found.extend(draft.layer_step(hidden, embedding, slots, draft.cached_attention(visibility)))

    slots = torch.arange(6).repeat(2, 1)
    run(slots, Visibility.prefill(cache, slots))
    for count, above in ((1, None), (3, None), (2, [[True, False, True, False], [False, True, False, True]])):
        slots = torch.tensor([[4], [6]]) + torch.arange(count)
        tree = None if above is None else torch.tensor(above).expand(2, -1, -1)
        run(slots, Visibility.cached(cache, slots, length=16, above_BSM=tree))
    return [*found, cache.keys, cache.values]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, taken, inner = make(kind), [], few_rows.FewRows.layer
    monkeypatch.setattr(few_rows.FewRows, "layer", lambda *a: taken.append(1) or inner(*a))
    with torch.no_grad():
        fast = steps(draft)
        layers = len(draft.decoder_layers)
        assert len(taken) == 3 * layers  # not the prefill
        draft.paths = draft.paths.without("draft_decode")
        for a, b in zip(fast, steps(draft), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert len(taken) == 3 * layers


def test_what_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks, modules of another kind, and more rows than a product of few rows takes."""
    draft = make("eagle3")
    slots = torch.tensor([[4, 5]])
    seen = Visibility.cached(draft.new_cache(1, 16), slots, length=16)

    def fast() -> bool:
        return isinstance(draft.cached_attention(seen), few_rows.FewRows)

    assert fast()
    handle = draft.midlayer.mlp.register_forward_hook(lambda *_: None)
    assert not fast()
    handle.remove()
    assert fast()
    kind = type(draft.midlayer.mlp)
    draft.midlayer.mlp.__class__ = type("Other", (kind,), {})
    assert not fast()
    draft.midlayer.mlp.__class__ = kind
    monkeypatch.setattr(few_rows, "MOST_ROWS", 1)
    assert not fast()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": ParallelConfig(tensor_model_parallel_size=2)}, "summed over tensor parallel ranks"),
        ({"quant": QuantConfig()}, "fake-quantised"),
        ({"draft": presets.medusa_config(BASE, num_heads=2)}, "own output"),
        ({"draft": presets.eagle_config(BASE, "eagle3", {**CAPTURES, "sliding_window": 4})}, "sliding window"),
    ],
)
def test_what_blocks_it(changes: dict[str, Any], reason: str) -> None:
    config = presets.eagle_config(BASE, "eagle3", CAPTURES)
    assert "draft_decode" not in Paths(Setting(H100, "float32", draft=config)).blocked
    assert (
        reason
        in Paths(Setting(**{"machine": H100, "dtype": "bfloat16", "draft": config, **changes})).blocked["draft_decode"]
    )
