"""Features on disk: one manifest, and shards of a fixed number of samples as safetensors.

    FOLDER/manifest.json               settings, base and number of samples
    FOLDER/features-00000.safetensors  samples 0 .. samples_per_shard-1, and so on

A shard has five tensors per sample i, without padding: "i.tokens" int64 [n], "i.turns" int32 [n], "i.captures"
[n, C], "i.state" [n, H], "i.argmax" int32 [n] (the base's next token). In fp8 (float8_e4m3fn) captures and
state are divided by the scale of their row and layer: "i.capture_scales" float32 [n, captures], "i.state_scale" [n, 1].
Shards are renamed into place when complete, so an interrupted run continues with the missing ones.

n tokens of a sample, C = captures * H, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_spec.config import Config, UserError
from megatron_spec.data.chat import Sample
from megatron_spec.runtime.files import names_in, read_object, replacing, write_json

FORMAT_VERSION = 2
CONVENTION = "captures: layer outputs before any norm; state: after the base's final norm"
_MANIFEST = "manifest.json"
_FP8 = torch.float8_e4m3fn
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": _FP8}


@dataclass(frozen=True)
class StoreManifest(Config):
    """Contents of manifest.json: what must agree between the writing and the reading run."""

    base_fingerprint: str
    """Hash of the base's weights, and of its ranges if it is fake-quantised."""
    capture_layer_ids: tuple[int, ...]
    """Base layers whose outputs are stored."""
    hidden_size: int
    """Hidden size of the base."""
    dtype: str
    """Data type of captures and state on disk: float32, bfloat16, float16 or float8_e4m3fn."""
    template_hash: str
    """Identity of tokenizer and chat template; '' if unknown."""
    num_samples: int
    """Conversations."""
    seq_length: int
    """Maximum number of tokens per sample."""
    samples_per_shard: int = 16
    """Number of samples per shard."""
    data_hash: str = ""
    """Identity of the conversations or dumps that were read; '' if unknown."""
    computed: str = ""
    """Data type that the base computed in; '' if unknown."""
    convention: str = CONVENTION
    """Definition of the stored states."""
    format_version: int = FORMAT_VERSION
    """Version of the format."""

    def validate(self) -> None:
        """Raise UserError if fields are out of range or inconsistent."""
        if self.format_version != FORMAT_VERSION:
            raise UserError(f"feature store format {self.format_version}: this version reads {FORMAT_VERSION}")
        if self.dtype not in _DTYPES:
            raise UserError(f"feature store dtype {self.dtype!r}: expected one of {', '.join(_DTYPES)}")
        if self.num_samples < 1 or self.samples_per_shard < 1:
            raise UserError(
                f"a feature store needs samples: found num_samples={self.num_samples}, "
                f"samples_per_shard={self.samples_per_shard}"
            )

    @property
    def num_shards(self) -> int:
        """Number of shard files of a complete store."""
        return -(-self.num_samples // self.samples_per_shard)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Data type of captures and state on disk."""
        return _DTYPES[self.dtype]

    @property
    def read_dtype(self) -> torch.dtype:
        """Data type of captures and state after reading."""
        return torch.bfloat16 if self.torch_dtype is _FP8 else self.torch_dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token on disk: captures, state, their scales, token, turn, argmax."""
        layers = len(self.capture_layer_ids) + 1
        scales = 4 * layers if self.torch_dtype is _FP8 else 0
        return layers * self.hidden_size * self.torch_dtype.itemsize + scales + 16

    def samples_of(self, shard: int) -> range:
        """Indices of the samples in a shard."""
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.num_samples))


@dataclass
class SampleFeatures:
    """One sample with its features: tokens [n], turns [n], captures [n, C], state [n, H], the base's argmax [n]."""

    tokens: Tensor
    turns: Tensor
    captures: Tensor
    state: Tensor
    argmax: Tensor


def shard_path(folder: Path, shard: int) -> Path:
    """File of a shard."""
    return folder / f"features-{shard:05d}.safetensors"


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({error}): remove it and run the extraction again"


def missing_shards(folder: Path, manifest: StoreManifest) -> list[int]:
    """Shards that are missing in the folder."""
    found = names_in(folder)
    return [s for s in range(manifest.num_shards) if shard_path(folder, s).name not in found]


def differences(found: StoreManifest, expected: dict[str, Any]) -> list[str]:
    """'name: found X, expected Y' for every field that differs from `expected`.

    An unknown `data_hash` or `computed` differs from none: earlier versions wrote none.
    """
    values = found.to_dict()
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in expected.items()}
    unknown = {name for name in ("data_hash", "computed") if "" in (values[name], lists.get(name, ""))}
    wrong = {name: value for name, value in lists.items() if values[name] != value and name not in unknown}
    return [f"{name}: found {values[name]!r}, expected {value!r}" for name, value in wrong.items()]


def manifest_file(folder: str | Path) -> Path:
    """Path of the manifest. Raises UserError if the folder is not a store."""
    path = Path(folder) / _MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} has no features ({_MANIFEST} is missing): run offline_feature_extract.py first")
    return path


def read_manifest(folder: str | Path) -> StoreManifest:
    """Manifest of a store. Raises UserError if there is none or it cannot be read."""
    return StoreManifest.from_dict(read_object(manifest_file(folder)))


class FeatureWriter:
    """Writes shards to a folder that may already have some.

    Raises UserError if the folder was started with other settings.
    """

    def __init__(self, folder: str | Path, manifest: StoreManifest) -> None:
        self.folder, self.manifest = Path(folder), manifest
        path = self.folder / _MANIFEST
        if not path.is_file():
            write_json(path, manifest.to_dict())
            return
        wrong = differences(StoreManifest.from_dict(read_object(path)), manifest.to_dict())
        if wrong:
            raise UserError(
                f"{self.folder} was started with other settings ({'; '.join(wrong)}): use another folder, or remove it"
            )

    def pending(self) -> list[int]:
        """Shards that are missing."""
        return missing_shards(self.folder, self.manifest)

    def write(self, shard: int, samples: Sequence[SampleFeatures]) -> None:
        """Write a shard, under a temporary name that is then renamed.

        Args:
            samples: the samples `manifest.samples_of(shard)`.
        """
        numbers = self.manifest.samples_of(shard)
        assert len(samples) == len(numbers), (len(samples), numbers)
        tensors: dict[str, Tensor] = {}
        for i, sample in zip(numbers, samples, strict=True):
            tensors[f"{i}.tokens"] = sample.tokens.to("cpu", torch.int64).contiguous()
            tensors[f"{i}.turns"] = sample.turns.to("cpu", torch.int32).contiguous()
            self._add(tensors, f"{i}.captures", f"{i}.capture_scales", sample.captures)
            self._add(tensors, f"{i}.state", f"{i}.state_scale", sample.state)
            tensors[f"{i}.argmax"] = sample.argmax.to("cpu", torch.int32).contiguous()
        with replacing(shard_path(self.folder, shard), sum(t.nbytes for t in tensors.values())) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})

    def _add(self, tensors: dict[str, Tensor], name: str, scale_name: str, x_NC: Tensor) -> None:
        dtype = self.manifest.torch_dtype
        if dtype is _FP8:
            rows_NKH = x_NC.cpu().float().unflatten(1, (-1, self.manifest.hidden_size))
            scale_NK = (rows_NKH.abs().amax(-1) / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
            tensors[scale_name], x_NC = scale_NK, (rows_NKH / scale_NK[..., None]).flatten(1)
        tensors[name] = x_NC.to("cpu", dtype).contiguous()


class FeatureStore:
    """A complete store, read lazily. Also a dataset of its samples, so training needs no conversations.

    Args:
        expected: required values of `StoreManifest` fields, for example base_fingerprint and capture_layer_ids.

    Raises:
        UserError: no store, another manifest than expected, or missing shards.
    """

    def __init__(self, folder: str | Path, expected: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self.seq_length = self.manifest.seq_length
        wrong = differences(self.manifest, {"convention": CONVENTION, **(expected or {})})
        if wrong:
            raise UserError(
                f"the features in {self.folder} do not match this run ({'; '.join(wrong)}): extract them again"
            )
        missing = [shard_path(self.folder, s).name for s in missing_shards(self.folder, self.manifest)]
        if missing:
            raise UserError(
                f"{self.folder}: {len(missing)} of {self.manifest.num_shards} shards are missing "
                f"({', '.join(missing[:5])}): run the extraction again; it continues with the missing shards"
            )
        # Bounded: every open file is a memory mapping, of which a process may have about 65,000.
        self._open = lru_cache(maxsize=64)(self._open_shard)

    def __len__(self) -> int:
        return self.manifest.num_samples

    def _open_shard(self, shard: int) -> Any:
        return safe_open(shard_path(self.folder, shard), framework="pt")

    @cached_property
    def lengths(self) -> NDArray[Any]:
        """int32 [samples] number of tokens of each sample, from the headers of the files."""
        found = np.empty(len(self), dtype=np.int32)
        for shard in range(self.manifest.num_shards):
            path = shard_path(self.folder, shard)
            try:
                with safe_open(path, framework="pt") as file:
                    for i in self.manifest.samples_of(shard):
                        found[i] = file.get_slice(f"{i}.tokens").get_shape()[0]
            except (SafetensorError, OSError) as e:
                raise UserError(_damaged(path, e)) from e
        return found

    def _read(self, index: int, names: Sequence[str]) -> list[Tensor]:
        if not 0 <= index < len(self):
            raise UserError(f"{self.folder}: sample {index} was requested, but the store has 0..{len(self) - 1}")
        shard = index // self.manifest.samples_per_shard
        try:
            file = self._open(shard)
            return [file.get_tensor(f"{index}.{name}") for name in names]
        except (SafetensorError, OSError) as e:
            raise UserError(_damaged(shard_path(self.folder, shard), e)) from e

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` without its features."""
        tokens, turns = self._read(index, ("tokens", "turns"))
        return Sample(tokens, turns, f"{self.folder} sample {index}")

    def features_of(self, index: int) -> SampleFeatures:
        """Sample `index` with its features."""
        names = ["tokens", "turns", "captures", "state", "argmax"]
        if self.manifest.torch_dtype is not _FP8:
            return SampleFeatures(*self._read(index, names))
        tokens, turns, captures, state, argmax, *scales = self._read(index, [*names, "capture_scales", "state_scale"])
        captures, state = (self._unscaled(x, scale) for x, scale in zip((captures, state), scales, strict=True))
        return SampleFeatures(tokens, turns, captures, state, argmax)

    def _unscaled(self, x_NC: Tensor, scale_NK: Tensor) -> Tensor:
        rows_NKH = x_NC.float().unflatten(1, (-1, self.manifest.hidden_size))
        return (rows_NKH * scale_NK[..., None]).flatten(1).to(self.manifest.read_dtype)
