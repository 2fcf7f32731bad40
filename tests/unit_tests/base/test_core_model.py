"""A GPTModel of the user's own is wrapped only if it is the base that its folder describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.config import BaseConfig, ParallelConfig, UserError
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from tests.tiny import make_batch, save_llama
from tests.unit_tests.checkpoint.test_base_import import ARGS

LAYERS = 2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield distributed.initialize(ParallelConfig())
    distributed.shutdown()


@pytest.fixture(scope="module")
def config() -> BaseConfig:
    from megatron_spec.families.megatron_args import config_from_args

    return config_from_args({**ARGS, "num_layers": LAYERS, "untie_embeddings_and_output_weights": True}, "x")


def gpt(layers: dict[str, Any], model: dict[str, Any]) -> Any:
    """megatron-core's own model of ARGS, with other options for the layers and the model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 12, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "use_cpu_initialization": True, **layers,
    }  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=values.get("qk_layernorm", False))
    block = TransformerBlockSubmodules(layer_specs=[spec] * LAYERS, layer_norm=WrappedTorchNorm)
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False, **model}
    return GPTModel(TransformerConfig(**values), block, options.pop("vocab_size", 96), 64, **options)


OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"rotary_base": 500000}, "its rotary frequencies are not those of"),
    ({}, {"rotary_percent": 0.5}, "its rotary frequencies are not those of"),
    ({}, {"rope_scaling": True, "rope_scaling_factor": 8.0, "rotary_base": 5e5}, "its rotary frequencies are not"),
    ({}, {"seq_len_interpolation_factor": 2.0}, "its rotary frequencies are not those of"),
    ({}, {"position_embedding_type": "none"}, "position_embedding_type is 'none', expected 'rope'"),
    ({}, {"position_embedding_type": "learned_absolute"}, "position_embedding_type is 'learned_absolute'"),
    ({}, {"share_embeddings_and_output_weights": True}, "share_embeddings_and_output_weights is True, expected False"),
    ({}, {"vocab_size": 64}, "vocab_size is 64, expected at least 83"),
    ({"rotary_interleaved": True}, {}, "rotary_interleaved is True, expected False"),
    ({"layernorm_epsilon": 1e-6}, {}, "layernorm_epsilon is 1e-06, expected 1e-05"),
    ({"num_attention_heads": 2, "kv_channels": 16}, {}, "num_attention_heads is 2, expected 4; kv_channels is 16"),
    ({"no_rope_freq": [1, 0]}, {}, "no_rope_freq is .1, 0., expected None"),
    ({"qk_layernorm": True}, {}, "qk_layernorm is True, expected False"),
    ({"add_qkv_bias": True}, {}, "add_qkv_bias is True, expected False"),
]


@pytest.mark.parametrize(("layers", "model", "message"), OTHERS, ids=lambda x: next(iter(x), "") if x != "" else "")
def test_a_model_that_is_not_the_base_is_refused(
    layers: dict[str, Any], model: dict[str, Any], message: str, config: BaseConfig, world: World
) -> None:
    with pytest.raises(UserError, match=f"the GPTModel is not the base in its base_path: {message}"):
        FrozenBase.wrap(gpt(layers, model), config, world, ())


@pytest.mark.parametrize("scaling", [None, "llama3"])
def test_the_base_itself_is_wrapped(scaling: str | None, config: BaseConfig, world: World) -> None:
    options: dict[str, Any] = {}
    if scaling:
        config = config.replace(
            rope=config.rope.replace(
                type="llama3", factor=8.0, low_freq_factor=1.0, original_max_position_embeddings=8192
            )
        )
        options = {"rope_scaling": True, "rope_scaling_factor": 8.0}
    assert FrozenBase.wrap(gpt({}, options), config, world, (0,)).stage_counts == [LAYERS]


def test_rows_longer_than_a_window_that_the_model_lacks(config: BaseConfig, world: World) -> None:
    """Mistral in a model without window_size: equal up to the window, another base beyond it."""
    base = FrozenBase.wrap(gpt({}, {}), config.replace(window=12, window_layers=(0, 1)), world, (0,))
    assert run_base(base, [make_batch(1, 12, seed=0, vocab_size=83)])[0][1].shape == (12, 1, 32)
    with pytest.raises(UserError, match=r"window of 12, the wrapped model none .* rows have 13 tokens"):
        run_base(base, [make_batch(1, 13, seed=0, vocab_size=83)])


def test_layers_of_load_base_are_wrapped(tmp_path: Path, world: World) -> None:
    """Their angles come from the configuration anyway."""
    reference = inspect_base(save_llama(tmp_path / "base"))
    base = load_base(reference, world)
    assert FrozenBase.wrap(base.model, reference.config, world, ()).stage_counts == base.stage_counts
