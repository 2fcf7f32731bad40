"""The unroll of a one-layer EAGLE-3 draft with its backward written by hand: fewer passes over memory, fewer products.

Computes what `unroll.unroll` computes with `EagleDraft.layer_step`, which stays the plain version and the fallback.
What is gained:

- The embedding half of q, k and v depends on the token alone, so its projection is made once for all steps: step k
  reads rows j + k. The same holds for its backward.
- Weight gradients are one product over the rows of many steps, summed in fp32 straight into `main_grad`.
- Norms, rotary embedding, gate and branch attention are one pass over memory each (`ops/kernels/rows.py`,
  `ops/kernels/branch.py`); the gate's output is recomputed, and its input replaced by its gradient in place.
- Only rows that some step supervises are written for the head, and steps after the first run on those rows alone
  where that saves enough.

Tensor parallel: rows are whole on every rank, heads and intermediate columns are split. Partial sums are added over
ranks after the two row-sharded products, and after the gradients of what column-sharded ones and the head read; the
embedding's norm alone is left with its own share, of which only the weight's gradient [E] travels. Under sequence
parallelism the unroll holds whole rows all the same (up to `estimate.MOST_WHOLE_ROWS`), so it may drop those that no
step supervises.

Fake-quantised linears round in place what a kernel wrote for them, and multiply with their rounded weights; gradients
pass the rounding as they are (a quantiser that clips them takes the plain way).

S sequence, B micro-batch, R rows (s * B + b), T draft steps, H draft hidden size, E embedding size, N query and G
key/value heads, D head size, X = (N + 2G) * D width of the fused projection, M intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_spec.batch import Batch
from megatron_spec.config import DraftConfig, EagleConfig, UserError
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.unroll_steps import Steps
from megatron_spec.ops.products import GradientSums, add_product, kernels_available
from megatron_spec.ops.ttt_attention import TrunkLayout, trunk_backward, trunk_forward, trunk_layout
from megatron_spec.ops.weight_products import WeightProducts
from megatron_spec.planning.estimate import MOST_WHOLE_ROWS, whole_rows_bytes

if TYPE_CHECKING:
    from megatron_spec.drafts.eagle3 import EagleDraft

ROWS_AT_ONCE = 65536
"""Rows whose weight gradient is one product: bounds the memory of the backward at long sequences."""
COMPACT_BELOW = 0.9
"""From step 1 on, unsupervised rows are dropped when less than this share is left: moving rows costs something too."""


def why_not_fused(
    config: DraftConfig, tp_size: int, device: torch.device, dtype: torch.dtype, detach: bool
) -> str | None:
    """What keeps such a draft from being unrolled here, or None; everything else takes the plain way.

    Args:
        detach: `ObjectiveConfig.detach`.
    """
    if not isinstance(config, EagleConfig) or not config.reads_captures:
        return "it is not an EAGLE-3 draft"
    reasons = {
        "there is no GPU": device.type != "cuda",
        "Triton is missing": not kernels_available(),
        "it is not in half precision": dtype not in (torch.bfloat16, torch.float16),
        "its steps are detached": detach,
        "there are fewer key/value heads than tensor parallel ranks": bool(config.num_key_value_heads % tp_size),
        "it has several layers": config.num_hidden_layers > 1,
        "it has an embedding of its own": config.own_embedding,
        f"its layer has {', '.join(config.layer_options)}": bool(config.layer_options),
        "it feeds back a normed state (norm_output)": config.norm_output,
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        f"its head size is {config.head_dim}": config.head_dim < 16 or config.head_dim % 8 != 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def can_fuse(draft: EagleDraft, hidden_SBH: Tensor, detach: bool, steps: int) -> bool:
    """True when this draft can be unrolled here now, `steps` times."""
    if draft.sequence_parallel:
        rows = hidden_SBH.shape[0] * hidden_SBH.shape[1] * draft.tp_group.size()
        if whole_rows_bytes(hidden_SBH.shape[2], rows, steps, hidden_SBH.element_size()) > MOST_WHOLE_ROWS:
            return False
    where = (draft.tp_group.size(), hidden_SBH.device, hidden_SBH.dtype, detach)
    if not torch.is_grad_enabled() or why_not_fused(draft.config, *where) is not None:
        return False
    linears = [m for layer in draft.decoder_layers for m in layer.modules() if hasattr(m, "input_quantizer")]
    quantisers: list[Any] = [q for m in linears for q in (m.input_quantizer, m.weight_quantizer) if q is not None]
    return all(getattr(q, "straight", False) for q in quantisers)


def check_fp8(
    config: DraftConfig, quantised: bool, tp_size: int, device: torch.device, dtype: torch.dtype, detach: bool
) -> None:
    """Raise UserError when such a draft cannot compute in real fp8; see `why_not_fused`.

    Args:
        quantised: its linears carry fake quantisers.
    """
    reason = "it is fake-quantised" if quantised else why_not_fused(config, tp_size, device, dtype, detach)
    if reason is None and tp_size > 1:
        reason = "it is tensor parallel: every rank would round its own part of a row"
    if reason is None and dtype != torch.bfloat16:
        reason = "it is not in bfloat16"
    if reason is None and torch.cuda.get_device_capability(device) < (9, 0):
        reason = "the GPU has no fp8 tensor cores (compute capability 9.0, Hopper, or newer)"
    if reason is not None:
        raise UserError(f"--draft-fp8: this draft cannot be trained in fp8, because {reason}; leave the flag out")


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
        """The parameters of a draft of one layer."""
        layer = draft.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        return _Weights(
            layer.input_layernorm.weight, layer.hidden_norm.weight, attention.q_proj.weight, attention.k_proj.weight,
            attention.v_proj.weight, attention.o_proj.weight, layer.post_attention_layernorm.weight,
            mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, draft.norm.weight,
        )  # fmt: skip

    def all(self) -> list[nn.Parameter]:
        """In the order of the fields."""
        return list(vars(self).values())


def _round_(linear: Any, x: Tensor) -> Tensor:
    """x, rounded in place as the linear's input is."""
    quantizer = linear.input_quantizer
    return x if quantizer is None else quantizer.round_(x)  # type: ignore[no-any-return]


class _Unroll:
    """Buffers and both directions of one micro-batch."""

    def __init__(
        self,
        draft: EagleDraft,
        weights: _Weights,
        hidden_RH: Tensor,
        batch: Batch,
        steps: Steps,
        ends: BaseEnds,
        layout: TrunkLayout,
        kernels: tuple[Any, Any],
    ) -> None:
        config, layer = draft.config, draft.midlayer
        self.attention: Any = layer.self_attn
        self.mlp: Any = layer.mlp
        self.kernels, self.branch_kernels = kernels  # ops.kernels.rows and ops.kernels.branch
        self.w, self.layout, self.eps, self.steps = weights, layout, config.rms_norm_eps, steps
        self.B, self.S = batch.tokens_BS.shape
        self.tp, self.sequence_parallel = draft.tp_group, draft.sequence_parallel
        ranks = self.tp.size()
        self.N, self.G, self.D = (
            config.num_attention_heads // ranks,
            config.num_key_value_heads // ranks,
            config.head_dim,
        )
        self.E, self.H, self.M = config.target_hidden_size, config.hidden_size, config.intermediate_size // ranks
        self.R, self.T, self.X = steps.R, steps.T, (self.N + 2 * self.G) * self.D
        self.like: dict[str, Any] = {"dtype": hidden_RH.dtype, "device": hidden_RH.device}
        total, kv = steps.span(0, self.T).stop, self.G * self.D
        self.normed, self.inner, self.post = (torch.empty(total, self.H, **self.like) for _ in range(3))
        self.q, self.out = (torch.empty(total, self.N * self.D, **self.like) for _ in range(2))
        self.gate_up = torch.empty(total, 2 * self.M, **self.like)
        self.trunk = [torch.empty(self.R, kv, **self.like) for _ in range(2)]
        self.branches = [torch.empty(self.T - 1, steps.later, kv, **self.like) for _ in range(2)]
        self.before: list[Tensor] = [hidden_RH]
        """State each step reads, and `after`: state it ends with. The same but for dropped rows."""
        self.after: list[Tensor] = []
        self.rstd_before: list[Tensor] = []
        self.rstd_inner: list[Tensor] = []
        self.rstd_after: list[Tensor] = []
        self.lse: list[Tensor] = []
        self.rng: list[tuple[Tensor, ...]] = []
        self.tables = [self._tables(draft, batch, k) for k in range(self.T)]
        self.embedding = self._embedding(ends, batch.tokens_BS).to(hidden_RH.dtype)
        self.used, self.fp8 = False, bool(draft.fp8)

    def _embedding(self, ends: BaseEnds, tokens_BS: Tensor) -> Tensor:
        """[(S + T - 1) * B, E]: row j at step k reads place j + k."""
        rows = self.S + self.T - 1
        extra = -rows % self.tp.size() if self.sequence_parallel else 0
        embedded = ends.embed(torch.nn.functional.pad(tokens_BS[:, 1:], (0, self.T + extra)))
        if self.sequence_parallel:
            embedded = mappings.gather_from_sequence_parallel_region(embedded.contiguous(), group=self.tp)
        return embedded[:rows].reshape(-1, self.E)

    def _summed(self, x: Tensor) -> Tensor:
        """x, summed over tensor parallel ranks in place."""
        if self.tp.size() > 1:
            dist.all_reduce(x, group=self.tp)
        return x

    def _tables(self, draft: EagleDraft, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """fp32 (cos, sin) [rows, D / 2] of step k."""
        positions, index = batch.positions_BS.t().flatten(), self.steps.compacted(k)
        positions = positions if index is None else positions[index]
        angles = (positions + k)[:, None].float() * draft.inv_freq_on(positions.device)
        return angles.cos(), angles.sin()

    def _at(self, x: Tensor, k: int) -> Tensor:
        """Rows of step k in a buffer over all steps."""
        return x[self.steps.span(k, k + 1)]

    def _kv(self, trunk: list[Tensor], branches: list[Tensor], k: int) -> tuple[Tensor, Tensor]:
        return (trunk[0], trunk[1]) if k == 0 else (branches[0][k - 1], branches[1][k - 1])

    def _heads(self, x_RX: Tensor) -> Tensor:
        """[B, S, heads, D] of all rows."""
        return x_RX.view(self.S, self.B, -1, self.D).transpose(0, 1)

    def _spread(self, x: Tensor, k: int) -> Tensor:
        """[B, S, heads, D] of the rows of step k, zero where it has none."""
        index = self.steps.compacted(k)
        if index is None:
            return self._heads(x)
        return self._heads(x.new_zeros(self.R, x.shape[1]).index_copy_(0, index, x))

    def _fused_qkv(self) -> tuple[Tensor, Tensor]:
        """Rows of q, k and v together: the half that reads the embedding, and the half that reads the state."""
        linears = (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        parts = [linear.quantized_weight().detach() for linear in linears]
        return torch.cat([p[:, : self.E] for p in parts]), torch.cat([p[:, self.E :] for p in parts])

    def forward(self, counts: list[int]) -> list[Tensor]:
        """The normed states of the supervised rows of every step (`counts` of them)."""
        w, kernels, mlp = self.w, self.kernels, self.mlp
        self.fused_qkv = self._fused_qkv()
        gate, up, down, o = (
            linear.quantized_weight().detach()
            for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj, self.attention.o_proj)
        )
        self.qkv, self.gate_up_product, self.o, self.down = (
            WeightProducts(weight, self.fp8) for weight in (self.fused_qkv[1], torch.cat([gate, up]), o, down)
        )
        self.normed_embedding = torch.empty_like(self.embedding)
        self.rstd_embedding = kernels.norm_forward(
            self.embedding, self.eps, first=(w.input_norm, self.normed_embedding)
        )
        projected = _round_(self.attention.q_proj, self.normed_embedding) @ self.fused_qkv[0].t()
        # one buffer, which the head then reads as a whole
        states = list(torch.empty(sum(counts), self.H, **self.like).split(counts))
        first = (w.hidden_norm, self._at(self.normed, 0))
        self.rstd_before.append(kernels.norm_forward(self.before[0], self.eps, first=first))
        scratch = torch.empty(self.R, self.M, **self.like)
        for k in range(self.T):
            self._attend(k, projected)
            delta = self._summed(self.o.forward(self._attended(k, k + 1)))
            inner, gated = self._at(self.inner, k), scratch[: len(delta)]
            first = (w.post_norm, self._at(self.post, k))
            self.rstd_inner.append(kernels.norm_forward(self.before[k], self.eps, delta, inner, first))
            post = _round_(mlp.gate_proj, self._at(self.post, k))
            self.gate_up_product.forward(post, out=self._at(self.gate_up, k))
            kernels.gated_forward(self._at(self.gate_up, k), gated)
            self._summed(self.down.forward(_round_(mlp.down_proj, gated), out=delta))
            self._finish(k, inner, delta, states[k])
        return states

    def _attended(self, start: int, end: int) -> Tensor:
        """What the output projection reads in steps start..end-1; `out` stays as it is for the attention's backward."""
        out, linear = self.out[self.steps.span(start, end)], self.attention.o_proj
        return out if linear.input_quantizer is None else _round_(linear, out.clone())

    def _attend(self, k: int, projected: Tensor) -> None:
        index, q = self.steps.compacted(k), self._at(self.q, k)
        key, value = self._kv(self.trunk, self.branches, k)
        x = self.qkv.forward(_round_(self.attention.q_proj, self._at(self.normed, k)))
        self.kernels.rotary_forward(x, self.tables[k], q, key, value, self.N, self.G, projected[k * self.B :], index)
        o, lse, rng = trunk_forward(
            self._spread(q, k), self._heads(self.trunk[0]), self._heads(self.trunk[1]), self.layout
        )
        self.rng.append(rng)
        self.lse.append(lse)
        branches = (self.branches[0][:k], self.branches[1][:k])
        self.branch_kernels.merge_forward(q, o, lse, *branches, self._at(self.out, k), index)

    def _finish(self, k: int, inner: Tensor, delta: Tensor, state: Tensor) -> None:
        """Sum and norms after step k: what the head reads, and what the next step starts from."""
        w, after = self.w, torch.empty_like(inner)
        last, dropping = k + 1 == self.T, k == 0 and self.steps.index is not None
        following = None if last or dropping else (w.hidden_norm, self._at(self.normed, k + 1))
        rstd = self.kernels.norm_forward(
            inner, self.eps, delta, after, following, (w.final_norm, state), self.steps.places[k]
        )
        self.after.append(after)
        self.rstd_after.append(rstd)
        if last:
            return
        if dropping:
            after = after[self.steps.index]
            rstd = self.kernels.norm_forward(after, self.eps, first=(w.hidden_norm, self._at(self.normed, k + 1)))
        self.before.append(after)
        self.rstd_before.append(rstd)

    def backward(self, grad_states: tuple[Tensor, ...], sums: GradientSums) -> Tensor:
        """Gradient of the first hidden state; weight gradients go to `sums`."""
        assert not self.used, "the buffers of this unroll were overwritten by its first backward"
        self.used = True
        w, kernels, steps, device = self.w, self.kernels, self.steps, self.q.device
        if self.tp.size() > 1:  # of each rank's part of the head; one message
            grad_states = self._summed(torch.cat(grad_states)).split([len(g) for g in grad_states])
        groups = steps.groups(ROWS_AT_ONCE)
        most = max(steps.span(*g).stop - steps.span(*g).start for g in groups)
        d_after, d_inner = (torch.empty(most, self.H, **self.like) for _ in range(2))
        gated = torch.empty(most, self.M, **self.like)
        self.dx = torch.empty(steps.span(0, self.T).stop, self.X, **self.like)
        self.d_trunk = [torch.empty_like(x, dtype=torch.float32) for x in self.trunk]
        self.d_branches = [torch.empty_like(x, dtype=torch.float32) for x in self.branches]
        self.norms = {p: kernels.norm_partials(self.H, device) for p in (w.hidden_norm, w.post_norm, w.final_norm)}
        scratch = torch.empty(self.R, self.M, **self.like)
        above: tuple[Tensor, Tensor] | None = None
        for start, end in groups:
            for k in reversed(range(start, end)):
                part = slice(steps.span(start, k).stop - steps.span(start, k).start, None)
                part = slice(part.start, part.start + steps.count(k))
                self._into_after(k, grad_states[k], above, d_after[part])
                d_gated, gate_up = scratch[: steps.count(k)], self._at(self.gate_up, k)
                self.down.backward(d_after[part], out=d_gated)
                kernels.gated_backward(gate_up, d_gated, gated[part])
                _round_(self.mlp.down_proj, gated[part])
                first = (self._summed(self.gate_up_product.backward(gate_up)), w.post_norm, self.norms[w.post_norm])
                kernels.norm_backward(
                    self._at(self.inner, k), self.rstd_inner[k], d_inner[part], first, add_RH=d_after[part]
                )
                self._attend_backward(k, d_inner[part])
                above = (d_inner[part], self._summed(self.qkv.backward(self._at(self.dx, k))))
            self._weight_gradients(start, end, d_after, gated, d_inner, sums)
        assert above is not None
        out = torch.empty_like(self.before[0])
        self._into_before(0, above, out)
        self._embedding_gradients(sums)
        # Under sequence parallelism the trainer sums the gradients of norms over ranks; here each has the whole.
        once = not self.sequence_parallel or self.tp.rank() == 0
        for parameter, partial in self.norms.items():
            sums.of(parameter).add_(partial.sum(0), alpha=int(once))
        return out

    def _into_before(self, k: int, above: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Gradient of the state step k reads: past its residual, and through its norm."""
        residual, d_normed = above
        first = (d_normed, self.w.hidden_norm, self.norms[self.w.hidden_norm])
        self.kernels.norm_backward(self.before[k], self.rstd_before[k], out, first, add_RH=residual)

    def _into_after(self, k: int, d_state: Tensor, above: tuple[Tensor, Tensor] | None, out: Tensor) -> None:
        """Gradient of the state step k ends with: from the head and from the step above."""
        w, first, residual = self.w, None, None
        if above is not None and k == 0 and self.steps.index is not None:
            kept = torch.empty_like(above[0])
            self._into_before(1, above, kept)
            residual = torch.zeros_like(out).index_copy_(0, self.steps.index, kept)
        elif above is not None:
            residual, first = above[0], (above[1], w.hidden_norm, self.norms[w.hidden_norm])
        second = (d_state, w.final_norm, self.norms[w.final_norm])
        self.kernels.norm_backward(
            self.after[k], self.rstd_after[k], out, first, second, self.steps.places[k], residual
        )

    def _attend_backward(self, k: int, d_inner: Tensor) -> None:
        index, q, out = self.steps.compacted(k), self._at(self.q, k), self._at(self.out, k)
        d_out = self.o.backward(d_inner)
        dq0, *trunk = trunk_backward(
            self._spread(d_out, k),
            self._spread(q, k),
            self._heads(self.trunk[0]),
            self._heads(self.trunk[1]),
            self._spread(out, k),
            self.lse[k],
            self.rng[k],
            self.layout,
        )
        for total, part in zip(self.d_trunk, trunk, strict=True):
            if k == self.T - 1:
                self._heads(total).copy_(part)
            else:
                self._heads(total).add_(part)
        dq = torch.empty_like(q)
        self.branch_kernels.merge_backward(
            q,
            out,
            d_out,
            self.lse[k],
            self.branches[0][:k],
            self.branches[1][:k],
            dq0,
            dq,
            self.d_branches[0],
            self.d_branches[1],
            k == self.T - 1,
            index,
        )
        dk, dv = self._kv(self.d_trunk, self.d_branches, k)
        self.kernels.rotary_backward(dq, dk, dv, self.tables[k], self._at(self.dx, k), self.N, self.G)

    def _weight_gradients(
        self, start: int, end: int, d_after: Tensor, gated: Tensor, d_inner: Tensor, sums: GradientSums
    ) -> None:
        """Of steps start..end-1, in one product each."""
        w, span = self.w, self.steps.span(start, end)
        rows = slice(0, span.stop - span.start)
        add_product(sums.of(w.down), d_after[rows].t(), gated[rows])
        d_gate_up = self.gate_up[span].t()
        add_product(sums.of(w.gate), d_gate_up[: self.M], self.post[span])
        add_product(sums.of(w.up), d_gate_up[self.M :], self.post[span])
        add_product(sums.of(w.o), d_inner[rows].t(), self._attended(start, end))
        for parameter, columns in self._qkv_columns():
            add_product(sums.of(parameter)[:, self.E :], self.dx[span][:, columns].t(), self.normed[span])

    def _qkv_columns(self) -> list[tuple[nn.Parameter, slice]]:
        q, kv = self.N * self.D, self.G * self.D
        return [(self.w.q, slice(0, q)), (self.w.k, slice(q, q + kv)), (self.w.v, slice(q + kv, q + 2 * kv))]

    def _embedding_gradients(self, sums: GradientSums) -> None:
        steps = self.steps
        d_projected = self.kernels.shifted_sum(self.dx, self.R, steps.later, self.T, self.B, steps.inverse)
        for parameter, columns in self._qkv_columns():
            add_product(sums.of(parameter)[:, : self.E], d_projected[:, columns].t(), self.normed_embedding)
        partial = self.kernels.norm_partials(self.E, d_projected.device)
        first = (d_projected @ self.fused_qkv[0], self.w.input_norm, partial)
        self.kernels.norm_backward(self.embedding, self.rstd_embedding, None, first)
        own = partial.sum(0)
        sums.of(self.w.input_norm).add_(own if self.sequence_parallel else self._summed(own))


class _FusedUnroll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Unroll, counts: list[int], hidden_RH: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        """Supervised states of every step."""
        ctx.work = work
        return tuple(work.forward(counts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the first hidden state and of the parameters."""
        work, sums = ctx.work, GradientSums()
        ctx.work = None  # its buffers are the bulk of the memory
        first = work.backward(tuple(g.contiguous() for g in grads), sums)
        return None, None, first, *(sums.result(p) for p in work.w.all())


def fused_unroll(
    draft: EagleDraft, hidden_SBH: Tensor, batch: Batch, rows: list[Tensor], active: list[Tensor], ends: BaseEnds
) -> list[Tensor]:
    """Supervised rows [R_k, H] of the state that the head reads, for every step; differentiable.

    Args:
        hidden_SBH: state of step 0 ([S / TP, B, H] under sequence parallelism).
        rows: int64 rows (s * B + b) that step k supervises, ascending.
        active: per step, ascending, the rows that some step from it on supervises.
    """
    from megatron_spec.ops.kernels import branch
    from megatron_spec.ops.kernels import rows as row_kernels

    weights = _Weights.of(draft)
    if draft.sequence_parallel:  # every rank finds the whole gradient, so each keeps its rows of it
        hidden_SBH = mappings.gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=False, group=draft.tp_group
        )
    hidden = hidden_SBH.flatten(0, 1).contiguous()
    layout = trunk_layout(batch.documents_BS, hidden.dtype, None, batch.single_document)
    steps = Steps(rows, active, len(hidden), COMPACT_BELOW)
    work = _Unroll(draft, weights, hidden.detach(), batch, steps, ends, layout, (row_kernels, branch))
    states = _FusedUnroll.apply(work, [len(r) for r in rows], hidden, *weights.all())  # type: ignore[no-untyped-call]
    return list(states)
