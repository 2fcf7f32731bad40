"""The one call into megatron-core's pipeline schedules: the base, forward only.

Ordinary 1F1B would wait for gradients that a frozen base never sends; the forward-only schedule does not.

S sequence (this rank's part under sequence parallelism), B micro-batch, H hidden, C = captures * H.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_spec.base import relay
from megatron_spec.base.model import FrozenBase
from megatron_spec.batch import Batch
from megatron_spec.config import UserError
from megatron_spec.ops.visibility import Visibility

Result = tuple[Tensor, Tensor]
"""(captures [S, B, C], state [S, B, H] after the final norm)."""


class _ScheduledStage:
    """A FrozenBase with the interface that megatron-core's schedules expect of a model."""

    def __init__(self, base: FrozenBase) -> None:
        self.base = base
        self.model_type = base.model.model_type
        self.config = self._forward_config(base)
        self.input_tensor: Tensor | None = None

    @staticmethod
    def _forward_config(base: FrozenBase) -> Any:
        # A copy: a wrapped model may belong to a training loop with its own hooks.
        config = copy.copy(base.model.config)
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "timers"):
            setattr(config, name, None)
        config.pipeline_dtype = base.dtype
        config.overlap_p2p_comm = False
        config.batch_p2p_comm = True
        config.variable_seq_lengths = False
        return config

    def exchange_shapes(self) -> None:
        """Let stages send the shape of every tensor before it, for micro-batches of different lengths."""
        self.config.variable_seq_lengths = True

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Called by the schedule with the tensor received from the previous stage."""
        self.input_tensor = tensors[0]

    def step(self, work: Iterator[tuple[Batch, Visibility]], _model: Any) -> tuple[Any, Any]:
        """megatron-core's forward_step_func."""
        batch, visibility = next(work)
        hidden, captures = self.base(batch, visibility, self.input_tensor)
        self.input_tensor = None
        if self.base.world.is_last_stage:
            result = (_concatenate(hidden, captures), hidden)
            return hidden, lambda _output, non_loss_data: result
        return relay.join(hidden, captures), None


def _concatenate(hidden_SBH: Tensor, captures: list[Tensor]) -> Tensor:
    return torch.cat(captures, dim=-1) if captures else hidden_SBH[..., :0]


def check_lengths(base: FrozenBase, batches: list[Batch]) -> None:
    """Raise UserError for micro-batches whose length the layout cannot split."""
    multiple = base.world.sequence_multiple
    for S in {batch.tokens_BS.shape[1] for batch in batches}:
        if S % multiple:
            raise UserError(
                f"sequence length {S} is not a multiple of {multiple}, as sequence_parallel (the tensor parallel "
                "size) and context parallelism (twice its size) together require: change the length, or turn them off"
            )


@torch.no_grad()
def run_base(base: FrozenBase, batches: list[Batch], visibilities: list[Visibility] | None = None) -> list[Result]:
    """Run the base over micro-batches, whose shapes may differ. Collective over the pipeline ranks.

    Args:
        visibilities: one per micro-batch; default: causal inside each document.

    Returns:
        (captures [S, B, C], state [S, B, H]) per micro-batch on the last stage, [] elsewhere.
    """
    if not batches:
        return []
    check_lengths(base, batches)
    B, S = batches[0].tokens_BS.shape
    visibilities = visibilities if visibilities is not None else [Visibility.of(batch) for batch in batches]
    stage, world = _ScheduledStage(base), base.world
    adjust = None
    if any(batch.tokens_BS.shape != (B, S) for batch in batches):
        stage.exchange_shapes()
    elif world.pp_size > 1:
        adjust = relay.shapes_adjuster(len(base.stage.captures_in), len(base.stage.captures_out))
    results: list[Result] = get_forward_backward_func()(
        forward_step_func=stage.step,
        data_iterator=iter(list(zip(batches, visibilities, strict=True))),
        model=[stage],
        num_microbatches=len(batches),
        seq_length=S,
        micro_batch_size=B,
        forward_only=True,
        collect_non_loss_data=True,
        adjust_tensor_shapes_fn=adjust,
    )
    return results


@torch.no_grad()
def run_base_everywhere(base: FrozenBase, batch: Batch, visibility: Visibility) -> Result:
    """Run one micro-batch and give its result to every pipeline rank (decoding; `visibility` may hold a cache)."""
    world = base.world
    if world.pp_size == 1:  # nothing to schedule
        check_lengths(base, [batch])
        hidden_SBH, captures = base(batch, visibility, None)
        return _concatenate(hidden_SBH, captures), hidden_SBH
    results = run_base(base, [batch], [visibility])
    B, S = batch.tokens_BS.shape
    rows = world.local_rows(S)
    width = base.config.hidden_size * (1 + len(base.capture_layer_ids))
    if results:
        joined = torch.cat([results[0][1], results[0][0]], dim=-1)
    else:
        joined = torch.empty(rows, B, width, dtype=base.dtype, device=world.device)
    dist.broadcast(joined, dist.get_process_group_ranks(world.pp)[-1], group=world.pp)
    return joined[..., base.config.hidden_size :], joined[..., : base.config.hidden_size]
