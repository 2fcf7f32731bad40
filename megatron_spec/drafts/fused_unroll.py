"""Unroll of a one-layer EAGLE-3 draft with a hand-written backward: fewer passes over memory, fewer products.

Its plain twin is `unroll.unroll` with `EagleDraft.layer_step`. The gains:

- The embedding half of q, k and v depends only on the token, so it is projected once for all steps: step k reads rows
  j + k. So does its backward.
- Weight gradients are one product over the rows of many steps, accumulated in fp32 directly in `main_grad`.
- Gate and up are computed again in the backward where keeping them would take too much memory (`MOST_GATES`).
- Norms, rotary embedding, gate and branch attention take one pass over memory each (`rows.py`, `rotary.py` and
  `branch.py` in `ops/kernels`); the gate's output is recomputed, and its gradient overwrites its input.
- Only rows that some step supervises are written for the LM head, and steps after the first run only on these rows if
  that saves enough.

Tensor parallelism: every rank has all rows, complete; heads and intermediate columns are split. All-reduces follow the
two row-sharded products and, in the backward, the input gradients of column-sharded products and of the LM head; those
of the backward run beside weight-gradient products, which nothing waits for. The gradient of the embedding's norm stays
partial; only its weight gradient is reduced. Under sequence parallelism the unroll also works on the full sequence (up
to `MOST_WHOLE_ROWS` rows), so it can drop unsupervised rows.

Context parallelism: a rank has the rows of two chunks of every sequence. Keys and values of the trunk are gathered once
per micro-batch, and their gradients are summed once; all else is local to a row.

Inputs of fake-quantised linears are rounded in place after the kernel that writes them, and weights are rounded;
gradients pass straight through (quantisers that clip gradients use the plain unroll).

The buffers are in `fused_tape.py`, the backward in `fused_backward.py`. R rows (s * B + b), H draft hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.batch import Batch
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.fused_backward import Backward
from megatron_spec.drafts.fused_tape import Tape, Weights, round_
from megatron_spec.drafts.linear import attached_quantizers
from megatron_spec.drafts.unroll_steps import Steps
from megatron_spec.ops import attention
from megatron_spec.ops.products import GradientSums
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.unroll_memory import MOST_WHOLE_ROWS, whole_rows_bytes

if TYPE_CHECKING:
    from megatron_spec.drafts.eagle3 import EagleDraft

COMPACT_BELOW = 0.9
"""From step 1 on, unsupervised rows are dropped if fewer than this share remain: copying rows has a cost, too."""


def suits(draft: EagleDraft, hidden_SBH: Tensor, batch: Batch, steps: int) -> bool:
    """True if a draft whose path `draft_fused` is on can use it for this micro-batch: gradients are enabled, no
    quantiser is calibrating, no subclass, replaced module or hook changes a step, and, under sequence parallelism, all
    rows fit."""
    if draft.sequence_parallel:
        rows = hidden_SBH.shape[0] * hidden_SBH.shape[1] * draft.tp_group.size()
        if whole_rows_bytes(hidden_SBH.shape[2], rows, steps, hidden_SBH.element_size()) > MOST_WHOLE_ROWS:
            return False
    if not torch.is_grad_enabled() or draft.has_own_steps:
        return False
    modules = [m for layer in draft.decoder_layers for m in layer.modules()]
    return all(getattr(q, "straight", False) for q in attached_quantizers(modules))


class _Forward:
    """Forward of one micro-batch."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.x = tape.empty(tape.sizes.rows, tape.sizes.qkv_width)
        """The state's half of the projection of a step."""

    def run(self, counts: list[int]) -> list[Tensor]:
        """Normed states of the supervised rows of every step.

        Args:
            counts: number of supervised rows per step.
        """
        tape, sizes, saved, weights = self.tape, self.tape.sizes, self.tape.saved, self.tape.weights
        first = (weights.input_norm, tape.normed_embedding)
        tape.rstd_embedding = tape.kernels.norm_forward(tape.embedding, tape.eps, first=first)
        projected = round_(tape.attention.q_proj, tape.normed_embedding) @ tape.qkv_embedding.t()
        # one buffer, which the LM head reads at once
        states = list(tape.empty(sum(counts), sizes.hidden).split(counts))
        first = (weights.hidden_norm, tape.at(tape.normed, 0))
        saved.rstd_before.append(tape.kernels.norm_forward(saved.before[0], tape.eps, first=first))
        self._project(0)
        scratch = tape.empty(sizes.rows, sizes.intermediate)
        for k in range(sizes.steps):
            self._attend(k, projected)
            delta = tape.o_product.forward(tape.attended(k, k + 1))
            delta = self._mlp(k, tape.summed(delta), scratch[: len(delta)])
            self._finish(k, tape.summed(delta), states[k])
        return states

    def _mlp(self, k: int, delta: Tensor, gated: Tensor) -> Tensor:
        """The MLP's output on this rank, which takes the place of the attention's, `delta`."""
        tape, post, gates = self.tape, self.tape.at(self.tape.post, k), self.tape.gates(k)
        norm = (delta, tape.at(tape.inner, k), (tape.weights.post_norm, post))
        tape.saved.rstd_inner.append(tape.kernels.norm_forward(tape.saved.before[k], tape.eps, *norm))
        tape.gate_up_product.forward(round_(tape.mlp.gate_proj, post), out=gates)
        if tape.down_product.fp8 is not None:
            return tape.down_product.forward(tape.kernels.quantized_gate(gates), out=delta)
        tape.kernels.gated_forward(gates, gated)
        return tape.down_product.forward(round_(tape.mlp.down_proj, gated), out=delta)

    def _project(self, k: int) -> None:
        """The state's half of q, k and v in step k."""
        tape = self.tape
        normed = round_(tape.attention.q_proj, tape.at(tape.normed, k))
        tape.qkv_product.forward(normed, out=self.x[: len(normed)])

    def _attend(self, k: int, projected: Tensor) -> None:
        tape, sizes = self.tape, self.tape.sizes
        index, q = tape.steps.compacted(k), tape.at(tape.q, k)
        key, value = tape.keys_values(tape.trunk, tape.branches, k)
        tape.kernels.rotary_forward(
            self.x[: len(q)], tape.tables[k], q, key, value, sizes.heads, sizes.kv_heads,
            projected[k * sizes.batch :], tape.token_rows.of_step(k),
        )  # fmt: skip
        if k == 0:
            tape.share_trunk()
        trunk_key, trunk_value = (tape.by_heads(x) for x in tape.whole_trunk)
        o, lse_BSN, state = attention.forward(tape.spread(q, k), trunk_key, trunk_value, tape.visibility)
        lse = lse_BSN.transpose(1, 2).contiguous()
        tape.saved.attention.append(state)
        tape.saved.lse.append(lse)
        branches = (tape.branches[0][:k], tape.branches[1][:k])
        tape.kernels.merge_forward(q, o, lse, *branches, tape.at(tape.out, k), index)

    def _finish(self, k: int, delta: Tensor, state: Tensor) -> None:
        """Residual sum and norms after step k: the LM head's input, and the next step's input with its projection."""
        tape, saved, inner = self.tape, self.tape.saved, self.tape.at(self.tape.inner, k)
        after, places, second = torch.empty_like(inner), tape.steps.places[k], (tape.weights.final_norm, state)
        hidden_norm, index = tape.weights.hidden_norm, tape.steps.index
        last, dropping = k + 1 == tape.sizes.steps, k == 0 and index is not None
        normed = None if last else tape.at(tape.normed, k + 1)
        following = None if normed is None or dropping else (hidden_norm, normed)
        rstd = tape.kernels.norm_forward(inner, tape.eps, delta, after, following, second, places)
        saved.after.append(after)
        saved.rstd_after.append(rstd)
        if normed is None:
            return
        if dropping:
            after = after[index]
            rstd = tape.kernels.norm_forward(after, tape.eps, first=(hidden_norm, normed))
        self._project(k + 1)
        saved.before.append(after)
        saved.rstd_before.append(rstd)


class _FusedUnroll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, counts: list[int], hidden_RH: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        """Supervised states of every step."""
        ctx.tape = tape
        return tuple(_Forward(tape).run(counts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the first hidden state and of the parameters."""
        tape, sums = ctx.tape, GradientSums()
        assert tape is not None, "the buffers of this unroll were overwritten by its first backward"
        ctx.tape = None  # frees its buffers, most of the memory
        first = Backward(tape, sums).run(tuple(g.contiguous() for g in grads))
        return None, None, first, *(sums.result(p) for p in tape.weights.all())


def fused_unroll(
    draft: EagleDraft, hidden_SBH: Tensor, batch: Batch, rows: list[Tensor], active: list[Tensor], ends: BaseEnds
) -> list[Tensor]:
    """Supervised rows [R_k, H] of the LM head's input, for every step; differentiable.

    Args:
        hidden_SBH: state of step 0 ([S / TP, B, H] under sequence parallelism).
        rows: int64 rows (s * B + b) that are supervised at each step, ascending.
        active: int64 rows that are supervised at this step or a later one, per step, ascending.
    """
    weights = Weights.of(draft)
    if draft.sequence_parallel:  # every rank has the full gradient and keeps its own rows
        hidden_SBH = mappings.gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=False, group=draft.tp_group
        )
    hidden = hidden_SBH.flatten(0, 1).contiguous()
    steps = Steps(rows, active, len(hidden), COMPACT_BELOW)
    tape = Tape(draft, weights, hidden.detach(), batch, steps, ends, Visibility.of(batch))
    states = _FusedUnroll.apply(tape, [len(r) for r in rows], hidden, *weights.all())  # type: ignore[no-untyped-call]
    return list(states)
