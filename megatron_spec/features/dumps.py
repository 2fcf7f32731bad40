"""Features computed by other programs: one file per sample.

A .pt file (loaded with weights_only) or a .safetensors file with these tensors, each optionally with a leading
dimension of one:

    input_ids          integers [n]
    hidden_states      floats [n, H]   final state of the base
    aux_hidden_states  floats [n, C]   concatenated outputs of the captured layers
    loss_mask          0 or 1 [n]      optional; 1: the assistant wrote this token

Other entries (a conversation id, say) are ignored.

n tokens of a sample, H hidden, K captures, C = K * H.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_spec.config import UserError

SUFFIXES = (".pt", ".safetensors")
_WANTED = ("input_ids", "hidden_states", "aux_hidden_states")


@dataclass(frozen=True)
class Dump:
    """One sample: tokens int64 [n], turns int32 [n] (see `batch.Batch`), captures [n, C], state [n, H].

    Attributes:
        masked: the file has a loss_mask; without one, all tokens count as one turn.
    """

    tokens: Tensor
    turns: Tensor
    captures: Tensor
    state: Tensor
    masked: bool


def dump_files(folder: str | Path) -> list[Path]:
    """The dumps below a folder, by name. Raises UserError if there are none, or if two differ only in their suffix."""
    root = Path(folder)
    found = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise UserError(f"{folder}: found no {' or '.join(SUFFIXES)} file, expected one per sample")
    stems = [p.with_suffix("") for p in found]
    for stem, following in itertools.pairwise(stems):
        if stem == following:
            raise UserError(f"{stem} exists as .pt and as .safetensors: remove one of them")
    return found


def turns_of_mask(mask_N: Tensor) -> Tensor:
    """int32 [n]: 1, 2, ... in each run of supervised tokens, 0 elsewhere."""
    mask = mask_N.to(torch.int32)
    begins = torch.cat([mask[:1], (mask[1:] - mask[:-1]).clamp(min=0)])
    return (begins.cumsum(0) * mask).to(torch.int32)


def _entries(path: Path) -> dict[str, Any]:
    """Contents of the file by name; loading executes no code."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if name in (*_WANTED, "loss_mask")}  # noqa: SIM118
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as e:
        cause = str(e).strip().split("\n")[0][:200]
        raise UserError(
            f"{path}: cannot be read ({cause}): it is damaged, or has more than tensors and plain values"
        ) from e
    if not isinstance(found, dict):
        raise UserError(f"{path}: found a {type(found).__name__}, expected a dictionary with {', '.join(_WANTED)}")
    return found


def _tensor(path: Path, entries: dict[str, Any], name: str, dims: int, floating: bool) -> Tensor:
    x = entries.get(name)
    if not isinstance(x, Tensor):
        found = (
            f"a {type(x).__name__}" if x is not None else "only " + (", ".join(sorted(map(str, entries))) or "nothing")
        )
        raise UserError(f"{path}: expected a tensor {name}, found {found}")
    if x.dim() == dims + 1 and x.shape[0] == 1:
        x = x[0]
    if x.dim() != dims:
        raise UserError(f"{path}: {name} has shape {list(x.shape)}, expected {['[n]', '[n, width]'][dims - 1]}")
    if x.is_floating_point() != floating:
        raise UserError(f"{path}: {name} is {x.dtype}, expected {'floats' if floating else 'integers'}")
    return x.contiguous()


def read_dump(path: Path, hidden_size: int, capture_layer_ids: Sequence[int], vocab_size: int) -> Dump:
    """Read and check one sample. Raises UserError, naming the file, if it is invalid."""
    entries = _entries(path)
    tokens = _tensor(path, entries, "input_ids", 1, floating=False)
    state = _tensor(path, entries, "hidden_states", 2, floating=True)
    captures = _tensor(path, entries, "aux_hidden_states", 2, floating=True)
    mask = torch.ones_like(tokens)
    if entries.get("loss_mask") is not None:
        mask = _tensor(path, entries, "loss_mask", 1, floating=False)
    lengths = {"input_ids": len(tokens), "hidden_states": len(state), "aux_hidden_states": len(captures)}
    lengths["loss_mask"] = len(mask)
    if len(set(lengths.values())) > 1 or not len(tokens):
        raise UserError(f"{path}: expected equally many rows in every entry, at least one; found {lengths}")
    if state.shape[1] != hidden_size:
        raise UserError(
            f"{path}: hidden_states has width {state.shape[1]}, expected {hidden_size}, the base's hidden_size"
        )
    if captures.shape[1] != len(capture_layer_ids) * hidden_size:
        raise UserError(
            f"{path}: aux_hidden_states has width {captures.shape[1]} ({captures.shape[1] / hidden_size:g} captures), "
            f"expected {len(capture_layer_ids)} captures of width {hidden_size}, layers {list(capture_layer_ids)}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"{path}: input_ids range from {low} to {high}, expected 0 to {vocab_size - 1}, the base's vocabulary"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise UserError(f"{path}: loss_mask has {sorted(set(mask.tolist()))[:5]}, expected 0 and 1")
    for name, x in (("hidden_states", state), ("aux_hidden_states", captures)):
        if not bool(torch.isfinite(x).all()):
            raise UserError(f"{path}: {name} has values that are not finite")
    return Dump(tokens.long(), turns_of_mask(mask), captures, state, entries.get("loss_mask") is not None)
