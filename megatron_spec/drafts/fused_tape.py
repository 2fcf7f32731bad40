"""Shared by forward and backward of the fused unroll: sizes, weights and saved buffers.

S sequence, B micro-batch, R rows (s * B + b), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn

from megatron_spec.batch import Batch
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.drafts.unroll_steps import Steps, TokenRows
from megatron_spec.ops import backend
from megatron_spec.ops.overlap import Wait
from megatron_spec.ops.visibility import Visibility
from megatron_spec.ops.weight_products import WeightProducts
from megatron_spec.planning.unroll_memory import ROWS_AT_ONCE, keeps_gates

if TYPE_CHECKING:
    from megatron_spec.drafts.eagle3 import EagleDraft


@dataclass
class Weights:
    """Parameters in the order in which autograd receives them."""

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
    def of(draft: EagleDraft) -> Weights:
        """The parameters of a draft of one layer."""
        layer = draft.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        return Weights(
            layer.input_layernorm.weight, layer.hidden_norm.weight, attention.q_proj.weight, attention.k_proj.weight,
            attention.v_proj.weight, attention.o_proj.weight, layer.post_attention_layernorm.weight,
            mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, draft.norm.weight,
        )  # fmt: skip

    def all(self) -> list[nn.Parameter]:
        """All parameters in the order of the fields."""
        return list(vars(self).values())


@dataclass(frozen=True)
class Sizes:
    """Sizes of one micro-batch on this rank; heads and intermediate columns are this rank's."""

    batch: int
    rows: int
    """Rows of all sequences on this rank."""
    steps: int
    hidden: int
    embedding: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(draft: EagleDraft, batch: Batch, steps: Steps) -> Sizes:
        """From a draft and a micro-batch."""
        config, ranks = draft.config, draft.tp_group.size()
        return Sizes(
            len(batch.tokens_BS), steps.R, steps.T, config.hidden_size, config.target_hidden_size,
            config.intermediate_size // ranks, config.num_attention_heads // ranks, config.num_key_value_heads // ranks,
            config.head_dim,
        )  # fmt: skip

    @property
    def q_width(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key or of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection."""
        return self.q_width + 2 * self.kv_width


def round_(linear: Any, x: Tensor) -> Tensor:
    """x, fake-quantised in place like the linear's input."""
    quantizer = linear.input_quantizer
    return x if quantizer is None else quantizer.round_(x)  # type: ignore[no-any-return]


@dataclass
class Saved:
    """Saved for the backward, one entry per step."""

    before: list[Tensor]
    """Input state of a step; `after`: its output state. `before` of a step is `after` of the previous one, less dropped
    rows."""
    after: list[Tensor] = field(default_factory=list)
    rstd_before: list[Tensor] = field(default_factory=list)
    """Reciprocal root mean squares of the norms over `before`, `inner` and `after`."""
    rstd_inner: list[Tensor] = field(default_factory=list)
    rstd_after: list[Tensor] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    """Logsumexp of the merged attention."""
    attention: list[tuple[Tensor, ...]] = field(default_factory=list)
    """State of the attention kernel for its backward."""


class Tape:
    """Modules, sizes and buffers of one micro-batch; buffers over all steps are ordered as in `Steps`."""

    def __init__(
        self, draft: EagleDraft, weights: Weights, hidden_RH: Tensor, batch: Batch, steps: Steps, ends: BaseEnds,
        visibility: Visibility,
    ) -> None:  # fmt: skip
        layer = draft.midlayer
        self.attention: Any = layer.self_attn
        self.mlp: Any = layer.mlp
        self.kernels: Any = backend.load(draft.paths.kernels("draft_fused"))
        self.weights, self.visibility, self.eps, self.steps = weights, visibility, draft.config.rms_norm_eps, steps
        self.tp, self.sequence_parallel, self.sums = draft.tp_group, draft.sequence_parallel, draft.sums
        self.sizes = sizes = Sizes.of(draft, batch, steps)
        self.like: dict[str, Any] = {"dtype": hidden_RH.dtype, "device": hidden_RH.device}
        total = steps.span(0, sizes.steps).stop
        self.normed, self.inner, self.post = (self.empty(total, sizes.hidden) for _ in range(3))
        self.q, self.out = (self.empty(total, sizes.q_width) for _ in range(2))
        self.groups = steps.groups(ROWS_AT_ONCE)
        """(start, end) of the steps whose weight gradients are one product, in the order of the backward; those of
        gate and up alone where `early`."""
        self.early = self.sums.beside_gradients
        """The other weight gradients (o, down, q, k, v) are products of one step, beside sums over ranks."""
        self.most = max(steps.span(*g).stop - steps.span(*g).start for g in self.groups)
        self.keeps_gates = keeps_gates(total, sizes.intermediate, hidden_RH.element_size())
        self.gate_up = self.empty(total if self.keeps_gates else self.most, 2 * sizes.intermediate)
        self.trunk = [self.empty(sizes.rows, sizes.kv_width) for _ in range(2)]
        """Keys and values of step 0, of this rank's rows."""
        self.whole_trunk = self.trunk
        """The same of the full sequence, from step 0 on (`share_trunk`)."""
        self.branches = [self.empty(sizes.steps - 1, steps.later, sizes.kv_width) for _ in range(2)]
        self.saved = Saved([hidden_RH])
        self.tables = [self._tables(draft, batch, k) for k in range(sizes.steps)]
        self.token_rows = TokenRows(steps, batch)
        self.embedding = self._embedding(ends, batch.tokens_BS).to(hidden_RH.dtype)
        self.normed_embedding = torch.empty_like(self.embedding)
        self.rstd_embedding: Tensor = self.embedding
        self._project(self.kernels if draft.paths.on("draft_fp8") else None)

    def _project(self, fp8: Any) -> None:
        """Weights in the form of the products: q, k and v fused, split into an embedding half and a state half."""
        qkv = [
            linear.quantized_weight().detach()
            for linear in (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        ]
        width, mlp = self.sizes.embedding, self.mlp
        self.qkv_embedding = torch.cat([part[:, :width] for part in qkv])
        gate, up, down, o = (
            linear.quantized_weight().detach()
            for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj, self.attention.o_proj)
        )
        self.qkv_product = WeightProducts(torch.cat([part[:, width:] for part in qkv]), fp8)
        self.gate_up_product = WeightProducts(torch.cat([gate, up]), fp8)
        self.o_product, self.down_product = WeightProducts(o, fp8), WeightProducts(down, fp8)

    def _embedding(self, ends: BaseEnds, tokens_BS: Tensor) -> Tensor:
        """[N * B, embedding] of the tokens in `token_rows`."""
        sizes, places = self.sizes, self.token_rows.tokens_N
        rows = len(places)
        extra = -rows % self.tp.size() if self.sequence_parallel else 0
        tokens = torch.nn.functional.pad(tokens_BS, (0, sizes.steps)).index_select(1, places)
        embedded = ends.embed(torch.nn.functional.pad(tokens, (0, extra)))
        if self.sequence_parallel:
            embedded = mappings.gather_from_sequence_parallel_region(embedded.contiguous(), group=self.tp)
        return embedded[:rows].reshape(-1, sizes.embedding)

    def _tables(self, draft: EagleDraft, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """fp32 (cos, sin) [rows, D / 2] of step k."""
        positions, index = batch.local(batch.positions_BS).t().flatten(), self.steps.compacted(k)
        positions = positions if index is None else positions[index]
        angles = (positions + k)[:, None].float() * draft.inv_freq_on(positions.device)
        return angles.cos(), angles.sin()

    def empty(self, *shape: int) -> Tensor:
        """A buffer in the dtype and on the device of the states."""
        return torch.empty(*shape, **self.like)

    def summed(self, x: Tensor) -> Tensor:
        """x, summed over tensor parallel ranks in place."""
        return self.start_sum(x)()

    def start_sum(self, x: Tensor) -> Wait:
        """Start to sum x over tensor parallel ranks, in place."""
        return self.sums.start(x)

    def at(self, x: Tensor, k: int) -> Tensor:
        """The rows of step k in a buffer over all steps."""
        return x[self.steps.span(k, k + 1)]

    def gates(self, k: int) -> Tensor:
        """Where the forward of step k puts the outputs of gate and up, which the next step overwrites unless they are
        kept."""
        return self.at(self.gate_up, k) if self.keeps_gates else self.gate_up[: self.steps.count(k)]

    def keys_values(self, trunk: list[Tensor], branches: list[Tensor], k: int) -> tuple[Tensor, Tensor]:
        """Keys and values of step k: the trunk's for step 0, else those of its branch."""
        return (trunk[0], trunk[1]) if k == 0 else (branches[0][k - 1], branches[1][k - 1])

    def share_trunk(self) -> None:
        """Gather the trunk of the full sequence under context parallelism: once, for all steps."""
        context = self.visibility.context
        if context is not None:
            self.whole_trunk = [wait() for wait in [context.whole(self._by_sequence(x)) for x in self.trunk]]

    def own_trunk(self, d_trunk: list[Tensor]) -> list[Tensor]:
        """Gradients of this rank's trunk, from those of the full sequence on every rank."""
        context = self.visibility.context
        return d_trunk if context is None else [context.own_sum(self._by_sequence(x)).flatten(0, 1) for x in d_trunk]

    def _by_sequence(self, x_RX: Tensor) -> Tensor:
        return x_RX.view(-1, self.sizes.batch, x_RX.shape[-1])

    def by_heads(self, x_RX: Tensor) -> Tensor:
        """Rows [R, heads * D] as [B, S, heads, D]."""
        return x_RX.view(-1, self.sizes.batch, x_RX.shape[-1] // self.sizes.head_dim, self.sizes.head_dim).transpose(
            0, 1
        )

    def spread(self, x: Tensor, k: int) -> Tensor:
        """Rows of step k as [B, S, heads, D], zero at dropped rows."""
        index = self.steps.compacted(k)
        if index is None:
            return self.by_heads(x)
        return self.by_heads(x.new_zeros(self.sizes.rows, x.shape[1]).index_copy_(0, index, x))

    def attended(self, start: int, end: int) -> Tensor:
        """Input of the output projection in steps start..end-1. `out` is unchanged, for the backward of attention."""
        out, linear = self.out[self.steps.span(start, end)], self.attention.o_proj
        return out if linear.input_quantizer is None else round_(linear, out.clone())
