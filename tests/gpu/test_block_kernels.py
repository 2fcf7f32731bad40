"""The kernels of block attention equal the plain version in fp64, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_spec.ops.block_attention import BlockLayout, block_attention
from tests.gpu.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies the bits of bfloat16


@pytest.mark.parametrize(
    ("C", "N", "G", "D", "causal", "window"),
    [
        (4, 4, 2, 64, False, None),
        (5, 7, 1, 64, True, None),
        (8, 8, 1, 128, False, 40),
        (8, 3, 3, 64, False, None),
        (16, 12, 1, 64, True, 9),
    ],
)
def test_equals_the_plain_version(C: int, N: int, G: int, D: int, causal: bool, window: int | None) -> None:
    from megatron_spec.ops.kernels import block

    torch.manual_seed(0)
    L = 150
    anchor = torch.tensor([0, 3, 4, 20, 69, 70, 71, 100, 140])  # documents begin at 0, 70 and 90
    first = torch.tensor([0, 0, 0, 0, 0, 70, 70, 90, 90])
    shapes = [(len(anchor), C, N, D), (len(anchor), C, G, D), (len(anchor), C, G, D), (L, G, D), (L, G, D)]
    wide = [torch.randn(s, dtype=torch.float64).to(HALF).double().requires_grad_() for s in shapes]
    expected = block_attention(*wide, BlockLayout(first, anchor, causal, window))
    weight = torch.randn_like(expected).to(HALF).double()
    expected.backward(weight)
    half = [x.detach().to(HALF).to(DEVICE).requires_grad_() for x in wide]
    layout = BlockLayout(first.to(DEVICE), anchor.to(DEVICE), causal, window)
    found = block.attention(*half, layout).flatten(2)
    found.backward(weight.to(HALF).to(DEVICE))
    for a, b in [(found, expected), *((x.grad, y.grad) for x, y in zip(half, wide, strict=True))]:
        error = (a.detach().cpu().double() - b.detach()).norm() / b.detach().norm()
        assert error < 8e-3, (tuple(b.shape), float(error))
