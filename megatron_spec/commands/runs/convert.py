"""Options of convert_model.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_spec.commands.runs.common import Layers, Parallel, Precision, ScriptRun
from megatron_spec.config import LARGEST_SEED, EagleAlgorithm, UserError, flag_name, option


@dataclass(frozen=True, kw_only=True)
class DraftRequest(ScriptRun):
    """The draft that convert_model.py creates; None for flags that were not given."""

    algorithm: Literal["eagle", "medusa", "dflash", "dspark"] = option("eagle", flag="export-algorithm", once=True)
    """Kind of draft."""
    eagle_algorithm: EagleAlgorithm | None = option(None, flag="export-eagle-algorithm", once=True)
    """EAGLE variant; eagle-mtp is multi-token prediction (default: eagle3)."""
    eagle_config: str | None = option(None, "JSON")
    """eagle: file with overrides of the draft's architecture."""
    draft_vocab: str | None = option(None, "DIR")
    """eagle, dflash, dspark: calibrated draft vocabulary, from tools/calibrate_draft_vocab.py (default: all tokens)."""
    num_medusa_heads: int | None = option(None, "N", flag="export-num-medusa-heads")
    """Medusa heads (default: 4)."""
    num_medusa_layers: int | None = option(None, "N", flag="export-num-medusa-layers")
    """Blocks per Medusa head (default: 1)."""
    share_base_head: bool | None = option(None, flag="medusa-share-base-head")
    """Use the base's frozen LM head after the Medusa blocks instead of a trained head each."""
    mtp_from_base: bool | None = None
    """eagle-mtp: load the base's own prediction module (DeepSeek-V3) instead of creating a new one."""

    draft_config: str | None = option(None, "JSON")
    """dflash, dspark: file with overrides of the draft's architecture (mask_token_id, block_size, ...)."""
    draft: str | None = option(None, "FOLDER")
    """Start from the draft in FOLDER, in any format that check_export.py reads, with its own vocabulary."""

    def validate(self) -> None:
        """Raise UserError for flags of another kind of draft."""
        eagle = ("eagle_algorithm", "eagle_config", "mtp_from_base")
        medusa = ("num_medusa_heads", "num_medusa_layers", "share_base_head")
        block, both = ("draft_config",), ("draft_vocab",)
        given = self._given((*eagle, *both, *medusa, *block)) if self.draft is not None else []
        if given:
            raise UserError(f"--draft takes the draft from its folder unchanged: leave {', '.join(given)} out")
        owners = {"eagle": eagle, "medusa": medusa, "dflash or dspark": block}
        owners["eagle, dflash or dspark"] = both
        for owner, names in owners.items():
            given = [] if self.algorithm in owner else self._given(names)
            if given:
                raise UserError(
                    f"--export-algorithm {self.algorithm} and {', '.join(given)} contradict each other: "
                    f"{'they belong' if len(given) > 1 else 'it belongs'} to --export-algorithm {owner}"
                )
        if self.mtp_from_base and self.eagle_algorithm != "eagle-mtp":
            raise UserError(
                "--mtp-from-base loads the base's own prediction module: add --export-eagle-algorithm eagle-mtp"
            )
        taken = self._given(("eagle_config", "draft_vocab")) if self.mtp_from_base else []
        if taken:
            raise UserError(f"--mtp-from-base takes the base's module unchanged: leave {', '.join(taken)} out")

    def _given(self, names: tuple[str, ...]) -> list[str]:
        fields = self.__dataclass_fields__
        return [f"--{flag_name(fields[name])}" for name in names if getattr(self, name) is not None]


@dataclass(frozen=True)
class ConvertRun(Parallel, Precision, Layers, DraftRequest):
    """convert_model.py: make a draft for a base."""

    load: str = option(metavar="BASE")
    """Base: Hugging Face folder, name on the hub, or Megatron checkpoint."""
    save: str = option(metavar="DIR")
    """New or empty folder for the draft checkpoint."""
    seed: int = option(1234, least=0, most=LARGEST_SEED)
    """Seed of the draft's initial values."""

    def validate(self) -> None:
        """Raise UserError for flags that contradict one another."""
        super().validate()
        fixed = "--mtp-from-base" if self.mtp_from_base else "--draft" if self.draft is not None else None
        if fixed is None and self.algorithm == "medusa":
            fixed = "--export-algorithm medusa"  # heads begin as the base's LM head
        if fixed is not None and self.sets("seed"):
            raise UserError(f"--seed does nothing with {fixed}, which draws no weights: leave it out")
