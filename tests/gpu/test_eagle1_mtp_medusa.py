"""Drafts other than EAGLE-3 in bf16 on a GPU against fp32: losses, every gradient, the noise of EAGLE-1."""

from __future__ import annotations

import pytest
import torch

from megatron_spec.batch import Batch, Features
from megatron_spec.config import BaseConfig, BlockConfig, DraftConfig, ObjectiveConfig, presets
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.contract import DraftLosses
from megatron_spec.drafts.eagle1 import feature_noise
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.runtime import distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

V, H, ROWS, LENGTH = 2000, 256, 2, 130
BASE = BaseConfig("llama", H, 512, 8, 4, 2, 64, V, 4096)
BLOCK = {"mask_token_id": 7, "capture_layer_ids": [1, 3, 4], "block_size": 5, "num_hidden_layers": 3}
CONFIGS: dict[str, DraftConfig] = {
    "eagle1": presets.eagle_config(BASE, "eagle1"),
    "eagle3.1": presets.eagle_config(BASE, "eagle3.1", {"capture_layer_ids": [1, 3, 4]}),
    "eagle3.1, fused": presets.eagle_config(
        BASE, "eagle3.1", {"capture_layer_ids": [1, 3, 4], "norm_output": False, "norm_before_fc": True}
    ),
    "eagle-mtp": presets.eagle_config(BASE, "eagle-mtp"),
    "medusa": presets.medusa_config(BASE, 3),
    "medusa, base head": presets.medusa_config(BASE, 2, share_base_head=True),
    "dflash": presets.block_config(BASE, "dflash", BLOCK),
    "dspark": presets.block_config(BASE, "dspark", {**BLOCK, "markov_rank": 16}),
}


class Ends:
    """A base's embedding and head on one rank."""

    vocab_size, head_fp8 = V, None

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        random = torch.Generator().manual_seed(3)
        table, head = (torch.randn(V, H, generator=random).bfloat16() * 0.1 for _ in range(2))
        self.table, self.head_weight = (x.to(device, dtype) for x in (table, head))

    def embed(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens_BS, self.table).transpose(0, 1)

    def logits(self, state_SBH: torch.Tensor) -> torch.Tensor:
        return state_SBH @ self.head_weight.t()


def micro_batch(device: torch.device) -> Batch:
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, V, (ROWS, LENGTH), generator=random)
    turns = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    turns[0, 10:60], turns[0, 70:], turns[1, 5:120] = 1, 2, 1
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    return Batch(tokens, torch.arange(LENGTH).repeat(ROWS, 1), turns, documents).to(device)


def run(config: DraftConfig, dtype: torch.dtype) -> tuple[DraftLosses, dict[str, torch.Tensor]]:
    """Losses and gradients, from the same bf16-representable numbers in every dtype."""
    world = distributed.initialize()
    device, ends = world.device, Ends(dtype, world.device)
    draft = build_draft(config, DraftVocab.full(V), world, dtype)
    half = dtype == torch.bfloat16
    assert draft.paths.on("draft_layer") is (half and isinstance(config, BlockConfig))
    draft.initialize(ends, seed=1)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, p in sorted(draft.named_parameters()):
            p.add_((torch.randn(p.shape, generator=random) * 0.02).to(device, dtype))
            p.copy_(p.bfloat16())
    captures, state = (torch.randn(LENGTH, ROWS, n, generator=random).bfloat16() for n in (3 * H, H))
    features = Features(micro_batch(device), captures.to(device, dtype), state.to(device, dtype))
    steps = {"ttt_steps": 7 if config.algorithm == "medusa" else 3} if not isinstance(config, BlockConfig) else {}
    goal = presets.objective_for(config, ObjectiveConfig(**steps))
    torch.manual_seed(9)
    losses = draft(features, ends, goal)
    losses.total.backward()
    return losses, {n: p.grad for n, p in draft.named_parameters()}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_half_precision_on_a_gpu_is_near_fp32(name: str) -> None:
    exact, exact_gradients = run(CONFIGS[name], torch.float32)
    losses, gradients = run(CONFIGS[name], torch.bfloat16)
    assert torch.equal(losses.rows_T, exact.rows_T)
    torch.testing.assert_close(losses.loss_T, exact.loss_T, rtol=1e-2, atol=0.0)
    for n, gradient in exact_gradients.items():
        error = float((gradients[n].float() - gradient).norm() / gradient.norm())
        assert error < 0.05, f"gradient of {n}: relative error {error}"


def test_noise_is_that_of_the_cpu() -> None:
    device = distributed.initialize().device
    like = torch.zeros(LENGTH, ROWS, 64)
    here = feature_noise(micro_batch(torch.device("cpu")), like, 0.1)
    assert torch.equal(feature_noise(micro_batch(device), like.to(device), 0.1).cpu(), here)
