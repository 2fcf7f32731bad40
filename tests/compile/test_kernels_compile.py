"""Every Triton kernel compiles for GPUs of three generations, at the sizes of a base of 8B parameters and its draft.

No GPU is needed. Registers that spill to memory, and products without tensor cores, would be slow without a word: they
fail here.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="tools/test_kernels.sh gets Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from megatron_spec.config import MoeConfig
from megatron_spec.ops.block_attention import BlockLayout
from megatron_spec.ops.fp8 import Fp8Matrix, padded
from megatron_spec.ops.kernels import (
    adam,
    block,
    branch,
    decode,
    experts,
    few_rows,
    fp8,
    loss,
    many_rows,
    rotary,
    rounding,
    rows,
    sample,
    teacher,
)
from tests.compile.devices import compiling_for, empty

R, H, M, N, G, D, VOCAB, DRAFT_VOCAB, STEPS, BATCH = 2048, 4096, 14336, 32, 8, 128, 128256, 32000, 7, 2
CAPABILITIES = [80, 90, 100]
FLOAT, INT, LONG = torch.float32, torch.int32, torch.int64
CPU = torch.device("cpu")


def per_row(*shape: int) -> torch.Tensor:
    return empty(*shape or (R,), dtype=FLOAT)


def logits() -> tuple[torch.Tensor, ...]:
    """Of a draft and its teacher, the teacher's log-sum-exps, and each row's teacher row."""
    return empty(R, DRAFT_VOCAB), empty(R, DRAFT_VOCAB), per_row(), torch.zeros(R, dtype=LONG)


def run_adam() -> None:
    adam.adamw(per_row(H), per_row(H), (per_row(H), per_row(H)), empty(H), 1.0, 1, 1e-4, (0.9, 0.95), 1e-8, 0.1)


def run_block() -> None:
    """Forward and backward of DFlash's attention: a block sees its context and itself."""
    P, C, L = 64, 16, 256
    x = [empty(*shape).requires_grad_() for shape in ((P, C, N, D), (P, C, G, D), (P, C, G, D), (L, G, D), (L, G, D))]
    anchor = torch.arange(P)
    block.attention(*x, BlockLayout(torch.zeros_like(anchor), anchor, False, None)).sum().backward()


def run_branch() -> None:
    q, keys, place = empty(R, N * D), empty(STEPS, R, G * D), torch.arange(R)
    o0, lse = empty(R // BATCH, BATCH, N, D).transpose(0, 1), per_row(BATCH, N, R // BATCH)
    dkeys, dq0 = torch.empty_like(keys), per_row(BATCH, R // BATCH, N, D)
    for where in (None, place):
        branch.merge_forward(q, o0, lse, keys, keys, q, where)
        branch.merge_backward(q, q, q, lse, keys, keys, dq0, q, dkeys, dkeys, True, where)


def run_decode() -> None:
    """A chain of few sequences, and a tree of many."""
    tables = (per_row(64, D // 2), per_row(64, D // 2))
    for B, S, tree in ((1, 8, None), (8, 8, torch.ones(8, 8, 8, dtype=torch.bool))):
        cache = empty(B, 4096, G, D)
        decode.decode_attention(
            empty(B * S, (N + 2 * G) * D), tables, (cache, cache), torch.zeros(B, dtype=LONG), N, G, 4096,
            above_BSM=tree,
        )  # fmt: skip


def run_experts() -> None:
    """Of Qwen3-30B-A3B, and gpt-oss's activation with biases."""
    moe = MoeConfig(num_experts=128, experts_per_token=8, intermediate_size=768)
    weights, chosen = experts.choose_experts(empty(R, 128), moe, None)
    _, place, ends = experts.sort_rows(empty(R, 2048), chosen, 0, 128)
    experts.gate_rows(empty(R, 2 * 768), ends, None, 0.0, 1.0)
    experts.gate_rows(empty(R, 2 * 768), ends, empty(128, 2 * 768), 7.0, 1.702)
    for bias in (None, empty(128, 2048)):
        experts.mix_rows(empty(R, 2048), place, weights, chosen, 0, bias)


def run_few_rows() -> None:
    x = empty(8, H)
    few_rows.few_rows_product(x, [empty(N * D, H), empty(G * D, H), empty(G * D, H)], norm_H=empty(H), eps=1e-5)
    few_rows.few_rows_product(x, [empty(M, H), empty(M, H)], gated=True)
    few_rows.few_rows_product(empty(8, M), [empty(H, M)], rest_RO=x)


def run_fp8() -> None:
    x, matrix = empty(R, H), Fp8Matrix.empty(R, H, CPU)
    fp8.quantized_norm(x, x, torch.empty_like(x), empty(H), 1e-5)
    fp8.quantized_gate(empty(R, 2 * M))
    fp8.quantize(empty(R, M))
    fp8.transpose(matrix.values, Fp8Matrix.empty(H, padded(R), CPU).values)
    fp8.quantize_columns(x, per_row(), Fp8Matrix.empty(H, padded(R), CPU))
    z, t, lse, at = logits()
    loss.soft_rows(z, t, lse, at, per_row(), 1.0, False, Fp8Matrix.empty(R, DRAFT_VOCAB, CPU))


def run_loss() -> None:
    z, t, lse, at = logits()
    loss.largest(z, 1.0)
    loss.soft_rows(z, t, lse, at, per_row(), 1.0, False)
    loss.soft_shard(z, t, lse, at, per_row(), lse, 1.0, False)
    loss.mixed_rows(z, t, lse, at, at, per_row(), 1.0, (0.1, 0.9))
    loss.mixed_sums(z, t, lse, at, at, lse, 1.0)
    loss.mixed_gradient(z, t, lse, at, at, per_row(), lse, lse, 1.0, (0.1, 0.9))


def run_many_rows() -> None:
    """Gate, teacher's and draft's head, also of a vocabulary whose last tile is not full, as under TP2."""
    x, weight = empty(R, H), empty(2 * M, H)
    many_rows.gated_product(x, weight, empty(R, M), empty(R, 2 * M))
    many_rows.gated_product(x, weight, empty(R, M))
    for vocab in (DRAFT_VOCAB, DRAFT_VOCAB // 2):
        for masses in (False, True):
            many_rows.largest_product(x, empty(vocab, H), 1.0, empty(R, vocab), masses)


def run_rotary() -> None:
    """Of the draft's projection with that of the embedding, and of Qwen3's with norms of heads."""
    x, tables, norms = empty(R, (N + 2 * G) * D), (per_row(R, D // 2), per_row(R, D // 2)), (empty(D), empty(D))
    q, k, v = (empty(R, heads * D) for heads in (N, G, G))
    rotary.rotary_forward(x, tables, q, k, v, N, G, x)
    rotary.rotary_forward(x, tables, q, k, None, N, G, grouped=True, norms=norms, eps=1e-6)
    rotary.rotary_backward(q, k, v, tables, x, N, G)
    rotary.rotary_backward(q, k, v, tables, x, N, G, norms=(x, norms, rows.norm_partials(2 * D, CPU)), eps=1e-6)


def run_rounding() -> None:
    for masked in (False, True):
        rounding.round_trip(empty(R, H), torch.ones(()), masked)


def run_rows() -> None:
    x, w, place = empty(R, H), empty(H), torch.arange(R, dtype=INT)
    rstd = rows.norm_forward(x, 1e-5, x, torch.empty_like(x), (w, torch.empty_like(x)), (w, torch.empty_like(x)), place)
    sums = rows.norm_partials(H, CPU)
    rows.norm_backward(x, rstd, torch.empty_like(x), (x, w, sums), (x, w, sums), place, x)
    rows.gated_forward(empty(R, 2 * M), empty(R, M))
    rows.gated_backward(empty(R, 2 * M), empty(R, M), empty(R, M))
    rows.shifted_sum(empty(2 * R, H), R, R, 2, BATCH)
    rows.scale_(x, torch.ones(()))


def run_sample() -> None:
    z, top, chunk = empty(8, VOCAB), per_row(8), torch.zeros(8, dtype=LONG)
    sample.chunk_masses(z, top, 0.7)
    sample.find_in_chunk(z, top, 0.7, chunk, empty(8, dtype=torch.float64))


def run_teacher() -> None:
    ids, draft_ids = torch.arange(DRAFT_VOCAB), torch.zeros(VOCAB, dtype=LONG)
    for argmax in (None, torch.zeros(R, dtype=LONG)):
        teacher.teacher_rows(empty(R, VOCAB), ids, draft_ids, 1.0, empty(R, DRAFT_VOCAB), argmax)


RUNS: dict[str, Callable[[], None]] = {
    "adam": run_adam, "block": run_block, "branch": run_branch, "decode": run_decode, "experts": run_experts,
    "few_rows": run_few_rows, "fp8": run_fp8, "loss": run_loss, "many_rows": run_many_rows, "rotary": run_rotary,
    "rounding": run_rounding, "rows": run_rows, "sample": run_sample, "teacher": run_teacher,
}  # fmt: skip
ONLY = {"fp8": [90, 100], "many_rows": [90]}
"""Capabilities where a module's paths run; the others' run everywhere."""
SPILLED = 160
"""Bytes that a thread may spill: no more than the compiler's choice of the day."""
SPILLED_BY_NEW_TRITON = {(80, "_query_backward_kernel"): 2048, (90, "_context_backward_kernel"): 640}
"""The same where Triton 3.9 spills more than 3.6 (at most 152 bytes)."""


def kernels_of(name: str) -> set[str]:
    """The names of a module's kernels that are launched, not called by another."""
    module = importlib.import_module(f"megatron_spec.ops.kernels.{name}")
    return {
        k for k, v in vars(module).items() if k.endswith("kernel") and getattr(v, "__module__", "") == module.__name__
    }


def test_every_file_of_kernels_is_here() -> None:
    folder = importlib.import_module("megatron_spec.ops.kernels").__path__
    assert RUNS.keys() == {module.name for module in pkgutil.iter_modules(folder)}


@pytest.mark.parametrize(("name", "capability"), [(n, c) for n in RUNS for c in ONLY.get(n, CAPABILITIES)])
def test_kernels_compile(name: str, capability: int) -> None:
    with compiling_for(capability) as gpu:
        RUNS[name]()
    assert kernels_of(name) <= {kernel.name for kernel in gpu.compiled}
    for kernel in gpu.compiled:
        most = SPILLED_BY_NEW_TRITON.get((capability, kernel.name), SPILLED)
        assert kernel.spilled <= most, f"{kernel.name} spills {kernel.spilled} bytes of registers"


def test_products_of_many_rows_use_warp_groups_and_the_copy_engine() -> None:
    with compiling_for(90) as gpu:
        run_many_rows()
    tiles = {k.name: k.ptx for k in gpu.compiled if k.name in ("_gated_kernel", "_largest_kernel")}
    assert len(tiles) == 2
    for ptx in tiles.values():
        assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx


def test_transposed_values_are_written_16_bytes_at_once() -> None:
    """A mask of any number of rows would allow one byte."""
    with compiling_for(90) as gpu:
        run_fp8()
    found = [k.ptx for k in gpu.compiled if k.name == "_columns_kernel"]
    assert len(found) == 2 and all("st.global.v4.b32" in ptx for ptx in found)


@pytest.mark.parametrize("name", RUNS)
def test_other_numbers_of_rows_compile_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches differ in their rows, and a compilation in the middle of a run holds up every rank."""
    compiled = []
    for count in (1040, 1030, 1042):
        monkeypatch.setitem(globals(), "R", count)
        with compiling_for(90) as gpu:
            RUNS[name]()
        compiled.append({(kernel.name, kernel.hash) for kernel in gpu.compiled})
    assert compiled[0] == compiled[1] == compiled[2]
