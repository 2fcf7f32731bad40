"""Read a base from a Hugging Face folder: one or more safetensors files, of which each rank reads only its slices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_spec.base.ends import EndsOnly
from megatron_spec.base.model import FrozenBase
from megatron_spec.checkpoint import block_fp8, mxfp4
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.families.fields import fp8_block
from megatron_spec.families.names import EVERYTHING, NameRule, hf_shapes, local_names, read_shard
from megatron_spec.families.rules import is_ignorable, name_rules
from megatron_spec.runtime.files import read_object

log = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_CHUNK_ROWS = 8192


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder. Raises UserError when there are none or one of the index is missing."""
    single = folder / _SINGLE
    if (folder / _INDEX).is_file():
        weight_map = read_object(folder / _INDEX, {"weight_map": dict}, ("weight_map",))["weight_map"]
        wrong = [tensor for tensor, name in weight_map.items() if not (isinstance(name, str) and name)]
        if wrong or not weight_map:
            what = f"names no file for {wrong[0]}" if wrong else "is empty"
            raise UserError(f"{folder / _INDEX}: weight_map {what}, expected the file of every tensor; copy it again")
        names = sorted(set(weight_map.values()))
        if single.is_file() and _SINGLE not in names:
            log.warning("%s and %s: of two sets of weights, %s is read, as by transformers", single, _INDEX, _SINGLE)
            return [single]
        bad = [name for name in names if Path(name).name != name]
        if bad:
            raise UserError(f"{folder / _INDEX}: names files outside its folder: {bad}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder}: missing {', '.join(missing)}, named in {_INDEX}; copy the folder again")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    others = sorted(p.name for p in folder.glob("*.bin"))
    hint = f" (found {others[0]}: convert it to safetensors first)" if others else ""
    raise UserError(f"{folder}: expected {_SINGLE} or {_INDEX}{hint}")


class HuggingFaceWeights:
    """Lazy view of all tensors of a folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._handle_of: dict[str, Any] = {}
        self._fp8_block = _fp8_block_of(folder / "config.json")
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

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._handle_of.keys()

    @property
    def parameters(self) -> set[str]:
        """Names of all parameters, however they are stored, without the tensors that hold scales."""
        packed = {n.removesuffix(mxfp4.BLOCKS) for n in self.names if n.endswith(mxfp4.BLOCKS)}
        parts = {name + part for name in packed for part in (mxfp4.BLOCKS, mxfp4.SCALES)}
        scales = {name + block_fp8.SCALES for name in self.names if self.has_scales(name)}
        return {*self.names, *packed} - parts - scales

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as stored."""
        return tuple(self._handle_of[name].get_slice(name).get_shape())

    def check(self, rules: list[NameRule], config: BaseConfig) -> None:
        """Raise UserError naming every missing tensor, unexpected tensor and wrong shape."""
        expected = {name: shape for rule in rules for name, shape in hf_shapes(rule).items()}
        self.check_names(expected, lambda name: is_ignorable(name, config))
        self._check_tied(config)

    def _check_tied(self, config: BaseConfig) -> None:
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if config.tie_word_embeddings and head in self.names and not self.same(head, embedding, config.vocab_size):
            raise UserError(
                f"{self.folder}: {head} is not a copy of {embedding}, which config.json expects with "
                "tie_word_embeddings true: set it to false to use this head, or remove the tensor"
            )

    def same(self, one: str, other: str, rows: int) -> bool:
        """True if two matrices of so many rows are equal."""
        if self.shape(one) != self.shape(other):
            return False
        for start in range(0, rows, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, rows)
            if not torch.equal(self.read(one, 0, start, stop), self.read(other, 0, start, stop)):
                return False
        return True

    def check_names(self, expected: dict[str, tuple[int, ...]], ignorable: Callable[[str], bool]) -> None:
        """`check` against names and shapes; other tensors must be `ignorable`."""
        expected = dict(expected)
        for name in [name for name in expected if name + mxfp4.BLOCKS in self._handle_of]:
            expected |= mxfp4.shapes(name, expected.pop(name))
        expected |= {
            name + block_fp8.SCALES: block_fp8.scale_shape(shape, self._fp8_block)
            for name, shape in expected.items()
            if self._fp8_block is not None and self.has_scales(name) and len(shape) == 2
        }
        problems = [f"missing {name}" for name in expected if name not in self._handle_of]
        problems += [f"unexpected {n}" for n in self._handle_of if n not in expected and not ignorable(n)]
        for name in expected.keys() & self._handle_of.keys():
            part = self._handle_of[name].get_slice(name)
            found = tuple(part.get_shape())
            if part.get_dtype().startswith("F8") and not self.has_scales(name):
                problems.append(f"{name} is in fp8 without {name}{block_fp8.SCALES}")
            if found != expected[name]:
                problems.append(f"{name}: found shape {list(found)}, expected {list(expected[name])}")
        if problems:
            shown = "; ".join(sorted(problems)[:20]) + ("; ..." if len(problems) > 20 else "")
            raise UserError(f"{self.folder}: {len(problems)} tensors do not fit its config.json: {shown}")

    def has_scales(self, name: str) -> bool:
        """True if the scales of a tensor in fp8 are in the folder."""
        return self._fp8_block is not None and name + block_fp8.SCALES in self._handle_of

    def _raw(self, name: str, dim: int, start: int, stop: int, outer: slice = EVERYTHING) -> Tensor:
        index = [outer] + [slice(None)] * dim if dim else [EVERYTHING]
        index[dim] = slice(start, stop)
        tensor: Tensor = self._handle_of[name].get_slice(name)[tuple(index)]
        return tensor

    def read(self, name: str, dim: int, start: int, stop: int, outer: slice = EVERYTHING) -> Tensor:
        """The slice [start, stop) of dimension `dim`, and `outer` of the first dimension if `dim` is not the first.

        MXFP4 is dequantised to bf16, block fp8 to fp32.
        """
        if name + mxfp4.BLOCKS in self._handle_of:
            return mxfp4.read(self._raw, name, dim, start, stop, outer)
        if self._fp8_block is not None and self.has_scales(name):
            return block_fp8.read(self._raw, name, self._fp8_block, dim, start, stop)
        return self._raw(name, dim, start, stop, outer)


def _fp8_block_of(config_json: Path) -> tuple[int, int] | None:
    raw = read_object(config_json, {"quantization_config": dict}) if config_json.is_file() else {}
    quantization = raw.get("quantization_config") or {}
    return fp8_block(quantization, str(config_json)) if quantization.get("quant_method") == "fp8" else None


@torch.no_grad()
def load_huggingface(base: FrozenBase, folder: Path, reader: type[HuggingFaceWeights] = HuggingFaceWeights) -> None:
    """Fill this rank's parameters. Strict: raises UserError as `HuggingFaceWeights.check` does."""
    config, world, stage = base.config, base.world, base.stage
    rules = name_rules(config)
    parameters = base.weights()
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
def load_ends(ends: EndsOnly, folder: Path, reader: type[HuggingFaceWeights] = HuggingFaceWeights) -> None:
    """Fill only embedding and head; names and shapes are still checked for all tensors of the folder."""
    config, world = ends.config, ends.world
    rules = name_rules(config)
    with reader(folder) as weights:
        weights.check(rules, config)
        for rule in (r for r in rules if r.kind == "vocab"):
            weight = ends.embedding_weight if rule.core.startswith("embedding") else ends.head_weight
            weight.copy_(read_shard(rule, config, world.tp_rank, world.tp_size, weights.read, weight.shape[0]))
