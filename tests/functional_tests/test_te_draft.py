"""The chain with a draft from (stand-ins of) Transformer Engine's modules equals the chain with the local draft.

Runs change the implementation where they resume, and from script to script. In fp32, so equal to rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig
from tests import te_stand_in
from tests.functional_tests.script_helpers import make_base, write_conversations
from tests.worlds import run_world

GOAL = ObjectiveConfig(ttt_steps=2)
ENGINE = "transformer_engine"


@te_stand_in.installed()
def chain(place: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Losses of each variant: everything local; modules of Transformer Engine from the second start of a run on; and
    from the first one to the second."""
    from megatron_spec.commands.export import export
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.commands.quantize import quantize

    root, data = Path(place), str(Path(place) / "train.jsonl")
    layout = ParallelConfig(**parallel)
    without_sp = layout.replace(sequence_parallel=False)  # ranges would differ with it
    found: dict[str, Any] = {}
    for name, before, after in (("local", "local", "local"), ("to", "local", ENGINE), ("from", ENGINE, "local")):

        def train(load: str, save: str, steps: int, impl: str) -> None:
            settings = TrainConfig(steps, micro_batch_size=1, global_batch_size=2, lr=1e-2, lr_decay_style="constant")
            run = FinetuneRun(
                str(root / load), str(root / save), data, settings, GOAL, parallel=layout, seq_length=64,
                draft_transformer_impl=impl,  # type: ignore[arg-type]
            )  # fmt: skip
            te_stand_in.calls.clear()
            assert finetune(run)
            assert bool(te_stand_in.calls) == (impl == ENGINE), "the other implementation ran"

        train("draft", f"{name} tuned", 2, before)
        train("draft", f"{name} tuned", 4, after)
        quantize(
            str(root / f"{name} tuned"), str(root / f"{name} q"), data, samples=2, seq_length=64, micro_batch_size=1,
            objective=GOAL, parallel=without_sp, draft_transformer_impl=after,  # type: ignore[arg-type]
        )  # fmt: skip
        train(f"{name} q", f"{name} qat", 2, after)
        export(
            str(root / f"{name} qat"), str(root / f"{name} out"), extra_modules=True, parallel=layout,
            draft_transformer_impl=before,  # type: ignore[arg-type]
        )  # fmt: skip
        lines = [(root / f"{name} {run}" / "metrics.jsonl").read_text() for run in ("tuned", "qat")]
        found[name] = [json.loads(line)["loss"] for text in lines for line in text.splitlines()]
    return found


@pytest.mark.parametrize("parallel", [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}])
def test_the_chain(parallel: dict[str, Any], tmp_path: Path) -> None:
    from megatron_spec.commands.convert import convert

    make_base(tmp_path / "base")
    write_conversations(tmp_path / "train.jsonl", 4)
    convert(str(tmp_path / "base"), str(tmp_path / "draft"))
    found = run_world(parallel.get("tensor_model_parallel_size", 1), chain, str(tmp_path), parallel)[0]
    assert len(found["local"]) == 6 and found["local"][0] != found["local"][3]
    expected = load_file(tmp_path / "local out" / "draft" / "model.safetensors")
    for name in ("to", "from"):
        assert found[name] == pytest.approx(found["local"], rel=1e-4)
        tensors = load_file(tmp_path / f"{name} out" / "draft" / "model.safetensors")
        assert tensors.keys() == expected.keys()
        for key, value in expected.items():
            distance = (tensors[key].float() - value.float()).norm() / value.float().norm().clamp_min(1e-9)
            assert float(distance) < 1e-3, f"{name}: {key}"


def test_a_draft_that_has_no_modules_of_ours(tmp_path: Path) -> None:
    from megatron_spec.commands import decode
    from megatron_spec.config import DecodeConfig, UserError

    make_base(tmp_path / "base")
    data = str(write_conversations(tmp_path / "train.jsonl", 1))
    with pytest.raises(UserError, match="no draft of this package decodes"):
        decode.validate(
            data, base=str(tmp_path / "base"), output=str(tmp_path / "x.json"),
            decode=DecodeConfig(decoding_type="NGram"), draft_transformer_impl=ENGINE,
        )  # fmt: skip
