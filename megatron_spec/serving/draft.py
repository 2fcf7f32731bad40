"""How a server is to draft: with an exported draft, with a second model, by looking back, or with the base's own MTP.

Everything an engine needs is gathered here once; `trtllm.py`, `vllm.py` and `sglang.py` spell it. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_spec.config import UserError
from megatron_spec.runtime.files import read_json

Method = Literal["eagle3", "eagle", "medusa", "ngram", "draft_target", "mtp"]

_METHODS: tuple[tuple[str, Method], ...] = (
    ("Eagle3", "eagle3"), ("LlamaForCausalLMEagle", "eagle"), ("MedusaModel", "medusa"),
)  # fmt: skip
NAMES: dict[Method, str] = {
    "eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa", "ngram": "NGram", "draft_target": "DraftTarget",
    "mtp": "MTP",
}  # fmt: skip


@dataclass(frozen=True)
class Speculation:
    """How to draft.

    Attributes:
        method: kind of draft.
        max_draft_len: tokens drafted per step.
        model: folder of the draft (absolute, since servers start elsewhere) or of the second model; None without one.
        capture_layers: EAGLE-3: base layers whose outputs are read, from 0; None for the defaults every engine knows.
        max_matching_ngram_size: NGram: longest suffix that is looked up.
        relaxed: MTP: (relaxed_topk, relaxed_delta) of relaxed acceptance in a thinking phase; None verifies exactly.
        num_nextn_predict_layers: MTP: modules the base ships.
    """

    method: Method
    max_draft_len: int = 3
    model: str | None = None
    capture_layers: tuple[int, ...] | None = None
    max_matching_ngram_size: int = 2
    relaxed: tuple[int, float] | None = None
    num_nextn_predict_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("max_draft_len", "max_matching_ngram_size", "num_nextn_predict_layers"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} must be at least 1, found {getattr(self, name)}")
        if self.method == "draft_target" and not self.model:
            raise UserError("DraftTarget drafts with a second, smaller model: give --draft-model")

    def require(self, methods: tuple[Method, ...], engine: str) -> None:
        """Raise UserError unless the engine can draft so."""
        if self.method not in methods:
            known = ", ".join(NAMES[m] for m in methods)
            raise UserError(f"{engine} does not serve {NAMES[self.method]} drafts; it serves {known}")


def exported(folder: Path | str, max_draft_len: int = 3, place: Path | str | None = None) -> Speculation:
    """With the exported draft in `folder`, or in the 'draft' inside it.

    Args:
        place: where it will be served from, when that is not where it is now.

    Raises UserError when there is no draft that an engine serves, or it cannot draft that far.
    """
    path = Path(folder)
    if not (path / "config.json").is_file() and (path / "draft" / "config.json").is_file():
        path = path / "draft"
    config = read_json(path / "config.json")
    if config.get("speculators_model_type") == "eagle3":
        return Speculation("eagle3", max_draft_len, str(Path(place or path).resolve()))
    architectures = config.get("architectures") or []
    method = next((m for part, m in _METHODS for name in architectures if part in name), None)
    if method is None:
        raise UserError(
            f"{path}: found architectures {architectures}, expected an exported EAGLE-3, EAGLE-1 or Medusa draft, "
            "which engines serve"
        )
    heads = config.get("medusa_num_heads")
    if heads is not None and max_draft_len > heads:
        raise UserError(f"--max-draft-len {max_draft_len}, but the draft has {heads} Medusa heads")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if nested is None and top is not None:
        nested = [k - 1 for k in top]  # the top level counts 'state after k layers'
    captures = tuple(nested) if nested is not None else None
    return Speculation(method, max_draft_len, str(Path(place or path).resolve()), captures)
