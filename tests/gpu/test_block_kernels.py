"""The kernels of block attention equal the plain version in fp64, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_spec.ops.block_attention import BlockLayout, block_attention
from tests.gpu.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies the bits of bfloat16


LAYOUTS = {
    # length of the context, (begin of a document, its anchors)...
    "short": (150, [(0, [0, 3, 4, 20, 69]), (70, [70, 71]), (90, [100, 140])]),
    "whole tiles": (420, [(0, [5, *range(130, 190, 4)]), (210, [*range(300, 420, 7)])]),
}


@pytest.mark.parametrize("context", list(LAYOUTS))
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
def test_equals_the_plain_version(
    C: int, N: int, G: int, D: int, causal: bool, window: int | None, context: str
) -> None:
    from megatron_spec.ops.kernels import block

    torch.manual_seed(0)
    L, documents = LAYOUTS[context]
    anchor = torch.tensor([a for _, anchors in documents for a in anchors])
    first = torch.tensor([begin for begin, anchors in documents for _ in anchors])
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
