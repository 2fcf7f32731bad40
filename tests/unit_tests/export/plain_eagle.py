"""A plain EAGLE-3 forward from an exported folder only, as in a serving engine.

S rows of one sequence; no batches, no cache. fp8 linears round their input by the file's scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class PlainEagle:
    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.t = load_file(str(folder / "model.safetensors"))

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight = self.t[f"{name}.weight"].float()
        if f"{name}.weight_scale" in self.t:
            weight = weight * self.t[f"{name}.weight_scale"]
            scale = self.t[f"{name}.input_scale"]
            x = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return x @ weight.T

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.t[f"{name}.weight"].float()

    def frequencies(self) -> Tensor:
        d = self.config["head_dim"]
        inv = self.config["rope_theta"] ** -(torch.arange(0, d, 2) / d)
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return inv
        assert scaling["rope_type"] == "linear"
        return inv / scaling["factor"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions[:, None] * self.frequencies())[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def layer(self, prefix: str, first: bool, hidden: Tensor, embedding: Tensor, positions: Tensor) -> Tensor:
        d, heads, groups = (self.config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        if first:
            x = torch.cat(
                [self.norm(f"{prefix}.input_layernorm", embedding), self.norm(f"{prefix}.hidden_norm", hidden)], -1
            )
        else:
            x = self.norm(f"{prefix}.hidden_norm", hidden)  # the name SGLang reads
            assert torch.equal(self.t[f"{prefix}.hidden_norm.weight"], self.t[f"{prefix}.input_layernorm.weight"])
        q, k, v = (self.linear(f"{prefix}.self_attn.{n}_proj", x).unflatten(-1, (-1, d)) for n in "qkv")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (y.repeat_interleave(heads // groups, dim=1) for y in (k, v))
        scores = torch.einsum("snd,tnd->nst", q, k) / d**0.5
        future = torch.ones(len(x), len(x)).triu(1).bool()
        out = torch.einsum("nst,tnd->snd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        hidden = hidden + self.linear(f"{prefix}.self_attn.o_proj", out.flatten(1))
        x = self.norm(f"{prefix}.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self.linear(f"{prefix}.mlp.gate_proj", x))
        return hidden + self.linear(f"{prefix}.mlp.down_proj", gate * self.linear(f"{prefix}.mlp.up_proj", x))

    def steps(self, captures: Tensor, embedding: Tensor, positions: Tensor, count: int) -> list[Tensor]:
        """Draft logits [S, D] of `count` steps that feed the state back; positions move by one each step."""
        layers = self.config["num_hidden_layers"]
        hidden, logits = self.linear("fc", captures), []
        for step in range(count):
            for i in range(layers):
                prefix = "midlayer" if layers == 1 else f"layers.{i}"
                hidden = self.layer(prefix, i == 0, hidden, embedding, positions + step)
            logits.append(self.linear("lm_head", self.norm("norm", hidden)))
        return logits
