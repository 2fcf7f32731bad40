"""Tensors of the original that an exported base keeps although the loaded base has no such parameters.

These are a base's own prediction modules (DeepSeek-V3: the layers after the last one). Engines that serve them look for
them in the base's folder, so an export must include them. They stay in high precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from megatron_spec.checkpoint.huggingface import HuggingFaceWeights
from megatron_spec.config import BaseConfig
from megatron_spec.export.common import BaseLike, parse_dtype
from megatron_spec.export.native_mtp import dtype_of
from megatron_spec.export.stream import Plan, TensorFolder
from megatron_spec.families.rules import is_ignorable, prediction_layer


class Carried:
    """Tensors that an export copies from the original's files, one at a time.

    Args:
        trained: folder of an exported draft that is the base's own module after training; it replaces the original's.
    """

    def __init__(self, reference: BaseLike, trained: Path | None = None) -> None:
        self.config: BaseConfig = reference.config
        self._original = HuggingFaceWeights(Path(reference.path)) if reference.kind == "hf" else None
        self._trained = TensorFolder(trained) if trained is not None else None
        ours = self._trained.names if self._trained is not None else set()
        replaced = {self._layer(name) for name in ours}
        kept = {name for name in self._stored() if self._layer(name) not in {None, *replaced}}
        self.names = sorted(ours | kept)

    def _layer(self, name: str) -> int | None:
        return prediction_layer(name, self.config)

    def _stored(self) -> set[str]:
        return self._original.parameters if self._original is not None else set()

    @property
    def layers(self) -> list[int]:
        """Layer numbers of the prediction modules, which follow those of the base."""
        return sorted({layer for layer in map(self._layer, self.names) if layer is not None})

    def plan(self, dtype: str) -> Plan:
        """name -> (dtype, shape) in an export of this dtype."""
        return {name: (dtype_of(name, dtype), self._shape(name)) for name in self.names}

    def tensors(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in its file format."""
        for name in self.names:
            yield name, self._read(name).to("cpu", parse_dtype(dtype_of(name, dtype)), copy=True)

    def lost(self, exported: Iterable[str]) -> list[str]:
        """Tensors of the original missing in an export, except buffers and copies that nothing reads."""
        lacking = self._stored() - set(exported)
        return sorted(n for n in lacking if self._layer(n) is not None or not is_ignorable(n, self.config))

    def _shape(self, name: str) -> tuple[int, ...]:
        if self._trained is not None and name in self._trained.names:
            return tuple(self._trained.tensor(name).shape)
        assert self._original is not None
        return self._original.shape(name)

    def _read(self, name: str) -> Tensor:
        if self._trained is not None and name in self._trained.names:
            return self._trained.tensor(name)
        assert self._original is not None
        return self._original.read(name, 0, 0, self._shape(name)[0])
