"""Rules a folder of any origin must follow for engines to load it correctly. No torch.

A draft is read by `export.formats`, as in validate.py: what cannot be read there is an error here. Rules of the engines
are added: which engine misreads what, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from megatron_spec.config import BaseConfig, UserError
from megatron_spec.export import bases
from megatron_spec.export.base_rows import KEY, base_rows, changed, is_target
from megatron_spec.export.check import block, eagle3, others
from megatron_spec.export.check.finding import ALL, Engine, Finding, Folder
from megatron_spec.export.formats import DraftProblems, Reading, Source, open_source, read_draft
from megatron_spec.export.formats.block_forms import algorithm_of
from megatron_spec.export.formats.eagle import CAPTURE_KEY
from megatron_spec.export.formats.medusa import is_block
from megatron_spec.export.native_mtp import is_own_module
from megatron_spec.export.tensor_files import Entry
from megatron_spec.families import draft_kind
from megatron_spec.runtime.files import model_json, read_object
from megatron_spec.runtime.hub import is_hub_name, model_folder

__all__ = ["Engine", "Finding", "check_folder", "kind_of", "refusals"]

_CHECKS: dict[str, Callable[[Folder], Iterator[Finding]]] = {
    "EAGLE-3": eagle3.check,
    "EAGLE-1": others.check_eagle1,
    "DFlash": block.check,
    "DSpark": block.check,
    "Medusa": others.check_medusa,
    "MTP": others.check_mtp,
    "speculators": others.check_speculators,
    "TensorRT-LLM legacy": others.check_legacy,
    "target": others.check_model,
}
_LOADED_BY: dict[str, tuple[tuple[Engine, ...], str]] = {
    "EAGLE-1": (("vllm", "sglang"), "TensorRT-LLM's PyTorch backend takes EAGLE-3 only; its converters read this one"),
    "Medusa": (
        ("vllm",),
        "vLLM has Medusa up to 0.32.0, SGLang and TensorRT-LLM's PyTorch backend have none; export trtllm-legacy for "
        "the latter",
    ),
    "MTP": ((), "engines load MTP only as part of a base that ships it"),
    "speculators": (("vllm",), "the format of speculators is vLLM's; export hf for the others"),
    "TensorRT-LLM legacy": (("trtllm",), "this is a checkpoint of TensorRT-LLM up to 1.2.1; export hf for the others"),
}
"""Kind -> (engines that load it, what to do for other engines); every engine loads kinds that are not listed."""
_CONFIG_RULES: dict[str, Callable[[Folder], Iterator[Finding]]] = {
    "EAGLE-3": eagle3.served_by_some, "speculators": others.speculators_served, "DFlash": block.served,
    "DSpark": block.served,
}  # fmt: skip
"""Rules that need nothing but config.json."""
_DRAFTING: dict[str, bases.Drafting] = {
    "EAGLE-3": "eagle3", "EAGLE-1": "eagle1", "DFlash": "block", "DSpark": "block", "eagle3": "eagle3",
    "peagle": "eagle3", "eagle": "eagle1", "dflash": "block", "dspark": "block",
}  # fmt: skip
"""Kind of a folder, or its `speculators_model_type` -> what it takes of its base."""


def kind_of(config: dict[str, Any], tensors: dict[str, Entry]) -> str:
    """Kind of a folder, from its config.json or, failing that, its tensors."""
    names = " ".join(config.get("architectures") or [])
    if "architecture" in config and "mapping" in config:
        return "TensorRT-LLM legacy"
    if "speculators_model_type" in config:
        return "speculators"
    if (algorithm := algorithm_of(config)) is not None:
        return {"dflash": "DFlash", "dspark": "DSpark"}[algorithm]
    if kind := draft_kind(names):
        return kind
    if config.get("model_type") == "medusa" or any(map(is_block, tensors)):
        return "Medusa"
    if is_own_module(config) and "model.embed_tokens.weight" not in tensors and tensors:
        return "MTP"
    stems = {n.removeprefix("model.") for n in tensors}
    if "fc.weight" in stems:
        return "EAGLE-3" if any("hidden_norm" in n or n in ("d2t", "lm_head.weight") for n in stems) else "EAGLE-1"
    return "MTP" if any("eh_proj" in n for n in stems) else "target"


def _read(source: Source, kind: str, base: dict[str, Any] | None) -> tuple[list[Finding], Reading | None]:
    """Findings of the draft reader, which refuses what validate.py would refuse, with the same messages."""
    if kind in ("target", "TensorRT-LLM legacy"):
        return [], None
    config = _base_config(base)
    try:
        return [], read_draft(source, config)
    except DraftProblems as e:
        return [Finding(p.rule, p.found, p.fix) for p in e.problems], None
    except UserError as e:
        return [Finding("config", str(e), "correct config.json")], None


def _recorded_rows(path: Path) -> dict[str, str]:
    """`base_rows` of the base that the draft was trained with, if the export recorded them."""
    run = read_object(path / "run.json") if (path / "run.json").is_file() else {}
    recorded = (run.get("config") or {}).get(KEY)
    return recorded if isinstance(recorded, dict) else {}


def _same_base(recorded: dict[str, str], found: dict[str, str]) -> Iterator[Finding]:
    """The target's embedding and LM head must be those the draft was trained with."""
    if names := changed(recorded, found):
        yield Finding(
            "base", f"{' and '.join(names)} of the target are not those the draft was trained with: the target has "
            "been changed (rotated, finetuned), so its hidden states differ and no draft token will be accepted",
            "serve the target the draft was trained for, or finetune the draft on this one",
        )  # fmt: skip


def _base_config(base: dict[str, Any] | None) -> BaseConfig | None:
    """Sizes of the target that a draft must match; None when its config.json lacks them."""
    names = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_hidden_layers": "num_layers"}
    if base is None or not all(isinstance(base.get(name), int) for name in names):
        return None
    sizes: dict[str, Any] = {ours: base[theirs] for theirs, ours in names.items()}
    shape: dict[str, Any] = dict(intermediate_size=1, num_attention_heads=1, num_key_value_heads=1, head_dim=1)
    return BaseConfig(family="", max_position_embeddings=1, **shape, **sizes)


def _base_json(base: Path | str | None) -> dict[str, Any] | None:
    """config.json of the target, if it is given."""
    return model_json(model_folder(base, weights=False)) if base is not None else None


def _rules(kind: str, folder: Folder, unreadable: bool) -> Iterator[Finding]:
    """Rules of engines; for an unreadable folder, only those that can still be checked."""
    try:
        yield from _CHECKS[kind](folder)
    except (KeyError, TypeError, AttributeError, ValueError):
        if not unreadable:
            raise


def _other_copies(reading: Reading | None, target: dict[str, str]) -> Iterator[Finding]:
    """An embedding or LM head of the draft that engines replace by the target's."""
    if reading is None:
        return
    for stored, name in reading.copies.items():
        theirs = target.get(name, target.get("embed_tokens"))  # the LM head may be tied
        if is_target(reading.source.entries[stored], theirs) is False:
            yield Finding(
                "copies", f"{stored} is not the target's, which SGLang and TensorRT-LLM use instead, and vLLM for some "
                "drafts", "use the target that the draft was trained for",
            )  # fmt: skip


def _embedding_compared(reading: Reading | None, target: str | None) -> bool:
    """Settle whether the embedding in a draft's folder is its own; False if that cannot be told.

    Args:
        target: fingerprint of the target's.
    """
    if not isinstance(reading, Reading) or not getattr(reading.config, "own_embed_tokens", False):
        return False
    entry = reading.source.entries[reading.names["embed_tokens.weight"] or ""]
    found = is_target(entry, target)
    if found is not False:
        reading.without_embedding("the target's, or not known to be another one")
    return found is not None


def _of_kind(kind: str, engine: Engine | None) -> Iterator[Finding]:
    loaded_by, instead = _LOADED_BY.get(kind, (ALL, ""))
    lost = tuple(e for e in ALL if e not in loaded_by and engine in (None, e))
    if lost:
        yield Finding(
            "kind", f"this is a {kind} folder, not loaded by {', '.join(lost)}", instead, lost, engine is None
        )


def _with_base(kind: str, config: dict[str, Any], base: dict[str, Any] | None) -> Iterator[Finding]:
    """Engines that serve this base, but not with such a draft."""
    drafting = _DRAFTING.get(config.get("speculators_model_type") or kind)
    names = (base or {}).get("architectures")
    if drafting is None or not isinstance(names, list) or not names:
        return
    ids = (config.get("eagle_config") or {}).get(CAPTURE_KEY)
    for engine, why in bases.lost(names[0], drafting, ids).items():
        fix = "serve it with another engine, or train another kind of draft"
        yield Finding("served", f"{engine}: {why}", fix, (cast(Engine, engine),))


def refusals(path: Path | str, base: Path | str | None = None) -> dict[Engine, str]:
    """Engine -> what keeps it from loading a draft, or from computing it as trained.

    A draft on the hub, whose weights only the engine downloads, is judged by its config.json alone.

    Args:
        base: the target's folder; without it, rules that depend on the target are skipped.

    Raises UserError if the draft cannot be read at all.
    """
    if is_hub_name(path):
        config = read_object(model_folder(path, weights=False) / "config.json")
        kind, folder = kind_of(config, {}), Folder(Path(path), config, {})
        findings = [*_CONFIG_RULES[kind](folder)] if kind in _CONFIG_RULES else []
        findings += _of_kind(kind, None)
        findings += _with_base(kind, config, _base_json(base))
    else:
        findings = check_folder(path, base=base)
    lost: dict[Engine, list[str]] = {}
    for finding in findings:
        for engine in finding.engines if finding.rule == "kind" or not finding.warning else ():
            lost.setdefault(engine, []).append(finding.found)
    return {engine: "; ".join(found[:3]) for engine, found in lost.items()}


def check_folder(path: Path | str, engine: Engine | None = None, base: Path | str | None = None) -> list[Finding]:
    """All findings about a folder, for one engine or all of them; errors first.

    Args:
        base: the target's folder; without it, rules that depend on the target are skipped.

    Raises:
        UserError: the folder cannot be read at all.
    """
    path = model_folder(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    base_json = _base_json(base)
    source = open_source(path)
    kind = kind_of(source.raw, source.entries)
    problems, reading = _read(source, kind, base_json)
    rows = {} if base is None else base_rows(model_folder(base, weights=False))
    recorded = _recorded_rows(path)
    compared = _embedding_compared(reading, (rows or recorded).get("embed_tokens"))
    problems += _other_copies(reading, rows or recorded)
    folder = Folder(path, read_object(path / "config.json"), source.entries, base_json, reading, compared)
    if kind != "target":
        problems += list(_same_base(recorded, rows))
    found = [*_rules(kind, folder, bool(problems)), *_with_base(kind, folder.config, base_json)]
    findings = problems + [f for f in found if engine is None or engine in f.engines]
    return sorted([*findings, *_of_kind(kind, engine)], key=lambda f: f.warning)
