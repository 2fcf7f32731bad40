"""Drafting method of a server: an exported draft, a second model, a lookup, or the base's own prediction module.

Collected here once for all engines; `trtllm.py`, `vllm.py` and `sglang.py` write their options. No torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_spec.config import UserError
from megatron_spec.export.check import kind_of, refusals
from megatron_spec.export.formats.options import PARALLEL_KEYS
from megatron_spec.export.formats.reading import refuse_checkpoint
from megatron_spec.export.tensor_files import read_entries
from megatron_spec.runtime.files import model_json
from megatron_spec.runtime.hub import is_hub_name, model_folder
from megatron_spec.runtime.provenance import trained_steps

log = logging.getLogger(__name__)

Engine = Literal["vllm", "sglang", "trtllm"]
Method = Literal["eagle3", "eagle", "medusa", "dflash", "dspark", "ngram", "sa", "draft_target", "pard", "mtp"]

_METHODS: dict[str, Method] = {
    "EAGLE-3": "eagle3", "EAGLE-1": "eagle", "Medusa": "medusa", "DFlash": "dflash", "DSpark": "dspark",
}  # fmt: skip
"""Kind of a folder (`export.check.kind_of`) -> method."""
_SPECULATORS: dict[str, Method] = {
    "eagle3": "eagle3", "peagle": "eagle3", "eagle": "eagle", "dflash": "dflash", "dspark": "dspark",
}  # fmt: skip
"""The same for `speculators_model_type`."""
NAMES: dict[Method, str] = {
    "eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa", "dflash": "DFlash", "dspark": "DSpark",
    "ngram": "NGram", "sa": "SA", "draft_target": "DraftTarget", "pard": "PARD", "mtp": "MTP",
}  # fmt: skip
ENGINES: dict[Engine, str] = {
    "vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM (PyTorch backend)",
}  # fmt: skip
_SECOND_MODEL = ("draft_target", "pard")


@dataclass(frozen=True)
class Speculation:
    """Drafting method and its options.

    Attributes:
        method: drafting method.
        max_draft_len: tokens drafted per step.
        model: folder of the draft (absolute, as servers start elsewhere) or of the second model; None without one.
        capture_layers: EAGLE-3: captured base layers, from 0; None for the engines' default.
        parallel: EAGLE-3: propose all tokens in one forward (P-EAGLE).
        max_matching_ngram_size: NGram: longest suffix to look up. SA: suffix length, -1 for the longest.
        is_public_pool, is_keep_all, is_use_oldest: NGram: share the pool, keep every match, propose the oldest one.
        enable_global_pool, global_pool_size: SA: also look up in other requests, and how many to keep.
        sa_threshold: beside EAGLE-3, MTP or PARD: a match of at least this length replaces the draft's tokens.
        relaxed: MTP: (relaxed_topk, relaxed_delta) of relaxed acceptance in a thinking phase; None verifies exactly.
        unserved: engine -> why it would not load the draft, or compute another one than was trained.
    """

    method: Method
    max_draft_len: int = 3
    model: str | None = None
    capture_layers: tuple[int, ...] | None = None
    parallel: bool = False
    max_matching_ngram_size: int | None = None
    is_public_pool: bool = True
    is_keep_all: bool = True
    is_use_oldest: bool = True
    enable_global_pool: bool = False
    global_pool_size: int | None = None
    sa_threshold: int | None = None
    relaxed: tuple[int, float] | None = None
    unserved: dict[Engine, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_draft_len", "global_pool_size", "sa_threshold"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
        size = self.max_matching_ngram_size
        if size is not None and size < 1 and not (self.method == "sa" and size == -1):
            raise UserError(f"--max-matching-ngram-size must be at least 1 (or -1, the longest, of SA), found {size}")
        if self.relaxed is not None and (self.relaxed[0] < 2 or self.relaxed[1] <= 0):  # else only the best is accepted
            raise UserError(
                f"--relaxed-topk {self.relaxed[0]} --relaxed-delta {self.relaxed[1]}: expected at least 2 and above 0"
            )
        if self.method in _SECOND_MODEL and not self.model:
            raise UserError(f"{NAMES[self.method]} drafts with a second, smaller model: give --draft-model")
        if self.global_pool_size is not None and not self.enable_global_pool:
            raise UserError("--global-pool-size needs --enable-global-pool")
        if self.sa_threshold is not None and self.method not in ("eagle3", "mtp", "pard"):
            raise UserError(f"--sa-threshold works with EAGLE-3, MTP and PARD, not with {NAMES[self.method]}")

    @property
    def ngram_size(self) -> int:
        """`max_matching_ngram_size`, or the default of the method."""
        return self.max_matching_ngram_size or (-1 if self.method == "sa" else 2)

    def require(self, methods: tuple[Method, ...], engine: Engine) -> None:
        """Raise UserError unless the engine supports this method."""
        if self.method not in methods:
            known = ", ".join(NAMES[m] for m in methods)
            raise UserError(f"{ENGINES[engine]} does not serve {NAMES[self.method]} drafts; it serves {known}")
        if engine in self.unserved:
            others = [ENGINES[e] for e in ENGINES if e not in self.unserved]
            instead = f"serve it with {' or '.join(others)}"
            if not others:
                instead = "no engine serves it as it is; tools/check_export.py says how to repair it"
            raise UserError(f"{ENGINES[engine]} does not serve this draft: {self.unserved[engine]}; {instead}")

    def require_plain(self, engine: str) -> None:
        """Raise UserError for options that only TensorRT-LLM has."""
        if self.sa_threshold is not None or self.relaxed is not None:
            raise UserError(f"--sa-threshold and --relaxed-topk are options of TensorRT-LLM, not of {engine}")


def exported(
    folder: Path | str, max_draft_len: int | None = None, place: Path | str | None = None,
    base: Path | str | None = None, **options: Any,
) -> Speculation:  # fmt: skip
    """Drafting with the exported draft in `folder` or `folder/draft`, or of that name on the hub.

    Args:
        max_draft_len: draft length (default: 3, or that of speculators' config.json; for DFlash and DSpark all tokens
            of a block).
        place: path it will be served from, if other than `folder`.
        base: folder of the target; without it, rules that depend on the target are skipped.
        options: further fields of `Speculation`.

    Raises UserError if no engine serves what the folder holds, or the draft is too short for max_draft_len.
    """
    path, named = model_folder(folder, weights=False), is_hub_name(folder)
    if not (path / "config.json").is_file() and (path / "draft" / "config.json").is_file():
        path = path / "draft"
    refuse_checkpoint(path)
    config = model_json(path)
    model = str(folder) if named else str(Path(place or path).resolve())  # an engine downloads it itself
    method = _method(path, config, named)
    length = _draft_len(method, config, max_draft_len)
    names, kind = config.get("architectures") or [], config.get("speculators_model_type")
    marked = any(part in name for part in ("PEagle", "Peagle") for name in names) or kind == "peagle"
    marked = marked or any(config.get(key) not in (None, False) for key in PARALLEL_KEYS)
    parallel = method == "eagle3" and marked
    most = trained_steps(path) if parallel else None
    if most is not None and (max_draft_len or 0) > most:
        raise UserError(f"--max-draft-len {length}, but this P-EAGLE draft was trained to propose {most} tokens")
    length = min(length, most or length)
    lost = refusals(folder if named else path, base)
    return Speculation(method, length, model, _captures(config), parallel, unserved=lost, **options)


def _method(path: Path, config: dict[str, Any], named: bool) -> Method:
    """Method of a draft. Raises UserError if no engine serves it by itself."""
    kind = kind_of(config, {})
    if kind not in _METHODS and not named:  # its tensors may tell
        kind = kind_of(config, read_entries(path))
    method = _METHODS.get(kind) or _SPECULATORS.get(config.get("speculators_model_type", ""))
    if method is None:
        raise UserError(
            f"{path}: found architectures {config.get('architectures') or []} ({kind}), expected an exported EAGLE-3, "
            "EAGLE-1, Medusa, DFlash or DSpark draft, which engines serve"
        )
    return method


def _draft_len(method: Method, config: dict[str, Any], asked: int | None) -> int:
    """Tokens drafted per step. Raises UserError beyond what the draft can propose."""
    heads, block = config.get("medusa_num_heads"), config.get("block_size")
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if heads is not None and asked is None:
        return min(3, heads)
    if heads is not None and asked > heads:
        raise UserError(f"--max-draft-len {asked}, but the draft has {heads} Medusa heads")
    if block is None or method not in ("dflash", "dspark"):
        return (proposals[0].get("speculative_tokens") or 3) if asked is None else asked
    longest = block - 1 if method == "dflash" else block  # DFlash's first slot is the known token
    if asked is not None and asked > longest:
        raise UserError(f"--max-draft-len {asked}, but a block of this draft proposes {longest} tokens")
    if asked is not None and asked < longest and not (config.get("dflash_config") or {}).get("causal"):
        log.warning(
            "--max-draft-len %d: engines then run shorter blocks than the %d slots of training, which changes the "
            "tokens: measure it, or leave it out", asked, block,
        )  # fmt: skip
    return longest if asked is None else asked


def _captures(config: dict[str, Any]) -> tuple[int, ...] | None:
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if nested is None and top is not None:
        nested = [k - 1 for k in top]  # the top level counts 'state after k layers'
    return tuple(nested) if nested is not None else None
