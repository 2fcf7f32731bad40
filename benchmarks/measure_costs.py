"""What costs.py measures: packing, stored features and checkpoints."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_spec.build import link
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.background import BackgroundWriter
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.checkpoint.spec import CheckpointSpec
from megatron_spec.commands.convert import new_draft
from megatron_spec.config import ObjectiveConfig, TrainConfig, presets
from megatron_spec.data.chat import Sample
from megatron_spec.data.loader import BatchLoader, Dataset, lengths_of
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.features.base import FeatureSource
from megatron_spec.features.offline import OfflineFeatures, extract
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.features.store import FeatureStore, StoreManifest
from megatron_spec.runtime import distributed
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer


class Conversations:
    """Random tokens in conversations of realistic lengths."""

    def __init__(self, count: int, seq_length: int, vocab_size: int) -> None:
        self.seq_length = seq_length
        generator = torch.Generator().manual_seed(1)
        sizes = torch.randn(count, generator=generator).mul(0.9).exp().mul(seq_length * 0.2).long()
        self.samples = []
        for n in sizes.clamp(16, seq_length).tolist():
            tokens = torch.randint(0, vocab_size, (n,), generator=generator)
            turns = (torch.arange(n) >= n // 2).int()
            self.samples.append(Sample(tokens, turns, "random"))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


class Bench:
    """A base, a new draft and its trainer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.world = args, distributed.initialize()
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.ref = inspect_base(args.base)
        base = self.ref.config
        size = min(args.draft_vocab_size, base.vocab_size)
        self.config = presets.eagle_config(base, overrides={"draft_vocab_size": size})
        self.vocab = DraftVocab(torch.arange(size) * (base.vocab_size // size), base.vocab_size)
        self.base = load_base(self.ref, self.world, self.config.capture_layer_ids, self.dtype)
        draft = new_draft(self.base, self.config, self.vocab, self.world, self.dtype, seed=1)
        train = TrainConfig(train_iters=10**6, bf16=args.bf16)
        ddp = wrap_ddp(draft, self.world, train)
        self.draft, (self.optimizer, scheduler) = draft, build_optimizer(ddp, self.world, train)
        objective = ObjectiveConfig(ttt_steps=args.ttt_steps)
        self.trainer = Trainer(self.world, ddp, self.optimizer, scheduler, self.base, objective)
        self.data = Conversations(args.conversations, args.seq_length, base.vocab_size)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of a call, including its work on the device."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def training(self, source: FeatureSource, data: Dataset, packing: bool) -> dict[str, float]:
        """Tokens per second, and their share of the rows of a batch, over one pass of the data."""
        B = self.args.micro_batch_size
        loader = BatchLoader(data, B, B, device=self.world.device, packing=packing)
        batches = [loader.step(i * B) for i in range(max(1, loader.samples_per_epoch // B))]
        places = sum(b.tokens_BS.numel() for step in batches for b in step)
        tokens = sum(b.num_tokens for step in batches for b in step)

        def train(steps: list[Any]) -> None:
            for step in steps:
                self.trainer.step(source.features(step))

        # On a GPU, kernels are compiled per row count, which varies from batch to batch.
        train(batches if self.world.device.type == "cuda" else batches[:1])  # warm
        seconds = self.seconds(lambda: train(batches))
        return {"tokens_per_second": tokens / seconds, "filled": tokens / places, "steps": len(batches)}

    def features(self, folder: Path) -> dict[str, float]:
        """Throughput and size of stored features, and throughput of training on them."""
        manifest = StoreManifest(
            base_fingerprint=self.ref.fingerprint, capture_layer_ids=self.config.capture_layer_ids,
            hidden_size=self.ref.config.hidden_size, dtype=str(self.dtype).removeprefix("torch."), template_hash="",
            num_samples=len(self.data), seq_length=self.data.seq_length,
        )  # fmt: skip
        seconds = self.seconds(lambda: extract(self.base, self.data, folder, manifest, self.args.micro_batch_size))
        tokens = int(lengths_of(self.data).sum())
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        source = OfflineFeatures(FeatureStore(folder), self.world, self.dtype)
        return {
            "tokens_per_second": tokens / seconds, "bytes_per_second": size / seconds, "bytes_per_token": size / tokens,
            "training_tokens_per_second": self.training(source, source.store, packing=True)["tokens_per_second"],
        }  # fmt: skip

    def checkpoint(self, folder: Path) -> dict[str, float]:
        """Seconds that training waits for a save, in the foreground and in the background, and its size."""
        spec = CheckpointSpec(base=link(self.ref), draft=self.config)
        writer = BackgroundWriter()

        def save(name: str, **options: Any) -> Callable[[], Any]:
            place = (spec, self.draft, self.vocab, self.world)
            return lambda: sharded.save(folder / name, *place, optimizer=self.optimizer, **options)

        self.seconds(save("warm"))
        found = {"sync_s": self.seconds(save("sync"))}
        size = sum(p.stat().st_size for p in (folder / "sync").rglob("*") if p.is_file())
        self.seconds(save("first", writer=writer))  # starts the writer process
        writer.wait()
        begin = time.perf_counter()
        found["async_blocking_s"] = self.seconds(save("async", writer=writer))
        writer.wait()
        return {**found, "async_complete_s": time.perf_counter() - begin, "bytes": size}


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print one line per result, write all results as JSON."""
    bench, report = Bench(args), {}
    online = OnlineFeatures(bench.base)
    with tempfile.TemporaryDirectory() as temporary:
        findings: list[tuple[str, Callable[[], dict[str, float]]]] = [
            ("single", lambda: bench.training(online, bench.data, packing=False)),
            ("packed", lambda: bench.training(online, bench.data, packing=True)),
            ("features", lambda: bench.features(Path(temporary, "features"))),
            ("checkpoint", lambda: bench.checkpoint(Path(temporary))),
        ]
        for name, find in findings:
            report[name] = find()
            print(json.dumps({name: report[name]}), flush=True)
    report["packed"]["speed_up"] = report["packed"]["tokens_per_second"] / report["single"]["tokens_per_second"]
    print(f"packing: {report['packed']['speed_up']:.2f} times the tokens a second", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    distributed.shutdown()
    return report
