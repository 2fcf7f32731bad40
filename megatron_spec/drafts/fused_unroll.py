"""The unroll of a one-layer EAGLE-3 draft with its backward written by hand: fewer passes over memory, fewer products.

Computes what `unroll.unroll` computes with `EagleDraft.layer_step`, its plain twin. What is gained:

- The embedding half of q, k and v depends on the token alone, so its projection is made once for all steps: step k
  reads rows j + k. The same holds for its backward.
- Weight gradients are one product over the rows of many steps, summed in fp32 straight into `main_grad`.
- Norms, rotary embedding, gate and branch attention are one pass over memory each (`ops/kernels/rows.py`,
  `ops/kernels/branch.py`); the gate's output is recomputed, and its input replaced by its gradient in place.
- Only rows that some step supervises are written for the head, and steps after the first run on those rows alone
  where that saves enough.

Tensor parallel: rows are whole on every rank, heads and intermediate columns are split. Partial sums are added over
ranks after the two row-sharded products, and after the gradients of what column-sharded ones and the head read; the
embedding's norm alone keeps its own share, of which only the weight's gradient travels. Under sequence parallelism the
unroll holds whole rows all the same (up to `paths.MOST_WHOLE_ROWS`), so it may drop those that no step supervises.

Fake-quantised linears round in place what a kernel wrote for them, and multiply with their rounded weights; gradients
pass the rounding unchanged (quantisers that clip them take the plain unroll).

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
from megatron_spec.drafts.unroll_steps import Steps
from megatron_spec.ops import attention
from megatron_spec.ops.products import GradientSums
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import MOST_WHOLE_ROWS, whole_rows_bytes

if TYPE_CHECKING:
    from megatron_spec.drafts.eagle3 import EagleDraft

COMPACT_BELOW = 0.9
"""From step 1 on, unsupervised rows are dropped when less than this share is left: moving rows costs something too."""


def suits(draft: EagleDraft, hidden_SBH: Tensor, batch: Batch, steps: int) -> bool:
    """True when a draft whose path `draft_fused` is on can take it for this micro-batch: gradients are wanted, its
    quantisers are not calibrating, and whole rows fit under sequence parallelism."""
    if draft.sequence_parallel:
        rows = hidden_SBH.shape[0] * hidden_SBH.shape[1] * draft.tp_group.size()
        if whole_rows_bytes(hidden_SBH.shape[2], rows, steps, hidden_SBH.element_size()) > MOST_WHOLE_ROWS:
            return False
    if batch.context is not None or not torch.is_grad_enabled():
        return False
    linears = [m for layer in draft.decoder_layers for m in layer.modules() if hasattr(m, "input_quantizer")]
    quantisers: list[Any] = [q for m in linears for q in (m.input_quantizer, m.weight_quantizer) if q is not None]
    return all(getattr(q, "straight", False) for q in quantisers)


class _Forward:
    """The steps of one micro-batch, from the first to the last."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def run(self, counts: list[int]) -> list[Tensor]:
        """The normed states of the supervised rows of every step (`counts` of them)."""
        tape, sizes, saved, weights = self.tape, self.tape.sizes, self.tape.saved, self.tape.weights
        first = (weights.input_norm, tape.normed_embedding)
        tape.rstd_embedding = tape.kernels.norm_forward(tape.embedding, tape.eps, first=first)
        projected = round_(tape.attention.q_proj, tape.normed_embedding) @ tape.qkv_embedding.t()
        # one buffer, which the head then reads as a whole
        states = list(tape.empty(sum(counts), sizes.hidden).split(counts))
        first = (weights.hidden_norm, tape.at(tape.normed, 0))
        saved.rstd_before.append(tape.kernels.norm_forward(saved.before[0], tape.eps, first=first))
        scratch = tape.empty(sizes.rows, sizes.intermediate)
        for k in range(sizes.steps):
            self._attend(k, projected)
            delta = tape.summed(tape.o_product.forward(tape.attended(k, k + 1)))
            inner = self._mlp(k, delta, scratch[: len(delta)])
            self._finish(k, inner, delta, states[k])
        return states

    def _mlp(self, k: int, delta: Tensor, gated: Tensor) -> Tensor:
        """The state between attention and MLP; `delta` comes with the attention's output and leaves with the MLP's."""
        tape = self.tape
        inner = tape.at(tape.inner, k)
        first = (tape.weights.post_norm, tape.at(tape.post, k))
        rstd = tape.kernels.norm_forward(tape.saved.before[k], tape.eps, delta, inner, first)
        tape.saved.rstd_inner.append(rstd)
        post = round_(tape.mlp.gate_proj, tape.at(tape.post, k))
        tape.gate_up_product.forward(post, out=tape.at(tape.gate_up, k))
        tape.kernels.gated_forward(tape.at(tape.gate_up, k), gated)
        tape.summed(tape.down_product.forward(round_(tape.mlp.down_proj, gated), out=delta))
        return inner

    def _attend(self, k: int, projected: Tensor) -> None:
        tape, sizes = self.tape, self.tape.sizes
        index, q = tape.steps.compacted(k), tape.at(tape.q, k)
        key, value = tape.keys_values(tape.trunk, tape.branches, k)
        x = tape.qkv_product.forward(round_(tape.attention.q_proj, tape.at(tape.normed, k)))
        tape.kernels.rotary_forward(
            x, tape.tables[k], q, key, value, sizes.heads, sizes.kv_heads, projected[k * sizes.batch :], index
        )
        trunk_key, trunk_value = (tape.by_heads(x) for x in tape.trunk)
        o, lse_BSN, state = attention.forward(tape.spread(q, k), trunk_key, trunk_value, tape.visibility)
        lse = lse_BSN.transpose(1, 2).contiguous()
        tape.saved.attention.append(state)
        tape.saved.lse.append(lse)
        branches = (tape.branches[0][:k], tape.branches[1][:k])
        tape.kernels.merge_forward(q, o, lse, *branches, tape.at(tape.out, k), index)

    def _finish(self, k: int, inner: Tensor, delta: Tensor, state: Tensor) -> None:
        """Sum and norms after step k: what the head reads, and what the next step starts from."""
        tape, saved, after = self.tape, self.tape.saved, torch.empty_like(inner)
        hidden_norm, index = tape.weights.hidden_norm, tape.steps.index
        last, dropping = k + 1 == tape.sizes.steps, k == 0 and index is not None
        following = None if last or dropping else (hidden_norm, tape.at(tape.normed, k + 1))
        rstd = tape.kernels.norm_forward(
            inner, tape.eps, delta, after, following, (tape.weights.final_norm, state), tape.steps.places[k]
        )
        saved.after.append(after)
        saved.rstd_after.append(rstd)
        if last:
            return
        if dropping:
            after = after[index]
            rstd = tape.kernels.norm_forward(after, tape.eps, first=(hidden_norm, tape.at(tape.normed, k + 1)))
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
        ctx.tape = None  # its buffers are the bulk of the memory
        first = Backward(tape, sums).run(tuple(g.contiguous() for g in grads))
        return None, None, first, *(sums.result(p) for p in tape.weights.all())


def fused_unroll(
    draft: EagleDraft, hidden_SBH: Tensor, batch: Batch, rows: list[Tensor], active: list[Tensor], ends: BaseEnds
) -> list[Tensor]:
    """Supervised rows [R_k, H] of the state that the head reads, for every step; differentiable.

    Args:
        hidden_SBH: state of step 0 ([S / TP, B, H] under sequence parallelism).
        rows: int64 rows (s * B + b) that step k supervises, ascending.
        active: per step, ascending, the rows that some step from it on supervises.
    """
    weights = Weights.of(draft)
    if draft.sequence_parallel:  # every rank finds the whole gradient, so each keeps its rows of it
        hidden_SBH = mappings.gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=False, group=draft.tp_group
        )
    hidden = hidden_SBH.flatten(0, 1).contiguous()
    steps = Steps(rows, active, len(hidden), COMPACT_BELOW)
    tape = Tape(draft, weights, hidden.detach(), batch, steps, ends, Visibility.of(batch))
    states = _FusedUnroll.apply(tape, [len(r) for r in rows], hidden, *weights.all())  # type: ignore[no-untyped-call]
    return list(states)
