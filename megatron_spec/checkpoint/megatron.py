"""Read a base from a megatron-core distributed checkpoint of any layout, from local or Transformer Engine layers.

The checkpoint may be that of a GPTModel or of a HybridModel whose attention and MLP layers pair up; both fill the same
base.

Nothing in a folder runs code: arguments and tensors are read with safe loaders, and `.metadata` is checked first
(`checkpoint.metadata`).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.safe_globals import SAFE_GLOBALS
from torch import Tensor

from megatron_spec.base.ends import EndsOnly
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.spec import FUSED_NORMS, own_name
from megatron_spec.checkpoint.metadata import check_metadata
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.families import parse_base_config
from megatron_spec.families.hybrid import gpt_name, stored_pattern, transformer_layers
from megatron_spec.families.megatron_args import config_from_args, contradictions
from megatron_spec.families.names import NameRule
from megatron_spec.families.rules import name_rules
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import read_object, read_text

log = logging.getLogger(__name__)

_POINTER = "latest_checkpointed_iteration.txt"
_LEGACY = (
    "is a checkpoint of Megatron-LM's older format (--ckpt-format torch), which is read with pickle: convert it with "
    "Megatron-LM's --ckpt-convert-format torch_dist --ckpt-convert-save DIR"
)
_PREFIXES = ("", "module.", "model.")
_PARTS = ("decoder.", "embedding.", "output_layer.", "mtp.")


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with the shards of `path` (itself, or its latest iteration); None when it is neither.

    Raises UserError when the iteration that the pointer names is missing.
    """
    if (path / "metadata.json").is_file() and (path / ".metadata").is_file():
        return path
    if any(path.glob("mp_rank_*")) or (path / "model_optim_rng.pt").is_file():
        raise UserError(f"{path} {_LEGACY}")
    if not (path / _POINTER).is_file():
        return None
    name = read_text(path / _POINTER, "text").strip()
    folder = path / (name if not name.isdigit() else f"iter_{int(name):07d}")
    if re.fullmatch(r"\d+|release", name) and any(folder.glob("mp_rank_*")):
        raise UserError(f"{folder} {_LEGACY}")
    if not re.fullmatch(r"\d+|release", name) or not (folder / "metadata.json").is_file():
        raise UserError(
            f"{path / _POINTER} names {name[:40]!r}, but {folder} is not a distributed checkpoint (metadata.json is "
            "missing): expected one saved with --ckpt-format torch_dist"
        )
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files whose content identifies the base. Raises UserError when there are no shards."""
    shards = sorted(folder.glob("*.distcp"))
    if not shards:
        raise UserError(
            f"{folder}: found no *.distcp files, as --ckpt-format torch_dist writes them; copy the checkpoint again"
        )
    return [folder / ".metadata", *shards]


def read_config(path: Path, folder: Path) -> BaseConfig:
    """Architecture: from a config.json beside or inside the checkpoint, else from the stored arguments.

    Warns when both are there and contradict each other.
    """
    for place in (folder, path):
        file = place / "config.json"
        if file.is_file():
            config = _readable(parse_base_config(read_object(file), str(file)), path)
            try:
                wrong = contradictions(_stored_args(folder) or {}, config)
            except UserError:
                wrong = []
            if wrong:
                log.warning("%s is used, but contradicts the arguments in %s: %s", file, folder, "; ".join(wrong))
            return config
    args = _stored_args(folder)
    if args is None:
        raise UserError(f"{folder}: holds no model arguments; put the base's config.json beside the checkpoint")
    return config_from_args(args, str(folder))


def _stored_args(folder: Path) -> dict[str, Any] | None:
    """Megatron-LM's arguments in a checkpoint; None if there are none. Raises UserError if they cannot be read."""
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            args: Any = dist_checkpointing.load_common_state_dict(str(folder)).get("args")
    except Exception as e:
        raise UserError(
            f"{folder}: the stored arguments cannot be read safely ({type(e).__name__}: {str(e)[:200]}); put the "
            "base's config.json (Hugging Face format) beside the checkpoint"
        ) from e
    return args if args is None or isinstance(args, dict) else vars(args)


def _readable(config: BaseConfig, path: Path) -> BaseConfig:
    if config.mla is not None or config.attention_sinks:
        raise UserError(
            f"{path}: Megatron checkpoints of bases with latent attention or attention sinks are not supported "
            f"({config.family}): give the base as a Hugging Face folder"
        )
    return config


class _Stored:
    """Shapes of the tensors in a checkpoint, under the names of a GPTModel."""

    def __init__(self, folder: Path, config: BaseConfig) -> None:
        self.folder, self.config = folder, config
        check_metadata(folder)
        metadata = dist_checkpointing.load_tensors_metadata(str(folder))
        self.shapes = {value.key: tuple(value.global_shape) for value in metadata.values()}
        embedding = "embedding.word_embeddings.weight"
        found = [prefix for prefix in _PREFIXES if prefix + embedding in self.shapes]
        if not found:
            raise UserError(
                f"{folder}: found no {embedding}, expected the checkpoint of a GPTModel or HybridModel (it holds "
                f"{', '.join(sorted(self.shapes)[:5])}, ...)"
            )
        self.prefix = found[0]
        self._hybrid_keys = self._of_hybrid_model()
        self.shapes = {name: self.shapes[key] for name, key in self._hybrid_keys.items()} or self.shapes
        self.vocab_rows = self.shapes[self.prefix + embedding][0]
        self.numbered = any(re.match(re.escape(self.prefix) + r"decoder\.layers\.\d+\.", key) for key in self.shapes)

    def _of_hybrid_model(self) -> dict[str, str]:
        """Name in a GPTModel -> key, in the checkpoint of a HybridModel; empty for a GPTModel's."""
        own = {key.removeprefix(self.prefix): key for key in self.shapes}
        if "decoder.final_norm.weight" not in own:
            return {}
        transformer_layers(stored_pattern(own), str(self.folder))
        return {self.prefix + gpt_name(name): key for name, key in own.items()}

    def on_disk(self, name: str) -> str:
        """Key of a tensor in the checkpoint."""
        return self._hybrid_keys.get(name, name)

    def key(self, rule: NameRule) -> str:
        """Key of the stored tensor that contains a parameter: one for all layers, unless numbered, and all experts."""
        key = rule.core if self.numbered else re.sub(r"^(decoder\.layers)\.\d+\.", r"\1.", rule.core)
        key = re.sub(r"\.local_experts\.\d+\.", ".experts.", key)
        for norm, fused in FUSED_NORMS.items():
            key = key.replace(norm, fused)
        return self.spelling(self.prefix + key)

    def spelling(self, key: str) -> str:
        """`key` as this checkpoint spells it: Transformer Engine fuses no norm into a router."""
        plain = own_name(key)
        return plain if key not in self.shapes and plain in self.shapes else key

    def check(self) -> None:
        """Raise UserError naming every tensor of the model that is missing or unexpected, and a wrong depth."""
        keys = {self.key(rule) for rule in name_rules(self.config)}
        ours = tuple(self.prefix + part for part in _PARTS)
        problems = [f"missing {key}" for key in sorted(keys - self.shapes.keys())]
        problems += [
            f"unexpected {self.on_disk(key)}" for key in sorted(self.shapes) if key.startswith(ours) and key not in keys
        ]
        norm = self.prefix + "decoder.layers." + FUSED_NORMS["input_layernorm."] + "weight"
        wanted = (self.config.num_layers, self.config.hidden_size)
        if norm in self.shapes and self.shapes[norm] != wanted:
            problems.append(f"{norm}: found [layers, hidden] {list(self.shapes[norm])}, expected {list(wanted)}")
        if self.vocab_rows < self.config.vocab_size:
            problems.append(f"the embedding has {self.vocab_rows} rows, expected at least {self.config.vocab_size}")
        if problems:
            raise UserError(f"{self.folder} does not fit its configuration: " + "; ".join(problems[:20]))


def padded_vocab_size(folder: Path, config: BaseConfig, world: World) -> int:
    """Vocabulary rows to build with: those of the checkpoint, rounded up to the tensor parallel size.

    Raises UserError when the checkpoint's tensors do not fit the configuration.
    """
    stored = _Stored(folder, config)
    stored.check()
    return -(-stored.vocab_rows // world.tp_size) * world.tp_size


def _load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return dict(dist_checkpointing.load(state, str(folder)))
    except Exception as e:
        raise UserError(f"{folder} cannot be loaded: {type(e).__name__}: {str(e)[:500]}") from e


@torch.no_grad()
def load_megatron(base: FrozenBase, folder: Path) -> None:
    """Fill this rank's parameters. Raises UserError when tensors do not fit."""
    stored = _Stored(folder, base.config)
    weights = base.sharded_weights(stored.prefix, stored.numbered)
    for _, tensor in weights.values():
        tensor.key = stored.on_disk(stored.spelling(tensor.key))
    loaded = _load({name: tensor for name, (_, tensor) in weights.items()}, folder)
    for name, (parameter, _) in weights.items():
        parameter.copy_(loaded[name])
    _clear_rows([base.embedding_weight, base.head_weight], base.vocab_size, base.world)
    base.share_ends()


@torch.no_grad()
def load_ends(ends: EndsOnly, folder: Path) -> None:
    """Fill only embedding and head. Raises UserError when they do not fit."""
    stored, world = _Stored(folder, ends.config), ends.world
    weights = {"embedding.word_embeddings.weight": ends.embedding_weight}
    if not ends.config.tie_word_embeddings:
        weights["output_layer.weight"] = ends.head_weight
    state = {
        name: ShardedTensor.from_rank_offsets(
            stored.prefix + name,
            weight.data,
            (0, world.tp_rank, world.tp_size),
            replica_id=world.draft_dp.rank(),
            allow_shape_mismatch=True,
        )
        for name, weight in weights.items()
    }
    loaded = _load(state, folder)
    for name, weight in weights.items():
        weight.copy_(loaded[name])
    _clear_rows([*weights.values()], ends.vocab_size, world)


def _clear_rows(weights: list[Tensor], vocab_size: int, world: World) -> None:
    """Clear the rows past the true vocabulary, whatever the checkpoint holds there."""
    for weight in weights:
        real = min(max(vocab_size - world.tp_rank * weight.shape[0], 0), weight.shape[0])
        weight[real:].zero_()
