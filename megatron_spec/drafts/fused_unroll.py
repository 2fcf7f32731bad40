"""The unroll of a one-layer EAGLE-3 draft with its backward written by hand: fewer passes over memory, fewer products.

Computes what `unroll.unroll` computes with `EagleDraft.layer_step`, which stays the plain version and the fallback.
What is gained:

- The embedding half of q, k and v depends on the token alone, so its projection is made once for all steps: step k
  reads rows j + k. The same holds for its backward.
- Weight gradients are one product over the rows of many steps, summed in fp32 straight into `main_grad`.
- Norms, rotary embedding, gate and branch attention are one pass over memory each (`ops/kernels.py`); the gate's
  output is recomputed, and its input replaced by its gradient in place.
- Only rows that some step supervises are written for the head.

S sequence, B micro-batch, R = S * B rows (row = s * B + b), T draft steps, H draft hidden size, E embedding size,
X = (N + 2G) * D width of the fused projection, M intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_spec.batch import Batch
from megatron_spec.drafts.base import BaseEnds
from megatron_spec.ops.products import GradientSums, add_product, kernels_available
from megatron_spec.ops.rope import rotary_angles
from megatron_spec.ops.ttt_attention import TrunkLayout, trunk_backward, trunk_forward, trunk_layout

if TYPE_CHECKING:
    from megatron_spec.drafts.eagle import EagleDraft
    from megatron_spec.ops import kernels

ROWS_AT_ONCE = 65536
"""Rows whose weight gradient is one product: bounds the memory of the backward at long sequences."""


def _power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


def can_fuse(draft: EagleDraft, hidden_SBH: Tensor, detach: bool) -> bool:
    """True when this draft can be unrolled here; everything else takes the plain way."""
    config = draft.config
    linears = [m for m in draft.modules() if hasattr(m, "input_quantizer")]
    return (
        hidden_SBH.is_cuda
        and kernels_available()
        and hidden_SBH.dtype in (torch.bfloat16, torch.float16)
        and torch.is_grad_enabled()
        and not detach
        and draft.tp_group.size() == 1
        and config.num_hidden_layers == 1
        and config.hidden_act == "silu"
        and all(m.input_quantizer is None and m.weight_quantizer is None for m in linears)
        and config.num_attention_heads % config.num_key_value_heads == 0
        and all(map(_power_of_two, (config.head_dim, config.num_key_value_heads, config.num_attention_heads)))
        and config.head_dim >= 16
    )


@dataclass
class _Weights:
    """Parameters in the order autograd sees them."""

    input_norm: nn.Parameter
    hidden_norm: nn.Parameter
    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    o: nn.Parameter
    post_norm: nn.Parameter
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    final_norm: nn.Parameter

    @staticmethod
    def of(draft: EagleDraft) -> _Weights:
        layer = draft.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        return _Weights(
            layer.input_layernorm.weight, layer.hidden_norm.weight, attention.q_proj.weight, attention.k_proj.weight,
            attention.v_proj.weight, attention.o_proj.weight, layer.post_attention_layernorm.weight,
            mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, draft.norm.weight,
        )  # fmt: skip

    def all(self) -> list[nn.Parameter]:
        return list(vars(self).values())


class _Unroll:
    """Buffers and both directions of one micro-batch. Leading axis T: one slot per draft step."""

    def __init__(
        self, draft: EagleDraft, weights: _Weights, hidden_RH: Tensor, batch: Batch, rows: list[Tensor], ends: BaseEnds,
        layout: TrunkLayout, k: Any,
    ) -> None:
        config = draft.config
        self.kernels: kernels = k  # type: ignore[valid-type]
        self.w, self.layout, self.eps = weights, layout, config.rms_norm_eps
        self.T, (self.B, self.S) = len(rows), batch.tokens_BS.shape
        self.N, self.G, self.D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.E = config.target_hidden_size
        like = {"dtype": hidden_RH.dtype, "device": hidden_RH.device}
        T, (R, H), M = self.T, hidden_RH.shape, config.intermediate_size
        self.R, self.H, self.M, self.X = R, H, M, (self.N + 2 * self.G) * self.D
        self.hidden = [hidden_RH] + [torch.empty(R, H, **like) for _ in range(T)]
        self.normed, self.inner, self.post = (torch.empty(T, R, H, **like) for _ in range(3))
        self.q, self.out = (torch.empty(T, R, self.N * self.D, **like) for _ in range(2))
        self.keys, self.values = (torch.empty(T, R, self.G * self.D, **like) for _ in range(2))
        self.gate_up = torch.empty(T, R, 2 * M, **like)
        self.lse = torch.empty(T, self.B, self.N, self.S, dtype=torch.float32, device=hidden_RH.device)
        self.rng: list[tuple[Tensor, ...]] = []
        self.rstd_hidden: list[Tensor] = []
        self.rstd_inner: list[Tensor] = []
        self.rows, self.places = rows, [self._place(r) for r in rows]
        angles = [rotary_angles(batch.positions_BS + i, draft.inv_freq_on(hidden_RH.device)) for i in range(T)]
        half = self.D // 2
        self.tables = [(a.cos().view(R, -1)[:, :half].contiguous(), a.sin().view(R, -1)[:, :half].contiguous()) for a in angles]
        ahead = torch.nn.functional.pad(batch.tokens_BS[:, 1:], (0, T))  # token of row j at step k: place j + k
        self.embedding = ends.embed(ahead).to(hidden_RH.dtype).reshape(-1, self.E)
        self.used = False

    def _place(self, rows_R: Tensor) -> Tensor:
        place = torch.full((self.R,), -1, dtype=torch.int32, device=rows_R.device)
        place[rows_R] = torch.arange(len(rows_R), dtype=torch.int32, device=rows_R.device)
        return place

    def _views(self, x_RX: Tensor) -> Tensor:
        """[B, S, heads, D] of rows."""
        return x_RX.view(self.S, self.B, -1, self.D).transpose(0, 1)

    def _fused_qkv(self) -> tuple[Tensor, Tensor]:
        """Rows of q, k and v together: the half that reads the embedding, and the half that reads the state."""
        parts = (self.w.q, self.w.k, self.w.v)
        return torch.cat([p[:, : self.E] for p in parts]), torch.cat([p[:, self.E :] for p in parts])

    def forward(self) -> list[Tensor]:
        """The normed states of the supervised rows of every step."""
        w, kernels = self.w, self.kernels
        embedding_half, state_half = self.fused_qkv = self._fused_qkv()
        gate_up = self.fused_gate_up = torch.cat([w.gate, w.up])
        self.normed_embedding = torch.empty_like(self.embedding)
        self.rstd_embedding = kernels.norm_forward(
            self.embedding, self.eps, first=(w.input_norm, self.normed_embedding)
        )
        projected = self.normed_embedding @ embedding_half.t()
        counts = [len(r) for r in self.rows]
        # one buffer, which the head then reads as a whole
        states = list(torch.empty(sum(counts), self.H, dtype=w.q.dtype, device=w.q.device).split(counts))
        self.rstd_hidden.append(
            kernels.norm_forward(self.hidden[0], self.eps, first=(w.hidden_norm, self.normed[0]))
        )
        gated = torch.empty(self.R, self.M, dtype=w.q.dtype, device=w.q.device)
        for k in range(self.T):
            x = self.normed[k] @ state_half.t()
            first = k * self.B
            kernels.rotary_forward(
                x, self.tables[k], self.q[k], self.keys[k], self.values[k], self.N, self.G,
                projected[first : first + self.R],
            )
            self._attend(k)
            delta = self.out[k] @ w.o.t()
            self.rstd_inner.append(
                kernels.norm_forward(self.hidden[k], self.eps, delta, self.inner[k], (w.post_norm, self.post[k]))
            )
            torch.mm(self.post[k], gate_up.t(), out=self.gate_up[k])
            kernels.gated_forward(self.gate_up[k], gated)
            torch.mm(gated, w.down.t(), out=delta)
            following = (w.hidden_norm, self.normed[k + 1]) if k + 1 < self.T else None
            self.rstd_hidden.append(
                kernels.norm_forward(
                    self.inner[k], self.eps, delta, self.hidden[k + 1], following, (w.final_norm, states[k]),
                    self.places[k],
                )
            )
        return states

    def _attend(self, k: int) -> None:
        o, lse, rng = trunk_forward(
            self._views(self.q[k]), self._views(self.keys[0]), self._views(self.values[0]), self.layout
        )
        self.rng.append(rng)
        self.kernels.merge_forward(
            self.q[k], o, lse, self.keys[1 : k + 1], self.values[1 : k + 1], self.out[k], self.lse[k]
        )

    def backward(self, grad_states: tuple[Tensor, ...], sums: GradientSums) -> Tensor:
        """Gradient of the first hidden state; weight gradients go to `sums`."""
        assert not self.used, "the buffers of this unroll were overwritten by its first backward"
        self.used = True
        w, kernels, like = self.w, self.kernels, {"dtype": self.q.dtype, "device": self.q.device}
        R, T = self.R, self.T
        state_half, gate_up = self.fused_qkv[1], self.fused_gate_up
        group = max(1, min(T, ROWS_AT_ONCE // R))
        d_hidden, d_inner = (torch.empty(group, R, self.H, **like) for _ in range(2))
        gated = torch.empty(group, R, self.M, **like)
        dx = torch.empty(T, R, self.X, **like)
        dk, dv = (torch.empty(T, R, self.G * self.D, dtype=torch.float32, device=dx.device) for _ in range(2))
        norms = {p: kernels.norm_partials(self.H, dx.device) for p in (w.hidden_norm, w.post_norm, w.final_norm)}
        scratch = torch.empty(R, self.M, **like)
        d_normed = torch.empty(R, self.H, **like)
        d_post, dq = torch.empty_like(d_normed), torch.empty(R, self.N * self.D, **like)
        above: Tensor | None = None
        end = T
        for k in reversed(range(T)):
            start = max(0, end - group)
            i = k - start
            kernels.norm_backward(
                self.hidden[k + 1], self.rstd_hidden[k + 1], d_hidden[i],
                (d_normed, w.hidden_norm, norms[w.hidden_norm]) if above is not None else None,
                (grad_states[k], w.final_norm, norms[w.final_norm]), self.places[k], above,
            )
            torch.mm(d_hidden[i], w.down, out=scratch)
            kernels.gated_backward(self.gate_up[k], scratch, gated[i])
            torch.mm(self.gate_up[k], gate_up, out=d_post)
            kernels.norm_backward(
                self.inner[k], self.rstd_inner[k], d_inner[i], (d_post, w.post_norm, norms[w.post_norm]),
                add_RH=d_hidden[i],
            )
            self._attend_backward(k, d_inner[i], dq, dk, dv)
            kernels.rotary_backward(dq, dk[k], dv[k], self.tables[k], dx[k], self.N, self.G)
            torch.mm(dx[k], state_half, out=d_normed)
            above = d_inner[i]
            if k == start:
                self._weight_gradients(start, end, d_hidden, gated, d_inner, dx, sums)
                end = start
        assert above is not None
        first = torch.empty_like(d_normed)
        kernels.norm_backward(
            self.hidden[0], self.rstd_hidden[0], first, (d_normed, w.hidden_norm, norms[w.hidden_norm]), add_RH=above
        )
        self._embedding_gradients(dx, sums)
        for parameter, partial in norms.items():
            sums.of(parameter).add_(partial.sum(0))
        return first

    def _attend_backward(self, k: int, d_inner_RH: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        d_out = d_inner_RH @ self.w.o
        trunk = trunk_backward(
            self._views(d_out), self._views(self.q[k]), self._views(self.keys[0]), self._views(self.values[0]),
            self._views(self.out[k]), self.lse[k], self.rng[k], self.layout,
        )
        self.kernels.merge_backward(
            self.q[k], self.out[k], d_out, self.lse[k], self.keys[1 : k + 1], self.values[1 : k + 1], trunk, dq, dk, dv,
            k == self.T - 1,
        )

    def _weight_gradients(
        self, start: int, end: int, d_hidden: Tensor, gated: Tensor, d_inner: Tensor, dx: Tensor, sums: GradientSums
    ) -> None:
        """Of steps start..end-1, in one product each."""
        w, count = self.w, end - start

        def flat(x: Tensor) -> Tensor:
            return x.flatten(0, 1)

        add_product(sums.of(w.down), flat(d_hidden[:count]).t(), flat(gated[:count]))
        d_gate_up, post = flat(self.gate_up[start:end]).t(), flat(self.post[start:end])
        add_product(sums.of(w.gate), d_gate_up[: self.M], post)
        add_product(sums.of(w.up), d_gate_up[self.M :], post)
        add_product(sums.of(w.o), flat(d_inner[:count]).t(), flat(self.out[start:end]))
        for parameter, columns in self._qkv_columns():
            add_product(sums.of(parameter)[:, self.E :], flat(dx[start:end])[:, columns].t(), flat(self.normed[start:end]))

    def _qkv_columns(self) -> list[tuple[nn.Parameter, slice]]:
        q, kv = self.N * self.D, self.G * self.D
        return [(self.w.q, slice(0, q)), (self.w.k, slice(q, q + kv)), (self.w.v, slice(q + kv, q + 2 * kv))]

    def _embedding_gradients(self, dx_TRX: Tensor, sums: GradientSums) -> None:
        d_projected = self.kernels.shifted_sum(dx_TRX, self.B)
        for parameter, columns in self._qkv_columns():
            add_product(sums.of(parameter)[:, : self.E], d_projected[:, columns].t(), self.normed_embedding)
        embedding_half = self.fused_qkv[0]
        partial = self.kernels.norm_partials(self.E, dx_TRX.device)
        self.kernels.norm_backward(
            self.embedding, self.rstd_embedding, None, (d_projected @ embedding_half, self.w.input_norm, partial)
        )
        sums.of(self.w.input_norm).add_(partial.sum(0))


class _FusedUnroll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Unroll, hidden_RH: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.work = work
        return tuple(work.forward())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        work, sums = ctx.work, GradientSums()
        ctx.work = None  # its buffers are the bulk of the memory
        first = work.backward(tuple(g.contiguous() for g in grads), sums)
        return None, first, *(sums.result(p) for p in work.w.all())


def fused_unroll(
    draft: EagleDraft, hidden_SBH: Tensor, batch: Batch, rows: list[Tensor], ends: BaseEnds
) -> list[Tensor]:
    """Supervised rows [R_k, H] of the state that the head reads, for every step; differentiable.

    Args:
        hidden_SBH: state of step 0.
        rows: int64 rows (s * B + b) that step k supervises.
    """
    from megatron_spec.ops import kernels

    weights = _Weights.of(draft)
    hidden = hidden_SBH.flatten(0, 1).contiguous()
    layout = trunk_layout(batch.documents_BS, hidden.dtype)
    work = _Unroll(draft, weights, hidden.detach(), batch, rows, ends, layout, kernels)
    states = _FusedUnroll.apply(work, hidden, *weights.all())  # type: ignore[no-untyped-call]
    return list(states)
