"""EAGLE-3 in the format of the `speculators` library, converted from a verified folder of `export.eagle`.

The same tensors with numbered layer names, always with the target's embedding, and a config.json that names the target.
Converted tensor by tensor from file to file; the result is read back and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_spec.config import DraftConfig, UserError
from megatron_spec.export import layout
from megatron_spec.export.common import VerificationError, copy_side_files
from megatron_spec.export.formats.eagle import DEFAULT_CAPTURES, OPTIONS
from megatron_spec.export.stream import TensorFile, TensorWriter, plan_of
from megatron_spec.families import read_base_config
from megatron_spec.runtime.files import read_object, write_json

VERSION = "0.9.0"
"""Release of speculators that defines this format."""
_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias", "vocab_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window", "use_sliding_window", "layer_types",
)  # fmt: skip


def check(config: DraftConfig, fp8: bool) -> None:
    """Raise UserError for a draft that this format cannot hold."""
    if not config.reads_captures:
        raise UserError(
            f"--export-format speculators: only EAGLE-3 drafts are written in this format, the draft is "
            f"{config.algorithm}: use hf"
        )
    if getattr(config, "parallel_drafting", False):
        raise UserError("--export-format speculators: drafts that propose in parallel (P-EAGLE) are written only as hf")
    if getattr(config, "fc_bias", False):
        raise UserError("--export-format speculators: this format has no bias after fc; use hf")
    if getattr(config, "norm_before_fc_and_fc_norm", False):
        raise UserError("--export-format speculators: this format has norm_before_fc or fc_norm, not both; use hf")
    if fp8:
        raise UserError(
            "--export-format speculators: this format has no fp8 of this kind; export the bf16 checkpoint, or use hf"
        )


def config_json(hf: dict[str, Any], base: Path, architectures: list[str], draft_len: int) -> dict[str, Any]:
    """Content of config.json, from that of the Hugging Face folder."""
    rope = dict(hf.get("rope_scaling") or {"rope_type": "default"})
    layer = {key: hf[key] for key in _LAYER_KEYS if key in hf}
    layer |= {"model_type": hf["model_type"], "tie_word_embeddings": False, "dtype": hf["torch_dtype"]}
    layer["rope_parameters"] = {"rope_theta": hf["rope_theta"], **rope}
    if "partial_rotary_factor" in hf:
        layer["rope_parameters"]["partial_rotary_factor"] = hf["partial_rotary_factor"]
    ids = hf.get("eagle_aux_hidden_state_layer_ids")  # also 'state after k layers' in this format
    if ids is not None and len(ids) != DEFAULT_CAPTURES:
        layer["num_aux_hidden_states"] = len(ids)  # of this format vLLM's Llama draft counts no ids
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": hf["draft_vocab_size"],
        "dtype": hf["torch_dtype"],
        "norm_before_residual": bool(hf.get("norm_before_residual", False)),
        **{name: bool(hf.get(name, False)) for name in OPTIONS},
        "tie_word_embeddings": False,
        **({"target_hidden_size": hf["target_hidden_size"]} if "target_hidden_size" in hf else {}),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_len}],
            "verifier": {"name_or_path": str(base), "architectures": architectures},
        },
        "transformer_layer_config": layer,
    }
    return values if ids is None else {**values, "eagle_aux_hidden_state_layer_ids": ids}


def file_name(name: str) -> str | None:
    """Name of a tensor in this format; None for a tensor that is not part of it."""
    if name.startswith("layers.") and not name.startswith("layers.0.") and ".hidden_norm." in name:
        return None  # the copy for engines that use this name for a later layer's input norm
    return name.replace("midlayer.", "layers.0.")


def _tensors(source: TensorFile) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(source.names):
        new = file_name(name)
        if new is not None:
            yield new, source.tensor(name)


def convert(folder: Path, base: Path | str, out: Path, draft_len: int = 3) -> None:
    """Convert an exported EAGLE-3 folder that contains `embed_tokens.weight` to the new folder `out`.

    Raises VerificationError when the written files differ.
    """
    source = TensorFile(folder / layout.WEIGHTS)
    if "embed_tokens.weight" not in source.names:
        raise VerificationError(f"{folder} holds no embed_tokens.weight, which speculators needs")
    out.mkdir(parents=True, exist_ok=True)
    hf = read_object(folder / "config.json")
    base = Path(base)
    architectures = ["LlamaForCausalLM"]
    if (base / "config.json").is_file():
        read_base_config(base)  # raises what is wrong with the base
        architectures = read_object(base / "config.json")["architectures"]
    writer = TensorWriter(out, {name: plan_of(tensor) for name, tensor in _tensors(source)})
    for name, tensor in _tensors(source):
        writer.add(name, tensor)
    writer.close()
    copy_side_files(folder, out)
    write_json(out / "config.json", config_json(hf, base, architectures, draft_len))
    write_json(out / "run.json", read_object(folder / "run.json"))
    written = TensorFile(out / layout.WEIGHTS)
    wrong = [name for name, tensor in _tensors(source) if not torch.equal(written.tensor(name), tensor)]
    if wrong:
        raise VerificationError(f"{out} differs from {folder}: {', '.join(wrong[:8])}")
