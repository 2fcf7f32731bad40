"""What tp_overlap.py measures: layers and draft steps under two tensor parallel ranks, and single sums."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure_layouts import start
from benchmarks.random_models import random_base, random_draft
from benchmarks.shapes import base_shape
from megatron_spec.batch import Batch
from megatron_spec.config import ObjectiveConfig
from megatron_spec.drafts.unroll import head_losses, teach
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.ops.overlap import RankSums, Wait
from megatron_spec.runtime.distributed import World

LAYERS, STEPS, DRAFT_VOCAB = 8, 7, 32000
SHAPE = {"num_layers": LAYERS}
SLOT_BYTES = 32 << 20
"""Of the slots in symmetric memory, into which sums by torch's kernel are copied."""


class Pieces(RankSums):
    """Sums of the base whose rows go in a number of pieces; the draft's weight gradients beside its sums, or after."""

    def __init__(self, group: dist.ProcessGroup, count: int, beside: bool = True) -> None:
        super().__init__(group)
        self.count, self.beside_gradients = count, beside

    def pieces(self, rows: int) -> list[slice]:
        """Equal pieces."""
        bounds = [rows * i // self.count for i in range(self.count + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(bounds)]


class NoSums(Pieces):
    """Nothing is summed: the upper limit."""

    def start(self, x: Tensor) -> Wait:
        """x."""
        return lambda: x


class KernelSums(Pieces):
    """torch's two-shot kernel over symmetric memory, on a stream of its own."""

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(group, count)
        self.memory = symmetric.empty(6, SLOT_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self.memory, group)
        self.stream, self.uses = torch.cuda.Stream(device), 0

    def start(self, x: Tensor) -> Wait:
        """Copy into symmetric memory, sum there, copy back."""
        chunks = x.view(-1).split(SLOT_BYTES // x.element_size())
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for chunk in chunks:
                slot = self.memory[self.uses % 6].view(x.dtype)[: len(chunk)]
                self.uses += 1
                slot.copy_(chunk)
                torch.ops.symm_mem.two_shot_all_reduce_(slot, "sum", self.group.group_name)
                chunk.copy_(slot)
            done = torch.cuda.Event()
            done.record()

        def wait() -> Tensor:
            """The sum."""
            torch.cuda.current_stream().wait_event(done)
            return x

        return wait


class Work:
    """The parts of a training step on one layout."""

    def __init__(self, layout: str, args: argparse.Namespace) -> None:
        self.world, _ = start(layout)
        cuda = self.world.device.type == "cuda"
        dtype = torch.bfloat16 if cuda else torch.float32
        config = base_shape("tiny") if args.tiny else base_shape("llama-3.1-8b").replace(**SHAPE)
        torch.manual_seed(self.world.tp_rank)
        self.base = random_base(config, self.world, dtype)
        self.draft = random_draft(config, self.world, DRAFT_VOCAB, dtype)
        for p in self.draft.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        self.objective = ObjectiveConfig(ttt_steps=args.steps)
        S, B = args.seq_length, args.micro_batch_size
        tokens = torch.randint(0, config.vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
        ones = torch.ones(B, S, dtype=torch.int32)
        batch = Batch(tokens, torch.arange(S).expand(B, S).clone(), ones, ones - 1).to(self.world.device)
        self.source = OnlineFeatures(self.base)
        self.batch, self.features = batch, self.source.features([batch])[0]
        self.plan = self.draft.supervision(batch, self.objective)
        self.teacher = self.teach()
        self.gradients: list[Tensor] = []

    def sums(self, sums: RankSums) -> None:
        """Sum by other means."""
        if self.base.direct is not None:
            self.base.direct.sums = sums
        self.draft.sums = sums

    def layers(self) -> None:
        """Embedding and all layers of the base."""
        self.source.features([self.batch])

    def unroll(self) -> None:
        """Projection of the captures and all draft steps, forward and backward."""
        states = self.draft.states(self.features, self.plan, self.base, self.objective)
        if not self.gradients:
            self.gradients = [torch.randn_like(x) * 1e-3 for x in states]
        torch.autograd.backward(states, [g.clone() for g in self.gradients])

    def teach(self) -> Any:
        """The teacher."""
        group, scattered = self.draft.tp_group, self.draft.sequence_parallel
        head = self.draft.teacher_head(self.base)
        return teach(self.features, self.plan, head, self.objective.temperature, group, scattered)

    def head(self) -> None:
        """Head, losses and their gradients, for given states."""
        rows, weight = sum(map(len, self.plan.rows)), self.draft.lm_head.quantized_weight()
        states = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device).requires_grad_()
        parts = list(states.split([len(r) for r in self.plan.rows]))
        given = (self.plan, self.teacher, self.objective, self.draft.tp_group)
        head_losses(parts, weight, *given, paths=self.draft.paths).total.backward()


PARTS: dict[str, tuple[str, int, int]] = {
    "base, a layer": ("layers", LAYERS, 32), "draft, a step": ("unroll", STEPS, 7),
    "teacher": ("teach", 1, 1), "head, a step": ("head", STEPS, 7),
}  # fmt: skip
"""Part of a step -> (method, units that it runs, units of a step with 32 layers and seven draft steps)."""


def milliseconds(action: Callable[[], Any], world: World, rounds: int) -> float:
    """Median of several runs on this rank, the slowest over ranks."""
    cuda, times = world.device.type == "cuda", []
    for i in range(rounds + 2):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        if i >= 2:
            times.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor(statistics.median(times), device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def high_priority(most: int | None = None) -> dist.ProcessGroup:
    """All ranks in an NCCL group whose kernels go first, in at most `most` thread blocks."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if most is not None:
        options.config.max_ctas = most
    return dist.new_group(pg_options=options)


def variants(work: Work) -> dict[str, Callable[[], RankSums]]:
    """Name -> means of summing; those that need CUDA are left out without it."""
    tp, device = work.world.tp, work.world.device
    found: dict[str, Callable[[], RankSums]] = {
        "no sums": lambda: NoSums(tp, 1), "no sums, gradients after": lambda: NoSums(tp, 1, False),
        "no sums, 2 pieces": lambda: NoSums(tp, 2),
        "all-reduce": lambda: Pieces(tp, 1), "all-reduce, gradients after": lambda: Pieces(tp, 1, False),
        "all-reduce, 2 pieces": lambda: Pieces(tp, 2),
    }  # fmt: skip
    if device.type != "cuda":
        return found
    for count in (1, 2):
        for most in (None, 8, 16):
            variant = f"{', 2 pieces' * (count == 2)}, high priority{'' if most is None else f', {most} CTAs'}"
            found["all-reduce" + variant] = lambda n=most, c=count: Pieces(high_priority(n), c)  # type: ignore[misc]
    found["all-reduce, again"] = lambda: Pieces(tp, 1)
    found["no sums, again"] = lambda: NoSums(tp, 1)
    found["symmetric two-shot kernel, 2 pieces"] = lambda: KernelSums(tp, 2, device)
    return found


def measured(work: Work, rounds: int, names: list[str]) -> dict[str, float]:
    """Milliseconds per unit of each part."""
    return {name: milliseconds(getattr(work, PARTS[name][0]), work.world, rounds) / PARTS[name][1] for name in names}


def say(world: World, text: str) -> None:
    """Print on rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def _concerned(name: str) -> list[str]:
    """The parts that differ: the draft has no pieces, the base no gradients."""
    parts = ["base, a layer", "draft, a step"]
    return parts[:1] if "pieces" in name else parts[1:] if "gradients" in name else parts


def compare(work: Work, half: dict[str, float], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a layer and a draft step with every means of summing."""
    names, found = ["base, a layer", "draft, a step"], {}
    say(work.world, f"\n{'ms':44}" + "".join(f"{name:>16} {'ratio':>7}" for name in names))
    rows = {"one GPU, halved": lambda: half, **variants(work)}
    for name, make in rows.items():
        try:
            sums = make()
            if isinstance(sums, RankSums):
                work.sums(sums)
                found[name] = measured(work, rounds, _concerned(name))
            else:
                found[name] = {n: half[n] for n in names}
        except Exception as error:
            say(work.world, f"{name:44} failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        cells = "".join(
            f"{found[name][n]:16.3f} {half[n] / found[name][n]:7.1%}" if n in found[name] else " " * 24 for n in names
        )
        say(work.world, f"{name:44}{cells}")
    return found


def losses_of_parts(work: Work, half: dict[str, float], rounds: int) -> dict[str, Any]:
    """Every part of a step as the package runs it, against half of one GPU's; milliseconds of a whole step."""
    work.sums(RankSums(work.world.tp))
    now = measured(work, rounds, list(PARTS))
    say(work.world, f"\n{'ms of a step':20}{'halved':>10}{'two GPUs':>10}{'lost':>8}")
    found, total = {}, [0.0, 0.0]
    for name, (_, _, units) in PARTS.items():
        row = [half[name] * units, now[name] * units]
        total = [a + b for a, b in zip(total, row, strict=True)]
        found[name] = row
        say(work.world, f"{name:20}{row[0]:10.2f}{row[1]:10.2f}{row[1] - row[0]:8.2f}")
    say(work.world, f"{'together':20}{total[0]:10.2f}{total[1]:10.2f}{total[1] - total[0]:8.2f}")
    return found


def alone(work: Work, rounds: int) -> float:
    """Milliseconds of one sum of a step's rows, with nothing else running; GB/s that each rank sends."""
    rows, width = work.batch.tokens_BS.numel(), work.base.config.hidden_size
    x = torch.ones(rows, width, dtype=work.base.dtype, device=work.world.device)
    sums = RankSums(work.world.tp)
    ms = milliseconds(lambda: [sums.start(x)() for _ in range(10)], work.world, rounds) / 10
    say(work.world, f"{'all-reduce':20}{ms:10.3f} ms{x.numel() * x.element_size() / ms / 1e6:10.0f} GB/s")
    return ms


def main(args: argparse.Namespace) -> dict[str, Any]:
    """All tables; the numbers as JSON at the end."""
    args.steps = STEPS
    one = Work("one", args)
    half = {name: ms / 2 for name, ms in measured(one, args.rounds, list(PARTS)).items()}
    del one
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    work = Work("tp2", args)
    report: dict[str, Any] = {"half": half, "alone": alone(work, args.rounds)}
    report["parts"] = losses_of_parts(work, half, args.rounds)
    report["sums"] = compare(work, half, args.rounds)
    say(work.world, "\n" + json.dumps(report))
    dist.barrier()
    return report
