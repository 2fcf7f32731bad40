"""What train_throughput.py measures: a step of training, its parts and its memory."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import pkgutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.flops import block_flops, standard_flops
from benchmarks.random_models import random_base, random_block_draft, random_draft
from benchmarks.shapes import base_shape
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.moe import LocalExperts, Router
from megatron_spec.batch import Batch
from megatron_spec.config import BaseConfig, BaseLayers, BlockConfig, ObjectiveConfig, TrainConfig, presets
from megatron_spec.data.chat import Sample
from megatron_spec.drafts import block_losses, dflash, eagle3, unroll
from megatron_spec.drafts.anchors import BlockPlan
from megatron_spec.features.ahead import FeaturesAhead
from megatron_spec.features.base import FeatureSource
from megatron_spec.features.offline import OfflineFeatures, extract
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.features.store import FeatureStore, StoreManifest
from megatron_spec.ops import head
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.optional import ENGINE
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer

PEAK = 990e12
"""Dense bf16 FLOP/s of one H100 SXM."""


def supervised_batch(config: BaseConfig, B: int, S: int, device: torch.device, share: float = 1.0) -> Batch:
    """Random tokens; the last `share` of every row is one assistant turn."""
    positions = torch.arange(S).expand(B, S).contiguous()
    turns = (positions >= round((1 - share) * S)).int()
    tokens = torch.randint(0, config.vocab_size, (B, S))
    return Batch(tokens, positions, turns, torch.zeros_like(turns)).to(device)


def build_trainer(draft: torch.nn.Module, base: FrozenBase, world: World, objective: ObjectiveConfig) -> Trainer:
    """The draft with its optimizer, as finetune.py builds them."""
    train = TrainConfig(train_iters=1000, bf16=base.dtype == torch.bfloat16)
    ddp = wrap_ddp(draft, world, train)
    optimizer, scheduler = build_optimizer(ddp, world, train)
    return Trainer(world, ddp, optimizer, scheduler, base, objective)


def new_draft(base: FrozenBase, world: World, T: int, args: argparse.Namespace) -> tuple[Any, ObjectiveConfig]:
    """(draft as --draft asks, what it is trained for)."""
    if args.draft == "eagle3":
        draft = random_draft(base.config, world, args.draft_vocab_size, base.dtype)
        objective = ObjectiveConfig(ttt_steps=T, loss=args.loss, step_weights=args.step_weights)
        return draft, presets.objective_for(draft.config, objective)
    draft = random_block_draft(base.config, world, args.draft, args.draft_layers, args.block_size, base.dtype)
    base.capture(draft.config.capture_layer_ids)
    objective = ObjectiveConfig(
        anchors=args.anchors,
        loss=args.loss,
        block_weights=args.block_weights,
        backbone_weight=args.backbone_weight,
    )
    return draft, presets.objective_for(draft.config, objective)


def flops_of(draft: Any, base: FrozenBase, objective: ObjectiveConfig, batch: Batch) -> dict[str, float]:
    """Of one token of this batch; for block drafts counted with the anchors that are drawn from it."""
    B, S = batch.tokens_BS.shape
    if not isinstance(draft.config, BlockConfig):
        return standard_flops(base.config, draft.config, S, objective.ttt_steps)
    plan = BlockPlan.of(batch, draft.config, objective.anchors)
    teacher = len(plan.supervision.teacher_U) / (B * S)
    return block_flops(base.config, draft.config, len(plan.tokens_P) // B, S, teacher)


def offline_source(base: FrozenBase, world: World, batches: list[Batch], folder: Path | None) -> OfflineFeatures:
    """The features of the batches, written to disk once, in the base's dtype."""
    folder = Path(folder or tempfile.mkdtemp(prefix="features-"))
    rows = [row for batch in batches for row in zip(batch.tokens_BS.cpu(), batch.turns_BS.cpu(), strict=True)]
    manifest = StoreManifest(
        base_fingerprint="random", capture_layer_ids=base.capture_layer_ids, hidden_size=base.config.hidden_size,
        dtype=str(base.dtype).removeprefix("torch."), template_hash="", num_samples=len(rows),
        seq_length=batches[0].tokens_BS.shape[1], samples_per_shard=1,
    )  # fmt: skip

    class Samples:
        seq_length = manifest.seq_length

        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> Sample:
            return Sample(*rows[index])

    extract(base, Samples(), folder, manifest)
    return OfflineFeatures(FeatureStore(folder), world, base.dtype)


class Stopwatch:
    """Device time of marked regions (wall clock on a CPU)."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.marks = cuda, []
        self.marks: list[tuple[str, Any, Any]]

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self.marks.append((name, begin, self._now()))

    def watch(self, owner: Any, attribute: str, name: str) -> Callable[[], None]:
        """Time every call of `owner.attribute`; returns what undoes it."""
        original = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.region(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)
        return lambda: setattr(owner, attribute, original)

    def watch_methods(self, owner: Any, attribute: str, names: dict[str, str]) -> Callable[[], None]:
        """Time these methods of whatever `owner.attribute` makes; returns what undoes it."""
        original = getattr(owner, attribute)

        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            for method, name in names.items():
                self.watch(made, method, name)
            return made

        setattr(owner, attribute, make)
        return lambda: setattr(owner, attribute, original)

    def watch_results(self, owner: Any, attribute: str, name: str) -> Callable[[], None]:
        """Time the functions that `owner.attribute` makes; returns what undoes it."""
        original = getattr(owner, attribute)

        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)

            def timed(*args: Any, **kwargs: Any) -> Any:
                with self.region(name):
                    return made(*args, **kwargs)

            return timed

        setattr(owner, attribute, make)
        return lambda: setattr(owner, attribute, original)

    def totals(self) -> dict[str, float]:
        """Milliseconds per region."""
        if self.cuda:
            torch.cuda.synchronize()
        out: dict[str, float] = {}
        for name, begin, end in self.marks:
            out[name] = out.get(name, 0.0) + (begin.elapsed_time(end) if self.cuda else (end - begin) * 1e3)
        return out


OF_PRODUCTS = {"forward": "head_forward", "forward_largest": "head_forward", "backward": "head_input_gradient"}
HEAD = ("head_forward", "loss", "head_input_gradient", "head_weight_gradient")
"""Parts of `head`: logits, loss with their gradient, gradients of its input and of its weight."""


def shares(
    step: Callable[[], Any], trainer: Trainer, ahead: FeaturesAhead, cuda: bool, repeats: int = 3
) -> dict[str, float]:
    """Parts of a step in milliseconds; `draft_layer` is what is left. `head` holds head, loss and their gradient, whose
    parts are also listed by themselves (`HEAD`)."""
    clock = Stopwatch(cuda)
    undo = [
        clock.watch(ahead, "_fill" if ahead.online else "_next", "base"), clock.watch(eagle3, "teach", "teacher"),
        clock.watch(eagle3, "head_losses", "head"), clock.watch(dflash, "teach", "teacher"),
        clock.watch(dflash, "block_losses", "head"), clock.watch(trainer, "_update", "optimizer"),
        clock.watch_methods(head, "WeightProducts", OF_PRODUCTS),
        clock.watch_methods(head, "weight_gradient", dict.fromkeys(("add", "result"), "head_weight_gradient")),
        clock.watch_results(unroll, "kernel_row_loss", "loss"),
        clock.watch_results(block_losses, "kernel_row_loss", "loss"),
    ]  # fmt: skip
    for _ in range(repeats):
        with clock.region("step"):
            step()
    for restore in reversed(undo):
        restore()
    parts = {name: value / repeats for name, value in clock.totals().items()}
    inside = {name: parts.pop(name) for name in HEAD if name in parts}
    total = parts.pop("step")
    return {**parts, "draft_layer": total - sum(parts.values()), **inside}


def count_events(step: Callable[[], Any], table: Path | None) -> dict[str, float]:
    """Launches, synchronisations and idle device time of one step, profiled; `table` gets the time per kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    averages = found.key_averages()
    if table is not None:
        table.write_text(averages.table(sort_by="self_cuda_time_total", row_limit=70, max_name_column_width=90))

    def total(*names: str) -> int:
        return sum(e.count for e in averages if any(n in e.key for n in names))

    spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if e.device_type == DeviceType.CUDA)
    idle, end = 0.0, spans[0][0]
    for begin, stop in spans:
        idle, end = idle + max(0.0, begin - end), max(end, stop)
    return {
        "idle_ms": idle / 1e3,
        "launches": total("LaunchKernel"),
        "synchronisations": total("StreamSynchronize", "DeviceSynchronize", "EventSynchronize") - 1,  # ours
    }


def compiled_kernels() -> int:
    """Variants of Triton kernels and torch.compile graphs so far."""
    import torch._dynamo.utils as dynamo

    count = int(dynamo.counters["stats"]["unique_graphs"])
    with contextlib.suppress(ImportError):
        from triton.runtime.jit import JITFunction

        from megatron_spec.ops import kernels

        modules = (
            importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)
        )
        found = {id(k): k for m in modules for k in vars(m).values() if isinstance(k, JITFunction)}
        count += sum(len(cache[0]) for k in found.values() for cache in k.device_caches.values())
    return count


def measure(base: FrozenBase, world: World, S: int, T: int, args: argparse.Namespace) -> dict[str, Any]:
    """Warm up, time whole steps, then take one apart."""
    cuda, B = world.device.type == "cuda", args.micro_batch_size
    draft, objective = new_draft(base, world, T, args)
    trainer = build_trainer(draft, base, world, objective)
    if args.draft_fp8:
        draft.paths = draft.paths.asked_for("draft_fp8")
        draft.paths.check()
    if args.plain:
        draft.paths = draft.paths.without("draft_fused", "draft_layer", "block_kernel", "product_epilogues")
    draft.paths = draft.paths.without(*args.without)
    batches = [supervised_batch(base.config, B, S, world.device, args.supervised_share) for _ in range(2)]
    source: FeatureSource = OnlineFeatures(base)
    if args.offline:
        batches = [replace(b, sample_ids=tuple((j,) for j in range(i * B, (i + 1) * B))) for i, b in enumerate(batches)]
        source = offline_source(base, world, batches, args.store)
    steps = (trainer.prepare([batches[i % 2]]) for i in itertools.count())
    ahead = FeaturesAhead(source, steps, world.pp_size)

    def step() -> Any:
        _, features, count = ahead.step()
        return trainer.step(features, count=count, meanwhile=ahead.prepare)

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize()

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step()
    sync()
    first = time.perf_counter() - begin
    for _ in range(args.warmup):
        step()
    sync()
    before, times = compiled_kernels(), []
    for _ in range(args.repeats):
        sync()
        begin = time.perf_counter()
        for _ in range(args.iters):
            result = step()
        sync()
        times.append((time.perf_counter() - begin) / args.iters)
    after = compiled_kernels()
    seconds = statistics.median(times)
    flops = flops_of(draft, base, objective, batches[0])
    if args.offline:
        flops["base"] = 0.0
    parts = shares(step, trainer, ahead, cuda)
    entry: dict[str, Any] = {
        "tokens_per_second": B * S / seconds,
        "mfu": sum(flops.values()) * B * S / seconds / PEAK,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "seq_length": S, "micro_batch_size": B, "ttt_steps": objective.ttt_steps, "step_ms": seconds * 1e3,
        "step_ms_all": [t * 1e3 for t in times], "first_step_s": first, "shares_ms": parts,
        "base_mfu": flops["base"] * B * S / (parts["base"] / 1e3) / PEAK if flops["base"] else None,
        "compiled_after_warmup": after - before, "loss": float(result.loss),
        "loss_kind": objective.loss, "step_weights": objective.step_weights, "block_weights": objective.block_weights,
    }  # fmt: skip
    if cuda:
        entry.update(count_events(step, Path(f"{args.profile}_{S}_{T}.txt") if args.profile else None))
    return entry


def versions() -> dict[str, str]:
    """Of everything that decides the speed."""
    import importlib.metadata as metadata

    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    engine = ["transformer-engine"] if sys.modules.get(ENGINE) is not None else []
    for name in ("megatron-core", *engine, "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Measure every (length, steps) pair; print a table, write JSON.

    Args:
        words: the command line, for the report.
    """
    torch.manual_seed(0)
    world = distributed.initialize()
    torch.manual_seed(0)  # the same tokens in every run
    cuda = world.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    layers = BaseLayers(
        "transformer_engine" if args.transformer_engine else "local", "e4m3" if args.fp8_recipe else None,
        args.fp8_recipe,
    )  # fmt: skip
    base = random_base(base_shape(args.shape), world, dtype, layers, args.without)
    if args.plain:
        base.direct = None
        for module in base.modules():
            if isinstance(module, (LocalExperts, Router)):
                module.kernels = None
    if args.base_fp8:
        from megatron_spec.base.direct import run_in_fp8

        run_in_fp8(base)
    pairs = [tuple(map(int, p.split("x"))) for p in args.only] if args.only else [
        (S, T) for S in dict.fromkeys(args.seq_length)
        for T in dict.fromkeys(args.ttt_steps if args.draft == "eagle3" else args.ttt_steps[:1])  # blocks: one size
    ]  # fmt: skip
    entries = []
    for S, T in pairs:
        entry = measure(base, world, S, T, args)
        entries.append(entry)
        memory = f"{entry['peak_gib']:.1f} GiB" if cuda else "-"
        parts = " ".join(f"{k} {v:.1f}" for k, v in entry["shares_ms"].items())
        print(
            f"S={S} B={entry['micro_batch_size']} T={entry['ttt_steps']}: {entry['step_ms']:.1f} ms, "
            f"{entry['tokens_per_second']:.0f} tokens/s, MFU {100 * entry['mfu']:.1f} %, peak {memory}; ms: {parts}",
            flush=True,
        )
        gc.collect()  # the wrapper of the draft holds cycles
        if cuda:
            torch.cuda.empty_cache()
    report = {
        **entries[0], "card": torch.cuda.get_device_name() if cuda else "CPU", "shape": args.shape, "plain": args.plain,
        "draft": args.draft, "without": args.without,
        "transformer_engine": args.transformer_engine, "base_fp8": args.base_fp8,
        "fp8_recipe": args.fp8_recipe, "draft_fp8": args.draft_fp8, "offline": args.offline,
        "supervised_share": args.supervised_share, "versions": versions(),
        "command": [Path(sys.argv[0]).name, *words], "runs": entries,
    }  # fmt: skip
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    distributed.shutdown()
    return report
