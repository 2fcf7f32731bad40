"""Record the outputs of chosen layers in one forward pass: the residual stream after the layer, before any norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def record_outputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yields a list that holds, after the forward, the output [S, B, H] of each of `layers` in the order they ran."""
    recorded: list[Tensor] = []

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        """Keep the output of the layer."""
        # megatron-core's TransformerLayer returns (hidden, context).
        recorded.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
