"""Deployment files for an exported draft and for other speculation methods."""

from __future__ import annotations

import csv
import itertools
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_spec.config import BaseConfig, RopeConfig, UserError
from megatron_spec.export import check as export_check
from megatron_spec.export import layout
from megatron_spec.export.base_rows import KEY, base_rows
from megatron_spec.export.check import check_folder
from megatron_spec.runtime.provenance import write_run_json
from megatron_spec.serving import draft as serving_draft
from megatron_spec.serving.docker import docker_command, mounts
from megatron_spec.serving.draft import Speculation, exported
from megatron_spec.serving.sglang import sglang_command
from megatron_spec.serving.trtllm import EngineOptions, trtllm_config, trtllm_yaml
from megatron_spec.serving.vllm import speculative_config, triton_models, vllm_command, write_triton_repository
from tests.unit_tests.export.test_rules import CONFIG, H, V, attends, good, other, write
from tools import make_serving_config

ROOT = Path(__file__).parents[3]
BASE = BaseConfig(
    family="llama", hidden_size=H, intermediate_size=12, num_layers=8, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, vocab_size=V, max_position_embeddings=64,
)  # fmt: skip


def draft(folder: Path, kind: str = "eagle3", **keys: Any) -> Path:
    """An exported draft without faults, and with other keys in its config.json."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors, config = good() if kind == "eagle3" else other(kind)
    return write(folder, tensors, {**config, **keys})


def trained(folder: Path, **options: Any) -> Path:
    """An EAGLE-3 draft with other options, as it is exported."""
    config = CONFIG.replace(**options)
    tensors = {name: torch.ones(shape) for name, (_, shape) in layout.expected_tensors(config, "float32").items()}
    return write(
        folder,
        tensors | {name: good()[0][name] for name in ("d2t", "t2d")},
        layout.config_json(config, BASE, "float32"),
    )


def base_folder(folder: Path, **keys: Any) -> Path:
    """A target's config.json, which fits the drafts."""
    folder.mkdir(parents=True)
    values = {"hidden_size": H, "vocab_size": V, "max_position_embeddings": 64, "num_hidden_layers": 8, **keys}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# ---- the exported draft


def test_trtllm_yaml(tmp_path: Path) -> None:
    path = draft(tmp_path / "draft")
    text = trtllm_yaml(exported(path, 4), "/base", "/t.yaml")
    assert yaml.safe_load(text) == {
        "speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": str(path.resolve())},
        "enable_attention_dp": False,
        "disable_overlap_scheduler": True,
        "max_batch_size": 1,
        "cuda_graph_config": {"max_batch_size": 1},
        "kv_cache_config": {"enable_block_reuse": False},
    }
    serve, bench = (shlex.split(line[2:]) for line in text.splitlines()[:2])
    assert serve[:2] == ["trtllm-serve", "/base"] and serve[-2:] == ["--extra_llm_api_options", "/t.yaml"]
    assert bench[0] == "trtllm-bench" and "throughput" in bench
    older = trtllm_config(exported(path, 4), EngineOptions(older=True))["speculative_config"]
    assert older == {"decoding_type": "Eagle", "max_draft_len": 4, "speculative_model_dir": str(path.resolve())}
    assert exported(path, 4, place="/elsewhere").model == "/elsewhere"


@pytest.mark.parametrize(
    "keys",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}},
        {
            "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
        },
    ],
)
def test_trtllm_gets_other_capture_layers(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = trtllm_config(exported(draft(tmp_path / "draft", **keys)))
    assert config["speculative_config"]["eagle3_layers_to_capture"] == [0, 3, 6]


def test_every_engine_gets_supported_kinds(tmp_path: Path) -> None:
    for method, kind, length in (("eagle", "eagle1", 3), ("medusa", "medusa", 2)):
        plan = exported(draft(tmp_path / method, kind))
        assert plan.max_draft_len == length
        assert json.loads(vllm_command(plan, "/base")[-1])["method"] == method
        with pytest.raises(UserError, match="does not serve"):
            trtllm_config(plan)
    assert "EAGLE" in sglang_command(exported(tmp_path / "eagle"), "/base")
    with pytest.raises(UserError, match="SGLang does not serve Medusa"):
        sglang_command(exported(tmp_path / "medusa"), "/base")
    with pytest.raises(UserError, match="has 2 Medusa heads"):
        exported(tmp_path / "medusa", 4)
    with pytest.raises(UserError, match="expected an exported EAGLE-3, EAGLE-1, Medusa, DFlash or"):
        exported(draft(tmp_path / "mtp", "mtp"))


def speculators(folder: Path, model_type: str = "eagle3", **layer: Any) -> Path:
    """The same draft in the format of speculators."""
    tensors, config = good()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if model_type == "peagle":
        renamed["mask_hidden"] = torch.ones(1, 3 * H)
    top = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": model_type, "speculators_version": "0.9.0",
        "draft_vocab_size": config["draft_vocab_size"], "norm_before_residual": False, "tie_word_embeddings": False,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]},
        **({"mask_token_id": 7} if model_type == "peagle" else {}),
    }  # fmt: skip
    nested = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size")}
    layer = {**nested, "model_type": "llama", **layer}
    return write(
        folder, {**renamed, "embed_tokens.weight": torch.ones(V, H)}, {**top, "transformer_layer_config": layer}
    )


def test_speculators_are_for_vllm(tmp_path: Path) -> None:
    """With the length that its config.json proposes; all other checks are those of every format."""
    folder = speculators(tmp_path / "s")
    plan = exported(folder)
    assert (plan.method, plan.parallel, plan.max_draft_len, exported(folder, 2).max_draft_len) == (
        "eagle3",
        False,
        5,
        2,
    )
    assert speculative_config(plan)["num_speculative_tokens"] == 5
    for refuse in (trtllm_config, lambda p: sglang_command(p, "/b")):
        with pytest.raises(UserError, match=r"serve this draft: this is a speculators folder.*; serve it with"):
            refuse(plan)
    with pytest.raises(UserError, match="--max-draft-len must be at least 1, found 0"):
        exported(folder, 0)
    parallel = speculators(tmp_path / "p", "peagle")
    assert exported(parallel).parallel and speculative_config(exported(parallel))["parallel_drafting"]
    write_run_json(parallel, {"ttt_steps": 4})
    assert exported(parallel).max_draft_len == 4
    with pytest.raises(UserError, match="--max-draft-len 6, but this P-EAGLE draft was trained to propose 4 tokens"):
        exported(parallel, 6)
    with pytest.raises(UserError, match="vLLM does not serve this draft: max_position_embeddings is 32, the target's"):
        short = speculators(tmp_path / "short", max_position_embeddings=32)
        speculative_config(exported(short, base=base_folder(tmp_path / "base")))
    (tensor_file := folder / "model.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(UserError, match=f"{tensor_file} is not a safetensors file"):
        exported(folder)


def test_folders_that_no_engine_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rules of check_export.py decide; warnings do not count."""
    tensors, config = good()
    base = base_folder(tmp_path / "base")
    broken = write(tmp_path / "broken", {n: t for n, t in tensors.items() if "hidden_norm" not in n}, config)
    for engine in ("vllm", "sglang", "trtllm"):
        with pytest.raises(
            UserError, match=r"does not serve this draft: missing midlayer.hidden_norm.*check_export\.py"
        ):
            run(capsys, str(broken), "--engine", engine, "--base", str(base))
    with pytest.raises(UserError, match=r"holds no \.safetensors file"):
        (broken / "model.safetensors").unlink()
        run(capsys, str(broken), "--engine", "vllm", "--base", str(base))
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    assert "vllm" in run(capsys, str(write(tmp_path / "w", renamed, config)), "--engine", "vllm", "--base", str(base))
    prefixed = write(tmp_path / "p", {f"model.{name}": tensor for name, tensor in tensors.items()}, config)
    assert "EAGLE3" in run(capsys, str(prefixed), "--engine", "sglang", "--base", str(base))
    with pytest.raises(UserError, match=r"tensor names begin with 'model.', which vLLM refuses; serve it with SGLang"):
        run(capsys, str(prefixed), "--engine", "vllm", "--base", str(base))
    last = draft(
        tmp_path / "last", eagle_aux_hidden_state_layer_ids=[1, 4, 8],
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 7]},
    )  # fmt: skip
    assert "EAGLE3" in run(capsys, str(last), "--engine", "sglang", "--base", "hub/name")  # not known here
    with pytest.raises(UserError, match="SGLang never delivers; serve it with vLLM or TensorRT-LLM"):
        run(capsys, str(last), "--engine", "sglang", "--base", str(base))


@pytest.mark.parametrize("told", ["base", "run.json", "nobody"])
def test_a_draft_with_an_embedding_of_its_own(tmp_path: Path, told: str) -> None:
    """Only vLLM reads one. What equals the target's is not its own; without the target the export's record tells."""
    base = base_folder(tmp_path / "base")
    save_file({"model.embed_tokens.weight": torch.ones(V, H)}, base / "model.safetensors")
    for value, own in ((2.0, True), (1.0, False)):
        folder = trained(tmp_path / f"{value}", own_embed_tokens=True)
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "embed_tokens.weight": torch.full((V, H), value)}, folder / "model.safetensors")
        write_run_json(folder, {KEY: base_rows(base)} if told == "run.json" else {})
        plan = exported(folder, base=base if told == "base" else None)
        assert speculative_config(plan)["method"] == "eagle3"
        warned = [f.rule for f in check_folder(folder, "sglang", base if told == "base" else None) if f.warning]
        assert ("embedding" in warned) == (told == "nobody")
        for refuse in (trtllm_config, lambda p: sglang_command(p, "/b")):
            if own and told != "nobody":
                with pytest.raises(UserError, match=r"the draft has own_embed_tokens.*; serve it with vLLM"):
                    refuse(plan)
            else:
                assert refuse(plan)


def test_speculators_without_a_key_on_which_readers_differ(tmp_path: Path) -> None:
    folder = speculators(tmp_path / "s")
    config = json.loads((folder / "config.json").read_text())
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="norm_before_residual is missing: vLLM reads true"):
        speculative_config(exported(folder))


def test_vllm_names_the_method(tmp_path: Path) -> None:
    draft(tmp_path / "out" / "draft")
    command = vllm_command(exported(tmp_path / "out"), "/base")  # the export folder holds draft/
    assert command[:3] == ["vllm", "serve", "/base"] and command[-2] == "--speculative-config"
    expected = {"method": "eagle3", "model": str((tmp_path / "out/draft").resolve()), "num_speculative_tokens": 3}
    assert json.loads(command[-1]) == expected


def test_sglang_counts_the_accepted_token(tmp_path: Path) -> None:
    command = sglang_command(exported(draft(tmp_path / "draft")), "/base", 9000)
    assert command[3] == "--enable-metrics"  # else bench_server.py finds no counters
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--model-path": "/base", "--port": "9000", "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str((tmp_path / "draft").resolve()), "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "4",
    }  # fmt: skip


def test_refuses_folders_without_a_draft(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected an exported EAGLE-3"):
        exported(draft(tmp_path / "model", "model"))
    with pytest.raises(UserError, match="no such folder; expected a folder in Hugging Face format"):
        exported(tmp_path / "nowhere")
    (tmp_path / "save" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000001" / "spec.json").write_text("{}")
    with pytest.raises(UserError, match=r"is a draft checkpoint, expected an exported draft: run export.py --load"):
        exported(tmp_path / "save")
    with pytest.raises(UserError, match="--max-draft-len must be at least 1"):
        exported(draft(tmp_path / "draft"), 0)


# ---- without an exported draft


def test_ngram() -> None:
    plan = Speculation("ngram", 4, max_matching_ngram_size=3, is_keep_all=False)
    assert trtllm_config(plan)["speculative_config"] == {
        "decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 3, "is_public_pool": True,
        "is_keep_all": False, "is_use_oldest": True,
    }  # fmt: skip
    assert speculative_config(plan) == {
        "method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 4
    }  # fmt: skip
    assert sglang_command(plan, "/b")[-4:] == [
        "--speculative-algorithm",
        "NGRAM",
        "--speculative-num-draft-tokens",
        "5",
    ]


def test_draft_target() -> None:
    plan = Speculation("draft_target", 4, "/small")
    assert trtllm_config(plan)["speculative_config"] == {
        "decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "/small"
    }  # fmt: skip
    assert trtllm_config(plan, EngineOptions(older=True))["speculative_config"] == {
        "decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model_dir": "/small"
    }  # fmt: skip
    assert speculative_config(plan) == {"method": "draft_model", "model": "/small", "num_speculative_tokens": 4}
    assert "STANDALONE" in sglang_command(plan, "/b")
    with pytest.raises(UserError, match="--draft-model"):
        Speculation("draft_target")


def test_mtp() -> None:
    plan = Speculation("mtp", 2, relaxed=(10, 0.6))
    assert trtllm_config(plan)["speculative_config"] == {
        "decoding_type": "MTP", "max_draft_len": 2, "num_nextn_predict_layers": 2,
        "use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 10, "relaxed_delta": 0.6,
    }  # fmt: skip
    assert speculative_config(Speculation("mtp", 1)) == {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(UserError, match="options of TensorRT-LLM, not of vLLM"):
        speculative_config(plan)


def test_block_drafts_pard_and_lookup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name of each method in the engines that support it, and an error for the others."""
    flash = exported(draft(tmp_path / "flash", "dflash"))
    assert flash.max_draft_len == 3  # the first slot of a block is the known token
    assert trtllm_config(flash)["speculative_config"] == {
        "decoding_type": "DFlash", "max_draft_len": 3, "speculative_model": flash.model
    }  # fmt: skip
    assert sglang_command(flash, "/b")[-2:] == ["--speculative-dflash-block-size", "4"]
    assert speculative_config(flash) == {"method": "dflash", "model": flash.model, "num_speculative_tokens": 3}
    spark = exported(draft(tmp_path / "spark", "dspark"))
    assert (spark.max_draft_len, trtllm_config(spark)["speculative_config"]["decoding_type"]) == (4, "DSpark")
    assert sglang_command(spark, "/b")[-2:] == ["--speculative-dspark-block-size", "4"]
    with pytest.raises(UserError, match="a block of this draft proposes 3 tokens"):
        exported(tmp_path / "flash", 4)
    assert not caplog.messages and exported(tmp_path / "flash", 2).max_draft_len == 2
    assert "shorter blocks than the 4 slots of training" in caplog.text
    causal = write(tmp_path / "causal", *attends(True, None)(*other("dflash")))
    assert speculative_config(exported(causal))["method"] == "dflash"
    for refuses in (lambda: sglang_command(exported(causal), "/b"), lambda: trtllm_config(exported(causal))):
        with pytest.raises(UserError, match=r"does not serve this draft: .*without a window .*; serve it with vLLM"):
            refuses()
    named = write(tmp_path / "named", *attends(True, None, is_causal=True)(*other("dflash")))
    assert "DFLASH" in sglang_command(exported(named), "/b")
    pard = Speculation("pard", 4, "/small")
    assert trtllm_config(pard)["speculative_config"]["decoding_type"] == "PARD"
    assert speculative_config(pard)["parallel_drafting"] is True
    with pytest.raises(UserError, match="SGLang does not serve PARD"):
        sglang_command(pard, "/b")
    with pytest.raises(UserError, match="knows PARD from release"):
        trtllm_config(pard, EngineOptions(older=True))
    lookup = Speculation("sa", 4, enable_global_pool=True, global_pool_size=64)
    assert trtllm_config(lookup)["speculative_config"] == {
        "decoding_type": "SA", "max_draft_len": 4, "max_matching_ngram_size": -1, "enable_global_pool": True,
        "global_pool_size": 64,
    }  # fmt: skip
    with pytest.raises(UserError, match="vLLM does not serve SA"):
        speculative_config(lookup)


def test_parallel_eagle3_is_for_vllm(tmp_path: Path) -> None:
    tensors, config = good()
    tensors["mask_hidden"] = torch.ones(1, 3 * H)
    plan = exported(write(tmp_path / "draft", tensors, {**config, "ptd_token_id": 7}))
    assert speculative_config(plan)["parallel_drafting"] is True
    for refuse in (trtllm_config, lambda p: sglang_command(p, "/b")):
        with pytest.raises(UserError, match="P-EAGLE"):
            refuse(plan)


@pytest.mark.parametrize(
    ("option", "values", "served"),
    [
        ("sliding_window", {"sliding_window": 16}, "vLLM"),
        ("attention_bias", {"attention_bias": True}, "vLLM or TensorRT-LLM"),
        ("norm_before_residual", {"norm_before_residual": True}, "vLLM"),
        ("qk_norm", {"qk_norm": True}, "vLLM"),
        ("fc_of_equal_widths", {"capture_layer_ids": (4,)}, "vLLM"),
        ("partial_rotation", {"rope": RopeConfig(partial_rotary_factor=0.5)}, "vLLM or TensorRT-LLM"),
        ("fc_of_one_capture", {"capture_layer_ids": (4,), "hidden_size": 2 * H}, "vLLM or SGLang"),
        (
            "norm_before_fc_and_fc_norm", {"algorithm": "eagle3.1", "norm_before_fc": True, "fc_norm": True},
            "vLLM or SGLang",
        ),
    ],
)  # fmt: skip
def test_options_that_an_engine_drops_are_refused(
    tmp_path: Path, option: str, values: dict[str, Any], served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft on the hub, too, of which only config.json is here."""
    folder = trained(tmp_path / "draft", **values)
    hub = tmp_path / "hub"
    hub.mkdir()
    shutil.copy(folder / "config.json", hub)
    for module in (export_check, serving_draft):
        monkeypatch.setattr(
            module, "model_folder", lambda name, weights=True: hub if name == "org/draft" else Path(name)
        )
    for plan in (exported(folder), exported("org/draft")):
        assert speculative_config(plan)["method"] == "eagle3"
        for name, command in (("TensorRT", trtllm_config), ("SGLang", lambda p: sglang_command(p, "/b"))):
            if name in served:
                assert command(plan)
                continue
            with pytest.raises(UserError, match=f"the draft has {option}, which .* serve it with {served}"):
                command(plan)
    unused = exported(draft(tmp_path / "unused", sliding_window=64, use_sliding_window=False, attention_bias=False))
    assert trtllm_config(unused)["speculative_config"]["decoding_type"] == "Eagle3"


@pytest.mark.parametrize(
    ("option", "left", "refused"),
    [
        ("norm_before_fc", "top", {"trtllm"}),
        ("fc_norm", "eagle_config", {"trtllm", "vllm", "sglang"}),
        ("norm_output", "eagle_config", {"trtllm", "vllm", "sglang"}),
    ],
)
def test_options_where_an_engine_does_not_look(tmp_path: Path, option: str, left: str, refused: set[str]) -> None:
    folder = trained(tmp_path / "d", algorithm="eagle3.1", **{option: True})
    assert not exported(folder).unserved
    config = json.loads((folder / "config.json").read_text())
    del (config if left == "eagle_config" else config["eagle_config"])[option]
    (folder / "config.json").write_text(json.dumps(config))
    lost = exported(folder).unserved
    assert lost.keys() == refused and all(f"{option} is only" in why for why in lost.values())


def test_trtllm_engine_options(tmp_path: Path) -> None:
    plan = exported(draft(tmp_path / "draft"), sa_threshold=6)
    options = EngineOptions(8, 4096, 2048, 0.6, False, tp_size=2)
    found = yaml.safe_load(text := trtllm_yaml(plan, "/b", "/t.yaml", options, 9000))
    assert found["speculative_config"]["sa_config"] == {"threshold": 6}
    assert found["kv_cache_config"] == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.6}
    expected = {"max_batch_size": 8, "max_num_tokens": 4096, "max_seq_len": 2048, "enable_autotuner": False}
    assert expected.items() <= found.items() and found["tensor_parallel_size"] == 2
    serve, bench = (shlex.split(line[2:]) for line in text.splitlines()[:2])
    assert serve[4:8] == ["--tp_size", "2", "--port", "9000"] and "--tp" in bench
    with pytest.raises(UserError, match="sa-threshold or --older"):
        trtllm_config(plan, EngineOptions(older=True))
    with pytest.raises(UserError, match="between 0 and 1"):
        EngineOptions(free_gpu_memory_fraction=1.5)


# ---- Triton and containers


def test_triton_repository(tmp_path: Path) -> None:
    plan = exported(draft(tmp_path / "draft"), 2)
    models = triton_models(plan, "/base", "eagle_model", Speculation("draft_target", 2, "/small"))
    write_triton_repository(tmp_path / "repo", models)
    engine = json.loads((tmp_path / "repo/eagle_model/1/model.json").read_text())
    assert engine["model"] == "/base" and engine["speculative_config"]["num_speculative_tokens"] == 2
    base = json.loads((tmp_path / "repo/base_model/1/model.json").read_text())
    assert base == {"model": "/base", "gpu_memory_utilization": 0.9}
    other = json.loads((tmp_path / "repo/draft_target_model/1/model.json").read_text())
    assert other["speculative_config"]["model"] == "/small"
    assert 'backend: "vllm"' in (tmp_path / "repo/eagle_model/config.pbtxt").read_text()
    with pytest.raises(UserError, match="not empty"):
        write_triton_repository(tmp_path / "repo", models)
    with pytest.raises(UserError, match="letters"):
        write_triton_repository(tmp_path / "other", {"../x": {}})


def test_medusa_needs_an_older_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    base = str(base_folder(tmp_path / "base"))
    words = run(capsys, str(draft(tmp_path / "m", "medusa")), "--engine", "vllm", "--base", base, "--docker").split()
    assert "vllm/vllm-openai:v0.32.0" in words and "up to release 0.32.0" in caplog.text
    caplog.clear()
    words = run(capsys, str(draft(tmp_path / "e")), "--engine", "vllm", "--base", base, "--docker").split()
    assert "vllm/vllm-openai:latest" in words and not caplog.messages


def test_docker_mounts_what_the_command_names(tmp_path: Path) -> None:
    base = draft(tmp_path / "my: base")  # a colon and a space
    plan = exported(draft(tmp_path / "draft"))
    command = docker_command("image", vllm_command(plan, str(base)))
    found = [word for flag, word in itertools.pairwise(command) if flag == "--mount"]
    assert found == [f"type=bind,source={p},target={p},readonly" for p in (str(base), plan.model)]
    assert command.index("image") == len(command) - len(vllm_command(plan, str(base))) - 1


def test_docker_mounts_what_links_lead_to(tmp_path: Path) -> None:
    """A snapshot of the hub's cache, under a link to another disk: as in a container, every file must be reachable."""
    cache, snapshot = tmp_path / "cache", tmp_path / "cache/models--x/snapshots/abc"
    (tmp_path / "disk/models--x/blobs").mkdir(parents=True)
    (tmp_path / "disk/models--x/snapshots/abc").mkdir(parents=True)
    cache.symlink_to(tmp_path / "disk")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "disk/models--x/blobs" / name).write_text("blob")
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    (tmp_path / "a,b").write_text("tokenizer")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "a,b")
    found = mounts([str(snapshot)])
    disk = tmp_path / "disk/models--x"
    assert found == {
        str(snapshot): str(disk / "snapshots/abc"), str(cache / "models--x/blobs"): str(disk / "blobs"),
        str(tmp_path / "a,b"): str(tmp_path / "a,b"),
    }  # fmt: skip
    option = docker_command("image", ["serve", str(tmp_path / "a,b")])[9]
    assert next(csv.reader([option])) == [
        "type=bind",
        *(f"{k}={tmp_path}/a,b" for k in ("source", "target")),
        "readonly",
    ]


# ---- the script


def script(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/make_serving_config.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    parser = make_serving_config.make_parser()
    make_serving_config.main(parser.parse_args(list(args)))
    return capsys.readouterr().out


def test_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft(tmp_path / "out" / "draft")
    export = str(tmp_path / "out")
    done = script(export, "--engine", "trtllm", "--output", str(tmp_path / "t.yaml"))
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "t.yaml").read_text())["speculative_config"]["max_draft_len"] == 3
    done = script(export, "--engine", "vllm")
    assert done.returncode == 2 and "give --base" in done.stderr
    base = base_folder(tmp_path / "out" / "base")
    words = shlex.split(run(capsys, export, "--engine", "vllm", "--max-draft-len", "5"))
    assert words[2] == str(base.resolve()) and json.loads(words[-1])["num_speculative_tokens"] == 5
    words = shlex.split(run(capsys, export, "--engine", "sglang", "--docker", "--image", "mine"))
    assert (
        words[:2] == ["docker", "run"]
        and f"type=bind,source={base},target={base},readonly" in words
        and "mine" in words
    )
    assert words[words.index("--host") + 1] == "0.0.0.0"
    with pytest.raises(UserError, match="give --base and --output"):
        run(capsys, export, "--engine", "trtllm", "--docker")
    words = shlex.split(run(capsys, "--method", "ngram", "--engine", "vllm", "--base", "hub/name"))
    assert words[2] == "hub/name" and json.loads(words[-1])["method"] == "ngram"


def test_docker_of_trtllm_mounts_the_file_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(tmp_path / "draft")
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    path = tmp_path / "t.yaml"
    run(
        capsys, str(tmp_path / "draft"), "--engine", "trtllm", "--docker", "--base", "org/name",
        "--output", str(path),
    )  # fmt: skip
    words = shlex.split(path.read_text().splitlines()[0][2:])
    assert words[:2] == ["docker", "run"] and yaml.safe_load(path.read_text())["speculative_config"]
    mounted = [word for flag, word in itertools.pairwise(words) if flag == "--mount"]
    assert f"type=bind,source={path},target={path},readonly" in mounted
    assert f"type=bind,source={tmp_path / 'hub'},target=/root/.cache/huggingface" in mounted
    assert words[words.index("--env") :][:2] == ["--env", "HF_TOKEN"] and "secret" not in path.read_text()
    serve = words[words.index("trtllm-serve") :]
    assert serve[1] == "org/name" and serve[serve.index("--host") + 1] == "0.0.0.0" and serve[-1] == str(path)
    base = str(base_folder(tmp_path / "base"))
    local = run(capsys, str(tmp_path / "draft"), "--engine", "vllm", "--docker", "--base", base)
    assert "HF_TOKEN" not in local  # nothing is named as on the hub


def test_triton_loads_the_drafted_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft(tmp_path / "draft")
    base = str(base_folder(tmp_path / "base"))
    base_folder(tmp_path / "s")
    flags = [str(tmp_path / "draft"), "--engine", "triton", "--draft-model", str(tmp_path / "s"), "--base", base]
    out = str(tmp_path / "repo")
    words = shlex.split(run(capsys, *flags, "--docker", "--output", out))
    assert f"type=bind,source={out},target={out},readonly" in words
    assert [word for flag, word in itertools.pairwise(words) if flag == "-p"] == [
        f"{p}:{p}" for p in (8000, 8001, 8002)
    ]
    server = words[words.index("tritonserver") :]
    assert server[3:7] == ["--model-control-mode", "explicit", "--load-model", "eagle_model"]
    assert server[7:] == ["--http-port", "8000", "--grpc-port", "8001", "--metrics-port", "8002"]
    names = ["base_model", "draft_target_model", "eagle_model"]
    assert sorted(p.name for p in Path(out).iterdir()) == names

    def shares(folder: Path) -> list[float]:
        return [json.loads((folder / n / "1/model.json").read_text())["gpu_memory_utilization"] for n in names]

    assert shares(tmp_path / "repo") == [0.9] * 3
    words = shlex.split(run(capsys, *flags, "--load-all", "--output", str(tmp_path / "all")))
    assert words.count("--load-model") == 3 and shares(tmp_path / "all") == [0.3] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm", "--base", "b"], "give EXPORT_DIR"),
        (["x", "--method", "ngram", "--engine", "vllm", "--base", "b"], "leave x out"),
        (["--method", "draft_target", "--engine", "vllm", "--base", "b"], "--draft-model"),
        (["--method", "ngram", "--engine", "vllm", "--base", "b", "--relaxed-topk", "3"], "--relaxed-topk needs"),
        (["--method", "mtp", "--engine", "trtllm", "--relaxed-topk", "3"], "need each other"),
        (
            ["--method", "mtp", "--engine", "trtllm", "--relaxed-topk", "1", "--relaxed-delta", "1"],
            "expected at least 2 and above 0",
        ),
        (["--method", "mtp", "--engine", "trtllm", "--relaxed-topk", "9", "--relaxed-delta", "0"], "and above 0"),
        (["--method", "ngram", "--engine", "vllm", "--base", "b", "--max-batch-size", "3"], "needs --engine trtllm"),
        (["--method", "ngram", "--engine", "vllm", "--base", "b", "--draft-model", "d"], "--draft-model needs"),
        (["--method", "ngram", "--engine", "vllm", "--base", "b", "--image", "d"], "--image needs --docker"),
        (["--method", "ngram", "--engine", "triton", "--base", "b"], "give --output"),
        (["--method", "ngram", "--engine", "vllm", "--base", "b", "--no-is-keep-all"], "--is-keep-all needs"),
        (["--method", "ngram", "--engine", "sglang", "--base", "b", "--max-matching-ngram-size", "3"], "needs"),
        (
            ["--method", "mtp", "--engine", "trtllm", "--num-nextn-predict-layers", "2", "--max-draft-len", "3"],
            "drafts one",
        ),
        (["--method", "ngram", "--engine", "trtllm", "--sa-threshold", "3"], "works with EAGLE-3"),
        (["--method", "ngram", "--engine", "vllm", "--base", "b", "--load-all"], "--load-all needs"),
        (["--method", "ngram", "--engine", "sglang"], "give --base"),
        (["--method", "ngram", "--engine", "trtllm", "--port", "8000"], "--port is for the command"),
        (["--method", "ngram", "--engine", "vllm", "--docker", "--base", "/no"], "/no: no such folder, so --docker"),
        (
            ["--method", "ngram", "--engine", "triton", "--base", "b", "--output", "o", "--name", "base_model"],
            "--name base_model is that of a model to compare with",
        ),
    ],
)
def test_flags_without_effect_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_serving_config.main(make_serving_config.make_parser().parse_args(arguments))


def test_commands_that_cannot_start(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--method", "ngram", "--engine", "vllm", "--base", "/no/such/folder"]
    assert "/no/such/folder" in run(capsys, *flags)  # of the machine with the server
    assert "no folder /no/such/folder on this machine" in caplog.text
    for wrong in ("0", "65534", "x"):
        with pytest.raises(SystemExit):
            run(capsys, *flags, "--port", wrong)
        assert "--port" in capsys.readouterr().err


def test_mismatched_target_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """MTP without a module in the base; a high-precision base for a draft trained for a quantised one."""
    draft(tmp_path / "out" / "draft")
    for folder, config in (("out/base", {"quantization_config": {}}), ("plain", {}), ("v3", {"mtp_num_layers": 1})):
        base_folder(tmp_path / folder, **config)
    plain, export = str(tmp_path / "plain"), str(tmp_path / "out")
    with pytest.raises(UserError, match="has no prediction module"):
        run(capsys, "--method", "mtp", "--engine", "vllm", "--base", plain)
    assert "mtp" in run(capsys, "--method", "mtp", "--engine", "vllm", "--base", str(tmp_path / "v3"))
    run(capsys, export, "--engine", "vllm", "--base", str(tmp_path / "out" / "base"))
    assert not caplog.records
    run(capsys, export, "--engine", "vllm", "--base", plain)
    assert "trained for the quantised base" in caplog.text


def test_a_draft_is_no_target_and_no_second_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted = str(draft(tmp_path / "draft"))
    (tmp_path / "save" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000001" / "spec.json").write_text("{}")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    base = str(base_folder(tmp_path / "base"))
    for wrong, words in (
        (drafted, r"a draft \(EAGLE-3\), expected a whole model"),
        (str(tmp_path / "save"), "is a draft checkpoint"),
        (str(tmp_path / "gguf"), r"found no config.json; .* \(GGUF is not read\)"),
    ):
        with pytest.raises(UserError, match=words):
            run(capsys, drafted, "--engine", "vllm", "--base", wrong)
        with pytest.raises(UserError, match=words):
            run(capsys, "--method", "pard", "--draft-model", wrong, "--engine", "trtllm", "--base", base)


# ---- the base


def test_bases_that_an_engine_serves_without_a_draft_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eagle3, eagle1, flash = draft(tmp_path / "3"), draft(tmp_path / "1", "eagle1"), draft(tmp_path / "f", "dflash")
    served = {
        "LlamaForCausalLM": ("vst", "vs", "vst"), "MistralForCausalLM": ("vs", "vs", "vs"),
        "Phi3ForCausalLM": ("vs", "vs", "vs"), "Qwen2ForCausalLM": ("vs", "vs", "v"),
        "MixtralForCausalLM": ("", "v", ""), "Qwen3MoeForCausalLM": ("vst", "vs", "vst"), "Other": ("vst", "vs", "vst"),
    }  # fmt: skip
    for architecture, engines in served.items():
        base = base_folder(tmp_path / architecture, architectures=[architecture])
        for folder, expected in zip((eagle3, eagle1, flash), engines, strict=True):
            lost = exported(folder, base=base).unserved
            assert {e[0] for e in ("vllm", "sglang", "trtllm") if e not in lost} == set(expected), (
                architecture,
                folder,
            )
    qwen = str(tmp_path / "Qwen2ForCausalLM")
    with pytest.raises(
        UserError, match=r"TensorRT.*only without it: its class has no drafter inside; serve it with vLLM"
    ):
        run(capsys, str(eagle3), "--engine", "trtllm", "--base", qwen)
    with pytest.raises(UserError, match="--method sa: TensorRT-LLM does not draft so"):
        run(capsys, "--method", "sa", "--engine", "trtllm", "--base", qwen)
    assert "NGram" in run(capsys, "--method", "ngram", "--engine", "trtllm", "--base", qwen)
    assert "ngram" in run(capsys, "--method", "ngram", "--engine", "vllm", "--base", qwen)


def test_layers_of_deepseek_in_sglang(tmp_path: Path) -> None:
    """Its class takes ids that do not begin with 1 for those of the inputs of layers, one before those of outputs."""
    base = base_folder(tmp_path / "base", architectures=["DeepseekV3ForCausalLM"])
    for ids, lost in (([1, 3, 6], False), ([2, 3, 6], True), (None, False)):
        keys = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids or []]} if ids else {}
        nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if ids else {}
        folder = draft(tmp_path / str(ids), **keys, **nested)
        found = [str(f) for f in check_folder(folder, "sglang", base) if "one too early" in str(f)]
        assert bool(found) == lost and ("sglang" in exported(folder, base=base).unserved) == lost
        assert not [f for f in check_folder(folder, "vllm", base) if "one too early" in str(f)]
