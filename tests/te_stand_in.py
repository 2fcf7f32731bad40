"""Plain PyTorch with the interfaces of Transformer Engine 2.20 and of megatron-core's wrappers, which need a GPU.

Names, shapes and arguments are those of the real ones (wrappers: megatron-core 0.16 to 0.19): what is not there fails.
They differ from torch's modules where the real ones do, so that a caller who ignores their rules fails: 8-bit products
need rows and widths that are multiples of 16, a linear takes contiguous rows in the dtype of its weight, and no module
takes zero rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

calls: list[tuple[str, int, bool]] = []
"""(module, rows, in 8 bits) of every call: "linear" and "norm" of a draft, "base" for a linear of megatron-core's."""
autocasts: list[bool] = []
"""Contexts of fp8 that are open, the innermost last."""


# transformer_engine.pytorch


class Linear(nn.Module):
    """See Transformer Engine; without collectives."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: Any,
        init_method: Callable[[Tensor], Any],
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        init_method(self.weight)
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # type: ignore[attr-defined]

    def get_extra_state(self) -> Tensor:
        """The real modules put their scales into every state dict."""
        return torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T; in 8 bits, of both rounded to 1/128 of their largest magnitude."""
        assert x.dtype == self.weight.dtype and x.is_contiguous()
        _check_rows(x)
        eight = bool(autocasts) and autocasts[-1]
        calls.append(("linear", len(x), eight))
        if not eight:
            return F.linear(x, self.weight)
        assert len(x) % 16 == 0 and all(n % 16 == 0 for n in self.weight.shape)
        return F.linear(_coarse(x), _coarse(self.weight))


def _check_rows(x: Tensor) -> None:
    if not x.numel():
        raise RuntimeError("CheckOutputTensor: Assertion failed. Output is not allocated!")  # as the real ones say


def _coarse(x: Tensor) -> Tensor:
    unit = x.detach().abs().amax().clamp(min=1e-6) / 128
    return x + ((x.detach() / unit).round() * unit - x.detach())


class RMSNorm(nn.Module):
    """See Transformer Engine."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, dtype=dtype, device=device)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight."""
        _check_rows(x)
        calls.append(("norm", x.shape[:-1].numel(), False))
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


@contextmanager
def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
    """See Transformer Engine."""
    assert recipe is not None
    autocasts.append(enabled)
    try:
        yield
    finally:
        autocasts.pop()


def is_fp8_available(return_reason: bool) -> tuple[bool, str]:
    """As that of Transformer Engine on a GPU that has it."""
    assert return_reason
    return True, ""


class GroupedLinear(nn.Module):
    """See Transformer Engine."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool = True,
        params_dtype: torch.dtype | None = None, device: str = "cuda",
    ) -> None:  # fmt: skip
        super().__init__()
        assert device == "meta"
        self.use_bias, self.count = bias, num_gemms
        for i in range(num_gemms):
            empty = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", nn.Parameter(empty))
            if bias:
                self.register_parameter(f"bias{i}", nn.Parameter(empty[:, 0].clone()))
            else:
                setattr(self, f"bias{i}", torch.empty(0, device=device))

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        """[P, in] -> [P, out]."""
        assert len(m_splits) == self.count and sum(m_splits) == len(inp)
        _check_rows(inp)
        biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.count)]
        outputs = [F.linear(x, getattr(self, f"weight{i}"), biases[i]) for i, x in enumerate(inp.split(m_splits))]
        return torch.cat(outputs)


PYTORCH = SimpleNamespace(
    Linear=Linear, RMSNorm=RMSNorm, GroupedLinear=GroupedLinear, autocast=autocast, is_fp8_available=is_fp8_available
)


# megatron.core.extensions.transformer_engine


def _parameter(config: Any, *shape: int) -> nn.Parameter:
    device = "meta" if config.init_model_with_meta_device else "cpu"
    return nn.Parameter(torch.full(shape, torch.nan, dtype=config.params_dtype, device=device))


class _Linear(nn.Module):
    """The linear without its norm. `parallel_mode` is that of Transformer Engine: experts do not communicate."""

    def __init__(
        self, inputs: int, outputs: int, mode: str, config: Any, bias: bool, skip_bias_add: bool, is_expert: bool,
        tp_group: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self._tp_group, self.is_first_microbatch = config, tp_group, True
        self.mode, self.communicates = mode, not is_expert and mode != "duplicated"
        ranks = 1 if mode == "duplicated" else tp_group.size()
        outputs, inputs = (outputs // ranks, inputs) if mode == "column" else (outputs, inputs)
        inputs = inputs // ranks if mode == "row" else inputs
        self.weight = _parameter(config, outputs, inputs)
        self.te_return_bias = skip_bias_add and bias
        self.bias = _parameter(config, outputs) if bias else torch.empty(0)
        self.sequence_parallel = config.sequence_parallel and ranks > 1

    def product(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, bias that is left to the caller)."""
        _check_rows(x)
        calls.append(("base", x.shape[:-1].numel(), False))
        self.is_first_microbatch = False
        bias = self.bias if isinstance(self.bias, nn.Parameter) else None
        if self.communicates and self.mode == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self._tp_group)
        y = F.linear(x, self.weight)
        if self.communicates and self.mode == "row":
            reduce = mappings.reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                reduce = mappings.reduce_scatter_to_sequence_parallel_region
            y = reduce(y, group=self._tp_group)
        if self.te_return_bias:
            return y, bias
        return (y if bias is None else y + bias), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Place in a distributed checkpoint."""
        axes = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}[self.mode]
        own = self.state_dict(prefix="", keep_vars=True)
        group: Any = (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets, tp_group=self._tp_group, dp_cp_group=group
        )


class TELinear(_Linear):
    """See megatron-core."""

    def __init__(
        self, input_size: int, output_size: int, *, parallel_mode: str, config: Any, init_method: Any, bias: bool,
        skip_bias_add: bool, skip_weight_param_allocation: bool, is_expert: bool = False, tp_group: Any = None,
    ) -> None:  # fmt: skip
        assert not skip_weight_param_allocation and callable(init_method)
        assert (parallel_mode == "duplicated") == (tp_group is None)
        super().__init__(input_size, output_size, parallel_mode, config, bias, skip_bias_add, is_expert, tp_group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, bias)."""
        return self.product(x)


class TEColumnParallelLinear(TELinear):
    """See megatron-core."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, gather_output: bool, bias: bool,
        skip_bias_add: bool, is_expert: bool, skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None, tp_group: Any = None, stride: int = 1, name: str | None = None,
    ) -> None:  # fmt: skip
        assert not gather_output
        super().__init__(
            input_size, output_size, parallel_mode="column", config=config, init_method=init_method, bias=bias,
            skip_bias_add=skip_bias_add, skip_weight_param_allocation=skip_weight_param_allocation,
            is_expert=is_expert, tp_group=tp_group,
        )  # fmt: skip


class TERowParallelLinear(TELinear):
    """See megatron-core."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool, input_is_parallel: bool,
        skip_bias_add: bool, is_expert: bool, tp_comm_buffer_name: str | None = None, tp_group: Any = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        assert input_is_parallel
        super().__init__(
            input_size, output_size, parallel_mode="row", config=config, init_method=init_method, bias=bias,
            skip_bias_add=skip_bias_add, skip_weight_param_allocation=False, is_expert=is_expert, tp_group=tp_group,
        )  # fmt: skip


class TELayerNormColumnParallelLinear(_Linear):
    """See megatron-core: a norm and a linear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, gather_output: bool, bias: bool,
        skip_bias_add: bool, is_expert: bool, skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None, tp_group: Any = None, stride: int = 1, name: str | None = None,
    ) -> None:  # fmt: skip
        assert not gather_output and not is_expert and config.normalization == "RMSNorm"
        super().__init__(input_size, output_size, "column", config, bias, skip_bias_add, False, tp_group)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _parameter(config, input_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, bias)."""
        _check_rows(x)
        return self.product(F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))


class TENorm(nn.Module):
    """See megatron-core; its RMSNorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = _parameter(config, hidden_size), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        _check_rows(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TEDotProductAttention(nn.Module):
    """See megatron-core."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, k_channels: int | None = None,
        v_channels: int | None = None, num_splits: int | None = None, cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert attention_type == "self" and attn_mask_type.name == "causal" and layer_number >= 1
        self.window, self.scale, self.sizes = config.window_size, softmax_scale, (k_channels, v_channels)
        self.softmax_offset: Any = None
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(config.num_attention_heads // pg_collection.tp.size()))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, attn_mask_type: Any) -> Tensor:
        """[S, B, N, D], [S, B, G, D], [S, B, G, V] -> [S, B, N * V]."""
        assert attn_mask_type.name == "causal" and self.sizes == (key.shape[-1], value.shape[-1])
        _check_rows(query)
        S, B, N, D = query.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * (self.scale or D**-0.5)
        row, column = torch.arange(S)[:, None], torch.arange(S)[None]
        hidden = column > row
        if self.window is not None:
            assert self.window[1] == 0
            hidden = hidden | (column < row - self.window[0])
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.softmax_offset is not None:
            offset = self.softmax_offset.to(scores.dtype).view(1, N, 1, 1).expand(B, N, S, 1)
            scores = torch.cat([scores, offset], -1)
        weights = scores.softmax(-1)[..., :S]
        return (weights @ v).permute(2, 0, 1, 3).reshape(S, B, -1)


CORE = SimpleNamespace(
    TELinear=TELinear, TEColumnParallelLinear=TEColumnParallelLinear, TERowParallelLinear=TERowParallelLinear,
    TELayerNormColumnParallelLinear=TELayerNormColumnParallelLinear, TENorm=TENorm,
    TEDotProductAttention=TEDotProductAttention,
)  # fmt: skip


@contextmanager
def installed() -> Iterator[None]:
    """The stand-ins instead of Transformer Engine in base and draft, its paths on for any device, dtype and size."""
    from megatron_spec import build
    from megatron_spec.base import te
    from megatron_spec.drafts import engine
    from megatron_spec.planning import draft_modules, te_paths

    calls.clear()
    with ExitStack() as patches:
        for module, name, value in (
            (te, "core", lambda: CORE),
            (te, "grouped_linear", lambda: GroupedLinear),
            (te, "installed", lambda: True),
            (te, "check", lambda *_: None),
            (engine, "modules", lambda: PYTORCH),
            (engine, "recipe_of", lambda name: name),
            (build, "check_draft_modules", lambda _: None),
            (draft_modules, "check_draft_modules", lambda _: None),
            (te_paths, "_half", lambda _: {}),
            (te_paths, "_head_sizes", lambda *_: {}),
            (te_paths, "_engine", lambda s: {"local": not s.layers.engine}),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield
