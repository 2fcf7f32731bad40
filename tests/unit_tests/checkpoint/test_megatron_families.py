"""Megatron checkpoints with biases, head norms or experts: saved by megatron-core, read in another layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.checkpoint.megatron import read_config
from megatron_spec.config import ENGINE, LOCAL, BaseConfig, ParallelConfig, UserError
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from tests import te_stand_in
from tests.unit_tests.families.families import save
from tests.worlds import run_world

CASES = ("qwen2", "qwen3", "mixtral", "mixtral te", "qwen3_moe")
"""Families; 'te' spells the norm before a router as Transformer Engine's specs do."""


def _gpt(config: BaseConfig, te_names: bool, world: World) -> nn.Module:
    """megatron-core's own GPTModel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe = config.moe
    experts: dict[str, Any] = {}
    if moe:
        experts = dict(
            num_moe_experts=moe.num_experts, moe_ffn_hidden_size=moe.intermediate_size, moe_router_topk=2,
            moe_layer_freq=[int(config.has_experts(i)) for i in range(config.num_layers)],
            expert_model_parallel_size=2,
        )  # fmt: skip
        if all(experts["moe_layer_freq"]):
            experts["moe_layer_freq"] = 1
    core = TransformerConfig(
        num_layers=config.num_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim, normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, add_qkv_bias=config.family == "qwen2", qk_layernorm=config.qk_norm,
        use_cpu_initialization=True, tensor_model_parallel_size=world.tp_size, pipeline_dtype=torch.float32, **experts,
    )  # fmt: skip

    def layer(number: int) -> Any:
        routed = moe is not None and config.has_experts(number)
        spec = get_gpt_layer_local_spec(
            num_experts=moe.num_experts if moe and routed else None, moe_grouped_gemm=False,
            qk_layernorm=config.qk_norm, normalization="RMSNorm",
        )  # fmt: skip
        if te_names and routed:
            del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        return spec

    block = TransformerBlockSubmodules(
        layer_specs=[layer(i) for i in range(config.num_layers)], layer_norm=WrappedTorchNorm
    )
    rows = -(-config.vocab_size // world.tp_size) * world.tp_size
    return GPTModel(
        core, block, rows, 64, position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )  # fmt: skip


@torch.no_grad()
def _write(root: Path, case: str, world: World) -> set[str]:
    """The family's random weights inside megatron-core's model, saved by it. Returns the keys of the experts' norms."""
    from megatron.core import dist_checkpointing

    from megatron_spec.checkpoint.results import results_in_this_process

    base = load_base(inspect_base(root / case.split()[0]), world)
    gpt = _gpt(base.config, case.endswith("te"), world)
    ours = dict(base.model.named_parameters())
    theirs = dict(gpt.named_parameters())
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    for name, parameter in theirs.items():
        parameter.copy_(ours[name])
    folder = root / f"{case} megatron"
    if world.rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    with results_in_this_process():
        dist_checkpointing.save({"model": gpt.sharded_state_dict(), "iteration": 7}, str(folder))
    if world.rank == 0:
        shutil.copy(root / case.split()[0] / "config.json", folder)
    torch.distributed.barrier()
    return {key for key in dist_checkpointing.load_tensors_metadata(str(folder)) if "pre_mlp" in key}


def _layout(tp: int, pp: int, ep: int) -> World:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return distributed.initialize(
        ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep)
    )


def _different(root: str, case: str, world: World) -> list[str]:
    """Parameters that differ between a Megatron checkpoint, in both kinds of layers, and the Hugging Face folder."""
    true = load_base(inspect_base(Path(root, case.split()[0])), world).weights()
    assert len(true) > 10
    different: list[str] = []
    with te_stand_in.installed():
        for layers in (LOCAL, ENGINE):
            read = load_base(inspect_base(Path(root, f"{case} megatron")), world, layers=layers).weights()
            assert read.keys() == true.keys()
            different += [name for name, parameter in read.items() if not torch.equal(parameter, true[name])]
    return different


def _cases(root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for experts, cases in ((1, CASES[:2]), (2, CASES[2:])):
        world = _layout(2, 1, experts)
        for case in cases:
            found[f"norms {case}"] = _write(Path(root), case, world)
        layouts = [(2, 2, 1), (1, 2, experts)]  # tensors cut, and experts spread
        for layout in layouts:
            world = _layout(*layout)
            for case in cases:
                found[case] = found.get(case, []) + _different(root, case, world)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("families")
    for family in {case.split()[0] for case in CASES}:
        save(family, root / family)
    return run_world(4, _cases, str(root))


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_read_back_in_another_layout(found: list[dict[str, Any]], case: str) -> None:
    """Saved under TP 2 (x EP 2), read under TP 2 x PP 2 and PP 2 (x EP 2): the Hugging Face folder's, bit for bit."""
    for rank in found:
        assert rank[case] == []


def test_both_names_of_the_norm_occurred(found: list[dict[str, Any]]) -> None:
    assert found[0]["norms mixtral"] == set()
    assert found[0]["norms mixtral te"] == {"decoder.layers.pre_mlp_layernorm.weight"}


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_unsupported_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    with pytest.raises(UserError, match=f"latent attention or attention sinks are not supported .{name}"):
        read_config(tmp_path, tmp_path)
