"""Every family against transformers: logits, captures, packed documents, decoding, export, over layouts; and the first
loss of every kind of draft against one process.

One spawned world of two ranks runs all families; docs/families.md shows what it found.
S sequence, B micro-batch, V vocabulary, K captures, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.config import ParallelConfig
from megatron_spec.runtime import distributed
from tests.support_results import same_as_committed
from tests.unit_tests.base.tiny import gap
from tests.unit_tests.families import families
from tests.unit_tests.families.families import CAPTURES, LENGTH, MODELS, answers, save, tokens
from tests.worlds import gather_tp, run_world

TOLERANCE = 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}
ALGORITHMS = ("eagle1", "eagle3", "eagle-mtp", "medusa")
NO_NOISE: dict[str, dict[str, Any]] = {"eagle1": {"feature_noise": 0.0}}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v3 plain")


def runs(layout: str, name: str) -> bool:
    """The layouts that a model is tested under."""
    return layout != "EP 2" or name in MIXTURES


def has_drafts(name: str) -> bool:
    """Variants of a family differ in the base alone; their odd vocabulary is not for two ranks of a draft."""
    return " " not in name


def forward_gaps(base: Any, world: Any, expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest differences of this rank's results; under EP each rank has a batch of another length."""
    from megatron_spec.base.schedule import run_base
    from megatron_spec.batch import Batch

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
            gaps[case] = gap(gather_tp(base.logits(state), world), expected[case][m, :, :length])
            if case == "logits":
                whole = gather_tp(captures, world, 0) if world.parallel.sequence_parallel else captures
                gaps["captures"] = gap(whole, expected["captures"][m, :, :length])
    return gaps


def decode_gap(base: Any, world: Any, expected: dict[str, Tensor]) -> float:
    """A prompt of 7 tokens, steps of 1, 3 and 2, then a tree of 3 next tokens and 2 children of the second."""
    from megatron_spec.base.schedule import run_base_everywhere
    from megatron_spec.batch import Batch
    from megatron_spec.ops.visibility import Visibility

    ids = tokens(base.vocab_size)[0]
    cache, worst = base.new_cache(len(ids), LENGTH), 0.0

    def run(new: Tensor, positions: Tensor, visibility: Any) -> Tensor:
        zeros = torch.zeros_like(new, dtype=torch.int32)
        _, state = run_base_everywhere(base, Batch(new, positions, zeros, zeros), visibility)
        return gather_tp(base.logits(state), world).transpose(0, 1)[..., : base.vocab_size]

    done = 0
    for count in (7, 1, 3, 2):
        slots = torch.arange(done, done + count).expand(len(ids), -1)
        logits = run(ids[:, done : done + count], slots, Visibility.cached(cache, slots))
        worst = max(worst, float((logits - expected["start"][0][:, done : done + count]).abs().max()))
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
    logits = run(tree, positions, Visibility.cached(cache, slots, visible))
    return max(worst, float((logits[:, [1, 3, 4]] - expected["start"][0][:, done : done + 3]).abs().max()))


def draft_losses(base: Any, world: Any) -> dict[str, dict[int, float]]:
    """{algorithm: {micro-batch: loss sum of a new draft}} of the micro-batches that this rank trains on."""
    from megatron_spec.batch import Batch
    from megatron_spec.commands.convert import new_draft
    from megatron_spec.config import ObjectiveConfig, presets
    from megatron_spec.drafts.vocab import DraftVocab
    from megatron_spec.features.online import OnlineFeatures

    ids = tokens(base.vocab_size)
    positions = torch.arange(LENGTH).expand(ids.shape[1], -1)
    zeros, turns = torch.zeros_like(positions, dtype=torch.int32), (positions >= 5).int()
    batches = [Batch(each, positions, turns, zeros) for each in ids]
    mine = batches if world.dp_size == 1 else [batches[world.dp_rank]]
    numbers = [0, 1] if world.dp_size * world.pp_size == 1 else [world.dp_rank + world.pp_rank]
    features = OnlineFeatures(base).features(mine)
    assert len(features) == len(numbers)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8} if base.config.mla else {}
    losses: dict[str, dict[int, float]] = {}
    for algorithm in ALGORITHMS:
        vocab = DraftVocab.full(base.vocab_size)
        if algorithm == "medusa":
            config: Any = presets.medusa_config(base.config, num_heads=2)
        else:
            captured = {"capture_layer_ids": list(CAPTURES), "draft_vocab_size": 40} if algorithm == "eagle3" else {}
            config = presets.eagle_config(base.config, algorithm, {**heads, **captured})
        if algorithm == "eagle3":
            vocab = DraftVocab(torch.arange(1, 81, 2), base.vocab_size)
        draft = new_draft(base, config, vocab, world, torch.float32, seed=3)
        objective = presets.objective_for(config, ObjectiveConfig(ttt_steps=2, **NO_NOISE.get(algorithm, {})))
        losses[algorithm] = {
            number: float(draft(each, base, objective).total) for number, each in zip(numbers, features, strict=True)
        }
    return losses


def draft_gaps(base: Any, world: Any, expected: dict[str, dict[int, float]]) -> dict[str, float]:
    """Relative differences from the losses of one process."""
    return {
        f"draft {algorithm}": max(abs(loss / expected[algorithm][m] - 1) for m, loss in found.items())
        for algorithm, found in draft_losses(base, world).items()
    }


def _export_differs(base: Any, reference: Any, out: Path, source: Path, world: Any) -> list[str]:
    """Names of tensors that import and export changed."""
    from megatron_spec.export.base import export_base

    export_base(base, reference, out, None, world, dtype="float32")
    torch.distributed.barrier()
    found, expected = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [n for n, t in expected.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)]


@contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Counts elements read from files in this block: in total, and the maximum at a time."""
    from megatron_spec.checkpoint.huggingface import HuggingFaceWeights

    seen, plain = {"all": 0, "largest": 0}, HuggingFaceWeights._raw

    def counting(self: Any, *what: Any) -> Tensor:
        part = plain(self, *what)
        seen["all"] += part.numel()
        seen["largest"] = max(seen["largest"], part.numel())
        return part

    HuggingFaceWeights._raw = counting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        HuggingFaceWeights._raw = plain  # type: ignore[method-assign]


def lazy(base: Any, seen: dict[str, int]) -> bool:
    """True if this rank read only what it keeps (no vocabulary padding), one tensor at a time."""
    kept = dict(base.model.named_parameters())
    if base.config.tie_word_embeddings:
        kept.pop("output_layer.weight", None)  # comes from the first stage
    stacked = base.experts.count if base.config.family == "gpt_oss" else 1
    largest = max(p.numel() * (stacked if ".experts." in n else 1) for n, p in kept.items())
    ends = [p for n, p in kept.items() if "word_embeddings" in n or n.startswith("output_layer")]
    unread = sum(p.numel() for p in kept.values()) - seen["all"]
    return 0 <= unread <= len(ends) * base.config.hidden_size and seen["largest"] <= largest


def world_cases(folder: str, references: dict[str, dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """{(layout, model): what was found}."""
    from megatron.core import parallel_state

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, values in LAYOUTS.items():
        world = distributed.initialize(ParallelConfig(**values))
        for name in MODELS:
            if not runs(layout, name):
                continue
            reference = inspect_base(Path(folder, name))
            with counted_reads() as seen:
                base = load_base(reference, world, CAPTURES)
            result: dict[str, Any] = {"lazy": lazy(base, seen), **forward_gaps(base, world, references[name])}
            if has_drafts(name):
                result |= draft_gaps(base, world, references[name]["losses"])
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
    references: dict[str, dict[str, Any]] = {name: answers(save(name, folder / name)) for name in MODELS}
    world = distributed.initialize()
    for name in filter(has_drafts, MODELS):
        base = load_base(inspect_base(folder / name), world, CAPTURES)
        references[name]["losses"] = draft_losses(base, world)
    distributed.shutdown()
    return run_world(2, world_cases, str(folder), references)


def _good(result: dict[str, Any]) -> bool:
    gaps = [gap for case, gap in result.items() if case not in ("export", "lazy")]
    return all(gap < TOLERANCE for gap in gaps) and result["lazy"] and not result.get("export")


CASES = [(layout, name) for layout in LAYOUTS for name in MODELS if runs(layout, name)]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_equals_transformers(found: list[dict[tuple[str, str], dict[str, Any]]], layout: str, name: str) -> None:
    for rank, results in enumerate(found):
        result = results[layout, name]
        assert _good(result), result
        wanted = {"decode", "export"} if layout in ("TP 2", "PP 2") else set()
        if layout != "PP 2" or rank == 1:
            wanted |= {"logits", "captures", "packed"}
        if has_drafts(name):
            wanted |= {f"draft {algorithm}" for algorithm in ALGORITHMS}
        assert wanted <= result.keys()


def test_readme_states_what_ran(found: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    """The source of the table equals the findings of this run."""
    ran: dict[str, dict[str, bool]] = {}
    for layout, name in CASES:
        row = ran.setdefault(name.split()[0], {})
        good = all(_good(rank[layout, name]) for rank in found)
        row[layout] = row.get(layout, True) and good
        if has_drafts(name):
            row["drafts"] = row.get("drafts", True) and all(
                rank[layout, name][f"draft {algorithm}"] < TOLERANCE for rank in found for algorithm in ALGORITHMS
            )
    assert same_as_committed("layouts", ran), "run with MEGATRON_SPEC_WRITE_SUPPORT=1"


def test_features_change_the_models() -> None:
    """Each feature has an effect in these tiny models: without the window, logits change."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        narrow = families.save("mistral", Path(folder, "a"))
        wide = families.save("mistral", Path(folder, "b"), sliding_window=None)
        ids = tokens()[0]
        assert float((narrow(ids).logits - wide(ids).logits).abs().max()) > 0.1
