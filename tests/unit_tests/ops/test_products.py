"""Weight gradients summed into an existing matrix."""

from __future__ import annotations

import torch
from torch import nn

from megatron_spec.ops.head import StepRows, fused_head
from megatron_spec.ops.products import GradientSums, add_product


def test_add_product_to_a_strided_wider_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 5, generator=generator).bfloat16(), torch.randn(5, 3, generator=generator).bfloat16())
    target = torch.ones(4, 6)
    add_product(target[:, 3:], a, b)
    assert torch.equal(target[:, :3], torch.ones(4, 3))
    torch.testing.assert_close(target[:, 3:], 1 + (a @ b).float())


def test_without_main_grad_autograd_gets_the_sum_once() -> None:
    parameter, sums = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16)), GradientSums()
    sums.of(parameter).add_(1.5)
    sums.of(parameter).add_(1)
    found = sums.result(parameter)
    assert found is not None and found.dtype == torch.bfloat16 and torch.equal(found.float(), torch.full((2, 2), 2.5))
    assert sums.result(parameter) is None


def test_head_gradient_goes_to_main_grad() -> None:
    """Added to the existing gradient, scaled by the incoming one, and not passed to autograd as well."""

    def run(weight: nn.Parameter) -> None:
        x = torch.arange(6.0).view(2, 3)
        step = StepRows(torch.arange(2), torch.ones(2), torch.zeros(2, dtype=torch.int64))

        class Rows:
            loss_R, overlap_R, argmax_R = torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.int64)
            grad_RD = torch.ones(2, 4)

        (2 * fused_head([x], weight, [step], lambda *_: Rows())[0]).backward()

    plain, buffered = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))
    buffered.main_grad = torch.full((4, 3), 7.0)  # type: ignore[attr-defined]
    run(plain)
    run(buffered)
    assert buffered.grad is None and plain.grad is not None and plain.grad.any()
    torch.testing.assert_close(buffered.main_grad, 7 + plain.grad)  # type: ignore[attr-defined]
