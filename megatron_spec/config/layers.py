"""Modules that the frozen base's layers are built from, and the fp8 of Transformer Engine. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_spec.config.core import Config, require
from megatron_spec.config.training import TransformerImpl

Fp8Format = Literal["hybrid", "e4m3"]
BaseRecipe = Literal["delayed", "tensorwise", "blockwise"]


@dataclass(frozen=True)
class BaseLayers(Config):
    """What the base's layers are built from."""

    transformer_impl: TransformerImpl = "local"
    """Modules that the base's layers are built from."""
    fp8_format: Fp8Format | None = None
    """With --transformer-impl transformer_engine: run the base's linears in Transformer Engine's fp8. The two formats
    are the same for a frozen base: hybrid differs in gradients."""
    fp8_recipe: BaseRecipe | None = None
    """With --fp8-format: a scale per tensor from the last micro-batches (delayed) or from the tensor itself
    (tensorwise), or a scale per block (blockwise) (default: delayed, as in Megatron-LM)."""

    def validate(self) -> None:
        """Raise UserError for flags without the one they belong to."""
        given = "--fp8-format" if self.fp8_format else "--fp8-recipe" if self.fp8_recipe else None
        require(
            given is None or self.engine,
            f"{given} is Transformer Engine's: add --transformer-impl transformer_engine, or use --base-fp8, the fp8 "
            "of this package for a base of local layers",
        )
        require(self.fp8_recipe is None or self.fp8_format is not None, "--fp8-recipe needs --fp8-format: give both")

    @property
    def engine(self) -> bool:
        """The layers are Transformer Engine's modules."""
        return self.transformer_impl == "transformer_engine"

    @property
    def recipe(self) -> BaseRecipe | None:
        """How values are scaled in fp8; None: no fp8."""
        return (self.fp8_recipe or "delayed") if self.fp8_format else None


LOCAL = BaseLayers()
ENGINE = BaseLayers("transformer_engine")
