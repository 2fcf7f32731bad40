"""Read a base from a Hugging Face folder: safetensors in one file or several, each rank only its slices."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_spec.base_models import is_ignorable, name_rules
from megatron_spec.base_models.names import NameRule, hf_shapes, local_names, read_shard
from megatron_spec.checkpoint import mxfp4
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.pipeline import te_spec
from megatron_spec.pipeline.ends_only import EndsOnly
from megatron_spec.pipeline.model import FrozenBase

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder. Raises UserError when there are none or one of the index is missing."""
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        bad = [name for name in names if Path(name).name != name]
        if bad:
            raise UserError(f"{folder / _INDEX}: names files outside of its folder: {bad}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder}: missing {', '.join(missing)}, named in {_INDEX}; copy the folder again")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = sorted(p.name for p in folder.glob("*.bin"))
    hint = f" (found {others[0]}: convert it to safetensors first)" if others else ""
    raise UserError(f"{folder}: expected model.safetensors or {_INDEX}{hint}")


class HuggingFaceWeights:
    """Lazy view of all tensors of a folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._handle_of: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as e:
                raise UserError(f"{path}: cannot be read as safetensors ({e}); copy the file again") from e
            self._handle_of.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> HuggingFaceWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, rules: list[NameRule], config: BaseConfig) -> None:
        """Raise UserError naming every missing tensor, unexpected tensor and wrong shape."""
        expected = {name: shape for rule in rules for name, shape in hf_shapes(rule).items()}
        packed = [name for name in expected if name + mxfp4.BLOCKS in self._handle_of]
        for name in packed:
            expected |= mxfp4.shapes(name, expected.pop(name))
        problems = [f"missing {name}" for name in expected if name not in self._handle_of]
        extra = [n for n in self._handle_of if n not in expected and not is_ignorable(n, config)]
        problems += [f"unexpected {name}" for name in extra]
        for name in expected.keys() & self._handle_of.keys():
            found = tuple(self._handle_of[name].get_slice(name).get_shape())
            if found != expected[name]:
                problems.append(f"{name}: found shape {list(found)}, expected {list(expected[name])}")
        if problems:
            shown = "; ".join(sorted(problems)[:20]) + ("; ..." if len(problems) > 20 else "")
            raise UserError(f"{self.folder}: {len(problems)} tensors do not fit its config.json: {shown}")

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """The slice [start, stop) of a dimension of a tensor. MXFP4 is dequantised to bf16."""
        if name + mxfp4.BLOCKS in self._handle_of:
            return mxfp4.read(self.read, name, dim, start, stop)
        part = self._handle_of[name].get_slice(name)
        tensor: Tensor = part[tuple([slice(None)] * dim + [slice(start, stop)])]
        return tensor


@torch.no_grad()
def load_huggingface(base: FrozenBase, folder: Path, reader: type[HuggingFaceWeights] = HuggingFaceWeights) -> None:
    """Fill this rank's parameters. Strict: raises UserError as `HuggingFaceWeights.check` does."""
    config, world, stage = base.config, base.world, base.stage
    rules = name_rules(config)
    parameters = dict(te_spec.named_parameters(base.gpt))
    with reader(folder) as weights:
        weights.check(rules, config)
        for rule in rules:
            names = local_names(rule, stage.first, base.experts)
            mine = [parameters.pop(name) for name in names if name in parameters]
            if not mine:
                continue  # another rank's
            rows = base.embedding_weight.shape[0]
            shard = read_shard(rule, config, world.tp_rank, world.tp_size, weights.read, rows, base.experts)
            for parameter, part in zip(mine, shard if rule.kind.startswith("stacked") else [shard], strict=True):
                assert part.shape == parameter.shape, (rule.core, part.shape, parameter.shape)
                parameter.copy_(part)
    base.share_ends()


@torch.no_grad()
def load_ends(ends: EndsOnly, folder: Path) -> None:
    """Fill embedding and head alone; the whole folder is checked by names and shapes all the same."""
    config, world = ends.config, ends.world
    rules = name_rules(config)
    with HuggingFaceWeights(folder) as weights:
        weights.check(rules, config)
        for rule in (r for r in rules if r.kind == "vocab"):
            weight = ends.embedding_weight if rule.core.startswith("embedding") else ends.head_weight
            weight.copy_(read_shard(rule, config, world.tp_rank, world.tp_size, weights.read, weight.shape[0]))
