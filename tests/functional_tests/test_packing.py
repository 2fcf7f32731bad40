"""finetune.py --packing: the same conversations in fewer rows give the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.script_helpers import make_base, write_conversations
from tests.worlds import run_world

SEQ_LENGTH = 256
LAYOUTS: dict[str, dict[str, Any]] = {"one stage": {}, "two stages": {"pipeline_model_parallel_size": 2}}


def steps(root: str, layout: str) -> dict[str, Any]:
    """Metrics of two steps over all conversations, one in a row and packed, and the rows that packing needs."""
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.data import open_dataset
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig
    from megatron_spec.data.packing import pack

    parallel = ParallelConfig(**LAYOUTS[layout])
    here, data = f"{root}/{layout}", f"{root}/train.jsonl"
    convert(f"{root}/base", f"{here}/draft", eagle_config=f"{root}/eagle.json", parallel=parallel)
    dataset = open_dataset(data, f"{root}/base", SEQ_LENGTH)
    rows = len(pack([len(dataset[i]) for i in range(len(dataset))], SEQ_LENGTH))
    found: dict[str, Any] = {"rows": rows, "conversations": len(dataset)}
    for packing, batch in ((False, len(dataset)), (True, rows)):
        train = TrainConfig(2, 1, batch, packing=packing, lr=1e-2)
        run = FinetuneRun(
            f"{here}/draft",
            f"{here}/{packing}",
            data,
            train,
            ObjectiveConfig(ttt_steps=3, replay_weight=5.0),
            parallel=parallel,
            seq_length=SEQ_LENGTH,
        )
        assert finetune(run)
        lines = Path(f"{here}/{packing}/metrics.jsonl").read_text().splitlines()
        found[str(packing)] = [json.loads(line) for line in lines]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packing")
    make_base(folder / "base")
    write_conversations(folder / "train.jsonl", 8, rejected=True)
    (folder / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 3, 6]}))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_steps_equal_unpacked_steps(root: Path, layout: str) -> None:
    found = run_world(1 if layout == "one stage" else 2, steps, str(root), layout)[0]
    assert found["rows"] % 2 == 0 and found["rows"] < found["conversations"]
    for plain, packed in zip(found["False"], found["True"], strict=True):
        assert packed["supervised_rows"] == plain["supervised_rows"]
        for name in ("loss_per_step", "accuracy_per_step", "overlap_per_step"):
            assert packed[name] == pytest.approx(plain[name], rel=1e-5), name
        assert packed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
