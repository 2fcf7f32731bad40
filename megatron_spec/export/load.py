"""Builds a draft from an exported folder, under any tensor parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron_spec.config import EagleConfig, UserError
from megatron_spec.distributed import World
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export import layout
from megatron_spec.export.common import shard
from megatron_spec.fake_quant import dequantize, quantize
from megatron_spec.files import read_json


class ExportedScale(nn.Module):
    """Input quantiser of an exported linear: rounds to E4M3 under the scale of the file."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """x rounded, in its shape and dtype."""
        return dequantize(quantize(x, self.scale), self.scale, x.dtype)


class ExportedFolder:
    """An exported draft on disk: its configuration, its vocabulary, and its tensors one by one.

    Raises UserError when config.json or the file of tensors is missing or malformed.
    """

    def __init__(self, folder: Path | str, num_base_layers: int) -> None:
        self.folder = Path(folder)
        self.json: dict[str, Any] = read_json(self.folder / "config.json")
        self.config: EagleConfig = layout.read_config_json(self.json, num_base_layers)
        path = self.folder / layout.WEIGHTS
        if not path.is_file():
            raise UserError(f"{self.folder} holds no {layout.WEIGHTS}")
        self._file = safe_open(str(path), framework="pt")
        self.names = set(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is in the file, on the CPU."""
        return self._file.get_tensor(name)  # type: ignore[no-any-return]

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter in `dtype`; fp8 is multiplied by its scale."""
        tensor = self.tensor(name)
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantize(tensor, self.tensor(f"{name.removesuffix('.weight')}.weight_scale"), dtype)
        return tensor.to(dtype)

    def vocab(self) -> DraftVocab:
        """The draft vocabulary. Raises UserError when d2t and t2d are missing, contradict each other or the config."""
        V, D = self.config.vocab_size, self.config.draft_vocab_size
        if not {"d2t", "t2d"} & self.names:
            if D < V:
                raise UserError(f"{self.folder}: draft_vocab_size {D} < vocab_size {V}, but d2t and t2d are missing")
            return DraftVocab.full(V)
        if not {"d2t", "t2d"} <= self.names:
            raise UserError(f"{self.folder}: d2t and t2d come together, found only one of them")
        vocab = DraftVocab.from_tensors(self.tensor("d2t"), self.tensor("t2d"))
        if (len(vocab), vocab.vocab_size) != (D, V):
            raise UserError(
                f"{self.folder}: d2t maps {len(vocab)} of {vocab.vocab_size} tokens, config.json says {D} of {V}"
            )
        return vocab


def load_exported_draft(
    folder: Path | str, num_base_layers: int, world: World, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A draft with the weights of an exported folder; fp8 linears round their inputs as an engine does.

    Raises UserError on a missing tensor.
    """
    exported = ExportedFolder(folder, num_base_layers)
    draft = build_draft(exported.config, exported.vocab(), world, dtype)
    parameters = dict(draft.named_parameters())
    missing = sorted(parameters.keys() - exported.names)
    if missing:
        raise UserError(f"{folder}: missing {', '.join(missing[:8])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard(exported.weight(name, dtype), parameter, world.tp))
    for name, module in draft.named_modules():
        if f"{name}.input_scale" in exported.names:
            linear: Any = module
            linear.input_quantizer = ExportedScale(exported.tensor(f"{name}.input_scale").to(world.device))
    return draft
