"""Inputs of validate.py and generate.py: a draft checkpoint, an exported folder or a base; resolved, then loaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.placement import check_parallel
from megatron_spec.build import load_checkpoint
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.base_import import BaseReference
from megatron_spec.checkpoint.fingerprint import fingerprint
from megatron_spec.checkpoint.spec import CheckpointSpec, identity, locked, read_spec
from megatron_spec.commands.features import teacher_fingerprint
from megatron_spec.config import (
    LOCAL,
    BaseConfig,
    BaseLayers,
    DecodeConfig,
    DecodingType,
    DraftConfig,
    EagleConfig,
    ParallelConfig,
    TransformerImpl,
    UserError,
)
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.decoding.drafters.draft_target import check_tokenizers
from megatron_spec.decoding.drafters.user import find_drafter
from megatron_spec.decoding.options import (
    DECODING_TYPES,
    WITHOUT_DRAFT,
    check_confidence,
    check_lengths,
    check_options,
    check_tree_depth,
    check_undrafted,
    decoding_type,
    default_length,
)
from megatron_spec.drafts.contract import Draft
from megatron_spec.export.formats import Reading
from megatron_spec.export.load import inspect_exported_base, load_draft, load_exported_base, open_draft
from megatron_spec.generation.prompts import Dialogue, Prompt
from megatron_spec.planning import draft_modules, layouts
from megatron_spec.planning.paths import OF_DECODING, Paths, Setting
from megatron_spec.runtime import platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import sha256_of
from megatron_spec.runtime.provenance import trained_steps

log = logging.getLogger(__name__)


@dataclass
class Inputs:
    """Resolved inputs of a decoding run; no weights are read yet.

    Attributes:
        kind: decoding type; None: the base alone.
        folder: iteration folder of a draft checkpoint, or None.
        spec: its spec.json.
        base: folder given for the base, or None.
        base_config: architecture of the base.
        reference: the base, unless the checkpoint names it.
        captures: base layers that the draft captures.
        tokenizer, source: the tokenizer, and its folder.
        stop_ids: ids that end an answer, of tokenizer and base.
        decode: the complete configuration.
        reading: the draft of an exported folder.
        target: a second base, used as draft.
        draft_identity: the trained draft or second base by its content, wherever it lies; None without one.
    """

    kind: DecodingType | None
    folder: Path | None
    spec: CheckpointSpec | None
    base: str | None
    base_config: BaseConfig
    reference: BaseReference | None
    captures: Sequence[int]
    tokenizer: Any
    source: str
    stop_ids: set[int]
    decode: DecodeConfig
    reading: Reading | None = None
    target: BaseReference | None = None
    draft_identity: str | None = None

    @property
    def agreed(self) -> dict[str, Any]:
        """Findings, besides the settings, that must be equal on all ranks."""
        return {} if self.folder is None else {"load": identity(self.folder)}

    def check_prompts(self, prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any] | None) -> None:
        """Raise UserError for a prompt that the template refuses, or with token ids outside the base's vocabulary.

        Checks the first prompt, or all prompts if the tokenizer is larger than the base's vocabulary; without prompts
        the header of a user's turn, from which the base draws them.
        """
        known = self.base_config.vocab_size
        encoder = ChatEncoder(self.tokenizer, template_kwargs=template_kwargs, vocab_size=known)
        if not prompts:
            encoder.question_ids()
        for prompt in prompts if max(self.tokenizer.get_vocab().values()) >= known else prompts[:1]:
            Dialogue(prompt).ask(encoder, sys.maxsize)


def _thinking_tokens(decode: DecodeConfig, tokenizer: Any, vocab_size: int) -> DecodeConfig:
    """Thinking tokens, by default the tokenizer's. Raises UserError for one outside the base's vocabulary."""
    if not decode.use_relaxed_acceptance_for_thinking:
        return decode
    vocab, changes = tokenizer.get_vocab(), {}
    for name, word in (("begin_thinking_phase_token", "<think>"), ("end_thinking_phase_token", "</think>")):
        if getattr(decode, name) is None:
            changes[name] = vocab.get(word)
        token = changes.get(name, getattr(decode, name))
        if token is not None and not 0 <= token < vocab_size:
            raise UserError(
                f"--{name.replace('_', '-')} {token}: the base has the tokens 0 to {vocab_size - 1}; give the id that "
                "its tokenizer has for the beginning or the end of a thinking phase"
            )
    return decode.replace(**changes)


@contextmanager
def iteration_of(load: str | None) -> Iterator[Path | None]:
    """The iteration folder of `load`, locked while it is read; None without `load`."""
    if load is None:
        yield None
    else:
        with locked(load) as folder:
            yield folder


def _draft_of(
    spec: CheckpointSpec | None, base: str | None, decode: DecodeConfig
) -> tuple[DraftConfig | None, Reading | None, BaseReference | None]:
    """(configuration of the draft, the draft itself if it is exported, the base unless a checkpoint names it)."""
    exported = decode.speculative_model if decode.decoding_type not in WITHOUT_DRAFT else None
    if spec is not None:
        if exported is not None:
            raise UserError("--load and --speculative-model are two drafts: give one of them")
        return spec.draft, None, None
    if base is None:
        raise UserError(
            "give --load (a draft checkpoint), or --base with --speculative-model (an exported draft) or with "
            "--decoding-type NGram, DraftTarget or User"
        )
    reference = inspect_exported_base(base)
    if exported is None:
        return None, None, reference
    reading = open_draft(exported, reference)
    return reading.config, reading, reference


def resolve(
    folder: Path | None, base: str | None, decode: DecodeConfig, parallel: ParallelConfig, tokenizer: str | None,
    draft_needed: bool, lens: Sequence[int] | None = None,
) -> Inputs:  # fmt: skip
    """Resolve the inputs of a decoding run. Raises UserError for mismatches; no weights are read.

    Args:
        folder: iteration folder of a draft checkpoint.
        lens: draft lengths; default: that of `decode`.
        draft_needed: a missing draft is an error; else the base decodes alone.
    """
    spec = None if folder is None else read_spec(folder)
    config, reading, reference = _draft_of(spec, base, decode)
    algorithm = config.algorithm if config is not None else None
    kind = None
    if draft_needed or algorithm is not None or decode.decoding_type is not None:
        kind = decoding_type(algorithm, decode.decoding_type)
    known: Any = reference or (spec and spec.base)
    base_config: BaseConfig = known.config
    layouts.check("decode", parallel)
    check_parallel(base_config, parallel)
    if config is not None:
        layouts.check_draft_parallel(config, parallel)
    place = base or str(known.path)
    source = tokenizer or place
    opened = load_tokenizer(source)
    stop_ids = set(stop_token_ids(source, opened, place))
    decode = _thinking_tokens(decode, opened, base_config.vocab_size).replace(decoding_type=kind)
    if kind is None:
        check_undrafted(decode)
    else:
        check_options(decode, kind)
        draft = config if kind in DECODING_TYPES.values() else None
        parallel_drafting = isinstance(config, EagleConfig) and config.parallel_drafting
        trained = _trained_steps(folder, reading) if parallel_drafting else None
        check_confidence(decode, draft)
        positions = base_config.max_position_embeddings
        if lens is None and not decode.sets("max_draft_len"):
            decode = decode.replace(max_draft_len=default_length(decode, draft, trained, positions))
        if decode.max_draft_len == 0:
            raise UserError(
                "--max-draft-len 0 drafts nothing: give at least 1, or --base alone to decode without a draft"
            )
        check_lengths(decode, lens or (decode.max_draft_len,), draft, trained, positions=positions)
        check_tree_depth(decode, max(lens or (decode.max_draft_len,)))
    if kind == "User":
        find_drafter(decode.drafter or "")
    target = None
    if kind == "DraftTarget":
        assert decode.speculative_model is not None
        target = inspect_exported_base(decode.speculative_model)
        check_parallel(target.config, parallel)
        check_tokenizers(opened, load_tokenizer(decode.speculative_model), decode.speculative_model)
    reads = ("Eagle3", "Eagle", "MTP", "DFlash", "DSpark")
    captures = config.capture_layer_ids if config is not None and kind in reads else ()
    drafts = _identity(folder if kind not in WITHOUT_DRAFT else None, reading, target)
    return Inputs(
        kind, folder, spec, base, base_config, reference, captures, opened, source, stop_ids, decode, reading, target,
        drafts,
    )  # fmt: skip


def _identity(folder: Path | None, reading: Reading | None, target: BaseReference | None) -> str | None:
    """See `Inputs.draft_identity`."""
    if target is not None:
        return target.fingerprint
    if reading is not None:
        files = {entry.path for entry in reading.source.entries.values()}
        return fingerprint((reading.source.folder / "config.json").read_bytes(), files)
    return None if folder is None else f"sha256:{sha256_of(folder / 'run.json')}"


def _trained_steps(folder: Path | None, reading: Reading | None) -> int | None:
    """--ttt-steps of the training behind a checkpoint or an exported draft; None if unknown."""
    if folder is None:
        return trained_steps(reading.source.folder) if reading is not None else None
    found: int | None = sharded.read_extra(folder).get("objective", {}).get("ttt_steps")
    return found


@dataclass
class Models:
    """Base and draft on this rank.

    Attributes:
        draft: draft model, second base model, or None.
        fingerprint: identity of the base.
        fake_quantised: the inputs of the base's linears are rounded to fp8.
    """

    base: FrozenBase
    draft: Any
    fingerprint: str
    fake_quantised: bool


def check_draft_modules_of(inputs: Inputs, parallel: ParallelConfig, dtype: torch.dtype, impl: TransformerImpl) -> None:
    """Raise UserError for modules of a draft that cannot be built here, or without a draft that has modules."""
    if impl == "local":
        return
    config = inputs.reading.config if inputs.reading is not None else None
    if inputs.folder is not None and inputs.spec is not None and inputs.kind not in WITHOUT_DRAFT:
        config = inputs.spec.draft
    if config is None:
        raise UserError(f"{draft_modules.FLAG} does nothing here: no draft of this package decodes; leave it out")
    draft_modules.check_draft_modules(_setting(parallel, dtype, None, config, False, impl))


def _setting(
    parallel: ParallelConfig, dtype: torch.dtype, base: BaseConfig | None, draft: DraftConfig | None, plain: bool,
    impl: TransformerImpl = "local", layers: BaseLayers = LOCAL,
) -> Setting:  # fmt: skip
    """What determines the fast paths of one model."""
    name, engine = str(dtype).removeprefix("torch."), impl == "transformer_engine"
    machine = platform.machine()
    return Setting(
        machine, name, parallel, base, draft, layers=layers, plain=plain, draft_transformer_engine=engine
    )  # fmt: skip


def load_models(
    inputs: Inputs, world: World, dtype: torch.dtype, plain: bool, impl: TransformerImpl, layers: BaseLayers = LOCAL
) -> Models:
    """Load base and draft. Collective.

    Args:
        plain: no fast paths.
        impl: modules of the draft.
        layers: what the base's layers are built from; a second base, used as draft, has local ones.
    """

    def paths(base: BaseConfig | None = None, draft: DraftConfig | None = None, layers: BaseLayers = LOCAL) -> Paths:
        """Fast paths of one model."""
        own = impl if draft is not None else "local"
        return Paths(_setting(world.parallel, dtype, base, draft, plain, own, layers))

    if inputs.folder is not None:
        loaded = load_checkpoint(
            inputs.folder,
            world,
            spec=inputs.spec,
            dtype=dtype,
            base_path=inputs.base,
            layers=layers,
            plain=plain,
            draft_impl=impl,
        )
        found = Models(loaded.base, loaded.draft, teacher_fingerprint(loaded), bool(loaded.base_amax))
    else:
        assert inputs.reference is not None
        own = paths(inputs.reference.config, layers=layers)
        model = load_exported_base(inputs.reference, world, inputs.captures, dtype, layers, own)
        quantised = any(getattr(m, "input_quantizer", None) is not None for m in model.modules())
        found = Models(model, None, inputs.reference.fingerprint, quantised)
    if inputs.kind in ("NGram", "SA", "User"):
        found.draft = None
    elif inputs.target is not None:
        own = paths(inputs.target.config)
        found.draft = load_exported_base(inputs.target, world, dtype=dtype, paths=own)
    elif inputs.reading is not None:
        found.draft = load_draft(inputs.reading, world, dtype, paths(draft=inputs.reading.config))
    for line in path_lines(found, inputs.decode):
        log.info("fast path %s", line)
    return found


def path_lines(models: Models, decode: DecodeConfig) -> list[str]:
    """Which fast paths decoding takes, and why not the others."""
    base = models.base.paths if decode.cuda_graphs else models.base.paths.without("cuda_graphs")
    draft = models.draft.paths.lines(("draft_decode",)) if isinstance(models.draft, Draft) else []
    return [*base.lines(OF_DECODING), *draft]
