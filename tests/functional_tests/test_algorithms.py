"""Every algorithm through the whole chain, in one process: convert, finetune, quantise, QAT, export, validate."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_spec.commands.convert import DraftRequest
from megatron_spec.config import UserError
from megatron_spec.export.check import check_folder
from tests.functional_tests.script_helpers import SCRIPTS, make_base, refuse, write_conversations
from tests.worlds import run_world

OWN_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16}
"""Other than the base's."""
REQUESTS: dict[str, dict[str, Any]] = {
    "eagle1": {"eagle_algorithm": "eagle1"},
    "medusa": {"algorithm": "medusa", "num_medusa_heads": 3, "num_medusa_layers": 2},
    "medusa-shared": {"algorithm": "medusa", "num_medusa_heads": 2, "share_base_head": True},
    "mtp": {"eagle_algorithm": "eagle-mtp"},
    "eagle3.1": {
        "eagle_algorithm": "eagle3.1",
        "eagle_config": {"capture_layer_ids": [0, 3, 6], "norm_before_fc": True},
    },
    "p-eagle": {
        "eagle_algorithm": "p-eagle",
        "eagle_config": {"capture_layer_ids": [0, 3, 6], "mask_token_id": 3},
    },
    "dflash": {"algorithm": "dflash", "draft_config": {"mask_token_id": 3, "block_size": 3, "causal": True}},
    "dspark": {
        "algorithm": "dspark",
        "draft_config": {"mask_token_id": 3, "block_size": 2, "markov_rank": 8, **OWN_HEADS},
    },
}


def request(root: str, name: str) -> dict[str, Any]:
    """The request with its configuration in a file."""
    found = dict(REQUESTS[name])
    for key in ("eagle_config", "draft_config"):
        if key in found:
            Path(root, f"{name}.json").write_text(json.dumps(found[key]))
            found[key] = f"{root}/{name}.json"
    return found


def chain(root: str, name: str) -> dict[str, Any]:
    """All steps for one algorithm; what was reported on the way."""
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.decode import validate
    from megatron_spec.commands.export import ExportRun, export
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.commands.quantize import quantize
    from megatron_spec.config import DecodeConfig, ObjectiveConfig, TrainConfig

    here, data = f"{root}/{name}", f"{root}/train.jsonl"
    convert(f"{root}/base", f"{here}/draft", **request(root, name))
    fixed = REQUESTS[name].get("algorithm") is not None  # heads and blocks have as many steps as they are
    goal = ObjectiveConfig() if fixed else ObjectiveConfig(ttt_steps=2)

    def train(load: str, save: str, iterations: int, cache: str | None = None) -> list[Any]:
        settings = TrainConfig(iterations, micro_batch_size=2, global_batch_size=4, lr=3e-3)
        where = f"{here}/{load}", f"{here}/{save}", data
        run = FinetuneRun(*where, settings, goal, seq_length=96, feature_cache=cache)
        assert finetune(run)
        lines = Path(here, save, "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    found: dict[str, Any] = {"tuned": train("draft", "tuned", 10, f"{here}/features")}
    heads = 2 if name in ("dflash", "dspark", "p-eagle") else REQUESTS[name].get("num_medusa_heads", 3)
    few = DecodeConfig(max_draft_len=heads, max_new_tokens=10, batch_size=2)
    report = validate(data, load=f"{here}/tuned", num_prompts=3, decode=few)
    found["identical"], found["accepted"] = report.first.text_identical, report.first.acceptance.acceptance_length
    export(ExportRun(f"{here}/tuned", f"{here}/bf16", extra_modules=True))
    quantize(f"{here}/tuned", f"{here}/quantized", data, samples=4, seq_length=96, micro_batch_size=2, objective=goal)
    found["qat"] = train("quantized", "qat", 2)
    export(ExportRun(f"{here}/qat", f"{here}/fp8", extra_modules=True))
    return found


def library(root: str) -> dict[str, Any]:
    """The library's way for heads: convert, losses, quantise, save, load, export."""
    import megatron_spec
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from tests.tiny import make_batch

    base = load_base(inspect_base(f"{root}/base"), megatron_spec.initialize())
    model = megatron_spec.convert(base, [("medusa", {"num_heads": 2})], base_path=f"{root}/base")
    before = model(make_batch(2, 24, seed=1))[0].loss_T.tolist()
    megatron_spec.quantize(model, [[make_batch(2, 24, seed=2)]])
    megatron_spec.save(model, f"{root}/library")
    megatron_spec.export_draft(model, f"{root}/library-export")
    again = megatron_spec.load(f"{root}/library")
    losses = [m(make_batch(2, 24, seed=1))[0].loss_T.tolist() for m in (model, again)]
    return {"heads": len(before), "same": losses[0] == losses[1], "quantised": losses[0] != before}


def chains(root: str) -> dict[str, Any]:
    return {
        **{name: chain(root, name) for name in REQUESTS},
        "one process": trained_in(root, ({},)),
        "library": library(root),
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("algorithms")
    make_base(root / "base")
    write_conversations(root / "train.jsonl", 8)
    return root, run_world(1, chains, str(root))[0]


@pytest.mark.parametrize("name", list(REQUESTS))
def test_trains_decodes_and_continues_quantised(done: tuple[Path, dict[str, Any]], name: str) -> None:
    found = done[1][name]
    tuned, qat = found["tuned"], found["qat"]
    losses = [line["loss"] for line in tuned]  # two steps read all conversations once
    assert sum(losses[-2:]) < sum(losses[:2]), losses
    assert len(tuned[0]["accuracy_per_step"]) == REQUESTS[name].get("num_medusa_heads", 2)
    assert abs(qat[0]["loss"] - tuned[-1]["loss"]) < 0.5 * tuned[0]["loss"]
    assert found["identical"] and found["accepted"] >= 1.0


def test_library(done: tuple[Path, dict[str, Any]]) -> None:
    assert done[1]["library"] == {"heads": 2, "same": True, "quantised": True}


def test_exported_eagle1(done: tuple[Path, dict[str, Any]]) -> None:
    folder = done[0] / "eagle1" / "bf16" / "draft"
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert not tensors["fc.bias"].any() and tensors["fc.weight"].shape == (32, 64)
    assert not {"layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight", "d2t"} & tensors.keys()
    assert len(tensors) == 10
    assert not (done[0] / "eagle1" / "bf16" / "trtllm.yaml").exists()
    quantised = load_file(done[0] / "eagle1" / "fp8" / "draft" / "model.safetensors")
    assert quantised["layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert quantised["fc.weight"].dtype == torch.bfloat16


def test_exported_medusa(done: tuple[Path, dict[str, Any]]) -> None:
    folder = done[0] / "medusa" / "bf16" / "draft"
    tensors, config = load_file(folder / "medusa_lm_head.safetensors"), json.loads((folder / "config.json").read_text())
    names = {f"{h}.{i}.linear.{kind}" for h in range(3) for i in range(2) for kind in ("weight", "bias")}
    assert tensors.keys() == names | {f"{h}.2.weight" for h in range(3)}
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["medusa_fc_bias"]) == (3, 2, True)
    assert tensors["2.1.linear.bias"].abs().max() > 0
    base = load_file(done[0] / "base" / "model.safetensors")["lm_head.weight"].bfloat16()
    shared = load_file(done[0] / "medusa-shared" / "bf16" / "draft" / "medusa_lm_head.safetensors")
    assert torch.equal(shared["0.1.weight"], base) and torch.equal(shared["1.1.weight"], base)
    assert not torch.equal(tensors["0.2.weight"], base)
    quantised = load_file(done[0] / "medusa" / "fp8" / "draft" / "medusa_lm_head.safetensors")
    assert all(x.dtype == torch.bfloat16 for x in quantised.values())
    assert not (folder / "hf_quant_config.json").exists()


def test_exported_mtp(done: tuple[Path, dict[str, Any]]) -> None:
    folder = done[0] / "mtp" / "bf16" / "draft"
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert {f"layers.0.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= tensors.keys()
    assert config["architectures"] == ["LlamaForCausalLMMTP"] and config["num_nextn_predict_layers"] == 1
    assert not {"lm_head.weight", "norm.weight", "fc.weight"} & tensors.keys()


def test_exported_eagle31(done: tuple[Path, dict[str, Any]]) -> None:
    folder = done[0] / "eagle3.1" / "bf16" / "draft"
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert tensors["fc_norm.2.weight"].shape == (32,) and tensors["input_norm.weight"].shape == (96,)
    for place in (config, config["eagle_config"]):
        assert place["norm_before_fc"] and place["fc_norm"] and place["norm_output"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]


def test_exported_blocks(done: tuple[Path, dict[str, Any]]) -> None:
    for name, architecture in (("dflash", "DFlashDraftModel"), ("dspark", "Qwen3DSparkModel")):
        folder = done[0] / name / "bf16" / "draft"
        tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [architecture] and config["model_type"] == "qwen3"
        assert config["dflash_config"]["mask_token_id"] == 3 and config["num_target_layers"] == 8
        assert config["dflash_config"]["target_layer_ids"] == [1, 2, 3, 4, 5]
        assert tensors["fc.weight"].shape == (32, 5 * 32) and tensors["layers.1.self_attn.k_norm.weight"].dim() == 1
        assert not {"lm_head.weight", "embed_tokens.weight", "d2t"} & tensors.keys()
        quantised = load_file(done[0] / name / "fp8" / "draft" / "model.safetensors")
        assert quantised["layers.0.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
        high = ["fc", *(f"layers.0.self_attn.{x}_proj" for x in "qkv")]  # what engines slice as bare numbers
        assert all(quantised[f"{x}.weight"].dtype == torch.bfloat16 for x in high)
        assert not {f"{x}.weight_scale" for x in high} & quantised.keys()
        ignored = json.loads((done[0] / name / "fp8" / "draft" / "config.json").read_text())["quantization_config"]
        assert {"*q_proj", "*k_proj", "*v_proj", "*qkv_proj"} <= set(ignored["ignore"])
        findings = check_folder(done[0] / name / "fp8" / "draft")
        assert not [f for f in findings if not f.warning and f.rule != "served"], findings
        written = (done[0] / name / "bf16" / "trtllm.yaml").is_file()
        assert written == (name == "dspark")  # TensorRT-LLM does not compute a causal draft
    assert OWN_HEADS.items() <= config.items() and tensors["layers.0.self_attn.k_proj.weight"].shape == (96, 32)
    assert config["markov_rank"] == 8 and config["enable_confidence_head"] and config["target_layer_ids"]
    assert quantised["markov_head.markov_w2.weight"].dtype == torch.bfloat16
    ignored = json.loads((folder / "../../fp8/draft/config.json").read_text())["quantization_config"]["ignore"]
    assert "*markov_head*" in ignored
    assert tensors["markov_head.markov_w2.weight"].any() and tensors["confidence_head.proj.weight"].any()


LAYOUTS: tuple[dict[str, Any], ...] = ({"tensor_model_parallel_size": 2, "sequence_parallel": True},)


def trained_in(root: str, layouts: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Losses and gradient norms of short runs of the drafts that have something of their own: noise, other heads."""
    from megatron.core import parallel_state

    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.finetune import FinetuneRun, finetune
    from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig

    found = []
    for layout in layouts:
        for name in ("eagle1", "medusa"):
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
            here, parallel = f"{root}/{len(layout)}-{name}", ParallelConfig(**layout)
            convert(f"{root}/base", f"{here}/draft", parallel=parallel, **REQUESTS[name])
            settings = TrainConfig(2, micro_batch_size=1, global_batch_size=4, lr=1e-3)
            goal = ObjectiveConfig() if name == "medusa" else ObjectiveConfig(ttt_steps=2)
            data = f"{root}/train.jsonl"
            where = (f"{here}/draft", f"{here}/tuned", data)
            assert finetune(FinetuneRun(*where, settings, goal, parallel=parallel, seq_length=96))
            lines = [json.loads(line) for line in Path(here, "tuned", "metrics.jsonl").read_text().splitlines()]
            found.append({"name": name, "values": [[line["loss"], line["grad_norm"]] for line in lines]})
    return found


def test_layouts_train_equally(done: tuple[Path, dict[str, Any]]) -> None:
    one = {x["name"]: x["values"] for x in done[1]["one process"]}
    for found in run_world(2, trained_in, str(done[0]), LAYOUTS)[0]:
        assert torch.tensor(found["values"]).allclose(torch.tensor(one[found["name"]]), rtol=1e-5), found


def test_conflicting_flags_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--load", str(tmp_path / "base"), "--save", str(tmp_path / "out")]
    assert "it belongs to --export-algorithm medusa" in refuse(
        "convert_model", *where, "--export-num-medusa-heads", 3
    )  # fmt: skip
    with pytest.raises(UserError, match=r"--export-eagle-algorithm, --eagle-config contradict.*algorithm eagle"):
        DraftRequest(algorithm="medusa", eagle_algorithm="eagle3", eagle_config="file")
    script = runpy.run_path(str(SCRIPTS / "convert_model.py"))
    with pytest.raises(SystemExit):
        script["parser"]().parse_args([*where, "--export-algorithm", "eagle", "--export-algorithm", "medusa"])
    assert "given twice" in capsys.readouterr().err
