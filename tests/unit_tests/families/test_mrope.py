"""mrope_section in a text model: for text its rotary embedding is the plain one, as in transformers' Qwen2.5-VL."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_spec.base.schedule import run_base
from megatron_spec.batch import Batch
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.runtime import distributed
from tests.unit_tests.families.families import CAPTURES, LENGTH, SHAPE, save, tokens


def test_text_of_a_model_with_mrope_sections(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = save("qwen2", tmp_path)
    reference = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**SHAPE, rope_parameters=rope)).eval()
    reference.load_state_dict(text.model.state_dict())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))

    base = load_base(inspect_base(tmp_path), distributed.initialize(), CAPTURES)
    ids = tokens()[0]
    zeros = torch.zeros_like(ids, dtype=torch.int32)
    [(_, state)] = run_base(base, [Batch(ids, torch.arange(LENGTH).expand_as(ids), zeros, zeros)])
    with torch.no_grad():
        expected = text.lm_head(reference(ids).last_hidden_state)
    torch.testing.assert_close(
        base.logits(state).transpose(0, 1)[..., : SHAPE["vocab_size"]], expected, rtol=0, atol=1e-4
    )
    distributed.shutdown()
