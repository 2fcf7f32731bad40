"""The README's library example, run as it stands, and its result equal to the scripts' own path."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_spec
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.commands.finetune_inputs import resolve as resolve_run
from megatron_spec.commands.runs import FinetuneRun
from megatron_spec.config import DecodeConfig, ObjectiveConfig, TrainConfig, UserError
from tests import warm
from tests.functional_tests.script_helpers import ROOT, environment, make_base, write_conversations
from tests.worlds import run_world


def example(page: str, heading: str) -> str:
    """The Python block below a heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.search(r"```python\n(.*?)```", section, re.S).group(1)  # type: ignore[union-attr]


def test_readme_example(tmp_path: Path) -> None:
    """A script of its own, as printed, in a folder that has what it names."""
    make_base(tmp_path / "base", initializer_range=0.4)  # a base with opinions: there is something to learn
    write_conversations(tmp_path / "train.jsonl", 6)
    (tmp_path / "program.py").write_text(example("README.md", "Library"))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, env=environment()
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 20 and sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert float(re.search(r"acceptance length (\S+)", done.stdout)[1]) >= 1  # type: ignore[index]
    for part in ("base", "draft"):
        assert (tmp_path / "exported" / part / "hf_quant_config.json").is_file()
    assert read_spec(resolve(tmp_path / "my_draft")).quant is not None


def test_training_loop_of_the_docs(tmp_path: Path) -> None:
    """As printed on four ranks (TP 2 with SP x PP 2), and in one process: the same draft."""
    make_base(tmp_path / "base", num_hidden_layers=8)
    write_conversations(tmp_path / "train.jsonl", 6)
    program = example("docs/scale.md", "Your own training loop")
    layout = next(line for line in program.splitlines() if line.startswith("LAYOUT = "))
    alone = program.replace(layout, "LAYOUT = ParallelConfig()").replace('"my_draft"', '"alone"')
    for name, text, processes in (("four.py", program, 4), ("one.py", alone, 0)):
        (tmp_path / name).write_text(text)
        done = warm.run_script(str(tmp_path / name), [], processes, environment(), tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    found, expected = run_world(1, parameters_of, [str(tmp_path / name) for name in ("my_draft", "alone")])[0]
    for name, value in expected.items():
        assert float((found[name] - value).norm() / value.norm()) < 1e-4, name


OWN_LAYOUTS = {
    "tp2sp": "ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)",
    "pp2": "ParallelConfig(pipeline_model_parallel_size=2)",
    "dp2": "ParallelConfig()",
}


def test_own_draft_of_the_docs(tmp_path: Path) -> None:
    """The class as printed, in the training loop of the docs: in one process, and the same draft from every layout."""
    make_base(tmp_path / "base", num_hidden_layers=8)
    write_conversations(tmp_path / "train.jsonl", 6)
    (tmp_path / "mine.py").write_text(example("docs/architecture.md", "Your own draft or loss"))
    program = "from mine import MyDraft\n" + example("docs/scale.md", "Your own training loop")
    assert program.count("convert(base, ") == 1
    program = program.replace("convert(base, ", "convert(base, draft_class=MyDraft, drafts=")
    layout = next(line for line in program.splitlines() if line.startswith("LAYOUT = "))
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    for name, text in {"alone": "ParallelConfig()", **OWN_LAYOUTS}.items():
        given = program.replace(layout, f"LAYOUT = {text}").replace('"my_draft"', f'"{name}"')
        (tmp_path / f"{name}.py").write_text(given)
        processes = 0 if name == "alone" else 2
        done = warm.run_script(str(tmp_path / f"{name}.py"), [], processes, environment(**path), tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    names = ("alone", *OWN_LAYOUTS)
    expected, *others = run_world(1, own_parameters, str(tmp_path), names)[0]
    assert expected["midlayer.mlp.up.weight"].std() > 0.01
    for name, found in zip(names[1:], others, strict=True):
        for key, value in expected.items():
            assert float((found[key] - value).norm() / value.norm()) < 1e-4, (name, key)


def own_parameters(root: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Of the drafts that the programs saved. Without the class they are refused, and so is an export."""
    from tests.tiny import make_batch

    sys.path.insert(0, root)
    from mine import MyDraft

    found = []
    for name in names:
        with pytest.raises(UserError, match=r"has a draft of a class of yours, mine:MyDraft, .* draft_class=\.\.\."):
            megatron_spec.load(f"{root}/{name}")
        model = megatron_spec.load(f"{root}/{name}", draft_class=MyDraft)
        found.append({key: p.detach().clone() for key, p in model.draft.named_parameters()})
    with pytest.raises(UserError, match=r"MyDraft cannot be exported: .* \(more: midlayer.mlp.down.weight, .* fewer: "):
        megatron_spec.export_draft(model, f"{root}/out")
    few = DecodeConfig(max_draft_len=2, max_new_tokens=4)
    assert len(megatron_spec.decode(model, [[5, 6, 7]], few)[0].tokens) == 4
    assert megatron_spec.quantize(model, [make_batch(2, 24, seed=0)])
    with pytest.raises(UserError, match=r"the base is fake-quantised, by quantize\(\) of another model around it"):
        megatron_spec.convert(model.base, [("eagle3", {})])
    return found


def test_batches_are_moved_to_the_device() -> None:
    """Loaders put them on the host."""
    import torch

    from megatron_spec.api import _on_device
    from tests.tiny import make_batch

    world: Any = SimpleNamespace(device=torch.device("meta"))
    (moved,) = _on_device([make_batch(1, 8, seed=0)], world)
    assert moved.tokens_BS.device.type == "meta" and moved.host is not None


def parameters_of(checkpoints: list[str]) -> list[dict[str, Any]]:
    import megatron_spec

    return [
        {name: p.detach().clone() for name, p in megatron_spec.load(checkpoint).draft.named_parameters()}
        for checkpoint in checkpoints
    ]


PROGRAM = """
import contextlib
import json
from pathlib import Path

import torch

import megatron_spec
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.commands.convert import draft_kinds
from megatron_spec.config import DecodeConfig, ObjectiveConfig
from megatron_spec.evaluation.validate import _Validation
from tests.tiny import make_batch


def main() -> None:
    world = megatron_spec.initialize()
    base = load_base(inspect_base("base"), world)
    model = megatron_spec.convert(base, [("eagle", {})], objective=ObjectiveConfig(ttt_steps=2))
    megatron_spec.save(model, "draft")
    for kind in draft_kinds():
        mask = {"mask_token_id": 3} if kind in ("dflash", "dspark", "p-eagle") else {}
        captures = {} if kind in ("eagle1", "eagle-mtp", "medusa") else {"capture_layer_ids": [1, 3, 4]}
        if kind == "eagle3":  # in ModelOpt's words
            captures = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}
        fresh = megatron_spec.convert(base, [(kind, {**mask, **captures})])
        assert fresh.draft.config.algorithm == ("eagle3" if kind == "eagle" else kind)
        fresh(make_batch(2, 24, seed=0))[0].total.backward()
    few = DecodeConfig(max_draft_len=2, max_new_tokens=5, batch_size=2)
    measure, _Validation._measure = _Validation._measure, None  # what it measured stays nowhere: the draft may train on
    with contextlib.suppress(TypeError):
        megatron_spec.validate(model, "train.jsonl", few, num_prompts=2, output="report.json")
    assert not list(Path().glob("report.json*"))
    _Validation._measure = measure
    report = megatron_spec.validate(model, "train.jsonl", few, num_prompts=2, output="report.json")
    assert json.loads(Path("report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    prompts = [[5, 6, 7], [8, 9]]
    drafted = megatron_spec.decode(model, prompts, few)
    alone = megatron_spec.decode(model, prompts, few, speculate=False)
    megatron_spec.export_base(model, "out/base")
    megatron_spec.export_draft(model, "out/draft")
    print(json.dumps([report.first.text_identical, [d.tokens for d in drafted] == [a.tokens for a in alone]]))


main()
"""


def test_user_program(tmp_path: Path) -> None:
    """On a base that knows its folder, from convert to export; saving needs no main guard."""
    make_base(tmp_path / "base", num_hidden_layers=8)
    write_conversations(tmp_path / "train.jsonl", 3)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = warm.run_script(str(tmp_path / "program.py"), [], 0, environment(), tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[true, true]"
    assert (tmp_path / "out" / "base" / "config.json").is_file() and (tmp_path / "draft" / "iter_0000000").is_dir()


def test_a_process_that_imports_the_program_once_more_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UserError, match=r"large files are tokenised in processes .* below if __name__ =="):
        megatron_spec.initialize()


def tp2_wrapped(root: str) -> list[float]:
    """Losses of the wrapped GPTModel and of the base loaded from disk, in one layout."""
    import torch

    import megatron_spec
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.config import ObjectiveConfig, ParallelConfig
    from tests.tiny import make_batch

    world = megatron_spec.initialize(ParallelConfig(tensor_model_parallel_size=2))
    overrides = {"capture_layer_ids": [0, 3, 6]}
    plain = load_base(inspect_base(f"{root}/base"), world, (0, 3, 6))
    chunks = [load_base(inspect_base(f"{root}/base"), world).model]  # a GPTModel of the user's own, weights loaded
    for layer in chunks[0].decoder.layers:
        from megatron_spec.ops.visibility import Visibility

        layer.self_attention.core_attention.visibility = Visibility.causal()
    losses = []
    for model in (plain, chunks):
        spec = megatron_spec.convert(
            model, [("eagle", overrides)], base_path=f"{root}/base", objective=ObjectiveConfig(ttt_steps=2)
        )
        found = spec(make_batch(2, 24, seed=1))[0]
        losses.append(float(found.total))
        torch.testing.assert_close(found.rows_T[0] > 0, torch.tensor(True))
    return losses


def test_a_wrapped_model_gives_the_same_loss(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    for own, wrapped in run_world(2, tp2_wrapped, str(tmp_path)):
        assert wrapped == pytest.approx(own, rel=1e-6)


def seeds_of_ranks(root: str) -> list[str]:
    """What a call says with one seed on both ranks, and with two."""
    import torch

    import megatron_spec
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.config import ParallelConfig
    from tests.tiny import make_batch

    world = megatron_spec.initialize(ParallelConfig(tensor_model_parallel_size=2))
    base, said = load_base(inspect_base(f"{root}/base"), world), []
    for kind, seed in (("eagle1", 5), ("eagle1", world.rank), ("medusa", world.rank)):
        torch.manual_seed(seed)
        try:
            said.append(str(float(megatron_spec.convert(base, [(kind, {})])(make_batch(2, 24, seed=1))[0].total)))
        except UserError as e:
            said.append(str(e))
    return said


def test_ranks_with_other_seeds_are_refused_where_a_draft_draws(tmp_path: Path) -> None:
    """The noise of EAGLE-1 differed from shard to shard; block drafts broke a collective."""
    make_base(tmp_path / "base")
    first, second = run_world(2, seeds_of_ranks, str(tmp_path))
    assert first == second and float(first[0]) > 0 and float(first[2]) > 0
    assert first[1].startswith("torch's seeds are [0, 1] on ranks of one tensor or context parallel group")


def resume_own_loop(root: str) -> dict[str, list[float]]:
    """Losses of four steps of two calls in a user's loop: whole, and in halves, the second also with a new draft."""
    import torch

    import megatron_spec
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.config import ObjectiveConfig, TrainConfig
    from megatron_spec.training.optimizer import build_optimizer, finish_gradients, wrap_ddp
    from tests.tiny import make_batch

    world = megatron_spec.initialize()
    before = torch.random.get_rng_state()
    base = load_base(inspect_base(f"{root}/base"), world)
    found: dict[str, list[float]] = {}
    for name, cut in (("whole", 4), ("halves", 2), ("new", 2)):
        losses = found.setdefault(name, [])
        for first, last in ((0, cut), (cut, 4)):
            if first and name == "halves":
                model = megatron_spec.load(f"{root}/{name}")
            else:  # EAGLE-1 draws noise in every call
                goal = ObjectiveConfig(2)
                model = megatron_spec.convert(base, [("eagle1", {})], base_path=f"{root}/base", objective=goal)
            train = TrainConfig(train_iters=4, lr=1e-2)
            ddp = wrap_ddp(model.draft, world, train)
            optimizer, _ = build_optimizer(ddp, world, train)
            if first:
                assert megatron_spec.load_optimizer(model, f"{root}/{name}", optimizer) == first
            for step in range(first, last):
                ddp.zero_grad_buffer()
                optimizer.zero_grad()
                parts = [model(make_batch(2, 24, seed=2 * step + i))[0] for i in range(2)]
                total = parts[0].total + parts[1].total
                total.backward()
                finish_gradients(ddp, world, sum(part.rows_T[0].float() for part in parts))
                optimizer.step()
                losses.append(float(total.detach()))
            megatron_spec.save(model, f"{root}/{name}", iteration=last, optimizer=optimizer)
    assert torch.equal(before, torch.random.get_rng_state()), "the library must leave the program's random state alone"
    return found


def test_user_training_loop_resumes(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    found = run_world(1, resume_own_loop, str(tmp_path))[0]
    assert len(found["whole"]) == 4 and found["halves"] == found["new"] == found["whole"]
    write_conversations(tmp_path / "train.jsonl", 2)
    run = FinetuneRun(
        f"{tmp_path}/halves", f"{tmp_path}/halves", f"{tmp_path}/train.jsonl", TrainConfig(4, bf16=False),
        ObjectiveConfig(2), seq_length=64,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"another training loop .* start a run from it with --load"):
        resolve_run(run)  # what data it has read is unknown


def misuses(root: str) -> list[int]:
    """Refusals, before anything is written; and a quantisation of single micro-batches."""
    import torch

    import megatron_spec
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from tests.tiny import make_batch

    base = load_base(inspect_base(f"{root}/base"), megatron_spec.initialize())
    wrong: list[Any] = ["eagle3", ["eagle3"], {"eagle3": {}}, ("eagle3", {})]
    for drafts in wrong:
        with pytest.raises(UserError, match=r"expected a list of one pair such as \('eagle3', \{\}\)"):
            megatron_spec.convert(base, drafts)
    model = megatron_spec.convert(base, [("medusa", {})])
    optimizer = torch.optim.AdamW(model.draft.parameters())
    with pytest.raises(UserError, match=r"found a torch.optim.adamw.AdamW, expected an optimizer of megatron-core"):
        megatron_spec.save(model, f"{root}/saved", optimizer=optimizer)
    megatron_spec.save(model, f"{root}/without")
    with pytest.raises(UserError, match="expected an optimizer of megatron-core"):
        megatron_spec.load_optimizer(model, f"{root}/without", optimizer)
    prompts: list[Any] = [["hello"], "hello", [5, 6]]
    for given in prompts:
        with pytest.raises(UserError, match="expected lists of token ids"):
            megatron_spec.decode(model, given)
    batches = [make_batch(2, 24, seed=i) for i in range(2)]
    return [len(megatron_spec.quantize(model, steps)) for steps in (batches, [[batch] for batch in batches])]


def test_arguments_of_another_form_are_refused(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    first, second = run_world(1, misuses, str(tmp_path))[0]
    assert first == second > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "without"]


def draws(root: str) -> dict[str, list[float]]:
    """Losses of one batch in four calls of an untrained draft, and of two with a checkpoint between them."""
    import torch

    import megatron_spec
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from tests.tiny import make_batch

    base = load_base(inspect_base(f"{root}/base"), megatron_spec.initialize())
    found: dict[str, list[float]] = {}
    for kind, goal in (("eagle1", {"ttt_steps": 2}), ("dflash", {"anchors": 2}), ("p-eagle", {"ttt_steps": 3})):
        config: dict[str, Any] = {} if kind == "eagle1" else {"capture_layer_ids": [1, 3, 4], "mask_token_id": 3}
        config |= {"block_size": 3} if kind == "dflash" else {}
        torch.manual_seed(5)
        model = megatron_spec.convert(base, [(kind, config)], objective=ObjectiveConfig(**goal))  # type: ignore[arg-type]
        batch, before = make_batch(2, 24, seed=1), torch.random.get_rng_state()
        found[kind] = [float(model(batch)[0].loss_T[-1]) for _ in range(2)]
        megatron_spec.save(model, f"{root}/{kind}", iteration=2)
        again = megatron_spec.load(f"{root}/{kind}")
        found[f"{kind} continued"] = [float(m(batch)[0].loss_T[-1]) for m in (model, again)]
        assert torch.equal(before, torch.random.get_rng_state())
    make_base(Path(root, "other"), rope_theta=500000.0)
    with pytest.raises(UserError, match=r"base_path .*/other has another base: rope is .* in the base and .* there"):
        megatron_spec.convert(base, [("eagle1", {})], base_path=f"{root}/other")
    goal = ObjectiveConfig(anchors=2, backbone_weight=1.0, backbone_iters=1)
    config = {"capture_layer_ids": [1, 3, 4], "mask_token_id": 3, "block_size": 2, "markov_rank": 4}
    scheduled = megatron_spec.convert(base, [("dspark", config)], objective=goal)
    after = [scheduled(make_batch(2, 24, seed=1))[0] for _ in range(2)]
    found["heads trained"] = []
    for losses in after:
        scheduled.draft.zero_grad()
        losses.total.backward()
        found["heads trained"].append(float(scheduled.draft.markov_head.markov_w2.weight.grad.norm()))
    return found


def test_every_call_draws_anew_and_continues(tmp_path: Path) -> None:
    """Noise, anchors and dropped rows of a program that seeds torch once; the share of a schedule moves on."""
    make_base(tmp_path / "base")
    found = run_world(1, draws, str(tmp_path))[0]
    for kind in ("eagle1", "dflash", "p-eagle"):
        first, second = found[kind]
        third, continued = found[f"{kind} continued"]
        assert len({first, second, third}) == 3 and continued == third, kind
    assert found["heads trained"][0] == 0 < found["heads trained"][1]
