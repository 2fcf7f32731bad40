"""What fake_quant.py measures: the rounding, and a draft step with and without it."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_spec.batch import Batch, Features
from megatron_spec.config import EagleConfig, ObjectiveConfig, QuantConfig
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.quantization import rounding
from megatron_spec.quantization.attach import attach_quantizers, quantizers
from megatron_spec.runtime import distributed

SHAPES = {
    False: dict(H=4096, M=14336, heads=32, groups=8, V=128256, D=32000, S=4096, B=2),
    True: dict(H=64, M=128, heads=4, groups=2, V=300, D=100, S=64, B=2),
}


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, after a warm-up call."""
    run()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def round_trips(shape: dict[str, int], device: torch.device, repeats: int) -> dict[str, float]:
    """GB/s (read and written) of the round trip of one input [S * B, 2H] in bfloat16."""
    x = torch.randn(shape["S"] * shape["B"], 2 * shape["H"], device=device, dtype=torch.bfloat16)
    amax = x.abs().amax().float()
    size = 2 * x.numel() * x.element_size() / 1e9
    found = {"plain_gb_s": size / timed(lambda: rounding.round_trip(x, amax), repeats)}
    if x.is_cuda:
        found["kernel_gb_s"] = size / timed(lambda: rounding.fake_quant(x, amax, kernel=True), repeats)
    return found


def steps(shape: dict[str, int], world: Any, ttt_steps: int, repeats: int) -> dict[str, float]:
    """Seconds of a draft's forward and backward, with and without fake quantisation."""
    H, S, B, V = (shape[n] for n in ("H", "S", "B", "V"))
    device, dtype = world.device, torch.bfloat16 if world.device.type == "cuda" else torch.float32
    config = EagleConfig(
        algorithm="eagle3", hidden_size=H, intermediate_size=shape["M"], num_attention_heads=shape["heads"],
        num_key_value_heads=shape["groups"], head_dim=H // shape["heads"], vocab_size=V, draft_vocab_size=shape["D"],
        target_hidden_size=H, max_position_embeddings=2 * S, capture_layer_ids=(1, 2, 3),
    )  # fmt: skip
    vocab = DraftVocab(torch.arange(shape["D"]) * (V // shape["D"]), V)
    draft = build_draft(config, vocab, world, dtype)
    with torch.no_grad():
        for p in draft.parameters():
            p.normal_(0, 0.02)
    head = torch.randn(V, H, device=device, dtype=dtype) * 0.02
    table = torch.randn(V, H, device=device, dtype=dtype)
    ends: Any = SimpleNamespace(head_weight=head, vocab_size=V, embed=lambda tokens: table[tokens.t()])
    tokens = torch.randint(V, (B, S), device=device)
    ones = torch.ones_like(tokens, dtype=torch.int32)
    batch = Batch(tokens, torch.arange(S, device=device).expand(B, S), ones, torch.zeros_like(ones))
    captures = torch.randn(S, B, 3 * H, device=device, dtype=dtype)
    features = Features(batch, captures, captures[..., :H].contiguous())
    objective = ObjectiveConfig(ttt_steps=ttt_steps)

    def step() -> None:
        draft.zero_grad()
        draft(features, ends, objective).total.backward()

    def both_ways(name: str) -> dict[str, float]:
        """Seconds of the step of training, and of the plain unroll if training uses the fused one."""
        found = {f"{name}_s": timed(step, repeats)}
        if device.type == "cuda":
            taken, draft.paths = draft.paths, draft.paths.without("draft_fused")
            try:
                found[f"{name}_general_unroll_s"] = timed(step, repeats)
            finally:
                draft.paths = taken
        return found

    found = both_ways("without")
    attach_quantizers(draft, QuantConfig(base="none"), "draft")
    for quantizer in quantizers(draft).values():
        quantizer.set_amax(1.0)
    found |= both_ways("with")
    found["cost"] = found["with_s"] / found["without_s"] - 1
    return found


def main(args: argparse.Namespace) -> None:
    """Measure and print one JSON object."""
    shape, world = SHAPES[args.tiny], distributed.initialize()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", **shape}
    report |= round_trips(shape, world.device, args.repeats)
    report |= steps(shape, world, args.ttt_steps, args.repeats)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
