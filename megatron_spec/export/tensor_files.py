"""Names, dtypes, shapes and raw bytes of the tensors in a folder; needs torch only for an old pytorch_model.bin.

A safetensors file is: 8 bytes little-endian header length N; N bytes of JSON {name: {dtype, shape, data_offsets}};
data.
"""

from __future__ import annotations

import array
import json
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.files import read_object

_HEADER_LIMIT = 100_000_000
_RANK = re.compile(r"rank\d+\.safetensors$")


@dataclass(frozen=True)
class Entry:
    """One tensor on disk. `dtype` as named by safetensors: BF16, F32, F8_E4M3, I64, BOOL, ..."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int
    name: str = ""
    """Name in the file."""
    tensor: Any = None
    """The tensor itself, if the file is a pickle."""

    def raw(self) -> bytes:
        """Its bytes."""
        if self.tensor is not None:
            import torch

            return bytes(self.tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        with self.path.open("rb") as f:
            f.seek(self.start)
            return f.read(self.stop - self.start)

    def integers(self) -> list[int]:
        """Values of an I64, I32 or BOOL tensor."""
        values = array.array({"I64": "q", "I32": "i", "BOOL": "b"}[self.dtype])
        values.frombytes(self.raw())
        if sys.byteorder == "big":
            values.byteswap()
        return list(values)

    def number(self) -> float:
        """Value of an F32 tensor of one element."""
        return float(struct.unpack("<f", self.raw())[0])


def _entry(path: Path, name: str, data: int, values: dict[str, Any]) -> Entry:
    start, stop = values["data_offsets"]
    return Entry(values["dtype"], tuple(values["shape"]), path, data + start, data + stop, name)


def _read_header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(_HEADER_LIMIT, size - 8):
            raise UserError(f"{path} is not a safetensors file (or is cut off): found a header of {length} bytes")
        try:
            header = json.loads(f.read(length))
            found = {name: _entry(path, name, 8 + length, v) for name, v in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path} is not a safetensors file: its header does not parse ({e})") from None
    if any(entry.stop > size for entry in found.values()):
        raise UserError(f"{path} is cut off: its header announces more data than the file holds; copy it again")
    end = max((entry.stop for entry in found.values()), default=8 + length)
    if end != size:
        raise UserError(f"{path} is damaged: its header announces {end} bytes, the file holds {size}; copy it again")
    return found


_TORCH_DTYPES = {
    "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.uint8": "U8",
    "torch.int64": "I64", "torch.int32": "I32", "torch.bool": "BOOL",
}  # fmt: skip


def _read_pickle(path: Path) -> dict[str, Entry]:
    """Entries of an older draft's pytorch_model.bin or medusa_lm_head.pt. Needs torch, which memory-maps the file."""
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        found = {}
        for name, tensor in tensors.items():
            dtype = _TORCH_DTYPES.get(str(tensor.dtype), str(tensor.dtype))
            found[name] = Entry(dtype, tuple(tensor.shape), path, 0, 0, name, tensor)
        return found
    except Exception as e:
        raise UserError(f"{path} does not load as a dictionary of tensors ({type(e).__name__}: {e})") from None


def _indexed(folder: Path, pattern: str) -> list[Path]:
    """Files listed in the index; [] without an index. Raises UserError when a listed file is missing."""
    index = folder / "model.safetensors.index.json"
    if pattern != "*.safetensors" or not index.is_file():
        return []
    names = read_object(index, {"weight_map": dict}).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise UserError(f"{index}: expected weight_map, from tensor names to file names; copy the folder again")
    missing = sorted({name for name in names.values() if not (folder / name).is_file()})
    if missing:
        raise UserError(f"{folder}: missing {', '.join(missing)}, named in {index.name}; copy the folder again")
    return [folder / name for name in sorted(set(names.values()))]


def read_entries(folder: Path, pattern: str = "*.safetensors") -> dict[str, Entry]:
    """Tensors by name of a folder's safetensors files (or, without any, of an old pickle).

    Raises UserError when there are no tensors or a file is damaged.
    """
    paths = _indexed(folder, pattern) or sorted(folder.glob(pattern))
    if not paths:
        pickles = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("medusa_lm_head.pt"))
        if pickles:
            return _merged({path: _read_pickle(path) for path in pickles})
    if not paths:
        others = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt")))
        hint = f"; found {', '.join(others)}: save its tensors as model.safetensors first" if others else ""
        raise UserError(f"{folder} holds no .safetensors file{hint}")
    return _merged({path: _read_header(path) for path in paths})


def _merged(files: dict[Path, dict[str, Entry]]) -> dict[str, Entry]:
    """The tensors of several files. Raises UserError when two files hold one of the same name.

    The ranks of a TensorRT-LLM checkpoint do; the last one counts.
    """
    found: dict[str, Entry] = {}
    for path, entries in files.items():
        twice = sorted(found.keys() & entries.keys())
        if twice and not _RANK.match(path.name):
            where = f"{found[twice[0]].path.name} and {path.name}"
            fix = "keep the file of the draft, or add the index that says which counts"
            raise UserError(f"{path.parent}: {twice[0]} ({len(twice)} in all) is in both {where}: {fix}")
        found |= entries
    return found
