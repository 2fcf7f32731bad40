"""Hand-written backward of the fused unroll (`fused_unroll.py`), over the buffers of its forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_spec.drafts.fused_tape import Tape, round_
from megatron_spec.ops import attention
from megatron_spec.ops.overlap import Wait
from megatron_spec.ops.products import GradientSums, add_product


@dataclass
class Above:
    """What step k + 1 sends to the state of step k.

    Attributes:
        residual: gradient along the residual.
        d_normed: waits for the gradient of the normed state; None: it is part of `residual`.
    """

    residual: Tensor
    d_normed: Wait | None


class Backward:
    """Gradients of one micro-batch, from the last step to the first.

    Args:
        tape: tape of the forward; its `gate_up` is overwritten.
        sums: accumulates weight gradients.
    """

    def __init__(self, tape: Tape, sums: GradientSums) -> None:
        self.tape, self.sums = tape, sums
        sizes, steps, weights = tape.sizes, tape.steps, tape.weights
        rows = sizes.rows if tape.early else tape.most  # of a step, or of a group of steps
        self.d_after, self.d_inner = (tape.empty(rows, sizes.hidden) for _ in range(2))
        self.gated = tape.empty(rows, sizes.intermediate)
        self.d_qkv = tape.empty(steps.span(0, sizes.steps).stop, sizes.qkv_width)
        self.d_trunk = [
            torch.empty(x.numel() // sizes.kv_width, sizes.kv_width, dtype=torch.float32, device=x.device)
            for x in tape.whole_trunk
        ]
        self.d_branches = [torch.empty_like(x, dtype=torch.float32) for x in tape.branches]
        self.d_gated = tape.empty(sizes.rows, sizes.intermediate)
        self.d_normed = tape.empty(sizes.rows, sizes.hidden)
        norms = (weights.hidden_norm, weights.post_norm, weights.final_norm)
        self.norms = {p: tape.kernels.norm_partials(sizes.hidden, tape.q.device) for p in norms}

    def run(self, grad_states: tuple[Tensor, ...]) -> Tensor:
        """Gradient of the first hidden state, given those of the LM head's inputs."""
        tape, above = self.tape, None
        # partial gradients from each rank's shard of the LM head, summed in their own memory one step ahead: sums run
        # one after the other, and those of a step must not wait for all of these
        state = tape.start_sum(grad_states[-1])
        for start, end in tape.groups:
            for k in reversed(range(start, end)):
                first, d_state = tape.steps.span(start, k).stop - tape.steps.span(start, k).start, state()
                if k > 0:
                    state = tape.start_sum(grad_states[k - 1])
                above = self._step(k, slice(first, first + tape.steps.count(k)), d_state, above)
            self._weight_gradients(start, end)
        assert above is not None
        out = torch.empty_like(tape.saved.before[0])
        self._into_before(0, above, out)
        self._embedding_gradients()
        # Under sequence parallelism the trainer sums norm gradients over ranks, but here each rank has the full one.
        once = not tape.sequence_parallel or tape.tp.rank() == 0
        for parameter, partial in self.norms.items():
            self.sums.of(parameter).add_(partial.sum(0), alpha=int(once))
        return out

    def _step(self, k: int, part: slice, d_state: Tensor, above: Above | None) -> Above:
        """Backward of one step; `part` is its slice of the group's buffers."""
        tape, count = self.tape, self.tape.steps.count(k)
        own = slice(0, count) if tape.early else part
        d_after, d_inner, gated = self.d_after[own], self.d_inner[own], self.gated[own]
        d_normed, gate_up = self.d_normed[:count], self._gates(k, part)
        self._into_after(k, d_state, self._reaching(k, above), d_after)
        d_gated = tape.down_product.backward(d_after, out=self.d_gated[:count])
        tape.kernels.gated_backward(gate_up, d_gated, gated)
        round_(tape.mlp.down_proj, gated)
        summed = tape.start_sum(tape.gate_up_product.backward(gate_up, out=d_normed))
        if tape.early:
            self._down_gradient(own)
        self._into_inner(k, summed(), d_after, d_inner)
        self._attention(k, tape.o_product.backward(d_inner, out=torch.empty_like(tape.at(tape.q, k))))
        summed = tape.start_sum(tape.qkv_product.backward(tape.at(self.d_qkv, k), out=d_normed))
        if tape.early:
            self._attention_gradients(k, k + 1, own)
        return Above(d_inner, summed)

    def _gates(self, k: int, part: slice) -> Tensor:
        """Outputs of gate and up in step k, which their gradient will overwrite."""
        tape = self.tape
        if tape.keeps_gates:
            return tape.at(tape.gate_up, k)
        return tape.gate_up_product.forward(tape.at(tape.post, k), out=tape.gate_up[part])

    def _into_before(self, k: int, above: Above, out: Tensor) -> None:
        """Gradient of the input state of step k: along the residual and through the norm."""
        tape = self.tape
        assert above.d_normed is not None
        first = (above.d_normed(), tape.weights.hidden_norm, self.norms[tape.weights.hidden_norm])
        before, rstd = tape.saved.before[k], tape.saved.rstd_before[k]
        tape.kernels.norm_backward(before, rstd, out, first, add_RH=above.residual)

    def _reaching(self, k: int, above: Above | None) -> Above | None:
        """What reaches the rows of step k; where step k + 1 had fewer rows, the gradient of the state it kept."""
        index = self.tape.steps.index
        if above is None or k > 0 or index is None:
            return above
        kept = torch.empty_like(above.residual)
        self._into_before(1, above, kept)
        return Above(kept.new_zeros(self.tape.sizes.rows, kept.shape[1]).index_copy_(0, index, kept), None)

    def _into_after(self, k: int, d_state: Tensor, above: Above | None, out: Tensor) -> None:
        """Gradient of the output state of step k: from the LM head and from step k + 1."""
        tape, weights, first = self.tape, self.tape.weights, None
        if above is not None and above.d_normed is not None:
            first = (above.d_normed(), weights.hidden_norm, self.norms[weights.hidden_norm])
        second = (d_state, weights.final_norm, self.norms[weights.final_norm])
        tape.kernels.norm_backward(
            tape.saved.after[k], tape.saved.rstd_after[k], out, first, second, tape.steps.places[k],
            None if above is None else above.residual,
        )  # fmt: skip

    def _into_inner(self, k: int, d_normed: Tensor, d_after: Tensor, out: Tensor) -> None:
        """Gradient of the state between attention and MLP."""
        tape, norm = self.tape, self.tape.weights.post_norm
        first = (d_normed, norm, self.norms[norm])
        tape.kernels.norm_backward(tape.at(tape.inner, k), tape.saved.rstd_inner[k], out, first, add_RH=d_after)

    def _attention(self, k: int, d_out: Tensor) -> None:
        tape, sizes, saved = self.tape, self.tape.sizes, self.tape.saved
        index, q, out = tape.steps.compacted(k), tape.at(tape.q, k), tape.at(tape.out, k)
        last = k == sizes.steps - 1
        key, value = (tape.by_heads(x) for x in tape.whole_trunk)
        dq0, *trunk = attention.backward(
            tape.spread(d_out, k), tape.spread(q, k), key, value, tape.spread(out, k), saved.lse[k].transpose(1, 2),
            saved.attention[k], tape.visibility,
        )  # fmt: skip
        for total, part in zip(self.d_trunk, trunk, strict=True):
            if last:
                tape.by_heads(total).copy_(part)
            else:
                tape.by_heads(total).add_(part)
        dq = torch.empty_like(q)
        tape.kernels.merge_backward(
            q, out, d_out, saved.lse[k], tape.branches[0][:k], tape.branches[1][:k], dq0, dq, *self.d_branches, last,
            index,
        )  # fmt: skip
        own = tape.own_trunk(self.d_trunk) if k == 0 else self.d_trunk
        dk, dv = tape.keys_values(own, self.d_branches, k)
        tape.kernels.rotary_backward(dq, dk, dv, tape.tables[k], tape.at(self.d_qkv, k), sizes.heads, sizes.kv_heads)

    def _weight_gradients(self, start: int, end: int) -> None:
        """Weight gradients of steps start..end-1 that were not computed beside sums, one product per weight."""
        tape, sums, weights = self.tape, self.sums, self.tape.weights
        span, width = tape.steps.span(start, end), tape.sizes.intermediate
        rows = slice(0, span.stop - span.start)
        d_gate_up = tape.gate_up[span if tape.keeps_gates else rows].t()
        add_product(sums.of(weights.gate), d_gate_up[:width], tape.post[span])
        add_product(sums.of(weights.up), d_gate_up[width:], tape.post[span])
        if not tape.early:
            self._down_gradient(rows)
            self._attention_gradients(start, end, rows)

    def _down_gradient(self, rows: slice) -> None:
        """Of the steps that have these rows of the buffers."""
        add_product(self.sums.of(self.tape.weights.down), self.d_after[rows].t(), self.gated[rows])

    def _attention_gradients(self, start: int, end: int, rows: slice) -> None:
        """Of o and of the state's half of q, k and v, in steps start..end-1, which have these rows of the
        buffers."""
        tape, sums, span = self.tape, self.sums, self.tape.steps.span(start, end)
        add_product(sums.of(tape.weights.o), self.d_inner[rows].t(), tape.attended(start, end))
        for parameter, columns in self._qkv_columns():
            target = sums.of(parameter)[:, tape.sizes.embedding :]
            add_product(target, self.d_qkv[span][:, columns].t(), tape.normed[span])

    def _qkv_columns(self) -> list[tuple[nn.Parameter, slice]]:
        weights, q, kv = self.tape.weights, self.tape.sizes.q_width, self.tape.sizes.kv_width
        return [(weights.q, slice(0, q)), (weights.k, slice(q, q + kv)), (weights.v, slice(q + kv, q + 2 * kv))]

    def _embedding_gradients(self) -> None:
        """Gradients of the embedding half of q, k and v, once for all steps."""
        tape, sizes, norm = self.tape, self.tape.sizes, self.tape.weights.input_norm
        steps, rows = tape.steps, tape.token_rows
        d_projected = tape.kernels.shifted_sum(
            self.d_qkv, sizes.rows, steps.later, sizes.steps, sizes.batch, rows.steps_later, rows.steps_first
        )  # fmt: skip
        for parameter, columns in self._qkv_columns():
            target = self.sums.of(parameter)[:, : sizes.embedding]
            add_product(target, d_projected[:, columns].t(), tape.normed_embedding)
        partial = tape.kernels.norm_partials(sizes.embedding, d_projected.device)
        first = (d_projected @ tape.qkv_embedding, norm, partial)
        tape.kernels.norm_backward(tape.embedding, tape.rstd_embedding, None, first)
        own = partial.sum(0)
        self.sums.of(norm).add_(own if tape.sequence_parallel else tape.summed(own))
