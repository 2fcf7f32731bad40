"""Deployment files for an exported draft."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_spec.config import UserError
from megatron_spec.serving.sglang import sglang_command
from megatron_spec.serving.trtllm import trtllm_config, write_trtllm_yaml
from megatron_spec.serving.vllm import vllm_command, write_triton_repository

ROOT = Path(__file__).parents[3]


def draft(folder: Path, **keys: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **keys}))
    return folder


def test_trtllm_yaml(tmp_path: Path) -> None:
    path = draft(tmp_path / "draft")
    write_trtllm_yaml(tmp_path / "t.yaml", path, 4)
    assert yaml.safe_load((tmp_path / "t.yaml").read_text()) == {
        "speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": str(path.resolve())},
        "enable_attention_dp": False,
        "disable_overlap_scheduler": True,
        "cuda_graph_config": {"max_batch_size": 1},
        "kv_cache_config": {"enable_block_reuse": False},
    }
    older = trtllm_config(path, 4, older=True)["speculative_config"]
    assert "speculative_model_dir" in older and "speculative_model" not in older


@pytest.mark.parametrize(
    "keys",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 7]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 6]}},
        {"eagle_aux_hidden_state_layer_ids": [1, 7], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 6]}},
    ],
)
def test_trtllm_gets_other_capture_layers(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = trtllm_config(draft(tmp_path / "draft", **keys), 3)
    assert config["speculative_config"]["eagle3_layers_to_capture"] == [0, 6]


def test_every_engine_gets_the_kinds_it_loads(tmp_path: Path) -> None:
    kinds = {"eagle": ["LlamaForCausalLMEagle", "LlamaForCausalLM"], "medusa": ["MedusaModel"]}
    for method, architectures in kinds.items():
        path = draft(tmp_path / method, architectures=architectures, medusa_num_heads=3)
        assert json.loads(vllm_command(path, "/base", 3)[4])["method"] == method
        with pytest.raises(UserError, match=r"found architectures.*expected an exported EAGLE-3 draft"):
            trtllm_config(path, 3)
    assert "EAGLE" in sglang_command(tmp_path / "eagle", "/base", 3)
    with pytest.raises(UserError, match="EAGLE-3 or EAGLE-1"):
        sglang_command(tmp_path / "medusa", "/base", 3)
    with pytest.raises(UserError, match="has 3 Medusa heads"):
        vllm_command(tmp_path / "medusa", "/base", 4)
    mtp = draft(tmp_path / "mtp", architectures=["LlamaForCausalLMMTP"])
    with pytest.raises(UserError, match="expected an exported EAGLE-3 or EAGLE-1 or Medusa draft"):
        vllm_command(mtp, "/base", 3)


def test_vllm_names_the_method(tmp_path: Path) -> None:
    draft(tmp_path / "out" / "draft")
    command = vllm_command(tmp_path / "out", "/base", 3)  # the export folder holds draft/
    assert command[:4] == ["vllm", "serve", "/base", "--speculative-config"]
    expected = {"method": "eagle3", "model": str((tmp_path / "out/draft").resolve()), "num_speculative_tokens": 3}
    assert json.loads(command[4]) == expected


def test_sglang_counts_the_accepted_token(tmp_path: Path) -> None:
    command = sglang_command(draft(tmp_path / "draft"), "/base", 3)
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options == {
        "--model-path": "/base", "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str((tmp_path / "draft").resolve()), "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "4",
    }  # fmt: skip


def test_triton_repository(tmp_path: Path) -> None:
    path = draft(tmp_path / "draft")
    write_triton_repository(tmp_path / "repo", "eagle", path, "/base", 2)
    engine = json.loads((tmp_path / "repo/eagle/1/model.json").read_text())
    assert engine["model"] == "/base" and engine["speculative_config"]["num_speculative_tokens"] == 2
    assert 'backend: "vllm"' in (tmp_path / "repo/eagle/config.pbtxt").read_text()
    with pytest.raises(UserError, match="not empty"):
        write_triton_repository(tmp_path / "repo", "eagle", path, "/base", 2)
    with pytest.raises(UserError, match="letters"):
        write_triton_repository(tmp_path / "other", "../x", path, "/base", 2)


def test_refuses_what_is_no_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="expected an exported EAGLE-3 draft"):
        trtllm_config(tmp_path, 3)
    with pytest.raises(UserError, match="does not exist"):
        trtllm_config(tmp_path / "nowhere", 3)
    with pytest.raises(UserError, match="at least 1"):
        trtllm_config(draft(tmp_path / "draft"), 0)


def script(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/make_serving_config.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_script(tmp_path: Path) -> None:
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
    done = script(export, "--engine", "vllm", "--max-draft-len", "5")
    words = shlex.split(done.stdout)
    assert words[2] == str(base.resolve()) and json.loads(words[4])["num_speculative_tokens"] == 5
    assert script(export, "--engine", "triton").returncode == 2
