"""TensorRT-LLM's own checkpoint of a Llama with Medusa heads (releases up to 1.2.1): config.json and one file per rank.

Converted tensor by tensor from verified Hugging Face folders of base and heads. Weights are sharded for TP ranks: q, k
and v of a rank joined into one matrix, MLP inputs and heads by rows, outputs by columns, the vocabulary padded with
zero rows to a multiple of the ranks. `mlp.fc` is the gate's matrix and `mlp.gate` that of the up projection.

V vocabulary, H hidden, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.export.common import VerificationError, copy_side_files
from megatron_spec.export.medusa import WEIGHTS
from megatron_spec.export.stream import TensorFolder, TensorWriter, plan_of
from megatron_spec.runtime.files import read_object, write_json

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
EXCLUDED = ["*lm_head*", "*vocab_embedding*", "*medusa_heads*"]
"""Modules that stay in high precision in an fp8 checkpoint."""

_SCALES = {"weight_scale": "weights_scaling_factor", "input_scale": "activation_scaling_factor"}
_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_layernorm"}
_ROWS = {"mlp.gate_proj": "mlp.fc", "mlp.up_proj": "mlp.gate"}
_COLUMNS = {"self_attn.o_proj": "attention.dense", "mlp.down_proj": "mlp.proj"}


def check(base: dict[str, Any], tp: int) -> None:
    """Raise UserError when a base with this config.json cannot be written for `tp` ranks."""
    architecture = (base.get("architectures") or ["?"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"--export-format trtllm-legacy: the base is a {architecture}; this format is written only for "
            f"{' and '.join(ARCHITECTURES)}"
        )
    for name in ("num_attention_heads", "intermediate_size", "hidden_size"):
        if base[name] % tp:
            raise UserError(f"--trtllm-tp {tp} does not divide the base's {name} {base[name]}")
    groups = base.get("num_key_value_heads") or base["num_attention_heads"]
    if groups % tp and tp % groups:
        raise UserError(f"--trtllm-tp {tp} does not fit the base's {groups} key/value heads: neither divides the other")


def config_json(base: dict[str, Any], heads: dict[str, Any], tp: int, max_draft_len: int) -> dict[str, Any]:
    """Content of config.json, from the config.json files of the two Hugging Face folders."""
    quantised = base.get("quantization_config") or {}
    rope = dict(base.get("rope_scaling") or base.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", base.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    N = base["num_attention_heads"]
    return {
        "architecture": "MedusaForCausalLM",
        "model_type": "llama",
        "dtype": base.get("dtype") or base["torch_dtype"],
        "logits_dtype": "float32",
        "num_hidden_layers": base["num_hidden_layers"],
        "num_attention_heads": N,
        "num_key_value_heads": base.get("num_key_value_heads") or N,
        "head_size": base.get("head_dim") or base["hidden_size"] // N,
        "hidden_size": base["hidden_size"],
        "intermediate_size": base["intermediate_size"],
        "vocab_size": base["vocab_size"],
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": base.get("max_position_embeddings", 2048),
        "hidden_act": base.get("hidden_act", "silu"),
        "rotary_base": theta,
        "rotary_scaling": None if kind == "default" else {"type": kind, "rope_type": kind, **rope},
        "norm_epsilon": base["rms_norm_eps"],
        "quantization": {
            "quant_algo": "FP8" if quantised else None,
            "kv_cache_quant_algo": "FP8" if quantised.get("kv_cache_scheme") else None,
            "exclude_modules": list(EXCLUDED) if quantised else None,
        },
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1},
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "max_draft_len": max_draft_len,
        "num_medusa_heads": heads["medusa_num_heads"],
        "num_medusa_layers": heads["medusa_num_layers"],
    }


Tensors = Iterator[tuple[str, Callable[[], Tensor]]]
"""(name, function that reads the tensor): only one tensor at a time is in memory."""


class _Rank:
    """The tensors of one rank, in the order of its file."""

    def __init__(self, base: TensorFolder, heads: TensorFolder, config: dict[str, Any], rank: int) -> None:
        self.base, self.heads, self.config, self.rank = base, heads, config, rank
        self.tp: int = config["mapping"]["tp_size"]

    def _cut(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.tp, dim)[self.rank]

    def _vocab(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a vocabulary matrix."""
        rows = -(-tensor.shape[0] // self.tp)
        part = tensor[self.rank * rows : (self.rank + 1) * rows]
        return torch.cat([part, part.new_zeros(rows - part.shape[0], part.shape[1])])

    def _key_value(self, tensor: Tensor) -> Tensor:
        """This rank's key/value heads; with more ranks than heads, several ranks hold the same one."""
        G, D = self.config["num_key_value_heads"], self.config["head_size"]
        if self.tp <= G:
            return self._cut(tensor, 0)
        head = self.rank * G // self.tp
        return tensor[head * D : (head + 1) * D]

    def _qkv(self, layer: str) -> Tensor:
        q, k, v = (self.base.tensor(f"{layer}self_attn.{n}_proj.weight") for n in "qkv")
        parts = [self._cut(q, 0), self._key_value(k), self._key_value(v)]
        return torch.cat([p.view(torch.uint8) for p in parts]).view(q.dtype) if q.itemsize == 1 else torch.cat(parts)

    def _scales(self, source: str, target: str) -> Tensors:
        for theirs, name in _SCALES.items():
            if f"{source}.{theirs}" in self.base.names:
                yield f"{target}.{name}", partial(self._scalar, f"{source}.{theirs}")

    def _scalar(self, *names: str) -> Tensor:
        """The largest of some scalars, shape [1]."""
        return torch.stack([self.base.tensor(name) for name in names]).amax().reshape(1)

    def _part(self, source: TensorFolder, name: str, dim: int) -> Tensor:
        return self._cut(source.tensor(name), dim)

    def _vocab_part(self, source: TensorFolder, name: str) -> Tensor:
        return self._vocab(source.tensor(name))

    def _layer(self, i: int) -> Tensors:
        source, target, base = f"model.layers.{i}.", f"transformer.layers.{i}.", self.base
        for theirs, name in _NORMS.items():
            yield f"{target}{name}.weight", partial(base.tensor, f"{source}{theirs}.weight")
        yield f"{target}attention.qkv.weight", partial(self._qkv, source)
        yield from self._scales(f"{source}self_attn.q_proj", f"{target}attention.qkv")
        for dim, names in ((0, _ROWS), (1, _COLUMNS)):
            for theirs, name in names.items():
                yield f"{target}{name}.weight", partial(self._part, base, f"{source}{theirs}.weight", dim)
                yield from self._scales(f"{source}{theirs}", f"{target}{name}")
        scales = [f"{source}self_attn.{n}_proj.{n}_scale" for n in "kv"]
        if scales[0] in base.names:  # the format has one factor for keys and values
            yield f"{target}attention.kv_cache_scaling_factor", partial(self._scalar, *scales)

    def tensors(self) -> Tensors:
        """Yield (name, function that reads it) for every tensor."""
        base, heads, layers = self.base, self.heads, self.config["num_medusa_layers"]
        yield "transformer.vocab_embedding.weight", partial(base.tensor, "model.embed_tokens.weight")
        for i in range(self.config["num_hidden_layers"]):
            yield from self._layer(i)
        yield "transformer.ln_f.weight", partial(base.tensor, "model.norm.weight")
        head = "lm_head.weight" if "lm_head.weight" in base.names else "model.embed_tokens.weight"
        yield "lm_head.weight", partial(self._vocab_part, base, head)
        for h in range(self.config["num_medusa_heads"]):
            for i in range(layers):
                for kind in ("weight", "bias"):
                    target = f"medusa_heads.{h}.medusa_layers.{i}.linear.{kind}"
                    yield target, partial(self._part, heads, f"{h}.{i}.linear.{kind}", 0)
            yield f"medusa_heads.{h}.lm_head.weight", partial(self._vocab_part, heads, f"{h}.{layers}.weight")


def convert(base: Path, heads: Path, out: Path, tp: int = 1, max_draft_len: int = 63) -> None:
    """Write a checkpoint for `tp` ranks to `out` from exported folders of base and Medusa heads.

    Args:
        max_draft_len: maximum number of tokens in a Medusa tree that an engine built from it can verify.

    Raises:
        UserError: a base that does not fit the format or the number of ranks.
        VerificationError: the written files differ.
    """
    base_json, heads_json = read_object(base / "config.json"), read_object(heads / "config.json")
    check(base_json, tp)
    config = config_json(base_json, heads_json, tp, max_draft_len)
    out.mkdir(parents=True, exist_ok=True)
    sources = TensorFolder(base), TensorFolder(heads, WEIGHTS)
    for rank in range(tp):
        part = _Rank(*sources, config, rank)
        plan = {name: plan_of(get()) for name, get in part.tensors()}
        writer = TensorWriter(out, plan, f"rank{rank}")
        for name, get in part.tensors():
            writer.add(name, get())
        writer.close()
        written = TensorFolder(out, f"rank{rank}.safetensors")
        wrong = [n for n, get in part.tensors() if not torch.equal(written.tensor(n).float(), get().float())]
        if wrong:
            raise VerificationError(f"{out}/rank{rank}.safetensors: {', '.join(wrong[:8])} differ from the model")
    copy_side_files(base, out)
    write_json(out / "config.json", config)
    write_json(out / "run.json", read_object(heads / "run.json"))
