from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spec import build
from megatron_spec.checkpoint.base_import import inspect_base, load_base, load_ends
from megatron_spec.checkpoint.fingerprint import fingerprint
from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from tests.unit_tests.base.tiny import save_tiny
from tests.worlds import gather_tp, run_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield distributed.initialize(ParallelConfig())
    distributed.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "base", num_hidden_layers=2)
    return tmp_path / "base"


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace (or with None remove) tensors of a single-file checkpoint; '__' stands for '.' in names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_every_mismatch_is_named(folder: Path, world: World) -> None:
    edit(
        folder, model__norm__weight=None, model__extra__weight=torch.ones(2),
        model__layers__1__mlp__up_proj__weight=torch.ones(3, 32),
    )  # fmt: skip
    with pytest.raises(UserError) as error:
        load_base(inspect_base(folder), world)
    text = str(error.value)
    assert "3 tensors" in text and "missing model.norm.weight" in text and "unexpected model.extra.weight" in text
    assert "model.layers.1.mlp.up_proj.weight: found shape [3, 32], expected [48, 32]" in text


def test_weights_that_are_not_finite(folder: Path, world: World) -> None:
    edit(folder, model__norm__weight=torch.full((32,), float("nan")))
    with pytest.raises(UserError, match=r"1 weights are not finite.*decoder\.final_layernorm\.weight"):
        load_base(inspect_base(folder), world)


def test_rotary_buffers_of_old_files_are_ignored(folder: Path, world: World) -> None:
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))
    base = load_base(inspect_base(folder), world, (1,), torch.bfloat16)
    assert not any(p.requires_grad for p in base.parameters()) and not base.training
    assert {p.dtype for p in base.parameters()} == {torch.bfloat16}


def test_folders_without_a_base_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        inspect_base(tmp_path / "nowhere")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=r"model.gguf: is a file .GGUF is not read.; expected a base"):
        inspect_base(tmp_path / "model.gguf")
    (tmp_path / "save" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000001" / "spec.json").touch()
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("1")
    with pytest.raises(UserError, match="save is a draft checkpoint, expected a base: give the folder of the one"):
        inspect_base(tmp_path / "save")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises(UserError, match=r"a draft \(EAGLE-3\), expected a whole model: give the base"):
        inspect_base(tmp_path / "draft")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"found pytorch_model\.bin: convert it to safetensors"):
        inspect_base(folder)


def test_missing_and_truncated_files(tmp_path: Path, world: World) -> None:
    sharded = tmp_path / "sharded"
    save_tiny(sharded, num_hidden_layers=2, max_shard_size="20KB")
    files = sorted(sharded.glob("model-*.safetensors"))
    assert len(files) > 1
    whole = inspect_base(sharded)
    content = files[1].read_bytes()
    files[1].write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{files[1].name}: cannot be read"):
        load_base(whole, world)
    files[1].unlink()
    with pytest.raises(UserError, match=f"missing {files[1].name}"):
        inspect_base(sharded)
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"] = dict.fromkeys(values["weight_map"], "../elsewhere.safetensors")
    index.write_text(json.dumps(values))
    with pytest.raises(UserError, match="outside its folder"):
        inspect_base(sharded)


def test_base_path_is_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert inspect_base("base").path == str(folder)


def test_fingerprint_depends_on_content_only(tmp_path: Path, folder: Path) -> None:
    first = inspect_base(folder).fingerprint
    moved = folder.rename(tmp_path / "moved")
    assert inspect_base(moved).fingerprint == first
    tensors = load_file(moved / "model.safetensors")
    edit(moved, model__norm__weight=tensors["model.norm.weight"] + 1e-3)
    assert inspect_base(moved).fingerprint != first


def test_fingerprint_samples_large_files(tmp_path: Path) -> None:
    big = tmp_path / "big.bin"
    big.write_bytes(bytes(16 << 20))
    zero = fingerprint(b"", [big])
    for position in (0, (16 << 20) - 1):
        content = bytearray(16 << 20)
        content[position] = 1
        big.write_bytes(content)
        assert fingerprint(b"", [big]) != zero
    big.write_bytes(bytes((16 << 20) + 1))
    assert fingerprint(b"", [big]) != zero
    assert fingerprint(b"{}", []) != fingerprint(b"", [])


# Megatron checkpoints: saved at TP=2 from megatron-core's own local layers, loaded at PP=2.

ARGS: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "group_query_attention": True, "kv_channels": 12, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
    "rotary_base": 10000, "vocab_size": 83, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False,
}  # fmt: skip
PADDED = 128


VARIANTS = {"untied": ("local", False), "tied": ("local", True), "te": ("te", False)}
TOLERANCE = {"untied": 1e-5, "tied": 1e-5, "te": 3e-2}  # Transformer Engine multiplies in TF32


def _has_te() -> bool:
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return bool(HAVE_TE) and torch.cuda.is_available()


@pytest.mark.parametrize(
    ("kind", "told"), [("megatron", "give the iteration of the conversion with --base"), ("hf", "")]
)
def test_a_base_that_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: str) -> None:
    found: Any = SimpleNamespace(fingerprint="sha256:now", kind=kind)
    spec: Any = SimpleNamespace(base=SimpleNamespace(path=str(tmp_path), fingerprint="sha256:then"))
    monkeypatch.setattr(build, "inspect_exported_base", lambda _: found)
    with pytest.raises(UserError, match="is not the base this draft was made for") as error:
        build.check_base(spec, None)
    assert ("--base" in str(error.value)) == bool(told) and told in str(error.value)


@pytest.mark.parametrize("given", ["", "iter_0000007", "iter_0000007/mp_rank_00"])
def test_older_checkpoints_of_megatron(tmp_path: Path, given: str) -> None:
    """They are pickles. The error says how to convert them, whichever folder is given."""
    part = tmp_path / "iter_0000007" / "mp_rank_00"
    part.mkdir(parents=True)
    (part / "model_optim_rng.pt").write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(UserError, match=r"older format \(--ckpt-format torch\).* --ckpt-convert-format torch_dist"):
        inspect_base(tmp_path / given)


def _gpt(layers: str, tied: bool, world: World) -> Any:
    """A random GPTModel as a user builds it, without this package."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=12 if layers == "local" else 16,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=layers == "local",
        tensor_model_parallel_size=world.tp_size,
        pipeline_dtype=torch.float32,
    )
    if layers == "te":
        spec: Any = specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        local = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        spec = TransformerBlockSubmodules(layer_specs=[local] * 3, layer_norm=WrappedTorchNorm)
    gpt = GPTModel(
        config, spec, PADDED, 64, position_embedding_type="rope", share_embeddings_and_output_weights=tied
    ).eval()
    torch.manual_seed(world.tp_rank)
    for name, p in gpt.named_parameters():
        if "norm" in name:
            p.data.fill_(1.0).add_(torch.linspace(-0.3, 0.3, p.numel(), device=p.device))  # equal on every rank
        else:
            p.data.normal_(0, 0.2)
    return gpt.to(world.device)


def _save_megatron(folder: Path, gpt: Any, args: Any, world: World) -> None:
    from megatron.core import dist_checkpointing

    from megatron_spec.checkpoint.results import results_in_this_process

    if world.rank == 0:
        (folder / "iter_0000007").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()
    state = {"model": gpt.sharded_state_dict(), "args": args, "iteration": 7}
    with results_in_this_process():
        dist_checkpointing.save(state, str(folder / "iter_0000007"))


def _message(path: Path, world: World) -> str:
    try:
        load_base(inspect_base(path), world)
    except UserError as e:
        return str(e)
    return ""


def _batch() -> Any:
    from megatron_spec.batch import Batch

    tokens = torch.randint(83, (2, 10), generator=torch.Generator().manual_seed(3))
    zeros = torch.zeros(2, 10, dtype=torch.int32)
    return Batch(tokens, torch.arange(10).expand(2, 10), zeros, zeros)


@torch.no_grad()
def _megatron_cases(root: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_spec.base.model import FrozenBase
    from megatron_spec.base.schedule import run_base, run_base_everywhere
    from megatron_spec.ops.visibility import Visibility

    found: dict[str, Any] = {}
    expected: dict[str, Tensor] = {}
    world = distributed.initialize(ParallelConfig(tensor_model_parallel_size=2))
    batch = _batch().to(world.device)
    variants = [name for name in VARIANTS if name != "te" or _has_te()]
    for name in variants:
        layers, tied = VARIANTS[name]
        gpt = _gpt(layers, tied, world)
        channels = gpt.config.kv_channels
        args = argparse.Namespace(**{**ARGS, "kv_channels": channels}, untie_embeddings_and_output_weights=not tied)
        folder = Path(root, name)
        _save_megatron(folder, gpt, args, world)
        # megatron-core's own forward, [B, S, V / TP]
        expected[name] = gather_tp(gpt(batch.tokens_BS, batch.positions_BS, None), world)[..., :83]
        base = FrozenBase.wrap([gpt], inspect_base(folder).config, world, (0, 2))
        captures, state = run_base(base, [batch])[0]
        logits = gather_tp(base.logits(state), world)[..., :83]
        found[f"wrapped {name}"] = float((logits.transpose(0, 1) - expected[name]).abs().max())
        found[f"wrapped captures {name}"] = tuple(captures.shape)
    try:
        base.new_cache(1, 8)
    except UserError as e:
        found["wrapped cache"] = str(e)
    extra = argparse.Namespace(**{**ARGS, "num_layers": 2}, untie_embeddings_and_output_weights=True)
    _save_megatron(Path(root, "depth"), _gpt("local", False, world), extra, world)
    found["wrong depth"] = _message(Path(root, "depth"), world)
    parallel_state.destroy_model_parallel()

    world = distributed.initialize(ParallelConfig(pipeline_model_parallel_size=2))
    for name in variants:
        reference = inspect_base(Path(root, name))
        base = load_base(reference, world, (0, 2))
        _, state = run_base_everywhere(base, batch, Visibility.causal())
        logits = base.logits(state)
        found[f"pp2 {name}"] = float((logits[..., :83].transpose(0, 1) - expected[name]).abs().max())
        found[f"pp2 padding {name}"] = bool((logits[..., 83:] == float("-inf")).all()) and logits.shape[-1] == PADDED
        half = load_base(reference, world, (), torch.bfloat16)
        whole = dict(base.named_parameters())
        ends = load_ends(reference, world)
        found[f"ends {name}"] = torch.equal(ends.embedding_weight, base.embedding_weight) and torch.equal(
            ends.logits(state), logits
        )
        found[f"bf16 {name}"] = max(float((p - whole[n]).abs().max()) for n, p in half.named_parameters())
    found["config.json"] = _export_without_config(Path(root, "tied"), batch, expected["tied"], world)
    return found


@torch.no_grad()
def _export_without_config(folder: Path, batch: Any, expected_BSV: Tensor, world: World) -> dict[str, Any]:
    """Export writes the missing config.json; one put beside the checkpoint later changes nothing."""
    from transformers import LlamaForCausalLM

    from megatron_spec.export.base import export_base

    reference = inspect_base(folder)
    out = folder.with_name("exported")
    export_base(load_base(reference, world), reference, out, None, world, dtype="float32")
    torch.distributed.barrier()
    written = json.loads((out / "config.json").read_text())
    if world.rank == 0:
        more = {"torch_dtype": "bfloat16", "eos_token_id": [2, 5], "bos_token_id": 1, "max_position_embeddings": 99}
        (folder / "config.json").write_text(json.dumps({**written, **more}))
    torch.distributed.barrier()
    later = inspect_base(folder)
    torch.distributed.barrier()
    if world.rank == 0:
        (folder / "config.json").write_text(json.dumps({**written, "rope_theta": 5e5}))
    torch.distributed.barrier()
    logits = LlamaForCausalLM.from_pretrained(out).to(batch.tokens_BS.device)(batch.tokens_BS).logits
    return {
        "gap": float((logits - expected_BSV).abs().max()), "written": written, "later ids": later.config.eos_token_ids,
        "same": later.fingerprint == reference.fingerprint, "files": sorted(p.name for p in out.iterdir()),
        "other rope": inspect_base(folder).fingerprint != reference.fingerprint,
    }  # fmt: skip


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, _megatron_cases, str(tmp_path_factory.mktemp("megatron")))


@pytest.mark.parametrize("name", VARIANTS)
def test_megatron_checkpoint_in_another_layout(megatron: list[dict[str, Any]], name: str) -> None:
    if f"pp2 {name}" not in megatron[0]:
        pytest.skip("needs a GPU and Transformer Engine")
    for rank in megatron:
        assert rank[f"pp2 {name}"] < TOLERANCE[name]
        assert rank[f"pp2 padding {name}"] and rank[f"ends {name}"]
        assert 0 < rank[f"bf16 {name}"] < 0.02


@pytest.mark.parametrize("name", VARIANTS)
def test_wrapped_gpt_model(megatron: list[dict[str, Any]], name: str) -> None:
    if f"wrapped {name}" not in megatron[0]:
        pytest.skip("needs a GPU and Transformer Engine")
    for rank in megatron:
        assert rank[f"wrapped {name}"] < TOLERANCE[name]
        assert rank[f"wrapped captures {name}"] == (10, 2, 64)
    assert "cannot decode with a cache" in megatron[0]["wrapped cache"]


def test_megatron_checkpoint_without_config_json(megatron: list[dict[str, Any]]) -> None:
    for rank in megatron:
        found = rank["config.json"]
        assert found["gap"] < TOLERANCE["tied"]
        assert found["written"]["architectures"] == ["LlamaForCausalLM"] and found["written"]["tie_word_embeddings"]
        assert found["files"] == ["config.json", "model.safetensors", "run.json"]
        assert found["same"] and found["later ids"] == (2, 5) and found["other rope"]


def test_megatron_checkpoint_of_another_depth(megatron: list[dict[str, Any]]) -> None:
    assert "found [layers, hidden] [3, 32], expected [2, 32]" in megatron[0]["wrong depth"]


def test_a_config_json_that_contradicts_the_stored_arguments(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts, as arguments may be stale, but not without a word."""
    args = argparse.Namespace(**ARGS, untie_embeddings_and_output_weights=True)
    _save_megatron(tmp_path, _gpt("local", False, world), args, world)
    plain = inspect_base(tmp_path).config
    written = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 83, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert inspect_base(tmp_path).config.rope == plain.rope and "config.json is used" not in caplog.text
    (tmp_path / "config.json").write_text(json.dumps({**written, "rope_theta": 5e5, "rms_norm_eps": 1e-6}))
    assert inspect_base(tmp_path).config.rope.theta == 5e5
    assert "config.json is used, but contradicts the arguments in" in caplog.text
    assert "norm_epsilon is 1e-05 there and 1e-06 here; rotary_base is 10000 there and 500000.0 here" in caplog.text
