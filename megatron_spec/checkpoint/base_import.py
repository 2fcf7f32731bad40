"""Load a base from disk into this rank's frozen stage: Hugging Face folders and megatron-core checkpoints.

`inspect_base` identifies a base without loading its weights, so unsupported bases are refused early.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_spec.base.ends import EndsOnly
from megatron_spec.base.model import FrozenBase
from megatron_spec.checkpoint import huggingface, megatron
from megatron_spec.checkpoint.fingerprint import fingerprint
from megatron_spec.checkpoint.spec import is_draft_checkpoint
from megatron_spec.config import LOCAL, BaseConfig, BaseLayers, UserError
from megatron_spec.families import read_base_config
from megatron_spec.planning.paths import Paths
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.hub import model_folder

COMPUTES = (
    "family", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rms_norm_eps", "rope", "tie_word_embeddings",
)  # fmt: skip
"""Fields that decide what a base computes, and that stored arguments give as well as a config.json beside them."""


@dataclass(frozen=True)
class BaseReference:
    """A base identified by path and content.

    Attributes:
        path: absolute path of the folder, because a later step may run from another directory.
        kind: 'hf' (Hugging Face) or 'megatron' (torch distributed checkpoint of megatron-core).
        fingerprint: content hash, see `checkpoint.fingerprint`.
        config: architecture.
    """

    path: str
    kind: Literal["hf", "megatron"]
    fingerprint: str
    config: BaseConfig


def inspect_base(path: str | Path) -> BaseReference:
    """Identify the base at `path`, a folder or a name on the hub. Reads its configuration and samples of its weights.

    Raises:
        UserError: no such folder, neither format, an unsupported architecture, or missing files.
    """
    folder = model_folder(path).absolute()
    if not folder.is_dir():
        found = "is a file (GGUF is not read)" if folder.exists() else "no such folder"
        raise UserError(f"{path}: {found}; expected a base in Hugging Face or Megatron format, or its name on the hub")
    if is_draft_checkpoint(folder):
        raise UserError(f"{path} is a draft checkpoint, expected a base: give the folder of the one it was made for")
    shards = megatron.checkpoint_folder(folder)
    if shards is not None:
        config = megatron.read_config(folder, shards)
        # Token ids and dtype are not in the arguments: a config.json added later must not change the fingerprint.
        values = {name: value for name, value in config.to_dict().items() if name in COMPUTES}
        text = json.dumps(values, sort_keys=True).encode()
        return BaseReference(str(folder), "megatron", fingerprint(text, megatron.weight_files(shards)), config)
    config = read_base_config(folder)
    content = fingerprint((folder / "config.json").read_bytes(), huggingface.weight_files(folder))
    return BaseReference(str(folder), "hf", content, config)


def load_base(
    reference: BaseReference,
    world: World,
    capture_layer_ids: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    layers: BaseLayers = LOCAL,
    paths: Paths | None = None,
) -> FrozenBase:
    """Build this rank's stage of the base and load its shards; every rank calls it.

    Args:
        layers: what the layers are built from.
        paths: fast paths it may use, for these layers; default: all that run here.

    Returns:
        The stage in eval mode, without gradients.

    Raises:
        UserError: parallel sizes or capture ids that do not fit; missing, unexpected or misshapen tensors; a weight
            that is not finite.
    """
    config, path = reference.config, Path(reference.path)
    if reference.kind == "hf":
        base = FrozenBase.build(config, world, capture_layer_ids, dtype, None, layers, paths)
        huggingface.load_huggingface(base, path)
    else:
        folder = megatron.checkpoint_folder(path)
        if folder is None:
            raise UserError(f"{path}: expected a Megatron checkpoint, but it no longer exists")
        rows = megatron.padded_vocab_size(folder, config, world)
        base = FrozenBase.build(config, world, capture_layer_ids, dtype, rows, layers, paths)
        megatron.load_megatron(base, folder)
    base.reference = reference
    _check_finite(base, reference.path)
    return base


def load_ends(
    reference: BaseReference, world: World, dtype: torch.dtype = torch.float32,
    reader: type[huggingface.HuggingFaceWeights] = huggingface.HuggingFaceWeights,
) -> EndsOnly:  # fmt: skip
    """Embedding and head of the base without its layers. Raises UserError as `load_base` does."""
    config, path = reference.config, Path(reference.path)
    if reference.kind == "hf":
        ends = EndsOnly(config, world, dtype)
        huggingface.load_ends(ends, path, reader)
    else:
        folder = megatron.checkpoint_folder(path)
        if folder is None:
            raise UserError(f"{path}: expected a Megatron checkpoint, but it no longer exists")
        ends = EndsOnly(config, world, dtype, megatron.padded_vocab_size(folder, config, world))
        megatron.load_ends(ends, folder)
    _check_finite(ends, reference.path)
    return ends


def _check_finite(base: FrozenBase | EndsOnly, where: str) -> None:
    bad = [name for name, parameter in base.named_parameters() if not bool(torch.isfinite(parameter).all())]
    if bad:
        raise UserError(
            f"{where}: {len(bad)} weights are not finite after loading as {base.dtype}: {', '.join(bad[:10])}; "
            "the checkpoint is damaged, or its values do not fit the dtype"
        )
