"""Kernels around the grouped products of experts against their plain twins, for routers and shapes of all kinds.

On a machine without a GPU, TRITON_INTERPRET=1 runs the kernels themselves on the CPU (as CI does).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_spec.config import MoeConfig
from megatron_spec.ops import plain
from tests.gpu.triton_device import DEVICE, MARKS

pytestmark = MARKS

ROUTERS: list[dict[str, Any]] = [
    {"num_experts": 128, "experts_per_token": 8},  # Qwen3-30B-A3B
    {"num_experts": 8, "experts_per_token": 2},  # Mixtral
    {"num_experts": 32, "experts_per_token": 4, "router": "softmax_of_chosen", "bias": True},  # gpt-oss
    {"num_experts": 60, "experts_per_token": 6, "normalize": False, "scale": 2.5},  # DeepSeek-V2, no power of two
    {"num_experts": 16, "experts_per_token": 3, "router": "sigmoid", "choice_bias": True, "scale": 1.5},
    {"num_experts": 16, "experts_per_token": 3, "router": "sigmoid", "groups": 4, "groups_per_token": 2},
    {"num_experts": 5, "experts_per_token": 5},
    {"num_experts": 3, "experts_per_token": 1},
]


def kernels() -> Any:
    """The kernels' module."""
    from megatron_spec.ops.kernels import experts

    return experts


@pytest.mark.parametrize("fields", ROUTERS)
@pytest.mark.parametrize("R", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choice(fields: dict[str, Any], R: int, dtype: torch.dtype) -> None:
    """The same experts with the same weights."""
    torch.manual_seed(R)
    moe, E = MoeConfig(intermediate_size=8, **fields), fields["num_experts"]
    logits = torch.stack([torch.randperm(2 * E)[:E] for _ in range(R)]).to(DEVICE, torch.float32) / 32 - 2
    assert torch.equal(logits.to(dtype).float(), logits)  # all different, also in half precision
    bias = torch.randperm(E).to(DEVICE) * 0.3 if moe.choice_bias else None
    expected, chosen = plain.choose_experts(logits, moe, bias)
    found, experts = kernels().choose_experts(logits.to(dtype), moe, bias)
    assert torch.equal(experts.long(), chosen)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6)


def test_choice_of_equal_and_invalid_scores() -> None:
    """Equal scores: the first experts. NaN: different experts of the base all the same, with weights that show it."""
    moe = MoeConfig(num_experts=6, experts_per_token=3, intermediate_size=8)
    logits = torch.zeros(2, 6, device=DEVICE)
    logits[1] = float("nan")
    weights, chosen = kernels().choose_experts(logits, moe, None)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights[0], torch.full((3,), 1 / 3, device=DEVICE))
    assert bool(weights[1].isnan().all())


CASES = [
    (1, 2, 8, 0, 8, 16), (37, 8, 128, 0, 128, 40), (700, 2, 6, 2, 3, 16), (65, 3, 9, 6, 3, 24), (40, 2, 6, 4, 2, 16),
]  # fmt: skip
"""(rows, experts per token, experts, first and number of those here, hidden)"""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("twice", [False, True])
def test_rows_in_order_and_their_sum(case: tuple[int, ...], twice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of rows, where they are, where experts end; the weighted sum of them. A row may name an expert twice."""
    R, K, E, first, count, H = case
    monkeypatch.setattr(kernels(), "BLOCKS_AT_ONCE", 16)  # as many rows as in a large batch would take too long
    torch.manual_seed(R)
    chosen = torch.stack([torch.randint(E, (K,)) if twice else torch.randperm(E - E // 4)[:K] for _ in range(R)])
    if chosen.max() < first:
        chosen[0, 0] = first
    chosen, x, weights = chosen.to(DEVICE), torch.randn(R, H, device=DEVICE), torch.rand(R, K, device=DEVICE)
    bias = torch.randn(count, H, device=DEVICE)
    expected, place, ends = plain.sort_rows(x, chosen, first, count)
    for dtype in (torch.int64, torch.int32):
        rows, at, last = kernels().sort_rows(x, chosen.to(dtype), first, count)
        assert torch.equal(at, place) and torch.equal(last, ends) and int(ends[-1]) > 0
        assert torch.equal(rows[: ends[-1]], expected[: ends[-1]])
    rows[ends[-1] :] = float("nan")  # nobody reads rows of no expert
    for given in (None, bias):
        found = kernels().mix_rows(rows, at, weights, chosen, first, given)
        torch.testing.assert_close(found, plain.mix_rows(rows, place, weights, chosen, first, given))
        assert bool(found.ne(0).any())


@pytest.mark.parametrize("clamp", [0.0, 1.2])
@pytest.mark.parametrize(("W", "ends"), [(24, [3, 3, 11]), (1500, [0, 5]), (8, [9, 9])])
@pytest.mark.parametrize("with_bias", [False, True])
def test_activation(clamp: float, W: int, ends: list[int], with_bias: bool) -> None:
    """Gate and up of every expert's rows, with its bias."""
    torch.manual_seed(W)
    last, given = ends[-1], torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x = torch.randn(13, 2 * W, device=DEVICE)
    bias = torch.randn(len(ends), 2 * W, device=DEVICE) if with_bias else None
    expected = plain.gate_rows(x, given, bias, clamp, 1.702)
    found = kernels().gate_rows(x, given, bias, clamp, 1.702)
    torch.testing.assert_close(found[:last], expected[:last], rtol=2e-5, atol=2e-5)
    assert bool(expected[:last].ne(0).any())


def test_no_synchronisation() -> None:
    """Choice, order, activation and sum do not wait for the device."""
    if DEVICE != "cuda":
        pytest.skip("needs a GPU")
    moe = MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=8)
    x = torch.randn(64, 16, device=DEVICE, dtype=torch.bfloat16)
    logits = torch.randn(64, 8, device=DEVICE, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        weights, chosen = kernels().choose_experts(logits, moe, None)
        rows, place, ends = kernels().sort_rows(x, chosen, 0, 8)
        rows = kernels().gate_rows(torch.cat([rows, rows], 1), ends, None, 0.0, 1.0)
        return kernels().mix_rows(rows, place, weights, chosen, 0, None)  # type: ignore[no-any-return]

    expected = run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
