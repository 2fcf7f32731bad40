"""Writer of safetensors files, one tensor at a time: names, dtypes and shapes are planned, values arrive in any order.

A file is laid out from its plan (header first, widest dtypes first for alignment), then every tensor is written at its
offset. Memory never holds more than one tensor. The folder around the files is published when all are complete.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_spec.export.common import VerificationError
from megatron_spec.runtime.distributed import together
from megatron_spec.runtime.files import require_space, write_json

Plan = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (dtype as named by torch, shape)."""

_CODES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def plan_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Plan entry of a tensor."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _size(entry: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = entry
    return torch.Size(shape).numel() * _itemsize(dtype)


class TensorFile:
    """A safetensors file, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(str(path), framework="pt")
        self.names = set(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, on the CPU."""
        return self._file.get_tensor(name)  # type: ignore[no-any-return]


class TensorFolder:
    """The safetensors files of a folder that match `pattern`, read tensor by tensor."""

    def __init__(self, folder: Path, pattern: str = "*.safetensors") -> None:
        self._files = {name: f for f in map(TensorFile, sorted(folder.glob(pattern))) for name in f.names}
        self.names = set(self._files)

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, on the CPU. Raises VerificationError when there is none of that name."""
        if name not in self._files:
            raise VerificationError(f"{name} is missing")
        return self._files[name].tensor(name)


class TensorWriter:
    """Writer of the planned tensors to `folder`: `NAME.safetensors`, or numbered shards with an index.

    Args:
        max_shard_bytes: maximum size of a file; None writes a single file.
        name: name of the files, without suffix.
    """

    def __init__(self, folder: Path, plan: Plan, name: str = "model", max_shard_bytes: int | None = None) -> None:
        self.plan = dict(plan)
        self.waiting = set(plan)
        self.place: dict[str, tuple[Path, int]] = {}
        groups = self._groups(max_shard_bytes)
        names = [f"{name}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        require_space(folder, sum(map(_size, self.plan.values())))
        if len(groups) == 1:
            names = [f"{name}.safetensors"]
        for group, file in zip(groups, names, strict=True):
            self._lay_out(folder / file, group)
        if len(groups) > 1:
            total = sum(map(_size, self.plan.values()))
            weight_map = {tensor: path.name for tensor, (path, _) in self.place.items()}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / f"{name}.safetensors.index.json", index)

    def _groups(self, limit: int | None) -> list[list[str]]:
        groups: list[list[str]] = [[]]
        size = 0
        for name, entry in self.plan.items():
            if limit is not None and groups[-1] and size + _size(entry) > limit:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += _size(entry)
        return groups

    def _lay_out(self, path: Path, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        starts = {}
        for name in sorted(names, key=lambda n: -_itemsize(self.plan[n][0])):
            dtype, shape = self.plan[name]
            starts[name], end = end, end + _size(self.plan[name])
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + end)
        self.place |= {name: (path, 8 + len(text) + start) for name, start in starts.items()}

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor. Raises VerificationError for a tensor that deviates from the plan."""
        if name not in self.waiting or plan_of(tensor) != self.plan[name]:
            planned = self.plan.get(name)
            raise VerificationError(f"{name} is {plan_of(tensor)}, planned {planned} (or it was added twice)")
        self.waiting.discard(name)
        path, start = self.place[name]
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with path.open("r+b") as f:
            f.seek(start)
            f.write(data.data)

    def close(self) -> None:
        """Raise VerificationError when a planned tensor was never added."""
        if self.waiting:
            raise VerificationError(f"never written: {', '.join(sorted(self.waiting)[:8])}")


def write_stream(tensors: Iterable[tuple[str, Tensor]], writer: TensorWriter | None) -> None:
    """Consume `tensors`, a collective over all ranks, with the writer of rank 0; its errors are raised on every rank.

    The iterator is exhausted even after an error, because the other ranks take part in its collectives.
    """
    error: Exception | None = None
    for name, tensor in tensors:
        if writer is None or error is not None:
            continue
        try:
            writer.add(name, tensor)
        except Exception as e:
            error = e

    def finish() -> None:
        """Close the file, or remove it after an error."""
        if error is not None:
            raise error
        if writer is not None:
            writer.close()

    together(finish)
