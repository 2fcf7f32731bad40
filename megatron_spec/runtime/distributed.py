"""Start-up of torch.distributed and the process groups of one run.

The base uses megatron-core's own groups (tensor, pipeline, data). The draft is data parallel over *every* rank with the
same TP rank, so it has a `ProcessGroupCollection` of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_spec.config import ParallelConfig, UserError, expect
from megatron_spec.runtime import failure, lock, platform
from megatron_spec.runtime.context import ContextShard

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class World:
    """This rank's coordinates, and every process group the package uses."""

    parallel: ParallelConfig
    rank: int
    size: int
    device: torch.device
    tp: dist.ProcessGroup
    """Ranks that hold the shards of one layer."""
    pp: dist.ProcessGroup
    """Ranks that hold the stages of one replica of the base, in order."""
    dp: dist.ProcessGroup
    """Ranks that hold the same shard of the base."""
    draft_dp: dist.ProcessGroup
    """Ranks that hold the same shard of the draft: same TP rank, any PP, DP and CP rank."""
    base_groups: ProcessGroupCollection
    draft_groups: ProcessGroupCollection
    context: ContextShard | None = None
    """Ranks that share every sequence; None without context parallelism."""

    @property
    def tp_rank(self) -> int:
        """Rank in the TP group."""
        return self.tp.rank()

    @property
    def tp_size(self) -> int:
        """Ranks that share a layer."""
        return self.tp.size()

    @property
    def pp_rank(self) -> int:
        """Pipeline stage of this rank."""
        return self.pp.rank()

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.pp.size()

    @property
    def dp_rank(self) -> int:
        """Index of the base's replica that this rank belongs to."""
        return self.dp.rank()

    @property
    def dp_size(self) -> int:
        """Replicas of the base."""
        return self.dp.size()

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.context is None else self.context.size

    @property
    def sequence_multiple(self) -> int:
        """The length of a batch must be a multiple of this."""
        chunks = 1 if self.context is None else self.context.multiple
        return chunks * (self.tp_size if self.parallel.sequence_parallel else 1)

    def local_rows(self, S: int) -> int:
        """Rows of a sequence of S that this rank holds between layers."""
        return S // self.cp_size // (self.tp_size if self.parallel.sequence_parallel else 1)

    @property
    def is_first_stage(self) -> bool:
        """True on the stage where tokens enter the base."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the stage that computes the base's final state."""
        return self.pp_rank == self.pp_size - 1


def _start_process_group(timeout_minutes: int) -> None:
    if dist.is_initialized():
        return
    if platform.has_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(platform.backend(), timeout=timeout)
    else:  # plain python, a world of one: its store uses a port of its own, and its children inherit no rank
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True, timeout=timeout)
        dist.init_process_group(platform.backend(), timeout=timeout, store=store, rank=0, world_size=1)
    failure.watch()


def existing_parallel() -> ParallelConfig:
    """Parallel sizes that megatron-core was initialised with in this process; all 1 without initialisation."""
    if not parallel_state.model_parallel_is_initialized():
        return ParallelConfig()
    return ParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def initialize(
    parallel: ParallelConfig | None = None,
    seed: int = 1234,
    settings: Mapping[str, Any] | None = None,
) -> World:
    """Start torch.distributed (torchrun's environment, or a world of one), the groups and the seeds.

    Args:
        settings: flag -> value; must be equal on every rank.

    Raises UserError when the world size does not fit the parallel sizes, or the ranks' settings differ.
    """
    parallel = parallel or ParallelConfig()
    expect(parallel, ParallelConfig, "parallel")
    if settings is None:
        parallel.check_world_size(int(os.environ.get("WORLD_SIZE", "1")))
    platform.activate()
    _start_process_group(parallel.distributed_timeout_minutes)
    if settings is not None:
        check_agreement(settings)
    parallel.check_world_size(dist.get_world_size())
    if not parallel_state.model_parallel_is_initialized():
        with _groups_shared_on_gloo():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor_model_parallel_size,
                pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
                context_parallel_size=parallel.context_parallel_size,
                expert_model_parallel_size=parallel.expert_model_parallel_size,
                distributed_timeout_minutes=parallel.distributed_timeout_minutes,
                # a sum that runs beside a product must not wait for the product's end
                high_priority_stream_groups=["tp", "cp"] if platform.has_cuda() else None,
            )
        seed_everything(seed)  # existing groups belong to a program with its own seeds
    return _build_world(parallel)


@contextmanager
def _groups_shared_on_gloo() -> Iterator[None]:
    """Inside, groups of the same ranks are one group: megatron-core creates about thirty, and each gloo group has three
    threads that wake up 200 times a second. Collectives run in program order on every rank, so sharing is safe."""
    if platform.has_cuda():
        yield
        return
    made: dict[tuple[int, ...] | None, Any] = {}
    new_group = dist.new_group

    def shared(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        """Create or reuse the group of a set of ranks."""
        key = None if ranks is None else tuple(ranks)
        if key not in made:
            made[key] = new_group(ranks, **options)
        return made[key]

    dist.new_group = shared  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = new_group


def seed_everything(seed: int) -> None:
    """Seed torch and megatron-core's dropout tracker (the CPU needs the inference tracker: no CUDA generator)."""
    torch.manual_seed(seed)
    if platform.has_cuda():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def _draft_groups(tp: dist.ProcessGroup, timeout: timedelta) -> tuple[dist.ProcessGroup, ProcessGroupCollection]:
    tp_size, world = tp.size(), dist.get_world_size()
    if world == 1:  # one group is enough: each new one costs three threads, and a process may initialise many times
        return tp, _draft_collection(tp, tp, tp)
    # megatron-core orders ranks with TP innermost: TP rank = rank % TP.
    shards, ranks = [list(range(t, world, tp_size)) for t in range(tp_size)], [[r] for r in range(world)]
    same_shard, _ = dist.new_subgroups_by_enumeration(shards, timeout=timeout)
    alone, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
    return same_shard, _draft_collection(tp, same_shard, alone)


def _draft_collection(
    tp: dist.ProcessGroup, same_shard: dist.ProcessGroup, alone: dist.ProcessGroup
) -> ProcessGroupCollection:
    groups = dict(
        tp=tp, mp=tp, pp=alone, cp=alone, embd=None, pos_embd=None, dp=same_shard, dp_cp=same_shard,
        intra_dp_cp=same_shard, expt_dp=same_shard, intra_expt_dp=same_shard, ep=alone, expt_tp=tp, tp_ep=tp,
        tp_ep_pp=tp, tp_cp=tp, intra_dist_opt=None, inter_dist_opt=None, tp_dp_cp=dist.group.WORLD,
    )  # fmt: skip
    known: Any = ProcessGroupCollection.__dataclass_fields__
    return ProcessGroupCollection(**{k: v for k, v in groups.items() if k in known})


def _build_world(parallel: ParallelConfig) -> World:
    tp = parallel_state.get_tensor_model_parallel_group()
    draft_dp, draft_groups = _draft_groups(tp, timedelta(minutes=parallel.distributed_timeout_minutes))
    return World(
        parallel=parallel,
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=platform.device(),
        tp=tp,
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        draft_dp=draft_dp,
        base_groups=ProcessGroupCollection.use_mpu_process_groups(),
        draft_groups=draft_groups,
        context=ContextShard(parallel_state.get_context_parallel_group())
        if parallel.context_parallel_size > 1
        else None,
    )


def together(action: Callable[[], T]) -> T:
    """Run `action` on every rank of the world; if it fails on any rank, every rank raises.

    The failed rank raises its own error, all other ranks name it. Without this, they would hang.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as e:
        error = e
    found: list[tuple[type[Exception], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (type(error), str(error)) if error is not None else None)
    if error is not None:
        raise error
    for rank, other in enumerate(found):
        if other is not None:
            kind = other[0] if other[0].__module__.startswith("megatron_spec.") else RuntimeError
            raise kind(f"rank {rank} failed: {other[1]}")
    return result  # type: ignore[return-value]


@contextmanager
def sole_run(output: Path | str, world: World, file: bool = False) -> Iterator[None]:
    """Inside, this run owns an output folder, or file. Collective; raises UserError naming the run that owns it.

    Ranks leave together: a launcher ends the others as soon as one exits with an error, such as the code of a run that
    a signal stopped, while rank 0 may still be closing its files.
    """
    with ExitStack() as stack:
        together(lambda: stack.enter_context(lock.exclusive(output, file)) if world.rank == 0 else None)
        yield
    if world.size > 1:
        dist.barrier()


def shutdown() -> None:
    """Destroy all groups; safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Raise UserError on every rank when `settings` (flag -> value) differ from those of rank 0. Collective.

    Ranks that disagree would hang or silently train a different model.
    """
    if dist.get_world_size() == 1:
        return
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {flag: str(value) for flag, value in settings.items()})
    differences = []
    for flag in sorted({flag for found in everywhere for flag in found}):
        values = [found.get(flag, "(not given)") for found in everywhere]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append(f"{flag} is {values[0]} on rank 0 and {values[other]} on rank {other}")
    if differences:
        raise UserError(
            f"the ranks were started differently: {'; '.join(differences)}. Start every rank with the same flags, and "
            "make sure that they read the same files"
        )
