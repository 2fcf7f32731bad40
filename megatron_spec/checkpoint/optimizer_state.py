"""State of megatron-core's optimizers on its way from a checkpoint: of any implementation of Adam, into any other.

torch's Adam counts steps per parameter, those of Transformer Engine and apex per group, and the groups of each have
settings of their own. Moments and master weights are the same in all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_spec.config import UserError

IMPLEMENTATION = (
    "amsgrad", "bias_correction", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused",
    "maximize",
)  # fmt: skip
"""Settings of parameter groups that belong to an implementation, not to the run."""


def translate(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give loaded state the form of the implementation that `optimizer` runs, in place.

    Raises UserError for parameters at different steps.
    """
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    own = {**inner.defaults, **(inner.param_groups[0] if inner.param_groups else {})}
    of_torch = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))
    for part in _parts(saved):
        step, state = _take_step(part), part.get("state")
        for group in part["param_groups"]:
            for name in IMPLEMENTATION:
                group.pop(name, None)
                if name in own:
                    group[name] = own[name]
            if step is not None and not (of_torch and state is not None):
                group["step"] = float(step) if of_torch else step
        if step is not None and of_torch and state is not None:
            state["common_step"] = torch.tensor(float(step))


def _take_step(part: dict[str, Any]) -> int | None:
    """The step count of an optimizer's state, which loses it; None before the first step."""
    found = [group.pop("step", None) for group in part["param_groups"]]
    found.append(part["state"].pop("common_step", None) if "state" in part else None)
    steps = {int(step) for step in found if step is not None}
    if len(steps) > 1:
        raise UserError(f"the optimizer's parameters are at different steps: {sorted(steps)}")
    return steps.pop() if steps else None


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """Every part with parameter groups of the state of an optimizer or of a chain of them."""
    if isinstance(state, list):
        for part in state:
            yield from _parts(part)
    elif isinstance(state, dict):
        if "param_groups" in state:
            yield state
        for name, part in state.items():
            if name not in ("param_groups", "state"):
                yield from _parts(part)


def _parameter_groups(state: Any) -> Iterator[dict[str, Any]]:
    for part in _parts(state):
        yield from part["param_groups"]


def adopt_learning_rates(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give the parameter groups the saved learning rates, by which megatron-core 0.19 finds a saved group.

    Loading restores the saved ones anyway; a run that changes them does so afterwards.
    """

    def kind(group: dict[str, Any]) -> tuple[Any, ...]:
        """What tells the groups of one optimizer apart."""
        return tuple(group.get(name) for name in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))

    found = list(_parameter_groups(saved))
    for group in optimizer.param_groups:
        same = [other for other in found if kind(other) == kind(group)]
        if len(same) == 1:
            group.update({name: same[0][name] for name in ("max_lr", "min_lr") if name in same[0]})


def allocate_state(optimizer: Any) -> None:
    """Let the distributed optimizer load its state over torch's AdamW (no Transformer Engine or apex).

    It cannot describe that state before the first step, so the moments are created first; and it looks for the step
    count among the loaded tensors, although it has just read it from the parameter groups.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if not isinstance(part, DistributedOptimizer) or not isinstance(inner, torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state.get(p):
                    moments = {"exp_avg": torch.zeros_like(p.data), "exp_avg_sq": torch.zeros_like(p.data)}
                    inner.state[p] = {"step": torch.tensor(0.0), **moments}
        part._set_main_param_and_optimizer_states = partial(_set_states, part)


def _set_states(part: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main = part.optimizer.param_groups[group]["params"][order]
    state = part.optimizer.state[main]
    state["step"] = state["step"].clone()  # megatron-core shares one tensor, which every parameter would increment
    known = {"step": state["step"], **tensors}
    DistributedOptimizer._set_main_param_and_optimizer_states(part, model_param, known)
