"""Transformer Engine's modules in the frozen base: linears, some with a norm, norms, attention, experts, and its fp8.

The parameters are those of local layers under other names (`spec.own_name`), and checkpoints do not differ. The
experts' parameters keep their modules; Transformer Engine's grouped linears run on them.

S sequence, B micro-batch, P rows of experts, H hidden.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_spec.base.modules import CoreAttention, LayerModules
from megatron_spec.base.moe import LocalExperts
from megatron_spec.config import BaseConfig, BaseLayers, UserError
from megatron_spec.config.machine import Machine
from megatron_spec.runtime.distributed import World

FP8_ROWS = 16
"""In fp8, the rows of a product are a multiple of this."""

PROBED_ROWS = 256
"""Sequence length of the forward that finds out which attention runs."""

_NORMED = (("input_layernorm", "self_attention", "linear_qkv"), ("pre_mlp_layernorm", "mlp", "linear_fc1"))
"""(norm, module, linear that may include the norm) of a layer."""


def installed() -> bool:
    """Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def check(layers: BaseLayers, machine: Machine) -> None:
    """Raise UserError when the base cannot be built from Transformer Engine's modules here."""
    if not layers.engine:
        return
    if not installed():
        raise UserError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed (pip install "
            "'megatron-spec[te]'); use --transformer-impl local"
        )
    if not machine.gpu:
        raise UserError("--transformer-impl transformer_engine needs a GPU; use --transformer-impl local")


def core() -> Any:
    """megatron-core's wrappers of Transformer Engine's modules."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine


def layer_modules() -> LayerModules:
    """What a layer is built from."""
    te = core()

    def replicated(config: TransformerConfig, inputs: int, outputs: int) -> Any:
        """A linear with the whole weight on every tensor parallel rank."""
        return te.TELinear(
            inputs, outputs, parallel_mode="duplicated", config=config, init_method=config.init_method, bias=False,
            skip_bias_add=False, skip_weight_param_allocation=False,
        )  # fmt: skip

    return LayerModules(
        column=te.TEColumnParallelLinear, row=te.TERowParallelLinear, norm=te.TENorm,
        normed_column=te.TELayerNormColumnParallelLinear, norm_before=IdentityOp, replicated=replicated,
    )  # fmt: skip


def linear_types() -> tuple[type, ...]:
    """Classes of linears without a norm; none where Transformer Engine is not installed."""
    return (core().TELinear,) if installed() else ()


def fused_linears(layer: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """(name of the norm, module, name of the linear, linear) of a layer's linears that include a norm."""
    for norm, part, name in _NORMED:
        module = getattr(layer, part)
        linear = getattr(module, name, None)
        if hasattr(linear, "layer_norm_weight"):
            yield norm, module, name, linear


def separate_norms(base: Any) -> None:
    """Make the inputs of all linears of a `FrozenBase` visible: those that include a norm become two modules.

    Raises UserError for a wrapped model with such linears.
    """
    if not any("layer_norm_weight" in name for name in base.core.weights()):
        return
    if len(base.attentions) != base.stage.count:
        raise UserError(
            "a wrapped model of Transformer Engine's modules cannot be quantised: load the base with load_base"
        )
    for _, layer in base.layers():
        _separate_norms(layer, base.model.config)


def _separate_norms(layer: nn.Module, config: TransformerConfig) -> None:
    """Replace a layer's linears that include a norm by a norm and a linear on the same parameters."""
    te, plain = core(), copy.copy(config)
    plain.init_model_with_meta_device = True  # no memory for parameters that are replaced
    for norm_name, module, name, fused in list(fused_linears(layer)):
        bias = getattr(fused, "bias", None)
        bias = bias if isinstance(bias, nn.Parameter) and bias.numel() else None
        rows, inputs = fused.weight.shape
        norm = te.TENorm(config=plain, hidden_size=inputs, eps=fused.eps)
        linear = te.TEColumnParallelLinear(
            inputs, rows * fused._tp_group.size(), config=plain, init_method=config.init_method, gather_output=False,
            bias=bias is not None, skip_bias_add=bool(fused.te_return_bias), is_expert=False, tp_group=fused._tp_group,
        )  # fmt: skip
        norm.weight, linear.weight = fused.layer_norm_weight, fused.weight
        if bias is not None:
            linear.bias = bias
        setattr(layer, norm_name, norm.eval())
        setattr(module, name, linear.eval())


def attention(attending: CoreAttention, base: BaseConfig, layer: int, config: TransformerConfig, groups: Any) -> Any:
    """Transformer Engine's attention with the options of a layer's own; it owns no parameters.

    Args:
        layer: its index, from 0.
        groups: process groups of the base.
    """
    own = copy.copy(config)
    own.window_size = None if attending.window is None else (attending.window - 1, 0)
    own.window_attn_skip_freq = None
    own.softmax_type = "vanilla" if attending.softmax_offset is None else "learnable"
    module = core().TEDotProductAttention(
        own, layer + 1, AttnMaskType.causal, "self", softmax_scale=attending.scale, k_channels=base.head_dim,
        v_channels=base.value_dim, pg_collection=groups,
    )  # fmt: skip
    if attending.softmax_offset is not None:
        module.softmax_offset = attending.softmax_offset
    return module.eval()


def backends() -> Mapping[str, Any]:
    """Transformer Engine's choice among its attentions in its last forward; empty if this version does not tell."""
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
    except ImportError:
        return {}
    return _attention_backends  # type: ignore[no-any-return]


def is_fused(module: Any, base: BaseConfig, world: World, dtype: torch.dtype) -> bool:
    """False if Transformer Engine has no kernel for this attention here, and would hold all scores in memory.

    It chooses by shapes, cuDNN's version and what is installed, so a few rows are computed.
    """
    N, G = (count // world.tp_size for count in (base.num_attention_heads, base.num_key_value_heads))
    with torch.no_grad():
        q, k, v = (
            torch.zeros(PROBED_ROWS, 1, heads, size, dtype=dtype, device=world.device)
            for heads, size in ((N, base.head_dim), (G, base.head_dim), (G, base.value_dim))
        )
        module(q, k, v, None, AttnMaskType.causal)
    chosen = backends()
    return any(chosen.get(f"use_{kind}_attention", True) for kind in ("flash", "fused"))


def versions_of_cudnn() -> str:
    """Of Transformer Engine and of torch; two of them in one process are why kernels fail to load."""
    try:
        from transformer_engine.pytorch.utils import get_cudnn_version

        own = ".".join(map(str, get_cudnn_version()))
    except ImportError:
        own = "unknown"
    return f"cuDNN of Transformer Engine: {own}, of torch: {torch.backends.cudnn.version()}"


class GroupedExperts:
    """The experts of a rank by two of Transformer Engine's grouped linears, on the experts' own parameters.

    Attributes:
        multiple: the number of rows of an expert must be a multiple of it.
        is_first_microbatch: the weights have not been quantised yet.
    """

    def __init__(self, experts: LocalExperts, fp8: bool) -> None:
        self.experts: list[Any] = list(experts.local_experts)
        self.multiple, self.is_first_microbatch = FP8_ROWS if fp8 else 1, True
        first = self.experts[0]
        self.enter = _grouped([e.linear_fc1 for e in self.experts], first.linear_fc1.bias is not None)
        # Tensor parallel ranks add their results: one of them adds the bias.
        self.leave = _grouped([e.linear_fc2 for e in self.experts], first.linear_fc2.bias is not None and first.first)

    def serves(self) -> bool:
        """True unless only some experts are quantised: one quantiser serves the rows of all."""
        return all(
            len({id(getattr(getattr(e, name), "input_quantizer", None)) for e in self.experts}) == 1
            for name in ("linear_fc1", "linear_fc2")
        )

    def __call__(self, rows_PH: Tensor, sizes: list[int]) -> Tensor:
        """[P, H] -> [P, H] for rows in the order of the experts, of which expert i has sizes[i]."""
        first = self.experts[0]
        rows_PM = self.enter(_quantised(first.linear_fc1, rows_PH), sizes, is_first_microbatch=self.is_first_microbatch)
        rows_PM = _quantised(first.linear_fc2, first.gated(rows_PM))
        out: Tensor = self.leave(rows_PM, sizes, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


def _quantised(linear: Any, rows: Tensor) -> Tensor:
    quantizer = getattr(linear, "input_quantizer", None)
    return rows if quantizer is None else quantizer(rows)  # type: ignore[no-any-return]


def grouped_linear() -> Any:
    """The class of Transformer Engine's grouped linear."""
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear


def _grouped(linears: Sequence[Any], bias: bool) -> Any:
    weight = linears[0].weight
    outputs, inputs = weight.shape
    module = grouped_linear()(
        len(linears), inputs, outputs, bias=bias, params_dtype=weight.dtype, device="meta"
    )  # on meta: the parameters are those of the experts
    for i, linear in enumerate(linears):
        setattr(module, f"weight{i}", linear.weight)
        setattr(module, f"bias{i}", linear.bias if bias else weight.new_empty(0))
    return module.eval()


class DelayedScaling:
    """Ranges of the delayed recipe, updated after every forward.

    Transformer Engine does that by itself only while autograd is on, where it also keeps transposed weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.begun = model, False

    @contextlib.contextmanager
    def updated(self, forward: Callable[[], Any]) -> Iterator[None]:
        """Context of a forward that updates the ranges. Before the first one, `forward` runs once to find them."""
        if not self.begun:
            forward()
            update_ranges()
            forget_weights(self.model)  # they were rounded with scales of 1
            self.begun = True
        yield
        update_ranges()


def update_ranges() -> None:
    """Scales of the next forward from the largest values so far; collective over the ranks that share a micro-batch."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


def forget_weights(model: nn.Module) -> None:
    """Have the next forward quantise the weights again."""
    for module in model.modules():
        owners: tuple[Any, ...] = (module, getattr(module, "engine", None))
        for owner in owners:
            if hasattr(owner, "is_first_microbatch"):
                owner.is_first_microbatch = True
