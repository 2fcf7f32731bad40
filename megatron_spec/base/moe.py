"""Mixture of experts of a frozen base: each expert is a pair of linears; expert parallel ranks gather the tokens.

Names are megatron-core's (`router`, `experts.local_experts.0.linear_fc1`, `shared_experts`). Tensor parallel ranks hold
a shard of every expert's matrices, expert parallel ranks complete experts; partial results are summed once at the end.

S sequence, B micro-batch, H hidden, E experts, R rows (tokens), K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from megatron_spec.base.modules import LOCAL_MODULES, LayerModules
from megatron_spec.config import MoeConfig
from megatron_spec.families.names import Experts
from megatron_spec.ops.moe import Stacked, choose, gated, mixed, mixed_by_groups, mixed_in_order


def _sharded_children(module: nn.Module, prefix: str, offsets: tuple[Any, ...], metadata: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    tp = parallel_state.get_tensor_model_parallel_group()
    for name, child in module.named_children():
        state.update(sharded_state_dict_default(child, f"{prefix}{name}.", offsets, metadata, tp_group=tp))
    return state


class Router(nn.Module):
    """Selects experts for each token and weights them.

    Attributes:
        kernels: operators (`ops.backend.load`) for the choice; None: torch's operations.
    """

    def __init__(self, config: TransformerConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        self.kernels: Any = None
        device = torch.cuda.current_device()

        def new(*shape: int, dtype: torch.dtype = config.params_dtype) -> nn.Parameter:
            """An empty parameter on the device."""
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        self.weight = new(moe.num_experts, config.hidden_size)
        self.bias = new(moe.num_experts) if moe.bias else None
        self.expert_bias = new(moe.num_experts, dtype=torch.float32) if moe.choice_bias else None

    def forward(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [R, K], chosen experts [R, K])."""
        if self.moe.router == "sigmoid":
            dtype = torch.promote_types(x_RH.dtype, torch.float32)
            logits = F.linear(x_RH.to(dtype), self.weight.to(dtype))
        else:
            logits = F.linear(x_RH, self.weight, self.bias)
        if self.kernels is None:
            return choose(logits, self.moe, self.expert_bias)
        return self.kernels.choose_experts(logits, self.moe, self.expert_bias)  # type: ignore[no-any-return]


class Expert(nn.Module):
    """This rank's shard of one gated MLP; its outputs are partial sums over the tensor parallel ranks."""

    def __init__(
        self, config: TransformerConfig, width: int, groups: Any, moe: MoeConfig, modules: LayerModules = LOCAL_MODULES
    ) -> None:
        super().__init__()
        self.clamp, self.alpha = moe.clamp, moe.alpha
        self.first = groups.tp.rank() == 0
        options = dict(
            config=config, init_method=config.init_method, bias=moe.bias, skip_bias_add=True, is_expert=True,
            tp_group=groups.tp,
        )  # fmt: skip
        self.linear_fc1 = modules.column(config.hidden_size, 2 * width, gather_output=False, **options)
        self.linear_fc2 = modules.row(width, config.hidden_size, input_is_parallel=True, **options)

    def forward(self, x_RH: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        gate_up, bias = self.linear_fc1(x_RH)
        out, out_bias = self.linear_fc2(self.gated(gate_up if bias is None else gate_up + bias))
        return out + out_bias if out_bias is not None and self.first else out

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        """Layout in a distributed checkpoint: that of megatron-core's MLP, with gate and up separate."""
        state = _sharded_children(self, prefix, sharded_offsets, metadata)
        for name in (f"{prefix}linear_fc1.weight", f"{prefix}linear_fc1.bias"):
            if name in state:
                state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state

    def gated(self, gate_up: Tensor) -> Tensor:
        """The activation of [..., 2 * width]."""
        return gated(gate_up, self.clamp, self.alpha)


class LocalExperts(nn.Module):
    """The experts of this rank.

    Attributes:
        kernels: operators (`ops.backend.load`) around one product for all experts (the path `grouped_experts`), which
            runs unless a module has hooks (quantisers); None: two products for each expert.
        engine: Transformer Engine's grouped linears on the same parameters (`te.GroupedExperts`); None: not used.
    """

    def __init__(self, config: TransformerConfig, moe: MoeConfig, groups: Any, experts: Experts) -> None:
        super().__init__()
        self.here, self.num_experts = experts, moe.num_experts
        self.kernels: Any = None
        self.engine: Any = None
        self.local_experts = nn.ModuleList(
            Expert(config, moe.intermediate_size, groups, moe) for _ in range(experts.count)
        )
        self._linears = {n: [getattr(e, n) for e in self.local_experts] for n in ("linear_fc1", "linear_fc2")}
        self._stacked: dict[str, tuple[Tensor, list[int]]] = {}  # tensor, addresses of its parts

    def _untouched(self) -> bool:
        return not any(m._forward_pre_hooks or m._forward_hooks for ms in self._linears.values() for m in ms)

    def _matrices(self, linear: str, kind: str = "weight") -> Tensor:
        """A parameter of all experts as one tensor, of which the parameters become parts; once.

        Called for every layer of every forward, so it goes around `nn.Module.__getattr__`.
        """
        name, parameters = f"{linear}.{kind}", [m._parameters[kind] for m in self._linears[linear]]
        found = self._stacked.get(name)
        if found is not None and found[1] == list(map(Tensor.data_ptr, parameters)):
            return found[0]
        whole = torch.stack([p.data for p in parameters])
        for parameter, part in zip(parameters, whole, strict=True):
            parameter.data = part
        self._stacked[name] = whole, [part.data_ptr() for part in whole]
        return whole

    def _whole(self) -> Stacked:
        expert: Any = self.local_experts[0]
        biases = None
        if expert.linear_fc1.bias is not None:
            leave = self._matrices("linear_fc2", "bias") if expert.first else None
            biases = (self._matrices("linear_fc1", "bias"), leave)
        matrices = (self._matrices("linear_fc1"), self._matrices("linear_fc2"))
        return Stacked(self.here.first, *matrices, biases, expert.clamp, expert.alpha)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        """Layout in a distributed checkpoint: that of megatron-core's SequentialMLP, all experts in one tensor."""
        state: dict[str, Any] = {}
        for i, expert in enumerate(self.local_experts):
            own = f"{prefix}local_experts.{i}."
            offsets = (*sharded_offsets, (len(sharded_offsets), self.here.first + i, self.num_experts))
            part = expert.sharded_state_dict(own, offsets, metadata)  # type: ignore[operator]
            replace_prefix_for_sharding(part, own, f"{prefix}experts.")
            for tensor in part.values():  # replicas are the ranks that hold the same experts
                tensor.replica_id = (*tensor.replica_id[:2], parallel_state.get_expert_data_parallel_rank())
            state.update(part)
        return state

    def forward(self, x_RH: Tensor, weights_RK: Tensor, chosen_RK: Tensor) -> Tensor:
        """Weighted sum [R, H] of this rank's experts."""
        if self.kernels is not None and self._untouched():
            return mixed_by_groups(x_RH, weights_RK, chosen_RK, self._whole(), self.kernels)
        weights = weights_RK.flatten().to(x_RH.dtype)
        if self.engine is not None and self.engine.serves():
            count, multiple = len(self.local_experts), self.engine.multiple
            return mixed_in_order(x_RH, weights, chosen_RK, self.here.first, count, self.engine, multiple)
        return mixed(x_RH, weights, chosen_RK, self.local_experts, self.here.first)


@dataclass
class Most:
    """Rows of the expert parallel rank that has the most, in this forward."""

    rows: int = 0


class MixtureOfExperts(nn.Module):
    """The MLP of a layer: routed experts and, if the base has one, a shared expert for every token.

    Attributes:
        most: shared by the layers of a stage.
        leads: this layer finds it.
    """

    moe: MoeConfig
    groups: Any
    layer_modules: LayerModules

    @staticmethod
    def of(moe: MoeConfig, groups: Any, modules: LayerModules = LOCAL_MODULES) -> type[MixtureOfExperts]:
        """A class that takes no more than megatron-core's configuration, which warns about MLPs with arguments."""
        values = {"moe": moe, "groups": groups, "layer_modules": modules}
        return type("MixtureOfExperts", (MixtureOfExperts,), values)

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        moe, groups = self.moe, self.groups
        self.tp, self.ep = groups.tp, groups.ep
        self.sequence_parallel = config.sequence_parallel
        self.most, self.leads = Most(), True
        size = moe.num_experts // self.ep.size()
        self.router = Router(config, moe)
        self.experts = LocalExperts(config, moe, groups, Experts(self.ep.rank() * size, size))
        shared = moe.shared_intermediate_size
        self.shared_experts = Expert(config, shared, groups, moe, self.layer_modules) if shared else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        """Layout in a distributed checkpoint."""
        return _sharded_children(self, prefix, sharded_offsets, metadata)

    def forward(self, hidden_SBH: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[S, B, H] -> ([S, B, H], no bias); [S / TP, B, H] under sequence parallelism."""
        if self.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=self.tp)
        x_RH = hidden_SBH.flatten(0, 1)
        out_RH = self._expert_parallel(x_RH) if self.ep.size() > 1 else self.experts(x_RH, *self.router(x_RH))
        if self.shared_experts is not None:
            out_RH = out_RH + self.shared_experts(x_RH)
        out_SBH = out_RH.view(hidden_SBH.shape)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(out_SBH, group=self.tp), None
        return reduce_from_tensor_model_parallel_region(out_SBH, group=self.tp), None

    def _expert_parallel(self, x_RH: Tensor) -> Tensor:
        """Gather the rows of all expert parallel ranks (R may differ), run this rank's experts, sum, keep own rows."""
        if self.leads:
            self.most.rows = _most_rows(len(x_RH), self.ep, x_RH.device)
        padded = F.pad(x_RH, (0, 0, 0, self.most.rows - len(x_RH)))  # padding is routed, too, and dropped
        every = gather_from_sequence_parallel_region(padded, group=self.ep)
        out = self.experts(every, *self.router(every))
        own: Tensor = reduce_scatter_to_sequence_parallel_region(out, group=self.ep)
        return own[: len(x_RH)]


def _most_rows(mine: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Rows of the rank that has the most. The host waits."""
    rows_1 = torch.tensor([mine], device=device)
    dist.all_reduce(rows_1, op=dist.ReduceOp.MAX, group=group)
    return int(rows_1)


def ask_once(layers: Iterable[MixtureOfExperts]) -> None:
    """Let the first of these layers, which run one after the other, find the number of rows for all."""
    most = Most()
    for number, layer in enumerate(layers):
        layer.most, layer.leads = most, number == 0
