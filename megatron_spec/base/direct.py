"""The layers of the frozen base as a short list of products and element-wise operations, without modules or autograd.

Computes what the stage's megatron-core layers compute, on the same weights, with one of three sets of operators: plain
torch (decoding on any device, which is bound by the host: a fraction of the calls per step), fused kernels (half
precision on a GPU, for decoding and training: fewer passes over memory), and fp8 linears (training only). A step of
decoding takes its attention, or whole layers, from `decode_layers.py`.

S sequence, B micro-batch, R = S * B rows, H hidden, N query and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.base.decode_layers import DecodeLayers
from megatron_spec.base.moe import MixtureOfExperts
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.ops import backend
from megatron_spec.ops.attention import attend
from megatron_spec.ops.fp8 import Fp8Matrix, padded
from megatron_spec.ops.overlap import RankSums, Wait
from megatron_spec.ops.rope import apply_rotary, rotary_angles
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import Paths

Norms = tuple[Tensor, Tensor] | None
"""Weights [D] of the RMS norms of each query and each key head, taken before they are rotated."""


class PlainOperators:
    """Plain torch operators, in any dtype. An activation is what `linear` accepts: here, a tensor [R, inputs]."""

    weights_released = False
    """True when the modules have lost their weights and only these operators can run the layers."""

    def __init__(self, config: BaseConfig, heads: int, kv_heads: int) -> None:
        self.config, self.heads, self.kv_heads, self.eps = config, heads, kv_heads, config.rms_norm_eps

    def serves(self, visibility: Visibility) -> bool:
        """True for the forwards that these operators speed up: decoding."""
        return visibility.cache is not None

    def attend(
        self,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor],
        S: int,
        B: int,
        visibility: Visibility,
        layer: int,
        norms: Norms,
    ) -> Tensor:
        """Attention output [R, N * D] of a layer from its projection [R, (N + 2G) * D]."""
        q, k, v = self.split_rotated(qkv, tables, S, B, norms)
        return attend(q, k, v, visibility, layer).reshape(S * B, -1)

    def tables(self, angles_SB1D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) as `split_rotated` expects them."""
        return angles_SB1D.cos().to(dtype)[:, :, None], angles_SB1D.sin().to(dtype)[:, :, None]

    def split_rotated(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], S: int, B: int, norms: Norms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [S, B, N, D] and k [S, B, G, D], rotated, and v [S, B, G, D] of a projection [R, (N + 2G) * D].

        Its columns are those of megatron-core's linear_qkv: per group the queries, the key, the value.
        """
        split = qkv.view(S, B, self.kv_heads, self.heads // self.kv_heads + 2, self.config.head_dim)
        rotated = split[..., :-1, :]
        if norms is not None:
            weights = torch.cat([norms[0].expand(rotated.shape[-2] - 1, -1), norms[1][None]])
            rotated = F.rms_norm(rotated, norms[0].shape, eps=self.eps) * weights
        rotated = apply_rotary(rotated, *tables)
        return rotated[..., :-1, :].flatten(2, 3), rotated[..., -1, :], split[..., -1, :]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """(x + delta, its norm as an activation)."""
        total = x if delta is None else x + delta
        return total, F.rms_norm(total, weight.shape, weight, self.eps)

    def final(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return self.add_norm(x, delta, weight)

    def linear(self, activation: Any, module: Any, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Product with the module's weight, plus a bias, [R, outputs of this rank], written to `out` when given."""
        if out is None:
            return F.linear(activation, module.weight, bias)
        if bias is None:
            return torch.mm(activation, module.weight.t(), out=out)
        return torch.addmm(bias, activation, module.weight.t(), out=out)

    def gated(self, gate_up: Tensor) -> Any:
        """silu(gate) * up as an activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def activation(self, x: Tensor) -> Any:
        """x as an activation."""
        return x


class KernelOperators(PlainOperators):
    """Operators with fused kernels (residual sum and norm, rotary embedding and split of q, k, v, gate), for training
    batches and decoding.

    Args:
        kernels: operators (`ops.backend.load`).
    """

    def __init__(self, config: BaseConfig, heads: int, kv_heads: int, kernels: Any) -> None:
        super().__init__(config, heads, kv_heads)
        self.kernels = kernels

    def serves(self, visibility: Visibility) -> bool:
        """True: training batches and decoding."""
        return True

    def tables(self, angles_SB1D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `PlainOperators.tables`; fp32 [R, D / 2]."""
        angles = angles_SB1D.flatten(0, 2)[:, : self.config.head_dim // 2]
        return angles.cos().contiguous(), angles.sin().contiguous()

    def split_rotated(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], S: int, B: int, norms: Norms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PlainOperators.split_rotated`."""
        N, G, D = self.heads, self.kv_heads, self.config.head_dim
        q, k = qkv.new_empty(S * B, N * D), qkv.new_empty(S * B, G * D)
        self.kernels.rotary_forward(qkv, tables, q, k, None, N, G, grouped=True, norms=norms, eps=self.eps)
        return q.view(S, B, N, D), k.view(S, B, G, D), qkv.view(S, B, G, N // G + 2, D)[:, :, :, -1]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """See `PlainOperators.add_norm`."""
        total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
        self.kernels.norm_forward(x, self.eps, delta, None if delta is None else total, (weight, normed))
        return total, normed

    def final(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `PlainOperators.final`; never in fp8."""
        return KernelOperators.add_norm(self, x, delta, weight)

    def gated(self, gate_up: Tensor) -> Any:
        """See `PlainOperators.gated`."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.kernels.gated_forward(gate_up, out)
        return out


class Fp8Operators(KernelOperators):
    """`KernelOperators` with the four linears of every layer in fp8; norms, attention and residual stream keep dtype.

    The bf16 weights of the linears are released, so the base serves training batches only.
    """

    weights_released = True

    def __init__(self, plain: KernelOperators, layers: list[Any]) -> None:
        super().__init__(plain.config, plain.heads, plain.kv_heads, plain.kernels)
        self.dtype = layers[0].input_layernorm.weight.dtype
        self.weights: dict[int, Any] = {}
        for layer in layers:
            attention, mlp = layer.self_attention, layer.mlp
            for module in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
                self.weights[id(module)] = Fp8Matrix.of_weight(module.weight.data)
                module.weight.data = module.weight.data.new_empty(0)

    def serves(self, visibility: Visibility) -> bool:
        """True for training batches; `FrozenBase` refuses the rest."""
        return visibility.cache is None

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Any]:
        """See `PlainOperators.add_norm`."""
        total = x if delta is None else torch.empty_like(x)
        return total, self.kernels.quantized_norm(x, delta, None if delta is None else total, weight, self.eps)

    def linear(self, activation: Any, module: Any, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See `PlainOperators.linear`."""
        found: Tensor = self.kernels.product(activation, self.weights[id(module)], self.dtype, out=out)
        return found if bias is None else found.add_(bias)

    def gated(self, gate_up: Tensor) -> Any:
        """See `PlainOperators.gated`."""
        return self.kernels.quantized_gate(gate_up)

    def activation(self, x: Tensor) -> Any:
        """See `PlainOperators.activation`."""
        return self.kernels.quantize(x)


def _experts(layer: Any) -> torch.nn.Module:
    """The layer's mixture of experts; an empty module for a dense layer."""
    return layer.mlp if isinstance(layer.mlp, MixtureOfExperts) else torch.nn.Module()


class DirectForward:
    """Forward of one stage's layers.

    Under tensor parallelism the rows of a training batch go through a layer in two pieces, so that the sums over ranks
    of one run beside the products of the other (`ops/overlap.py`). Under sequence parallelism the layers have all rows,
    since a forward without gradients keeps no activations: only what comes in and goes out is sharded.

    Args:
        layers: megatron-core TransformerLayers with this package's local spec.
        final_norm: weight of the final norm on the last stage.
        paths: fast paths of the base, with `base_direct` on.
    """

    def __init__(
        self, config: BaseConfig, layers: list[Any], final_norm: Tensor | None, tp: dist.ProcessGroup, paths: Paths
    ) -> None:
        self.config, self.layers, self.final_norm, self.tp = config, layers, final_norm, tp
        self.sums = RankSums(tp)
        self.sequence_parallel = paths.setting.parallel.sequence_parallel
        heads = (config.num_attention_heads // tp.size(), config.num_key_value_heads // tp.size())
        kind = paths.kernels("base_direct")
        self.operators: PlainOperators = PlainOperators(config, *heads)
        if kind != "none":
            self.operators = KernelOperators(config, *heads, backend.load(kind))
        kind = paths.kernels("decode_kernels")
        self.decode: DecodeLayers | None = None
        if kind != "none":
            self.decode = DecodeLayers(config, heads, backend.load(kind), paths.on("decode_products"))
        experts = {m for layer in layers for m in _experts(layer).modules()}  # run as modules, hooks included
        self._parts = [m for layer in layers for m in layer.modules() if m not in experts]

    def untouched(self) -> bool:
        """True if no module has hooks (quantisers, observers), which bypassing the modules would skip."""
        return not any(m._forward_pre_hooks or m._forward_hooks for m in self._parts)

    def can_run(self, visibility: Visibility) -> bool:
        """True if the operators serve this forward and no module has hooks."""
        return self.operators.serves(visibility) and self.untouched()

    @torch.no_grad()
    def __call__(
        self, hidden_SBH: Tensor, positions_BS: Tensor, inv_freq: Tensor, captured: Collection[int],
        visibility: Visibility | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run all layers.

        Args:
            captured: indices in `layers` of the outputs to capture.
            visibility: key visibility; default: causal.

        Returns:
            (state after the last layer and, on the last stage, the final norm; captured outputs), all [S, B, H]
            ([S / TP, B, H], as `hidden_SBH`, under sequence parallelism).
        """
        (_, B, H), do = hidden_SBH.shape, self.operators
        hidden_SBH = self._all_rows(hidden_SBH)
        visibility, S = visibility or Visibility.causal(), len(hidden_SBH)
        angles, whole, recorded = rotary_angles(positions_BS, inv_freq), hidden_SBH.reshape(S * B, H), []
        decode = self.decode if self.decode is not None and self.decode.serves(visibility) else None
        if decode is not None and decode.whole(visibility):
            return self._few_rows(decode, whole, decode.tables(angles), captured, visibility)
        tables = do.tables(angles, hidden_SBH.dtype) if decode is None else decode.tables(angles)
        parts = self._pieces(S * B, visibility)
        x = [whole[part] for part in parts]
        delta: list[Wait | None] = [None] * len(parts)
        for i, layer in enumerate(self.layers):
            x, qkv = self._projected(x, delta, layer, parts, decode is None)
            if i - 1 in captured:
                recorded.append(self._own_rows(x, B))
            attention = layer.self_attention
            if decode is not None:
                attended = decode.attend(qkv, attention, tables, visibility, i)
            else:
                attended = do.attend(qkv, tables, S, B, visibility, i, self._head_norms(attention))
            delta = [self._summed(do.activation(attended[part]), attention.linear_proj) for part in parts]
            for n, summed in enumerate(delta):
                assert summed is not None
                x[n], normed = do.add_norm(x[n], summed(), layer.pre_mlp_layernorm.weight)
                delta[n] = self._mlp(layer.mlp, normed, S)
        x, out = self._last(x, delta)
        if len(self.layers) - 1 in captured:
            recorded.append(self._own_rows(x, B))
        return self._own_rows(out, B), recorded

    def _few_rows(
        self, decode: DecodeLayers, x_RH: Tensor, tables: tuple[Tensor, Tensor], captured: Collection[int],
        visibility: Visibility,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """`__call__` for few rows over a cache."""
        assert visibility.slots_BS is not None
        (B, S), recorded, x = visibility.slots_BS.shape, [], x_RH
        for i, layer in enumerate(self.layers):
            x = decode.layer(layer, x, tables, visibility, i)
            if i in captured:
                recorded.append(x.view(S, B, -1))
        out = x if self.final_norm is None else self.operators.final(x, None, self.final_norm)[1]
        return out.view(S, B, -1), recorded

    def _pieces(self, rows: int, visibility: Visibility) -> list[slice]:
        dense = visibility.cache is None and self.config.moe is None
        return self.sums.pieces(rows) if dense else [slice(0, rows)]

    def _projected(
        self, x: list[Tensor], delta: list[Wait | None], layer: Any, parts: list[slice], biased: bool
    ) -> tuple[list[Tensor], Tensor]:
        """(input of a layer in pieces, its projection [R, (N + 2G) * D], with its bias if `biased`)."""
        do, linear, weight = self.operators, layer.self_attention.linear_qkv, layer.input_layernorm.weight
        width = (do.heads + 2 * do.kv_heads) * self.config.head_dim
        found, qkv = [], None
        for piece, summed, part in zip(x, delta, parts, strict=True):
            total, normed = do.add_norm(piece, None if summed is None else summed(), weight)
            found.append(total)
            if len(parts) > 1 and qkv is None:
                qkv = total.new_empty(parts[-1].stop, width)
            out = do.linear(normed, linear, linear.bias if biased else None, None if qkv is None else qkv[part])
        return found, out if qkv is None else qkv

    def _last(self, x: list[Tensor], delta: list[Wait | None]) -> tuple[list[Tensor], list[Tensor]]:
        """(state after the last layer, the same after the final norm on the last stage), in pieces."""
        sums = [None if summed is None else summed() for summed in delta]
        if self.final_norm is None:
            x = [a if b is None else a + b for a, b in zip(x, sums, strict=True)]
            return x, x
        both = [self.operators.final(a, b, self.final_norm) for a, b in zip(x, sums, strict=True)]
        return [a for a, _ in both], [b for _, b in both]

    def _all_rows(self, hidden_SBH: Tensor) -> Tensor:
        if not self.sequence_parallel or self.tp.size() == 1:
            return hidden_SBH
        whole = hidden_SBH.new_empty(self.tp.size() * len(hidden_SBH), *hidden_SBH.shape[1:])
        dist.all_gather_into_tensor(whole, hidden_SBH.contiguous(), group=self.tp)
        return whole

    def _own_rows(self, x: list[Tensor], B: int) -> Tensor:
        """[S, B, H] of pieces; this rank's rows under sequence parallelism."""
        whole = (torch.cat(x) if len(x) > 1 else x[0]).unflatten(0, (-1, B))
        if not self.sequence_parallel or self.tp.size() == 1:
            return whole
        return whole.chunk(self.tp.size())[self.tp.rank()].clone()  # does not keep the other rows

    def _mlp(self, mlp: Any, normed: Any, S: int) -> Wait:
        """[R, H] output of a dense MLP by the operators, or of experts by their modules."""
        if isinstance(mlp, MixtureOfExperts):
            mixed: Tensor = mlp(normed.view(S, -1, normed.shape[-1]))[0]
            return lambda: mixed.flatten(0, 1)
        gate_up = self.operators.linear(normed, mlp.linear_fc1, mlp.linear_fc1.bias)
        return self._summed(self.operators.gated(gate_up), mlp.linear_fc2)

    def _head_norms(self, attention: Any) -> Norms:
        return (attention.q_layernorm.weight, attention.k_layernorm.weight) if self.config.qk_norm else None

    def _summed(self, activation: Any, module: Any) -> Wait:
        """Output of a row-parallel module: partial products summed over ranks, plus the replicated bias."""
        if self.tp.size() == 1:
            out = self.operators.linear(activation, module, module.bias)
            return lambda: out
        wait = self.sums.start(self.operators.linear(activation, module, None))
        return wait if module.bias is None else lambda: wait().add_(module.bias)


def run_in_fp8(base: Any) -> None:
    """Convert the linears of a loaded `FrozenBase` to fp8 (E4M3), in place: twice the arithmetic rate, half the memory.

    Scales are per output channel for weights and per row for activations, computed on the fly. Head and embedding are
    unchanged; the teacher reads a copy of the head in fp8 where the path `teacher_fp8` is on. The path `base_fp8` must
    be available (`paths.check` raises what blocks it).

    Raises:
        UserError: the base has fake quantisers or layers of its own.
    """
    paths: Paths = base.paths.asked_for("base_fp8")
    paths.check()
    direct: DirectForward | None = base.direct
    if direct is None or not direct.can_run(Visibility.causal()):
        raise UserError("--base-fp8: this base has fake quantisers, or layers of its own; leave --base-fp8 out")
    assert isinstance(direct.operators, KernelOperators)
    kernels = direct.operators.kernels
    direct.operators, base.paths = Fp8Operators(direct.operators, direct.layers), paths
    if paths.on("teacher_fp8"):
        head = base.head_weight[: base.vocab_size]
        base.head_fp8 = kernels.quantize(F.pad(head, (0, 0, 0, padded(len(head)) - len(head))))


def reads_by_sequence(direct: DirectForward | None) -> bool:
    """True if a step of decoding reads as much of the cache as each sequence has, whatever the longest one has."""
    return direct is not None and direct.decode is not None and direct.untouched()
