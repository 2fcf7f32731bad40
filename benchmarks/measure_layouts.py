"""What scale.py measures in a layout: losses and gradients against one GPU, and throughput."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import layouts, small_base
from benchmarks.random_models import random_base, random_draft
from megatron_spec.batch import Batch
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.commands.convert import new_draft
from megatron_spec.config import ENGINE, LOCAL, ObjectiveConfig, TrainConfig, presets
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.features.ahead import FeaturesAhead
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.ops import overlap, shared_linear
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer

SMALLEST_PIECE = overlap.SMALLEST_PIECE


def start(layout: str) -> tuple[World, bool]:
    """The process groups of a layout, after removing those of the previous one."""
    from megatron.core import parallel_state

    found = layouts.parse(layout)
    parallel_state.destroy_model_parallel()
    return distributed.initialize(found.parallel), found.engine


# Equality


def equality_batches(vocab: int, S: int, world: World) -> list[Batch]:
    """This data-parallel rank's part of sixteen micro-batches with two turns per row and padding."""
    generator, found = torch.Generator().manual_seed(3), []
    for m in range(16):
        tokens = torch.randint(0, vocab, (2, S), generator=generator)
        turns, documents = torch.zeros(2, S, dtype=torch.int32), torch.zeros(2, S, dtype=torch.int32)
        turns[:, 3 : S // 2], turns[:, S // 2 + 5 : S - m] = 1, 2
        documents[:, S - m :] = -1
        found.append(Batch(tokens, torch.arange(S).expand(2, S).clone(), turns, documents, context=world.context))
    return [batch.to(world.device) for batch in found[world.dp_rank :: world.dp_size]]


def gradients(
    base_folder: Path, world: World, dtype: torch.dtype, engine: bool, S: int, *, draft_engine: bool | None = None,
    captures: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """Loss, sums and unsharded gradients of one global batch.

    Args:
        engine: Transformer Engine's layers in the base, and in the draft unless `draft_engine` says otherwise.
        captures: layers that the draft reads (default: those of the presets).
    """
    reference = inspect_base(base_folder)
    D = reference.config.vocab_size // 2
    given = {"capture_layer_ids": list(captures)} if captures else {}
    config = presets.eagle_config(reference.config, overrides={"draft_vocab_size": D, **given})
    base = load_base(reference, world, config.capture_layer_ids, dtype, ENGINE if engine else LOCAL)
    vocab = DraftVocab(torch.arange(D) * 2, reference.config.vocab_size)
    name = str(dtype).removeprefix("torch.")
    modules = engine if draft_engine is None else draft_engine
    setting = Setting(platform.machine(), name, world.parallel, draft=config, draft_transformer_engine=modules)
    draft = new_draft(base, config, vocab, world, dtype, 5, Paths(setting))
    train = TrainConfig(train_iters=4, bf16=dtype == torch.bfloat16)
    ddp = wrap_ddp(draft, world, train)
    trainer = Trainer(world, ddp, *build_optimizer(ddp, world, train), base, ObjectiveConfig(ttt_steps=4))
    batches = equality_batches(reference.config.vocab_size, S, world)
    _, features, count = FeaturesAhead(OnlineFeatures(base), [batches], world.pp_size).step()
    sums, loss = trainer.backward(features, count)
    whole = {}
    for name, p in draft.named_parameters():
        gradient = p.main_grad.detach().float() / float(sums[3, 0])
        if getattr(p, "tensor_model_parallel", False) and world.tp_size > 1:
            parts = [torch.empty_like(gradient) for _ in range(world.tp_size)]
            dist.all_gather(parts, gradient.contiguous(), group=world.tp)
            gradient = torch.cat(parts, dim=p.partition_dim)
        whole[name] = gradient.cpu()
    return {"loss": float(loss), "rows": sums[3].tolist(), "gradients": whole}


def equality(layout: str, reference: Path, tiny: bool) -> list[dict[str, Any]]:
    """Relative differences of loss and gradients from one GPU; the run on one GPU writes them."""
    world, engine = start(layout)
    overlap.SMALLEST_PIECE = shared_linear.FEWEST_ROWS = (
        256  # these micro-batches are small, and divided like large ones
    )
    entries = []
    for dtype in (torch.float32, torch.bfloat16):
        if engine and dtype == torch.float32:
            continue
        found = gradients(reference / "base", world, dtype, engine, 96 if tiny else 512)
        name = str(dtype).removeprefix("torch.")
        file = reference / f"{name}.pt"
        if layout == "one":
            torch.save(found, file)
        one = torch.load(file, weights_only=True)
        every, worst = differences(found["gradients"], one["gradients"])
        entries.append({
            "layout": layout, "gpus": world.size, "dtype": name, "loss": found["loss"],
            "loss_difference": abs(found["loss"] / one["loss"] - 1), "same_rows": found["rows"] == one["rows"],
            "gradient_difference": every, "worst_parameter": worst,
        })  # fmt: skip
        if dtype == torch.bfloat16:  # the effect of rounding alone, with and without parallelism
            exact = torch.load(reference / "float32.pt", weights_only=True)
            entries[-1]["gradient_from_fp32"] = differences(found["gradients"], exact["gradients"])[0]
        say(world, entries[-1])
    return entries


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Relative differences of all gradients together and of the worst parameter."""
    pairs = [(g, expected[n]) for n, g in found.items()]
    every = torch.cat([(a - b).flatten() for a, b in pairs]).norm() / torch.cat([b.flatten() for _, b in pairs]).norm()
    return float(every), max(float((a - b).norm() / b.norm()) for a, b in pairs)


# Throughput


def speed(layout: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second and GPU of training steps, with features computed ahead across steps."""
    world, _ = start(layout)
    overlap.SMALLEST_PIECE = SMALLEST_PIECE
    cuda = world.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda:  # NCCL allocates for itself: past this limit torch gives back what it only keeps
        torch.cuda.set_per_process_memory_fraction(0.95)
    model, config = layouts.speed_shape(args.model, args.tiny)
    torch.manual_seed(world.tp_rank)
    base = random_base(config, world, dtype, without=args.without)
    draft = random_draft(config, world, 32000, dtype, args.without)
    train = TrainConfig(train_iters=10**6, bf16=cuda, use_distributed_optimizer=world.size > 1)
    ddp = wrap_ddp(draft, world, train)
    trainer = Trainer(world, ddp, *build_optimizer(ddp, world, train), base, ObjectiveConfig(ttt_steps=args.ttt_steps))
    S, B, mine = args.seq_length, args.micro_batch_size, args.micro_batches
    if (rows := layouts.parse(layout).rows) and not args.tiny:
        S, B = rows
    generator = torch.Generator().manual_seed(world.dp_rank)
    tokens = torch.randint(0, config.vocab_size, (B, S), generator=generator)
    ones = torch.ones(B, S, dtype=torch.int32)
    positions = torch.arange(S).expand(B, S).clone()
    batch = Batch(tokens, positions, ones, ones - 1, context=world.context).to(world.device)
    copies = [replace(batch) for _ in range(mine * world.pp_size)]
    steps = (trainer.prepare(copies) for _ in itertools.count())
    stream = FeaturesAhead(OnlineFeatures(base), steps, world.pp_size, args.features_ahead)
    flush = max(1, stream.ahead // mine)  # steps that one run of the pipeline serves

    def run(count: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            _, features, owned = stream.step()
            trainer.step(features, count=owned, meanwhile=stream.prepare)
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return (time.perf_counter() - begin) / count

    run(flush * -(-args.warmup // flush))
    seconds = run(flush * -(-args.steps // flush))
    tokens_of_step = B * S * mine * world.pp_size * world.dp_size
    found = {
        "layout": layout, "gpus": world.size, "model": model, "seq_length": S, "micro_batch_size": B,
        "ttt_steps": args.ttt_steps, "features_ahead": stream.ahead, "step_s": seconds,
        "tokens_per_second": tokens_of_step / seconds,
        "tokens_per_second_per_gpu": tokens_of_step / seconds / world.size,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "off": {
            name: models.paths.blocked[name]
            for models, names in (
                (base, ("base_direct", *(("grouped_experts",) if config.moe else ()))),
                (draft, ("draft_fused", "loss_kernel", "teacher_kernel")),
            )
            for name in names
            if name in models.paths.blocked
        },
    }  # fmt: skip
    say(world, found)
    return found


def say(world: World, entry: dict[str, Any]) -> None:
    """Print one line on rank 0."""
    if world.rank == 0:
        print(json.dumps(entry), flush=True)


def main(args: argparse.Namespace) -> None:
    """Equality, then throughput, of every layout; a failed layout is reported, and the others continue."""
    report: dict[str, list[Any]] = {"equality": [], "speed": [], "failed": []}
    first, _ = start(args.layouts[0])
    if not args.no_equality and args.layouts[0] == "one" and not (args.reference / "base").is_dir():
        small_base.write(args.reference / "base", layouts.has_experts(args.model), args.tiny)
    for layout in args.layouts:
        for name in ("equality", "speed"):
            if getattr(args, f"no_{name}") or (name == "speed" and layout not in (args.speed_of or args.layouts)):
                continue
            say(first, {"begin": layout})
            try:
                report[name] += (
                    equality(layout, args.reference, args.tiny) if name == "equality" else [speed(layout, args)]
                )
            except torch.OutOfMemoryError as e:
                report["failed"].append(f"{layout} {name}: {str(e)[:200]}")
            gc.collect()
            if first.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    if first.rank == 0 and args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    distributed.shutdown()
