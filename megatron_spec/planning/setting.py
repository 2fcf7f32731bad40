"""What decides the fast paths of a run, and the reasons that several paths share. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_spec.config import (
    LOCAL,
    BaseConfig,
    BaseLayers,
    DraftConfig,
    Fp8Recipe,
    ObjectiveConfig,
    OptimizerImpl,
    ParallelConfig,
    QuantConfig,
)
from megatron_spec.config.machine import Machine


@dataclass(frozen=True)
class Setting:
    """Everything that determines the fast paths of a run."""

    machine: Machine = field(default_factory=Machine)
    dtype: str = "float32"
    """Data type of base and draft."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    base: BaseConfig | None = None
    """None: the base's layers do not run (features come from disk)."""
    draft: DraftConfig | None = None
    objective: ObjectiveConfig | None = None
    """None: unknown yet; `Paths.under` adds it."""
    quant: QuantConfig | None = None
    """Active fake quantisation."""
    layers: BaseLayers = LOCAL
    """What the base's layers are built from."""
    rows: int = 0
    """Rows of a micro-batch (its size times its length); 0: unknown yet."""
    wanted: tuple[str, ...] = ()
    """Opt-in paths that were requested."""
    off: tuple[str, ...] = ()
    """Paths turned off for comparison."""
    plain: bool = False
    """No fast paths."""
    draft_transformer_engine: bool = False
    """The draft's linears and norms are Transformer Engine's modules."""
    draft_fp8_recipe: Fp8Recipe | None = None
    """Transformer Engine's recipe for the draft's linears in training."""
    optimizer_impl: OptimizerImpl = "auto"
    """Whose optimizer was asked for."""


Reasons = dict[str, bool]
"""{reason why a path cannot run: whether it applies}."""


def half_kernels(s: Setting) -> Reasons:
    """Of kernels that take half precision alone."""
    real = s.machine.kernels != "plain"
    return {
        "there is no GPU": real and not s.machine.gpu,
        "Triton is missing": s.machine.kernels == "none",
        f"weights are in {s.dtype}, not in half precision (--bf16)": real and s.dtype not in ("bfloat16", "float16"),
    }


def wide_kernels(s: Setting) -> Reasons:
    """Of kernels that take fp32, too."""
    return {
        "there is no GPU": s.machine.kernels != "plain" and not s.machine.gpu,
        "Triton is missing": s.machine.kernels == "none",
        "weights are in float64": s.machine.kernels != "plain" and s.dtype == "float64",
    }


def fp8_products(s: Setting) -> Reasons:
    """Of products in real fp8."""
    real = s.machine.kernels != "plain"
    return {
        f"weights are in {s.dtype}, not in bf16 (--bf16)": real and s.dtype != "bfloat16",
        "the GPU has no fp8 tensor cores (compute capability 9.0, Hopper, or newer)": real and not s.machine.fp8,
    }


def product_epilogues(s: Setting) -> Reasons:
    """Of products of many rows that compute what follows them."""
    real = s.machine.kernels == "triton"
    return {
        **half_kernels(s),
        "the GPU is not of compute capability 9.0 (Hopper)": real and s.machine.capability != (9, 0),
        "Triton is older than 3.6": real and not s.machine.tile_products,
    }


def draft_engine(s: Setting) -> Reasons:
    """Of paths that need the draft's own modules."""
    return {"--draft-transformer-impl transformer_engine builds the draft": s.draft_transformer_engine}
