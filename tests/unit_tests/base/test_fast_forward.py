"""What the fast forward refuses where it cannot run; its numbers are tested on a GPU (tests/gpu)."""

from __future__ import annotations

import pytest
import torch

from megatron_spec.base.fast_forward import run_in_fp8
from megatron_spec.base.model import FrozenBase
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.runtime import distributed


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_a_cpu_base_runs_its_modules_and_refuses_fp8() -> None:
    config = BaseConfig.from_dict(
        dict(
            family="llama", hidden_size=32, intermediate_size=48, num_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, vocab_size=40, max_position_embeddings=64,
        )
    )  # fmt: skip
    base = FrozenBase.build(config, distributed.initialize(), ())
    assert base.fast is None
    with pytest.raises(UserError, match="fp8 tensor cores"):
        run_in_fp8(base)
