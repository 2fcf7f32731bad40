"""Every parallel layout trains the same draft: losses, gradients, gradient norm and parameters equal one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.batch import Batch
from tests.tiny import make_batch, save_llama, save_mixtral
from tests.unit_tests.families.families import save_with_module
from tests.worlds import run_world

D, ROWS, LENGTH, MICRO_BATCHES = 41, 8, 24, 4
ODD = 97
"""Vocabulary of the base `gqa`: no number of ranks divides it, nor D."""
CAPTURES = (1, 3, 6)  # on different stages for PP = 2 and PP = 3
ADAM_EPS = 1e-5
"""At 1e-8 Adam's first step is the sign of the gradient, also of elements that are nothing but rounding."""

Case = dict[str, Any]
# Every kind of draft with TP (and SP), PP, CP and EP where it has them; combinations once for each way of training.
CASES: dict[int, list[Case]] = {
    1: [
        dict(name="one"),
        dict(name="for three stages", micro_batches=6),
        dict(name="one, 1 kv head", model="kv1"),
        dict(name="experts", model="moe"),
        dict(name="packed", packed=True),
        dict(name="eagle1", packed=True, algorithm="eagle1"),
        dict(name="medusa", packed=True, algorithm="medusa"),
        dict(name="the base's own module", packed=True, model="own", algorithm="own"),
        dict(name="dflash", packed=True, algorithm="dflash"),
        dict(name="dspark", packed=True, algorithm="rnn dspark"),
        dict(name="dflash, own heads", packed=True, algorithm="wide dflash"),
        dict(name="own embedding, D = V", packed=True, whole=True),
        dict(name="dspark, 1 kv head", packed=True, algorithm="gated dspark", model="kv1"),
        dict(name="dspark, few tokens", packed=True, algorithm="few dspark"),
        dict(name="dflash, experts", packed=True, algorithm="dflash", model="moe"),
        dict(name="p-eagle", packed=True, algorithm="p-eagle"),
        dict(name="p-eagle, experts", packed=True, algorithm="p-eagle", model="moe"),
        dict(name="d-pace", packed=True, goal={"step_weights": "d-pace", "loss": "lk_hybrid"}),
    ],
    2: [
        dict(tp=2),
        dict(tp=2, sequence_parallel=True),
        dict(tp=2, model="kv1"),
        dict(pp=2),
        dict(pp=2, first=3),
        dict(),
        dict(distributed_optimizer=True),
        dict(ep=2, model="moe"),
        dict(cp=2, packed=True),
        dict(cp=2, packed=True, algorithm="eagle1"),
        dict(cp=2, packed=True, algorithm="medusa"),
        dict(tp=2, packed=True, model="own", algorithm="own", sequence_parallel=True),
        dict(pp=2, packed=True, model="own", algorithm="own"),
        dict(cp=2, packed=True, model="own", algorithm="own"),
        dict(ep=2, packed=True, model="own", algorithm="own", distributed_optimizer=True),
        dict(tp=2, packed=True, algorithm="dflash", sequence_parallel=True),
        dict(cp=2, packed=True, algorithm="rnn dspark"),
        dict(pp=2, packed=True, algorithm="dflash", distributed_optimizer=True),
        dict(tp=2, packed=True, algorithm="wide dflash", sequence_parallel=True),
        dict(tp=2, packed=True, algorithm="gated dspark", model="kv1"),
        dict(tp=2, packed=True, algorithm="few dspark", sequence_parallel=True),
        dict(cp=2, packed=True, algorithm="few dspark"),
        dict(tp=2, packed=True, algorithm="medusa", save=True),
        dict(tp=2, packed=True, algorithm="rnn dspark", save=True, sequence_parallel=True),
        dict(tp=2, packed=True, algorithm="eagle1", sequence_parallel=True),
        dict(tp=2, packed=True, whole=True, save=True, sequence_parallel=True, distributed_optimizer=True),
        dict(ep=2, packed=True, algorithm="dflash", model="moe"),
        dict(tp=2, packed=True, algorithm="p-eagle", sequence_parallel=True),
        dict(cp=2, packed=True, algorithm="p-eagle"),
        dict(pp=2, packed=True, algorithm="p-eagle", distributed_optimizer=True),
        dict(cp=2, packed=True, goal={"step_weights": "d-pace", "loss": "lk_hybrid"}),
        dict(tp=2, packed=True, goal={"step_weights": "d-pace", "loss": "lk_hybrid"}),
        dict(ep=2, packed=True, algorithm="p-eagle", model="moe"),
    ],
    3: [dict(pp=3, micro_batches=6), dict(pp=3, first=4, last=1, micro_batches=6)],
    4: [
        dict(tp=2, pp=2),
        dict(tp=2, pp=2, sequence_parallel=True, distributed_optimizer=True),
        dict(pp=2),
        dict(tp=4, model="kv1"),
        dict(ep=2, pp=2, model="moe"),
        dict(ep=2, tp=2, sequence_parallel=True, model="moe"),
        dict(cp=4),
        dict(cp=2, pp=2, distributed_optimizer=True),
        dict(cp=2, tp=2, sequence_parallel=True),
        dict(cp=2, tp=2, sequence_parallel=True, packed=True, algorithm="rnn dspark"),
        dict(tp=4, packed=True, whole=True),
        dict(cp=2, tp=2, sequence_parallel=True, packed=True, algorithm="p-eagle"),
        dict(cp=2, tp=2, sequence_parallel=True, packed=True, goal={"step_weights": "d-pace", "loss": "lk_hybrid"}),
    ],
}


def whole(tensor: torch.Tensor, like: Any, tp: Any) -> torch.Tensor:
    """A shard's whole tensor, on every rank."""
    if not getattr(like, "tensor_model_parallel", False) or tp.size() == 1:
        return tensor.detach().clone()
    parts: list[Any] = [None] * tp.size()
    torch.distributed.all_gather_object(parts, tensor.detach(), group=tp)
    return torch.cat(parts, dim=like.partition_dim)


def batches_of(case: Case) -> list[Batch]:
    """The global batch. Packed: two documents a row, and the first micro-batch supervises rows of few ranks alone."""
    batches = [make_batch(ROWS, LENGTH, seed=m) for m in range(case.get("micro_batches", MICRO_BATCHES))]
    if case.get("packed"):
        for m, batch in enumerate(batches):
            cut = 9 + m % 4
            batch.documents_BS[:, cut:] += batch.documents_BS[:, cut:] >= 0
            batch.positions_BS[:, cut:] -= cut
        batches[0].turns_BS[:, :6] = 0
        batches[0].turns_BS[:, 18:] = 0
    return batches


def new_config(base: Any, algorithm: str, whole_vocabulary: bool) -> Any:
    from megatron_spec.config import presets

    if algorithm == "medusa":
        return presets.medusa_config(base, num_heads=3)
    if algorithm.endswith(("dflash", "dspark")):
        head, _, algorithm = algorithm.rpartition(" ")
        overrides = {"mask_token_id": 95, "block_size": 4, "capture_layer_ids": list(CAPTURES)}
        if head == "wide":
            overrides |= {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4}
        elif head == "few":
            overrides["draft_vocab_size"] = D
        elif head:
            overrides["markov_head_type"] = head
        return presets.block_config(base, algorithm, overrides)
    if algorithm == "own":
        return presets.own_mtp_config(base)
    overrides: dict[str, Any] = {"init_from_base_layer": True}
    if algorithm in ("eagle3", "p-eagle"):
        size = base.vocab_size if whole_vocabulary else D
        overrides.update(capture_layer_ids=list(CAPTURES), draft_vocab_size=size, own_embed_tokens=whole_vocabulary)
    if algorithm == "p-eagle":
        overrides["mask_token_id"] = 95
    return presets.eagle_config(base, algorithm, overrides)


def run_case(folders: dict[str, str], case: Case, resave: str | None = None) -> dict[str, Any]:
    """One optimizer step in the layout of `case`.

    Args:
        resave: instead of a step, load what a case of two ranks saved, and save it under this name.
    """
    from megatron.core import parallel_state

    from megatron_spec.build import link
    from megatron_spec.checkpoint import sharded
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.checkpoint.spec import CheckpointSpec, iteration_folder
    from megatron_spec.commands.convert import first_draft
    from megatron_spec.config import BlockConfig, ObjectiveConfig, ParallelConfig, TrainConfig, presets
    from megatron_spec.drafts.vocab import DraftVocab
    from megatron_spec.features.ahead import FeaturesAhead
    from megatron_spec.features.online import OnlineFeatures
    from megatron_spec.runtime import distributed
    from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
    from megatron_spec.training.step import Trainer

    parallel_state.destroy_model_parallel()
    parallel = ParallelConfig(
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        context_parallel_size=case.get("cp", 1),
        expert_model_parallel_size=case.get("ep", 1),
        sequence_parallel=case.get("sequence_parallel", False),
        decoder_first_pipeline_num_layers=case.get("first"),
        decoder_last_pipeline_num_layers=case.get("last"),
    )
    world = distributed.initialize(parallel)
    ref = inspect_base(folders[case.get("model", "gqa")])
    config = new_config(ref.config, case.get("algorithm", "eagle3"), case.get("whole", False))
    chosen = torch.arange(0, 2 * D, 2) + torch.arange(D) % 2
    V = ref.config.vocab_size
    vocab = DraftVocab(chosen if config.draft_vocab_size == D else torch.arange(V), V)
    base = load_base(ref, world, config.capture_layer_ids)
    draft = first_draft(base, ref, config, vocab, world, torch.float32, seed=5)
    if config.algorithm == "dspark":  # W2 starts at 0, where W1 has no gradient
        heads = [draft.markov_head.markov_w2.weight.data, draft.confidence_head.proj.weight.data]
        for x, rows, size in zip(heads, (config.draft_vocab_size, 1), (world.tp_size, 1), strict=True):
            values = torch.linspace(-0.3, 0.2, rows * x.shape[1]).sin().view(-1, x.shape[1])
            x.copy_(values.chunk(size)[world.tp_rank if size > 1 else 0])
    train = TrainConfig(
        train_iters=4, lr=1e-2, weight_decay=0.1, clip_grad=0.5, adam_eps=ADAM_EPS,
        use_distributed_optimizer=case.get("distributed_optimizer", False),
    )  # fmt: skip
    ddp = wrap_ddp(draft, world, train)
    optimizer, scheduler = build_optimizer(ddp, world, train)
    first = {"anchors": 5} if isinstance(config, BlockConfig) else {"ttt_steps": 3}
    goal = presets.objective_for(config, ObjectiveConfig(**first, **case.get("goal", {})))
    spec = CheckpointSpec(base=link(ref), draft=config)
    if resave is not None:
        sharded.load(iteration_folder(saved(folders, case, "two ranks"), 0), draft, world, optimizer=optimizer)
        sharded.save(saved(folders, case, resave), spec, draft, vocab, world, optimizer=optimizer)
        return {}
    trainer = Trainer(world, ddp, optimizer, scheduler, base, goal)
    torch.manual_seed(9)  # as the training loop does on every rank: it draws the anchors
    batches = batches_of(case)[world.dp_rank :: world.dp_size]
    batches = [dataclasses.replace(batch, context=world.context) for batch in batches]
    result: dict[str, Any] = {"layout": f"world {world.size} {case}"}
    _, drawn, count = FeaturesAhead(OnlineFeatures(base), [batches], world.pp_size).step()  # as in the training loop
    sums, loss = trainer.backward(drawn, count)
    result["sums"], result["loss"] = sums.clone(), float(loss)
    if not train.use_distributed_optimizer:  # there, a rank holds only its part of the reduced gradient
        result["grads"] = {
            n: whole(p.main_grad / sums[3, 0], p, world.tp) for n, p in draft.named_parameters() if p.requires_grad
        }
    trainer.backward = lambda *_: (sums, loss)  # type: ignore[method-assign]  # the gradients are there
    step = trainer.step([], count=0)
    result["grad_norm"] = step.grad_norm
    result["parameters"] = {n: whole(p.data, p, world.tp) for n, p in draft.named_parameters()}
    if case.get("save"):
        sharded.save(saved(folders, case, "two ranks"), spec, draft, vocab, world, optimizer=optimizer)
    return result


def saved(folders: dict[str, str], case: Case, name: str) -> Path:
    return Path(folders["out"], kind(case), name)


SAVED = [case for case in CASES[2] if case.get("save")]


def run_cases(folders: dict[str, str], cases: list[Case]) -> list[dict[str, Any]]:
    found = [run_case(folders, case) for case in cases]
    if torch.distributed.get_world_size() == 4:
        for case in SAVED:
            run_case(folders, {**case, "tp": 4}, resave="four ranks")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("bases")
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    return {
        "out": str(root / "out"),
        "gqa": str(save_llama(root / "gqa", rope_scaling=scaling, vocab_size=ODD)),
        "moe": str(save_mixtral(root / "moe")),
        "own": str(save_with_module(root / "own", vocab_size=96)),
        "kv1": str(save_llama(root / "kv1", num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)),
    }


@pytest.fixture(scope="module")
def reference(folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {kind(case): run_case(folders, case) for case in CASES[1]}


def kind(case: Case) -> str:
    """What is computed, whatever the layout."""
    return " ".join(str(case.get(key)) for key in ("model", "packed", "algorithm", "whole", "micro_batches", "goal"))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.fixture(scope="module")
def ranks(folders: dict[str, str]) -> Callable[[int], list[Any]]:
    """What every rank of a world found; the worlds run one after the other, since four ranks load what two saved."""
    found: dict[int, list[Any]] = {}

    def of(size: int) -> list[Any]:
        for earlier in range(2, size + 1):
            if earlier not in found:
                found[earlier] = run_world(earlier, run_cases, folders, CASES[earlier], fresh=earlier == 2)
        return found[size]

    return of


@pytest.mark.parametrize("size", [2, 3, 4])
def test_layouts_equal_one_process(
    size: int, ranks: Callable[[int], list[Any]], reference: dict[str, dict[str, Any]]
) -> None:
    for rank, results in enumerate(ranks(size)):
        for case, found in zip(CASES[size], results, strict=True):
            expected = reference[kind(case)]
            where = f"{found['layout']}, rank {rank}"
            assert expected["sums"][3].min() > 15, "the batch must supervise rows at every step"
            assert torch.equal(found["sums"][3], expected["sums"][3]), where
            assert torch.equal(found["sums"][1], expected["sums"][1]), where
            assert relative(found["sums"], expected["sums"]) < 1e-5, where
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5), where
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), where
            for name, gradient in found.get("grads", {}).items():
                assert expected["grads"][name].abs().max() > 0, name
                assert relative(gradient, expected["grads"][name]) < 1e-5, f"gradient of {name}, {where}"
            for name, value in found["parameters"].items():
                assert relative(value, expected["parameters"][name]) < 1e-5, f"{name} after a step, {where}"


def all_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: parameters, and what the optimizer keeps of them."""
    from megatron.core import dist_checkpointing

    from megatron_spec.checkpoint.spec import iteration_folder

    found = dist_checkpointing.load_plain_tensors(str(iteration_folder(checkpoint, 0) / "dist"))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("case", SAVED, ids=kind)
def test_uneven_vocabulary_is_saved_without_padding_and_loads_at_any_size(
    case: Case, folders: dict[str, str], ranks: Callable[[int], list[Any]], reference: dict[str, dict[str, Any]]
) -> None:
    ranks(4)
    run_case(folders, {**case, "tp": 1, "sequence_parallel": False}, resave="one rank")
    two, four, one = (
        all_tensors(saved(folders, case, f"{n} rank{s}")) for n, s in (("two", "s"), ("four", "s"), ("one", ""))
    )
    assert two.keys() == four.keys() == one.keys()
    assert sum("exp_avg." in name for name in two) == sum(name.startswith("draft.") for name in two)
    assert sum(ODD in tensor.shape for tensor in two.values()) >= 6, "heads and embeddings with their state"
    for name, tensor in two.items():
        assert torch.equal(tensor, four[name]) and torch.equal(tensor, one[name]), name
    for name, value in reference[kind(case)]["parameters"].items():
        assert relative(two[f"draft.{name}"], value) < 1e-5, name
