"""megatron-core's DDP, optimizer and schedule for the draft, on the draft's own process groups.

Gradients are summed over all ranks that hold the same shard of the draft and divided once by the number of supervised
rows of the whole global batch; means of per-micro-batch means would be wrong (docs/algorithms.md#losses).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor, nn

from megatron_spec.config import TrainConfig
from megatron_spec.planning.paths import NO_PATHS
from megatron_spec.runtime.distributed import World
from megatron_spec.training import kernels

log = logging.getLogger(__name__)


def wrap_ddp(draft: nn.Module, world: World, train: TrainConfig) -> DistributedDataParallel:
    """Contiguous gradient buffers (fp32) and one reduction per step over `world.draft_dp`."""
    parallel = world.parallel
    # Only what DDP reads matters here; the shapes describe no layer of the draft.
    config = TransformerConfig(
        num_layers=1,
        hidden_size=parallel.tensor_model_parallel_size,
        num_attention_heads=parallel.tensor_model_parallel_size,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        calculate_per_token_loss=True,  # before DDP wraps: gradients are summed, not averaged
        bf16=train.bf16,
        params_dtype=torch.bfloat16 if train.bf16 else torch.float32,
        gradient_accumulation_fusion=False,
    )
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=train.use_distributed_optimizer,
    )
    return DistributedDataParallel(config, ddp_config, draft, pg_collection=world.draft_groups)


def build_optimizer(
    ddp: DistributedDataParallel, world: World, train: TrainConfig
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW with fp32 master weights under bf16, global gradient clipping, and the learning rate schedule."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        bf16=train.bf16,
        params_dtype=torch.bfloat16 if train.bf16 else torch.float32,
        use_distributed_optimizer=train.use_distributed_optimizer,
        clip_grad=train.clip_grad,
    )
    kernels.choose(train.optimizer_impl)
    optimizer = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False, pg_collection=world.draft_groups)
    _use_fused_adam(optimizer)
    _norm_without_waits()
    chosen = kernels.described(ddp.module.paths if hasattr(ddp.module, "paths") else NO_PATHS)
    log.info("optimizer: %s (%s)", chosen, kernels.order() if train.optimizer_impl == "auto" else "--optimizer-impl")
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.lr_warmup_iters,
        lr_decay_steps=max(train.lr_decay_iters or train.train_iters, train.lr_warmup_iters + 1),
        lr_decay_style=train.lr_decay_style,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=train.train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


SETTINGS = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_eps", "clip_grad",
)  # fmt: skip
"""Fields of TrainConfig that a run which continues may change only on request."""

KIND = ("bf16", "use_distributed_optimizer")
"""Fields of TrainConfig that decide what the saved state looks like."""


def settings(train: TrainConfig) -> dict[str, Any]:
    """Optimizer settings recorded in a checkpoint."""
    found = {name: getattr(train, name) for name in (*SETTINGS, *KIND)}
    return {**found, "lr_decay_iters": train.lr_decay_iters or train.train_iters}


def apply_settings(optimizer: MegatronOptimizer, train: TrainConfig) -> None:
    """Write the settings of `train` into parameter groups restored from a checkpoint."""
    for group in optimizer.param_groups:
        group.update(max_lr=train.lr, min_lr=train.min_lr, eps=train.adam_eps)
        group["betas"] = (train.adam_beta1, train.adam_beta2)


def _norm(_chunk: int, _overflow: Tensor, tensors: Sequence[Sequence[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """fp32 [1] norm of all tensors, like `amp_C.multi_tensor_l2norm` without the norm of each."""
    return torch.nn.utils.get_total_norm([t for part in tensors for t in part]).float().reshape(1), None


def _norm_without_waits() -> None:
    """megatron-core's own gradient norm (without Transformer Engine and apex) waits for the device at every tensor."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm


def _use_fused_adam(optimizer: MegatronOptimizer) -> None:
    """torch's Adam (where there is no Transformer Engine and no apex) as one kernel instead of a dozen passes."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and torch.cuda.is_available():
            for group in inner.param_groups:
                group.update(fused=True, foreach=False)


def scale_gradients(parameters: Sequence[Tensor], scale: float) -> None:
    """Multiply the ready gradients of an optimizer's parameters in one pass."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    if gradients and scale != 1.0:
        overflow = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
        clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, overflow, [gradients, gradients], scale)


def finish_gradients(ddp: DistributedDataParallel, world: World, supervised_rows: torch.Tensor | None = None) -> None:
    """Sum gradients over ranks, add the partial ones of sequence parallelism, divide by the global row count.

    Args:
        supervised_rows: scalar, rows supervised at step 0 in the whole global batch; None: the sums are left, to be
            divided with the clipping.
    """
    ddp.finish_grad_sync()
    if world.parallel.sequence_parallel and world.tp_size > 1:
        partial = [p.main_grad for p in ddp.parameters() if getattr(p, "sequence_parallel", False)]
        if partial:
            flat = torch.cat([g.reshape(-1) for g in partial])
            dist.all_reduce(flat, group=world.tp)
            for g, summed in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
                g.copy_(summed.view_as(g))
    if supervised_rows is not None:
        ddp.scale_gradients(1.0 / supervised_rows)
