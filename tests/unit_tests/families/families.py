"""Tiny random models of every family, made by transformers, and their results.

S sequence, B micro-batch, H hidden, V vocabulary, K captures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHAPE: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=84, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    pad_token_id=0, tie_word_embeddings=False, attn_implementation="eager",
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=16,
    rope_theta=150000.0,
)  # fmt: skip
LONG = dict(
    rope_type="longrope", rope_theta=1000.0, short_factor=[1.0, 1.1, 1.3], long_factor=[2.0, 3.0, 5.0],
    original_max_position_embeddings=16, partial_rotary_factor=0.75,
)  # fmt: skip
DEEPSEEK = dict(
    num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=16,
    first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    n_shared_experts=2, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.7),
)  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=5, head_dim=12)),
    "phi3": ("Phi3", dict(original_max_position_embeddings=16, rope_parameters=LONG)),
    "phi3 short": ("Phi3", dict(vocab_size=83, original_max_position_embeddings=32, rope_parameters={
        **LONG, "original_max_position_embeddings": 32})),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2 window": ("Qwen2", dict(use_sliding_window=True, max_window_layers=2, sliding_window=6)),
    "qwen3": ("Qwen3", dict(head_dim=12)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3Moe", dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1],
        head_dim=8)),
    "gpt_oss": ("GptOss", dict(
        num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=5, rope_parameters=YARN)),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3 plain": ("DeepseekV3", {
        **DEEPSEEK, "vocab_size": 83, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": None}),
}  # fmt: skip
"""Name -> (transformers' name, fields of its configuration)."""

CAPTURES = (0, 1, 3)
LENGTH = 24
START = 16
"""Tokens that a cache reads piece by piece: Phi-3's short factors hold up to here."""


def save(name: str, folder: Path, seed: int = 0, max_shard_size: str = "50GB", **overrides: Any) -> Any:
    """Write a random model and return it. Biases, sinks and norms are random, so that a lost one is detected."""
    import transformers

    stem, extra = MODELS[name]
    values = {**SHAPE, **extra, **overrides}
    if values.get("rope_parameters", 0) is None:
        values.pop("rope_parameters")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{stem}Config")(**values)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif "bias" in key or "sinks" in key or "router" in key or key.endswith("gate.weight"):
                tensor.normal_(0, 0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def tokens(vocab: int = SHAPE["vocab_size"]) -> Tensor:
    """[micro-batches, B, S]."""
    return torch.randint(vocab, (2, 3, LENGTH), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def answers(model: Any) -> dict[str, Tensor]:
    """Logits [M, B, S, V], captured layer outputs [M, B, S, K * H], logits of packed documents and of the start."""
    found: dict[str, list[Tensor]] = {"logits": [], "captures": [], "packed": [], "start": []}
    last: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _m, _i, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    for batch in tokens(model.config.vocab_size):
        out = model(batch, output_hidden_states=True)
        found["logits"].append(out.logits)
        states = [*(out.hidden_states[i + 1] for i in CAPTURES[:-1]), last[-1]]  # hidden_states[-1] is normed
        found["captures"].append(torch.cat(states, -1))
        found["start"].append(model(batch[:, :START]).logits)
        found["packed"].append(torch.cat([model(batch[:, :9]).logits, model(batch[:, 9:]).logits], 1))
    handle.remove()
    return {name: torch.stack(values) for name, values in found.items()}


class PredictionModule(torch.nn.Module):
    """DeepSeek-V3's prediction module (arXiv 2412.19437, section 2.2) around transformers' own decoder layer."""

    def __init__(self, config: Any) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (hf.DeepseekV3RMSNorm(H, eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * H, H, bias=False)
        self.layer = hf.DeepseekV3DecoderLayer(config, layer_idx=config.num_hidden_layers)
        self.rotary = hf.DeepseekV3RotaryEmbedding(config)
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if "norm" in name:
                tensor.data.normal_(1.0, 0.1)
            elif "inv_freq" not in name:
                tensor.data.normal_(0, 0.5 if "gate" in name and "proj" not in name else 0.2)

    def forward(self, embedding_BSH: Tensor, state_BSH: Tensor, positions_S: Tensor) -> Tensor:
        """[B, S, H] state before the module's last norm."""
        x = self.eh_proj(torch.cat([self.enorm(embedding_BSH), self.hnorm(state_BSH)], -1))
        S = x.shape[1]
        mask = torch.full((S, S), float("-inf")).triu(1)[None, None]
        return self.layer(x, attention_mask=mask, position_embeddings=self.rotary(x, positions_S[None]))  # type: ignore[no-any-return]

    def stored(self, number: int) -> dict[str, Tensor]:
        """Its tensors in DeepSeek's names."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            name = name.removeprefix("layer.")
            if name.startswith("mlp.experts."):
                for e, part in enumerate(tensor):
                    if name.endswith("down_proj"):
                        found[f"mlp.experts.{e}.down_proj.weight"] = part
                        continue
                    for which, half in zip(("gate", "up"), part.chunk(2), strict=True):
                        found[f"mlp.experts.{e}.{which}_proj.weight"] = half
            elif not name.startswith("rotary."):
                found["shared_head.norm.weight" if name == "norm.weight" else name] = tensor
        return {f"model.layers.{number}.{name}": tensor.contiguous().clone() for name, tensor in found.items()}


@torch.no_grad()
def save_with_module(folder: Path, name: str = "deepseek_v3", **overrides: Any) -> Path:
    """A DeepSeek base with its prediction module and copies of embedding and head; see `with_module`."""
    with_module(folder, name, **overrides)
    return folder


@torch.no_grad()
def with_module(
    folder: Path, name: str = "deepseek_v3", modules: int = 1, **overrides: Any
) -> tuple[Any, PredictionModule]:
    """Write them to `folder`; returns (the base, its first module)."""
    model = save(name, folder, **overrides)
    made, first = [PredictionModule(model.config).eval() for _ in range(modules)], model.config.num_hidden_layers
    tensors = load_file(folder / "model.safetensors")
    for number, module in enumerate(made, first):
        tensors |= module.stored(number)
        for own, base in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            tensors[f"model.layers.{number}.{own}.weight"] = tensors[f"{base}.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": modules}))
    return model, made[0]
