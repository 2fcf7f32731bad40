"""Parts of a decoder layer with backward passes of their own: one pass over memory each, besides matrix products.

- Products of linears with one input are written side by side into one matrix; their weights stay separate. Weight
  gradients are accumulated in `main_grad` (`ops/products.py`), input gradients are summed by the products themselves.
- A norm first adds what the previous block of the layer computed, so residual sums take no pass of their own; nor does
  the sum of the gradients of both outputs.
- Norms over query and key heads, rotary embedding and the split into queries, keys and values are one pass.
- The gate's output is recomputed in the backward, where the gradient of gate and up overwrites their values.

Everything is local to a rank: collectives stay between the parts.

R rows, H inputs and O outputs of a product, N query heads and G key/value heads of this rank, D head size,
M intermediate columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.ops.products import GradientSums, add_product


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Any, eps: float, weight_H: Tensor, x_RH: Tensor, delta_RH: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        ctx.set_materialize_grads(False)
        normed = torch.empty_like(x_RH)
        total = x_RH.view_as(x_RH) if delta_RH is None else torch.empty_like(x_RH)
        sums = (None, None) if delta_RH is None else (delta_RH, total)
        rstd = kernels.norm_forward(x_RH, eps, *sums, first=(weight_H, normed))
        ctx.kernels = kernels
        ctx.save_for_backward(total, rstd, weight_H)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same gradient for x and delta."""
        total, rstd, weight = ctx.saved_tensors
        need_weight, need_x, need_delta = ctx.needs_input_grad[2:]
        if d_normed is None:
            return None, None, None, d_total, d_total if need_delta else None
        dx = torch.empty_like(total) if need_x or need_delta else None
        partial, sums = ctx.kernels.norm_partials(total.shape[1], total.device), GradientSums()
        add = None if d_total is None else d_total.contiguous()
        ctx.kernels.norm_backward(total, rstd, dx, (d_normed.contiguous(), weight, partial), add_RH=add)
        if need_weight:
            sums.of(weight).add_(partial.sum(0))
        d_weight = sums.result(weight)
        return None, None, d_weight, dx if need_x else None, dx if need_delta else None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, *weights_OH: Tensor) -> Tensor:
        """[R, sum of O]: x W^T of every weight, side by side."""
        ctx.sizes = [len(w) for w in weights_OH]
        ctx.save_for_backward(x_RH, *weights_OH)
        out = x_RH.new_empty(len(x_RH), sum(ctx.sizes))
        for part, weight in zip(out.split(ctx.sizes, 1), weights_OH, strict=True):
            torch.mm(x_RH, weight.t(), out=part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RO: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of every weight; None for a weight whose `main_grad` has it."""
        x, *weights = ctx.saved_tensors
        parts, sums, dx = d_RO.split(ctx.sizes, 1), GradientSums(), None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(parts[0], weights[0])
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                dx.addmm_(part, weight)
        for part, weight, needed in zip(parts, weights, ctx.needs_input_grad[1:], strict=True):
            if needed:
                add_product(sums.of(weight), part.t(), x)
        return dx, *(sums.result(w) for w in weights)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Any, tables: tuple[Tensor, Tensor], heads: int, kv_heads: int, eps: float, x_RX: Tensor,
        q_norm_D: Tensor, k_norm_D: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """q [R, N * D] and k [R, G * D], both normed and rotated, and v [R, G * D]."""
        D = 2 * tables[0].shape[1]
        q, k, v = (x_RX.new_empty(len(x_RX), n * D) for n in (heads, kv_heads, kv_heads))
        kernels.rotary_forward(x_RX, tables, q, k, v, heads, kv_heads, norms=(q_norm_D, k_norm_D), eps=eps)
        ctx.kernels, ctx.heads, ctx.eps = kernels, (heads, kv_heads), eps
        ctx.save_for_backward(x_RX, q_norm_D, k_norm_D, *tables)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the projection and of both weights."""
        x, q_norm, k_norm, *tables = ctx.saved_tensors
        D, dx, sums = len(q_norm), torch.empty_like(x), GradientSums()
        partial = ctx.kernels.norm_partials(2 * D, x.device)
        grads = (g.contiguous() for g in (dq, dk, dv))
        norms = (x, (q_norm, k_norm), partial)
        ctx.kernels.rotary_backward(*grads, tuple(tables), dx, *ctx.heads, norms=norms, eps=ctx.eps)
        for weight, part, needed in zip(
            (q_norm, k_norm), partial.sum(0).split(D), ctx.needs_input_grad[6:], strict=True
        ):
            if needed:
                sums.of(weight).add_(part)
        return None, None, None, None, None, dx, sums.result(q_norm), sums.result(k_norm)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, x_RX: Tensor, weight_HM: Tensor) -> Tensor:
        """(silu(gate) * up) W^T [R, H] of x = [gate | up] [R, 2M]."""
        ctx.kernels, ctx.spent = kernels, False
        ctx.save_for_backward(x_RX, weight_HM)
        gated = x_RX.new_empty(len(x_RX), weight_HM.shape[1])
        kernels.gated_forward(x_RX, gated)
        return gated @ weight_HM.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RH: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, in its own memory, and of the weight."""
        assert not ctx.spent, "the first backward overwrote gate and up"
        ctx.spent = True
        x, weight = ctx.saved_tensors
        d_gated, sums = d_RH @ weight, GradientSums()
        gated = torch.empty_like(d_gated)
        ctx.kernels.gated_backward(x, d_gated, gated)
        if ctx.needs_input_grad[2]:
            add_product(sums.of(weight), d_RH.t(), gated)
        return None, x, sums.result(weight)


@dataclass(frozen=True)
class FusedLayer:
    """The parts, for modules of `drafts.linear` and inputs [..., H], contiguous.

    Attributes:
        kernels: operators of `ops.backend`.
        tables: fp32 (cos, sin) [R, D / 2] of the positions of the rows that are projected.
    """

    kernels: Any
    tables: tuple[Tensor, Tensor]

    def norm(self, norm: Any, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm), both of the shape of x."""
        rows = None if delta is None else delta.flatten(0, -2)
        total, normed = _AddNorm.apply(self.kernels, norm.eps, norm.weight, x.flatten(0, -2), rows)  # type: ignore[no-untyped-call]
        return total.view_as(x), normed.view_as(x)

    def products(self, x: Tensor, *linears: Any) -> Tensor:
        """[..., sum of O]: the outputs of linears without bias, side by side."""
        out: Tensor = _Products.apply(x.flatten(0, -2), *(linear.weight for linear in linears))  # type: ignore[no-untyped-call]
        return out.unflatten(0, x.shape[:-1])

    def heads(
        self, projected: Tensor, heads: int, kv_heads: int, norms: tuple[Tensor, Tensor], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., N, D] and keys [..., G, D], both normed and rotated, and values [..., G, D].

        Args:
            projected: [..., (N + 2G) * D] outputs of q, k and v; N may be 0.
            norms: weights of the norms over query and key heads.
        """
        found = _Heads.apply(self.kernels, self.tables, heads, kv_heads, eps, projected.flatten(0, -2), *norms)  # type: ignore[no-untyped-call]
        shape, D = projected.shape[:-1], 2 * self.tables[0].shape[1]
        q, k, v = (x.view(*shape, n, D) for x, n in zip(found, (heads, kv_heads, kv_heads), strict=True))
        return q, k, v

    def gated(self, gate_up: Tensor, down: Any) -> Tensor:
        """[..., H]: product of the linear `down` with silu(gate) * up, before any sum over ranks."""
        out: Tensor = _GatedProduct.apply(self.kernels, gate_up.flatten(0, -2), down.weight)  # type: ignore[no-untyped-call]
        return out.unflatten(0, gate_up.shape[:-1])
