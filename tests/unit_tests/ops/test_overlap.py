"""Sums of two ranks through a link between their memories, here a stand-in, against all-reduces; bit for bit."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_spec.base import direct as direct_module
from megatron_spec.config import ObjectiveConfig, ParallelConfig
from megatron_spec.config.machine import Machine
from megatron_spec.drafts import eagle3, fused_unroll
from megatron_spec.ops import overlap, peer_memory
from megatron_spec.ops.overlap import RankSums
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from tests.unit_tests.base import test_direct
from tests.unit_tests.drafts.plain_eagle3 import eagle_config
from tests.unit_tests.drafts.test_eagle_parallel import outcome
from tests.unit_tests.ops.peer_stand_in import StandInLink
from tests.worlds import run_world

TP2 = ParallelConfig(tensor_model_parallel_size=2)


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different on every rank."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def several_sums(group: Any) -> None:
    """Four sums in flight, one of them in two slots; all slots are free again, in any order."""
    link = StandInLink(group, slot_bytes=4096)
    sums = RankSums(group, lambda x: link)
    for _ in range(3):
        given = [values((8, 64), 1), values((32, 64), 2), values((16, 128), 3, torch.bfloat16), values((4, 2, 32), 4)]
        expected = [x.clone() for x in given]
        for x in expected:
            dist.all_reduce(x, group=group)
        waits = [sums.start(x) for x in given]
        assert [len(slots) for slots in link.sent] == [1, 2, 1, 1]
        for i in (1, 0, 3, 2):
            assert waits[i]() is given[i]
        for wait, x in zip(waits, expected, strict=True):
            assert torch.equal(wait(), x)  # a second call changes nothing
    assert link.exchanges == 12 and sorted(sums._free) == list(range(6)) and not link.sent and not link.inbox


def what_has_no_slot(group: Any, patch: pytest.MonkeyPatch) -> None:
    """Small, large or strided values, or those for which no slot is left, are all-reduced."""
    link = StandInLink(group, slots=2, slot_bytes=4096)
    sums = RankSums(group, lambda x: link)
    patch.setattr(overlap, "SMALLEST_COPY", 1024)
    given = [values((8, 8), 1), values((64, 64), 2), values((64, 16), 3).t(), values((32, 64), 4), values((16, 16), 5)]
    expected = [x.contiguous().clone() for x in given]
    for x in expected:
        dist.all_reduce(x, group=group)
    waits = [sums.start(x) for x in (given[0], given[1], given[3], given[4])]
    assert [*link.sent] == [range(2)]  # those of given[3]; none is left for given[4]
    for wait, x in zip(waits, (expected[0], expected[1], expected[3], expected[4]), strict=True):
        assert torch.equal(wait(), x)
    assert link.exchanges == 1 and sums._slots_for(given[2]) is None


def without_a_link(group: Any) -> None:
    """A link that could not be opened is not asked for again."""
    asked: list[int] = []
    sums = RankSums(group, lambda x: asked.append(1))
    for seed in (1, 2):
        x = values((8, 64), seed)
        expected = x.clone()
        dist.all_reduce(expected, group=group)
        assert torch.equal(sums.start(x)(), expected)
    assert asked == [1]


def base_forward(links: list[StandInLink]) -> None:
    """The base's direct forward."""
    base = test_direct.make_base(parallel=TP2)
    paths = Paths(Setting(Machine(kernels="plain"), parallel=TP2, base=base.config))
    norm, found = base.core.final_norm.weight, []
    for linked in (False, True):
        base.direct = direct_module.DirectForward(base.config, base.core.layers, norm, base.world.tp, paths)
        if linked:
            links.append(StandInLink(base.world.tp))
            base.direct.sums = RankSums(base.world.tp, lambda x: links[-1])
        found.append(test_direct.batch_of(base))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def draft_unroll(links: list[StandInLink], rows_below: float, patch: pytest.MonkeyPatch) -> None:
    """The fused unroll of a draft, and its gradients."""
    patch.setattr(fused_unroll, "COMPACT_BELOW", rows_below)
    group, config, found = parallel_state.get_tensor_model_parallel_group(), eagle_config(), []
    paths = Paths(Setting(Machine(kernels="plain"), parallel=TP2, draft=config))
    for linked in (False, True):
        if linked:
            links.append(StandInLink(group))
            patch.setattr(eagle3, "rank_sums", lambda g, p: RankSums(g, lambda x: links[-1]))
        found.append(outcome(config, ObjectiveConfig(ttt_steps=3), group, False, paths))
    patch.undo()
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name


class FaultyMemory:
    """Of two slots; `fault` happens on rank 1 alone."""

    slots = 2

    def __init__(self, group: Any, device: torch.device, driver: Any, fault: str = "") -> None:
        self.rank, self.fault = group.rank(), fault if group.rank() == 1 else ""
        if self.fault == "no memory":
            raise RuntimeError("CUDA driver error: peer access is not supported\nmore")

    def send(self, slots: range, x: Tensor) -> None:
        assert x.is_contiguous()

    def received(self, slots: range, like: Tensor) -> Tensor:
        return like + 1 if self.fault == "other values" else like

    def release(self, slots: range) -> None:
        pass

    def flags(self) -> tuple[list[int], list[int]]:
        return ([1, 0] if self.fault == "no flag" else [1, 1]), ([0, 1] if self.fault == "no return" else [1, 1])


def no_driver(device: torch.device) -> None:
    raise OSError("no libcuda")


def opened(group: Any, patch: pytest.MonkeyPatch) -> dict[str, tuple[bool, str]]:
    """{what is wrong: (a link was opened, what the log says)}."""
    found, said, cpu = {}, [], torch.device("cpu")
    patch.setattr(peer_memory.log, "warning", lambda text, *told: said.append(text % told))
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    patch.setattr(peer_memory, "_Driver", no_driver)
    found["no driver"] = (peer_memory.connect(group, cpu) is not None, said.pop())
    patch.setattr(peer_memory, "_Driver", lambda device: None)
    patch.setattr(peer_memory, "PeerMemory", FaultyMemory)
    for fault in ("no memory", "no flag", "other values", "no return"):
        found[fault] = (peer_memory.connect(group, cpu, fault=fault) is not None, said.pop())  # type: ignore[arg-type]
    found["works"] = (peer_memory.connect(group, cpu) is not None, "".join(said))
    patch.setattr(socket, "gethostname", lambda: f"host{group.rank()}")
    found["hosts"] = (peer_memory.connect(group, cpu) is not None, said.pop())
    return found


def ranks() -> tuple[list[int], dict[str, tuple[bool, str]]]:
    group, links = distributed.initialize(TP2).tp, []
    with pytest.MonkeyPatch.context() as patch:
        opening = opened(group, patch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SMALLEST_COPY", 1)
        several_sums(group)
        without_a_link(group)
        what_has_no_slot(group, patch)
    for rows_below in (None, 0.0, 1.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlap, "SMALLEST_COPY", 1)
            patch.setattr(overlap, "SMALLEST_PIECE", 3)
            base_forward(links) if rows_below is None else draft_unroll(links, rows_below, patch)
    return [link.exchanges for link in links], opening


@pytest.fixture(scope="module")
def world() -> list[Any]:
    return run_world(2, ranks)


def test_sums_through_a_link_equal_all_reduces(world: list[Any]) -> None:
    base, whole, compacted = world[0][0]
    # two sums in each of four layers, in two pieces; in each of three steps two sums forward and two backward, in two
    # pieces, and the gradient from the LM head; at last that of the embedding's norm
    assert base == 4 * 4
    assert whole == 3 * (4 + 4 + 1) + 1 and compacted > 0


def test_a_link_that_does_not_work_is_not_used(world: list[Any]) -> None:
    """On either rank, whichever has the fault; the log says why."""
    reasons = {
        "no driver": "the CUDA driver has no stream memory operations (no libcuda)",
        "no memory": "on rank 1, RuntimeError: CUDA driver error",
        "no flag": "on rank 1, RuntimeError: a flag did not arrive",
        "other values": "on rank 1, RuntimeError: values did not arrive",
        "no return": "on rank 1, RuntimeError: a flag did not come back",
        "hosts": "its ranks are on several hosts (host0, host1)",
    }
    for _, opening in world:
        assert opening.pop("works") == (True, "")
        assert {name: told[0] for name, told in opening.items()} == dict.fromkeys(reasons, False)
        for name, reason in reasons.items():
            assert opening[name][1].startswith(f"tp_symmetric is off: {reason}"), opening[name]


def test_the_path() -> None:
    base = test_direct.CONFIG
    on = Setting(Machine(True, (9, 0), "triton"), "bfloat16", TP2, base)
    assert Paths(on).on("tp_symmetric")
    for change, reason in (
        ({"parallel": ParallelConfig()}, "there are 1 tensor parallel ranks, not 2"),
        ({"parallel": ParallelConfig(tensor_model_parallel_size=4)}, "there are 4 tensor parallel ranks, not 2"),
        ({"machine": Machine(kernels="plain")}, "there is no GPU"),
        ({"machine": Machine(True, (9, 0), "triton", symmetric_memory=False)}, "this torch has no symmetric memory"),
        ({"base": None}, "neither base_direct nor draft_fused is on"),
        ({"off": ("tp_symmetric",)}, "turned off"),
        ({"plain": True}, "--plain turns it off"),
    ):
        assert Paths(Setting(**{**vars(on), **change})).blocked["tp_symmetric"] == reason
