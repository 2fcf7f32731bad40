"""Whether a draft can be built from Transformer Engine's modules, and trained in its fp8. No torch here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from megatron_spec.config import DraftConfig, Fp8Recipe, ParallelConfig, UserError
from megatron_spec.config.structure import draft_tensors, share
from megatron_spec.planning.setting import Setting

FLAG = "--draft-transformer-impl transformer_engine"


@dataclass(frozen=True)
class Recipe:
    """One of Transformer Engine's recipes.

    Attributes:
        name: its class in `transformer_engine.common.recipe`.
        capability: least compute capability of a GPU, and `gpu`, its name.
        check: function of `transformer_engine.pytorch` that knows more about the machine.
        rows: number of rows of a product is padded to a multiple of this.
        width: inputs and outputs of a linear must be multiples of this.
    """

    name: str
    capability: tuple[int, int]
    gpu: str
    check: str
    rows: int
    width: int


RECIPES: dict[Fp8Recipe, Recipe] = {
    "delayed": Recipe("DelayedScaling", (8, 9), "Ada", "is_fp8_available", 16, 16),
    "tensorwise": Recipe("Float8CurrentScaling", (8, 9), "Ada", "is_fp8_available", 16, 16),
    "blockwise": Recipe("Float8BlockScaling", (9, 0), "Hopper", "is_fp8_block_scaling_available", 128, 128),
    "mxfp8": Recipe("MXFP8BlockScaling", (10, 0), "Blackwell", "is_mxfp8_available", 32, 32),
    "nvfp4": Recipe("NVFP4BlockScaling", (10, 0), "Blackwell", "is_nvfp4_available", 32, 32),
}


def fp8_weights(config: DraftConfig, ranks: int) -> dict[str, tuple[int, int]]:
    """Shapes on a rank of the weights that compute in fp8: linears of decoder layers and of Medusa's blocks."""
    found = {}
    for name, spec in draft_tensors(config).items():
        inside = any(part in name for part in (".self_attn.", ".mlp.", ".blocks.")) and ".mlp.gate." not in name
        if inside and len(spec.shape) == 2:
            sizes = [len(share(n, ranks, 0)) if dim == spec.split else n for dim, n in enumerate(spec.shape)]
            found[name] = (sizes[0], sizes[1])
    return found


def check_draft_modules(setting: Setting, planned: bool = False) -> None:
    """Raise UserError where the draft's modules or its fp8 recipe cannot run.

    Args:
        planned: for another machine; what is installed here does not matter.
    """
    recipe = setting.draft_fp8_recipe
    if not setting.draft_transformer_engine:
        if recipe is not None:
            raise UserError(
                f"--draft-fp8-recipe {recipe} is a recipe of Transformer Engine: add {FLAG}, or use --draft-fp8"
            )
        return
    if not planned and importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            f"{FLAG}: Transformer Engine is not installed (pip install 'megatron-spec[te]'); use "
            "--draft-transformer-impl local"
        )
    if not setting.machine.gpu:
        raise UserError(f"{FLAG} needs a GPU; use --draft-transformer-impl local")
    if setting.dtype == "float64":
        raise UserError(f"{FLAG} does not compute in float64; use --draft-transformer-impl local")
    if recipe is not None:
        _check_recipe(recipe, setting)


def _check_recipe(name: Fp8Recipe, setting: Setting) -> None:
    recipe, flag = RECIPES[name], f"--draft-fp8-recipe {name}"
    if setting.dtype != "bfloat16":
        raise UserError(f"{flag}: weights are in {setting.dtype}, not in bf16; add --bf16")
    if setting.machine.capability < recipe.capability:
        major, minor = setting.machine.capability
        least = ".".join(map(str, recipe.capability))
        others = [n for n, r in RECIPES.items() if r.capability <= setting.machine.capability]
        raise UserError(
            f"{flag} needs a GPU of compute capability {least} ({recipe.gpu}) or newer, found {major}.{minor}; use "
            f"{' or '.join(others) or 'none: this GPU has no fp8'}"
        )
    if setting.quant is not None and setting.quant.draft != "none":
        raise UserError(f"{flag}: the draft is fake-quantised, and would be rounded twice; leave the recipe out")
    if setting.draft is not None:
        _check_widths(flag, recipe, setting.draft, setting.parallel)


def _check_widths(flag: str, recipe: Recipe, config: DraftConfig, parallel: ParallelConfig) -> None:
    for name, sizes in fp8_weights(config, parallel.tensor_model_parallel_size).items():
        if any(size % recipe.width for size in sizes):
            raise UserError(
                f"{flag}: {name} has the shape {list(sizes)} on a rank, not multiples of {recipe.width}; use another "
                "recipe, or fewer tensor parallel ranks"
            )
