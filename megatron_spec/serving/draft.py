"""What a deployment file needs to know of an exported draft. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_spec.config import UserError
from megatron_spec.files import read_json


@dataclass(frozen=True)
class ServedDraft:
    """An exported draft.

    Attributes:
        path: its folder, absolute, since servers start elsewhere.
        method: 'eagle3', 'eagle' (EAGLE-1) or 'medusa', as vLLM calls it.
        num_heads: of Medusa: it drafts no further.
        capture_layers: base layers whose outputs it reads, from 0; None for the defaults every engine knows.
    """

    path: Path
    capture_layers: tuple[int, ...] | None
    method: str = "eagle3"
    num_heads: int | None = None


_METHODS = {"Eagle3": "eagle3", "LlamaForCausalLMEagle": "eagle", "MedusaModel": "medusa"}
_NAMES = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa"}


def read_draft(folder: Path | str, methods: tuple[str, ...] = ("eagle3",)) -> ServedDraft:
    """Look at an exported draft, or at a folder that holds one as 'draft'.

    Args:
        methods: kinds of draft that the engine loads.

    Raises UserError when there is none, or one that the engine does not load.
    """
    path = Path(folder)
    if not (path / "config.json").is_file() and (path / "draft" / "config.json").is_file():
        path = path / "draft"
    config = read_json(path / "config.json")
    architectures = config.get("architectures") or []
    method = next((m for part, m in _METHODS.items() for name in architectures if part in name), None)
    if method not in methods:
        wanted = " or ".join(_NAMES[m] for m in methods)
        raise UserError(
            f"{path}: found architectures {architectures}, expected an exported {wanted} draft, as this engine loads"
        )
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if nested is None and top is not None:
        nested = [k - 1 for k in top]  # the top level counts 'state after k layers'
    return ServedDraft(
        path.resolve(), tuple(nested) if nested is not None else None, method, config.get("medusa_num_heads")
    )


def check_draft_len(max_draft_len: int) -> None:
    """Raise UserError unless at least one token is drafted."""
    if max_draft_len < 1:
        raise UserError(f"--max-draft-len must be at least 1, found {max_draft_len}")
