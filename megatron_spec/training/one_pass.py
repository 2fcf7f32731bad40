"""The step of megatron-core's optimizer under bf16 in one pass: gradient scaling, AdamW, and the copy of the weights.

megatron-core takes three: it scales the gradients, its Adam (of Transformer Engine, apex or torch) updates fp32 master
weights, and these are copied into the model. Here the same tensors are updated at once, under the same names, so
checkpoints of either continue with the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor


class OnePass:
    """The step of one of megatron-core's optimizers.

    Args:
        optimizer: an element of its `chained_optimizers`.
        kernels: operators (`ops.backend.load`), if the path `optimizer_pass` is on; None: megatron-core does it.
    """

    def __init__(self, optimizer: Any, kernels: Any) -> None:
        self.optimizer, self.kernels = optimizer, kernels
        self._counts: dict[int, tuple[Tensor, int]] = {}
        """Steps done, of states in which they are on the device: {group: (that tensor, its value)}."""
        self._prepared: list[dict[int, Tensor]] | None = None

    def prepare(self) -> None:
        """Look up what `step` will update (it does if this was not called): once the gradients are ready, and before
        the host waits for their norm."""
        pairs = None if self.kernels is None else self._pairs()
        self._prepared = [pairs] if pairs is not None and self._suits(pairs) else []

    def step(self, scale: float) -> bool:
        """Update with the ready gradients times `scale`.

        Returns False if megatron-core has to do it, with nothing changed: before its first step, which makes the state,
        and for other optimizers than AdamW with fp32 moments and a bf16 copy of every parameter.
        """
        if self._prepared is None:
            self.prepare()
        found, self._prepared = self._prepared, None
        if not found:
            return False
        pairs = found[0]
        for number, group in enumerate(self.optimizer.optimizer.param_groups):
            step, counters = self._count(number, group)
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self.optimizer.optimizer.state[master]
                self.kernels.adamw(
                    master.grad, master.detach(), (state["exp_avg"], state["exp_avg_sq"]), pairs[id(master)], scale,
                    step, float(group["lr"]), group["betas"], group["eps"], group["weight_decay"],
                )  # fmt: skip
            if counters:
                torch._foreach_add_(counters, 1)
        if isinstance(self.optimizer, DistributedOptimizer):
            for chunk in self.optimizer.model_chunks:  # gathers the parameters, as its own step does
                chunk.start_param_sync()
        return True

    def _pairs(self) -> dict[int, Tensor] | None:
        """{id of a master weight: the bf16 weight it is copied to}; None for optimizers without them."""
        part = self.optimizer
        if isinstance(part, DistributedOptimizer):
            names = ("shard_fp32_from_float16_groups", "shard_float16_groups", "shard_fp32_groups")
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            names = ("fp32_from_float16_groups", "float16_groups", "fp32_from_fp32_groups")
        else:
            return None
        masters, copies, others = (
            [p for group in getattr(part, name, [[None]]) for p in group] for name in names
        )  # fmt: skip
        if others or any(p is None for p in (*masters, *copies)):
            return None
        return {id(m): c.detach() for m, c in zip(masters, copies, strict=True)}

    def _suits(self, pairs: dict[int, Tensor]) -> bool:
        inner = self.optimizer.optimizer
        return decoupled(inner) and all(
            id(p) in pairs and _plain(p, inner.state.get(p, {})) for g in inner.param_groups for p in g["params"]
        )

    def _count(self, number: int, group: dict[str, Any]) -> tuple[int, list[Tensor]]:
        """(number of this step of a group, its counters on the device, which are not increased yet)."""
        states = [self.optimizer.optimizer.state[p] for p in group["params"] if p.grad is not None]
        steps = [state["step"] for state in states if "step" in state]
        if not steps:  # Transformer Engine, apex
            group["step"] = group.get("step", 0) + 1
            return int(group["step"]), []
        known, done = self._counts.get(number, (None, 0))
        if known is not steps[0]:  # read from the device once
            done = int(steps[0])
        self._counts[number] = (steps[0], done + 1)
        return done + 1, steps


def decoupled(inner: Any) -> bool:
    """True for AdamW of torch, Transformer Engine or apex, without variants."""
    if isinstance(inner, torch.optim.AdamW):
        return not any(group.get("amsgrad") or group.get("maximize") for group in inner.param_groups)
    return (
        type(inner).__name__ == "FusedAdam"
        and bool(getattr(inner, "adam_w_mode", False))
        and not getattr(inner, "capturable", False)
        and not getattr(inner, "master_weights", None)
        and all(g.get("bias_correction", True) and isinstance(g.get("step", 0), int) for g in inner.param_groups)
    )


def _plain(master: Tensor, state: dict[str, Any]) -> bool:
    """True if the state of a parameter exists, and all is fp32 and contiguous."""
    found = [state.get("exp_avg"), state.get("exp_avg_sq")]
    if master.grad is not None:
        found.append(master.grad)
    return all(
        isinstance(x, Tensor) and x.dtype == torch.float32 and x.is_contiguous() and x.shape == master.shape
        for x in found
    )


def parts(optimizer: Any) -> Iterator[Any]:
    """megatron-core's optimizer, or those that it chains."""
    yield from getattr(optimizer, "chained_optimizers", [optimizer])
