"""AdamW of one parameter in one pass over memory, with the scaling of its gradient and its copy in half precision."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    g_ptr, p_ptr, m_ptr, v_ptr, out_ptr, size, scale, step_size, kept, beta1, rest1, beta2, rest2, root, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    g = tl.load(g_ptr + at, mask=there, other=0.0, eviction_policy="evict_first") * scale
    m = tl.load(m_ptr + at, mask=there, other=0.0) * beta1 + rest1 * g
    v = tl.load(v_ptr + at, mask=there, other=0.0) * beta2 + rest2 * g * g
    p = tl.load(p_ptr + at, mask=there, other=0.0) * kept - step_size * m / (tl.sqrt(v) * root + eps)
    tl.store(m_ptr + at, m, mask=there)
    tl.store(v_ptr + at, v, mask=there)
    tl.store(p_ptr + at, p, mask=there)
    tl.store(out_ptr + at, p.to(out_ptr.dtype.element_ty), mask=there)


def adamw(
    grad: Tensor,
    master: Tensor,
    moments: tuple[Tensor, Tensor],
    out: Tensor,
    scale: float,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """A step of AdamW with the gradient times `scale`, which is not changed.

    Args:
        grad, master, moments: fp32, contiguous, of one size; master weight and moments are updated.
        out: output, the weight in half precision.
        step: number of this step, from 1 on.
    """
    beta1, beta2 = betas
    size = master.numel()
    if size:
        _adamw_kernel[(triton.cdiv(size, BLOCK),)](
            grad, master, *moments, out, size, scale, lr / (1 - beta1**step), 1 - lr * weight_decay, beta1, 1 - beta1,
            beta2, 1 - beta2, (1 - beta2**step) ** -0.5, eps, BLOCK, num_warps=8,
        )  # fmt: skip
