"""Deployment files for an exported draft and for other speculation methods."""

from __future__ import annotations

import csv
import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_spec.config import UserError
from megatron_spec.export.block import SAME
from megatron_spec.serving.docker import docker_command, mounts
from megatron_spec.serving.draft import Speculation, exported
from megatron_spec.serving.sglang import sglang_command
from megatron_spec.serving.trtllm import EngineOptions, trtllm_config, trtllm_yaml
from megatron_spec.serving.vllm import speculative_config, triton_models, vllm_command, write_triton_repository
from tools import make_serving_config

ROOT = Path(__file__).parents[3]


def draft(folder: Path, **keys: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **keys}))
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
        {"eagle_aux_hidden_state_layer_ids": [1, 7]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 6]}},
        {"eagle_aux_hidden_state_layer_ids": [1, 7], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 6]}},
    ],
)
def test_trtllm_gets_other_capture_layers(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = trtllm_config(exported(draft(tmp_path / "draft", **keys)))
    assert config["speculative_config"]["eagle3_layers_to_capture"] == [0, 6]


def test_every_engine_gets_supported_kinds(tmp_path: Path) -> None:
    kinds = {"eagle": ["LlamaForCausalLMEagle", "LlamaForCausalLM"], "medusa": ["MedusaModel"]}
    for method, architectures in kinds.items():
        plan = exported(draft(tmp_path / method, architectures=architectures, medusa_num_heads=3))
        assert json.loads(vllm_command(plan, "/base")[-1])["method"] == method
        with pytest.raises(UserError, match="does not serve"):
            trtllm_config(plan)
    assert "EAGLE" in sglang_command(exported(tmp_path / "eagle"), "/base")
    with pytest.raises(UserError, match="SGLang does not serve Medusa"):
        sglang_command(exported(tmp_path / "medusa"), "/base")
    with pytest.raises(UserError, match="has 3 Medusa heads"):
        exported(tmp_path / "medusa", 4)
    with pytest.raises(UserError, match="expected an exported EAGLE-3, EAGLE-1, Medusa, DFlash or"):
        exported(draft(tmp_path / "mtp", architectures=["LlamaForCausalLMMTP"]))
    speculators = draft(tmp_path / "s", architectures=["Eagle3Speculator"], speculators_model_type="eagle3")
    assert exported(speculators).method == "eagle3"
    exported(speculators).require(("eagle3",), "vllm")
    with pytest.raises(UserError, match="SGLang does not serve this draft: it is in the format of speculators"):
        exported(speculators).require(("eagle3",), "sglang")


def test_vllm_names_the_method(tmp_path: Path) -> None:
    draft(tmp_path / "out" / "draft")
    command = vllm_command(exported(tmp_path / "out"), "/base")  # the export folder holds draft/
    assert command[:3] == ["vllm", "serve", "/base"] and command[-2] == "--speculative-config"
    expected = {"method": "eagle3", "model": str((tmp_path / "out/draft").resolve()), "num_speculative_tokens": 3}
    assert json.loads(command[-1]) == expected


def test_sglang_counts_the_accepted_token(tmp_path: Path) -> None:
    command = sglang_command(exported(draft(tmp_path / "draft")), "/base", 9000)
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options == {
        "--model-path": "/base", "--port": "9000", "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str((tmp_path / "draft").resolve()), "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "4",
    }  # fmt: skip


def test_refuses_folders_without_a_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="expected an exported EAGLE-3"):
        exported(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        exported(tmp_path / "nowhere")
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
    flash = exported(draft(tmp_path / "flash", architectures=["DFlashDraftModel"], block_size=8))
    assert flash.max_draft_len == 7  # the first slot of a block is the known token
    assert trtllm_config(flash)["speculative_config"] == {
        "decoding_type": "DFlash", "max_draft_len": 7, "speculative_model": flash.model
    }  # fmt: skip
    assert sglang_command(flash, "/b")[-2:] == ["--speculative-dflash-block-size", "8"]
    assert speculative_config(flash) == {"method": "dflash", "model": flash.model, "num_speculative_tokens": 7}
    spark = exported(draft(tmp_path / "spark", architectures=["Qwen3DSparkModel"], block_size=5))
    assert (spark.max_draft_len, trtllm_config(spark)["speculative_config"]["decoding_type"]) == (5, "DSpark")
    assert sglang_command(spark, "/b")[-2:] == ["--speculative-dspark-block-size", "5"]
    with pytest.raises(UserError, match="a block of this draft proposes 7 tokens"):
        exported(tmp_path / "flash", 8)
    assert not caplog.messages and exported(tmp_path / "flash", 5).max_draft_len == 5
    assert "fewer slots than the 8 that see one another" in caplog.text
    shape: dict[str, Any] = dict.fromkeys(SAME, 8) | {"hidden_act": "silu", "rope_theta": 1e4}
    inside = {"mask_token_id": 3, "target_layer_ids": [1], "causal": True}
    causal = draft(tmp_path / "causal", architectures=["DFlashDraftModel"], **shape, dflash_config=inside)
    assert speculative_config(exported(causal))["method"] == "dflash"
    for refuses in (lambda: sglang_command(exported(causal), "/b"), lambda: trtllm_config(exported(causal))):
        with pytest.raises(UserError, match=r"does not serve this draft: without a window .*; serve it with vLLM"):
            refuses()
    named = draft(tmp_path / "named", architectures=["DFlashDraftModel"], **shape, dflash_config=inside, is_causal=True)
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
    plan = exported(draft(tmp_path / "draft", ptd_token_id=7))
    assert speculative_config(plan)["parallel_drafting"] is True
    for refuse in (trtllm_config, lambda p: sglang_command(p, "/b")):
        with pytest.raises(UserError, match="P-EAGLE"):
            refuse(plan)


@pytest.mark.parametrize(
    ("option", "config"),
    [
        (
            "sliding_window",
            {"sliding_window": 64, "layer_types": ["sliding_attention"], "max_position_embeddings": 256},
        ),
        ("attention_bias", {"attention_bias": True}),
        ("norm_before_residual", {"eagle_config": {"norm_before_residual": True}}),
        ("qk_norm", {"architectures": ["Eagle3Qwen3ForCausalLM"]}),
    ],
)
def test_options_that_an_engine_drops_are_refused(tmp_path: Path, option: str, config: dict[str, Any]) -> None:
    plan = exported(draft(tmp_path / "draft", **config))
    assert speculative_config(plan)["method"] == "eagle3"
    for refuse in (trtllm_config, lambda p: sglang_command(p, "/b")):
        with pytest.raises(UserError, match=f"does not compute {option}; serve it with vLLM"):
            refuse(plan)
    unused = exported(draft(tmp_path / "unused", sliding_window=64, use_sliding_window=False, attention_bias=False))
    assert trtllm_config(unused)["speculative_config"]["decoding_type"] == "Eagle3"


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
    base = tmp_path / "out" / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
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
    local = run(capsys, str(tmp_path / "draft"), "--engine", "vllm", "--docker", "--base", str(tmp_path / "draft"))
    assert "HF_TOKEN" not in local  # nothing is named as on the hub


def test_triton_loads_the_drafted_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft(tmp_path / "draft")
    flags = [str(tmp_path / "draft"), "--engine", "triton", "--draft-model", "/s", "--base", str(tmp_path / "draft")]
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
        (["--method", "ngram", "--engine", "trtllm", "--sa-threshold", "3"], "goes with EAGLE-3"),
        (["--method", "ngram", "--engine", "vllm", "--base", "b", "--load-all"], "--load-all needs"),
        (["--method", "ngram", "--engine", "sglang"], "give --base"),
    ],
)
def test_flags_without_effect_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_serving_config.main(make_serving_config.make_parser().parse_args(arguments))


def test_mismatched_target_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """MTP without a module in the base; a high-precision base for a draft trained for a quantised one."""
    draft(tmp_path / "out" / "draft")
    for folder, config in (("out/base", {"quantization_config": {}}), ("plain", {}), ("v3", {"mtp_num_layers": 1})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    plain, export = str(tmp_path / "plain"), str(tmp_path / "out")
    with pytest.raises(UserError, match="has no prediction module"):
        run(capsys, "--method", "mtp", "--engine", "vllm", "--base", plain)
    assert "mtp" in run(capsys, "--method", "mtp", "--engine", "vllm", "--base", str(tmp_path / "v3"))
    run(capsys, export, "--engine", "vllm", "--base", str(tmp_path / "out" / "base"))
    assert not caplog.records
    run(capsys, export, "--engine", "vllm", "--base", plain)
    assert "trained for the quantised base" in caplog.text
