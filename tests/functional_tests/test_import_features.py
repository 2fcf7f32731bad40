"""Features that transformers computed, imported: training on them equals training on the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.functional_tests.script_helpers import make_base, write_conversations
from tests.worlds import run_world

CAPTURES, LENGTH = (0, 3, 6), 96


def write_dumps(root: Path) -> None:
    """A file per conversation, as a transformers script would write it: raw lengths, both formats in turn."""
    from transformers import AutoModelForCausalLM

    from megatron_spec.commands.data import open_dataset

    model = AutoModelForCausalLM.from_pretrained(root / "base").eval()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    dataset = open_dataset(str(root / "train.jsonl"), str(root / "base"), 10**6)
    for name in ("dumps", "bare"):
        (root / name).mkdir()
    for i in range(len(dataset)):
        ids = dataset[i].tokens[None]
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        entry = {
            "input_ids": ids[0], "hidden_states": states[-1][0], "loss_mask": (dataset[i].turns > 0).long(),
            "aux_hidden_states": torch.cat([states[c + 1][0] for c in CAPTURES], dim=-1),
        }  # fmt: skip
        if i % 2:
            torch.save({**entry, "conversation_id": f"c{i}"}, root / "dumps" / f"{i:04d}.pt")
        else:
            save_file(entry, root / "dumps" / f"{i:04d}.safetensors")
        if i < 2:  # what hooks see: before the final norm
            torch.save({**entry, "hidden_states": last[-1][0].clone()}, root / "bare" / f"{i}.pt")


def tune(root: Path, save: str, **source: Any) -> list[float]:
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    train = TrainConfig(train_iters=3, global_batch_size=4, micro_batch_size=2, lr=3e-3, lr_decay_style="constant")
    run = FinetuneRun(
        f"{root}/draft", f"{root}/{save}", train=train, objective=ObjectiveConfig(ttt_steps=2),
        parallel=ParallelConfig(), **{"data": None, **source},
    )  # fmt: skip
    assert finetune(run)
    return [json.loads(line)["loss"] for line in (root / save / "metrics.jsonl").read_text().splitlines()]


def everything(folder: str) -> dict[str, Any]:
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.import_features import import_features
    from megatron_spec.config import UserError

    root = Path(folder)
    convert(f"{root}/base", f"{root}/draft", eagle_config=f"{root}/eagle.json")
    write_dumps(root)
    found: dict[str, Any] = {}

    def attempt(dumps: str, store: str, **options: Any) -> str:
        options = {"final_norm": "applied", "seq_length": LENGTH, **options}
        try:
            import_features(f"{root}/draft", f"{root}/{dumps}", f"{root}/{store}", **options)
        except UserError as e:
            return str(e)
        return ""

    assert attempt("dumps", "store") == ""
    times = {p.name: p.stat().st_mtime_ns for p in (root / "store").glob("*.safetensors")}
    (root / "store" / "features-00001.safetensors").unlink()  # as after a kill
    assert attempt("dumps", "store", check=0) == ""
    found["kept"] = [times[p.name] == p.stat().st_mtime_ns for p in sorted((root / "store").glob("*.safetensors"))]
    assert attempt("bare", "normed", final_norm="missing") == ""
    found["refused"] = {
        "norm": attempt("bare", "no"), "twice": attempt("dumps", "no", final_norm="missing"),
        "layers": attempt("bare", "no", final_norm="missing", check=0),
        "other length": attempt("dumps", "store", seq_length=64),
        "other norm": attempt("bare", "normed", final_norm="applied", check=0),
    }  # fmt: skip
    entry = torch.load(root / "dumps" / "0001.pt", weights_only=True)
    shifted = torch.cat([entry["aux_hidden_states"][:, 32:], entry["aux_hidden_states"][:, :32]], dim=-1)
    (root / "shifted").mkdir()
    torch.save({**entry, "aux_hidden_states": shifted}, root / "shifted" / "one.pt")
    found["refused"]["order"] = attempt("shifted", "no")
    found["left behind"] = (root / "no").exists()
    found["online"] = tune(root, "online", data=f"{root}/train.jsonl", seq_length=LENGTH)
    found["imported"] = tune(root, "imported", offline_data=f"{root}/store")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("dumps")
    make_base(root / "base")
    weights = load_file(root / "base" / "model.safetensors")
    weights["model.norm.weight"] += torch.rand(32)  # else a second norm changes nothing
    save_file(weights, root / "base" / "model.safetensors", metadata={"format": "pt"})
    write_conversations(root / "train.jsonl", 18)  # two shards
    (root / "eagle.json").write_text(json.dumps({"capture_layer_ids": list(CAPTURES)}))
    return root, run_world(1, everything, str(root))[0]


def test_training_on_imported_features_equals_online_training(found: tuple[Path, dict[str, Any]]) -> None:
    _, results = found
    assert results["imported"] == pytest.approx(results["online"], rel=1e-5)
    assert results["kept"] == [True, False], "what is there is not written again"


def test_missing_final_norm_is_applied(found: tuple[Path, dict[str, Any]]) -> None:
    from megatron_spec.features.store import FeatureStore

    root, _ = found
    bare, whole = FeatureStore(root / "normed"), FeatureStore(root / "store")
    for i in range(2):
        torch.testing.assert_close(bare.features_of(i).state, whole.features_of(i).state, rtol=1e-5, atol=1e-5)
        assert torch.equal(bare.features_of(i).argmax, whole.features_of(i).argmax)


@pytest.mark.parametrize(
    ("case", "file", "message"),
    [
        ("norm", "bare/0.pt", "the last state by"),
        ("twice", "dumps/0000.safetensors", "the last state by"),
        ("order", "shifted/one.pt", "the output of layer 0 by"),
        ("layers", "", "--check-samples 0 loads none"),
        ("other length", "", "started with other settings"),
        ("other norm", "", "started with other settings (data_hash"),
    ],
)
def test_mismatched_dumps_are_refused(found: tuple[Path, dict[str, Any]], case: str, file: str, message: str) -> None:
    _, results = found
    said = results["refused"][case]
    assert message in said and file in said, said
    assert not results["left behind"], results["refused"]
