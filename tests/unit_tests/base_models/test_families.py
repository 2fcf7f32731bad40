"""Every family against transformers: logits, captures, packed documents, decoding, export, over layouts.

One spawned world of two ranks runs all families; what it found is also what the README's table says.
S sequence, B micro-batch, V vocabulary, K captures, M micro-batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_spec.config import ParallelConfig
from tests.support_results import same_as_committed
from tests.unit_tests.base_models import families
from tests.unit_tests.base_models.families import CAPTURES, LENGTH, MODELS, answers, save, tokens
from tests.worlds import run_world

TOLERANCE = 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v3 plain")


def runs(layout: str, name: str) -> bool:
    """The layouts a model is tested under."""
    return layout != "EP 2" or name in MIXTURES


def _gather(x: Tensor, world: Any, dim: int) -> Tensor:
    shards = [torch.empty_like(x) for _ in range(world.tp_size)]
    torch.distributed.all_gather(shards, x.contiguous(), group=world.tp)
    return torch.cat(shards, dim=dim)


def _gap(found: Tensor, expected_BSX: Tensor) -> float:
    """Of [S, B, X] and [B, S, X]; padding of the vocabulary behind."""
    return float((found.transpose(0, 1)[..., : expected_BSX.shape[-1]] - expected_BSX).abs().max())


def forward_gaps(base: Any, world: Any, expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest differences of this rank's results; under EP each rank has a batch of another length."""
    from megatron_spec.batch import Batch
    from megatron_spec.pipeline.schedule import run_base

    m, length = world.dp_rank, LENGTH - 2 * world.dp_rank
    ids = tokens(base.vocab_size)[m, :, :length]
    positions = torch.arange(length).expand(len(ids), -1)
    zeros, second = torch.zeros_like(positions, dtype=torch.int32), (positions >= 9).int()
    batches = {
        "logits": Batch(ids, positions, zeros, zeros),
        "packed": Batch(ids, positions - 9 * second, zeros, second),
    }
    gaps: dict[str, float] = {}
    for case, batch in batches.items():
        for captures, state in run_base(base, [batch]):
            gaps[case] = _gap(_gather(base.logits(state), world, -1), expected[case][m, :, :length])
            if case == "logits":
                whole = _gather(captures, world, 0) if world.parallel.sequence_parallel else captures
                gaps["captures"] = _gap(whole, expected["captures"][m, :, :length])
    return gaps


def decode_gap(base: Any, world: Any, expected: dict[str, Tensor]) -> float:
    """A prompt of 7 tokens, then steps of 1, 3 and 2, then a tree of 3 next tokens and 2 behind the second of them."""
    from megatron_spec.batch import Batch
    from megatron_spec.ops.attention import AttentionPlan
    from megatron_spec.pipeline.schedule import run_base_everywhere

    ids = tokens(base.vocab_size)[0]
    cache, worst = base.new_cache(len(ids), LENGTH), 0.0

    def run(new: Tensor, positions: Tensor, plan: Any) -> Tensor:
        zeros = torch.zeros_like(new, dtype=torch.int32)
        _, state = run_base_everywhere(base, Batch(new, positions, zeros, zeros), plan)
        return _gather(base.logits(state), world, -1).transpose(0, 1)[..., : base.vocab_size]

    done = 0
    for count in (7, 1, 3, 2):
        slots = torch.arange(done, done + count).expand(len(ids), -1)
        logits = run(ids[:, done : done + count], slots, AttentionPlan.cached(cache, slots))
        worst = max(worst, float((logits - expected["logits"][0][:, done : done + count]).abs().max()))
        done += count
    # The tree: the true next token in the middle of its siblings, then the true one after it, and one more.
    tree = torch.stack(
        [(ids[:, done] + 1) % 83, ids[:, done], (ids[:, done] + 2) % 83, ids[:, done + 1], ids[:, done + 2]], 1
    )
    positions = torch.tensor([done, done, done, done + 1, done + 2]).expand(len(ids), -1)
    slots = torch.arange(done, done + 5).expand(len(ids), -1)
    visible = torch.zeros(len(ids), 5, done + 5, dtype=torch.bool)
    visible[:, :, :done] = True
    for node, ancestors in enumerate(([0], [1], [2], [1, 3], [1, 3, 4])):
        visible[:, node, [done + a for a in ancestors]] = True
    logits = run(tree, positions, AttentionPlan.cached(cache, slots, visible))
    return max(worst, float((logits[:, [1, 3, 4]] - expected["logits"][0][:, done : done + 3]).abs().max()))


def _export_differs(base: Any, reference: Any, out: Path, source: Path, world: Any) -> list[str]:
    """Names of tensors that import and export did not give back bit for bit."""
    from megatron_spec.export.base import export_base

    export_base(base, reference, out, None, world, dtype="float32")
    torch.distributed.barrier()
    found, expected = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [n for n, t in expected.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)]


def world_cases(folder: str, references: dict[str, dict[str, Tensor]]) -> dict[tuple[str, str], dict[str, Any]]:
    """{(layout, model): what was found}."""
    from megatron.core import parallel_state

    from megatron_spec import distributed
    from megatron_spec.checkpoint.base_import import inspect_base, load_base

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, values in LAYOUTS.items():
        world = distributed.initialize(ParallelConfig(**values))
        for name in MODELS:
            if not runs(layout, name):
                continue
            reference = inspect_base(Path(folder, name))
            base = load_base(reference, world, CAPTURES)
            result: dict[str, Any] = {**forward_gaps(base, world, references[name])}
            if layout in ("TP 2", "PP 2"):
                result["decode"] = decode_gap(base, world, references[name])
                out = Path(folder, f"{name} {layout}")
                result["export"] = _export_differs(base, reference, out, Path(folder, name), world)
            found[layout, name] = result
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("families")
    references = {name: answers(save(name, folder / name)) for name in MODELS}
    return run_world(2, world_cases, str(folder), references)


def _good(result: dict[str, Any]) -> bool:
    gaps = [gap for case, gap in result.items() if case != "export"]
    return all(gap < TOLERANCE for gap in gaps) and not result.get("export")


CASES = [(layout, name) for layout in LAYOUTS for name in MODELS if runs(layout, name)]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_equals_transformers(found: list[dict[tuple[str, str], dict[str, Any]]], layout: str, name: str) -> None:
    for rank, results in enumerate(found):
        result = results[layout, name]
        assert _good(result), result
        wanted = {"decode", "export"} if layout in ("TP 2", "PP 2") else set()
        if layout != "PP 2" or rank == 1:
            wanted |= {"logits", "captures", "packed"}
        assert wanted <= result.keys()


def test_the_readme_says_what_ran(found: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    """The table's source is what this run found, so that it can be neither stale nor wishful."""
    ran: dict[str, dict[str, bool]] = {}
    for layout, name in CASES:
        row = ran.setdefault(name.split()[0], {})
        good = all(_good(rank[layout, name]) for rank in found)
        row[layout] = row.get(layout, True) and good
    assert same_as_committed("layouts", ran), "run with MEGATRON_SPEC_WRITE_SUPPORT=1"


def test_models_differ_where_their_features_say() -> None:
    """Each feature matters in these tiny models: without the window, logits change."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        narrow = families.save("mistral", Path(folder, "a"))
        wide = families.save("mistral", Path(folder, "b"), sliding_window=None)
        ids = tokens()[0]
        assert float((narrow(ids).logits - wide(ids).logits).abs().max()) > 0.1
