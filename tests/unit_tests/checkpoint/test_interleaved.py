"""A base that was trained with an interleaved (virtual) pipeline loads, although that schedule is refused here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tests.unit_tests.checkpoint.test_base_import import ARGS, PADDED
from tests.worlds import run_world


def weight_of(name: str, layer: int, shape: torch.Size) -> torch.Tensor:
    """The same for a parameter of a global layer, on any rank."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * layer)
    return torch.randn(shape, generator=generator)


def cases(root: str) -> float:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.checkpoint.results import results_in_this_process
    from megatron_spec.runtime import distributed

    distributed.initialize()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    config = TransformerConfig(
        num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, kv_channels=12,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, use_cpu_initialization=True, pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
    )  # fmt: skip
    local = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    state: dict[str, Any] = {
        "args": argparse.Namespace(**{**ARGS, "num_layers": 4}, untie_embeddings_and_output_weights=True)
    }
    for chunk in (0, 1):
        gpt = GPTModel(
            config, TransformerBlockSubmodules(layer_specs=[local], layer_norm=WrappedTorchNorm), PADDED, 64,
            pre_process=chunk == 0 and rank == 0, post_process=chunk == 1 and rank == 1, vp_stage=chunk,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        for name, parameter in gpt.named_parameters():
            inside = name.startswith("decoder.layers.")
            key = name.split(".", 3)[3] if inside else name
            parameter.data = weight_of(key, 2 * chunk + rank if inside else 0, parameter.shape)
        state[f"model{chunk}"] = gpt.sharded_state_dict()
    folder = Path(root, "iter_0000001")
    if rank == 0:
        folder.mkdir()
        Path(root, "latest_checkpointed_iteration.txt").write_text("1")
    torch.distributed.barrier()
    with results_in_this_process():
        dist_checkpointing.save(state, str(folder))
    parallel_state.destroy_model_parallel()
    base = load_base(inspect_base(root), distributed.initialize())
    gap = 0.0
    for name, parameter in base.model.named_parameters():
        inside = name.startswith("decoder.layers.")
        layer, key = (int(name.split(".")[2]), name.split(".", 3)[3]) if inside else (0, name)
        real = 83 if "word_embeddings" in name or name.startswith("output_layer") else len(parameter)
        gap = max(gap, float((parameter - weight_of(key, layer, parameter.shape))[:real].abs().max()))
    return gap


def test_loads_layer_by_layer(tmp_path: Path) -> None:
    assert run_world(2, cases, str(tmp_path)) == [0.0, 0.0]
