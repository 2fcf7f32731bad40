"""Verification of an exported draft: read it back and compare it with the draft in memory.

Most engines silently load a draft with a missing norm, head or vocabulary map; the only symptom is low acceptance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch, Features
from megatron_spec.config import BaseConfig, EagleConfig, UserError
from megatron_spec.config.structure import layer_names
from megatron_spec.drafts.contract import BaseEnds, shift
from megatron_spec.drafts.dflash import DFlashDraft
from megatron_spec.drafts.dspark import DSparkDraft
from megatron_spec.drafts.peagle import PEagleDraft
from megatron_spec.drafts.recurrent import SharedHeadDraft
from megatron_spec.export import layout
from megatron_spec.export.common import VerificationError, parameters_by_file_name, parse_dtype, shard
from megatron_spec.export.formats import read_draft
from megatron_spec.export.load import StoredTensors, load_exported_draft
from megatron_spec.export.native_mtp import dtype_of
from megatron_spec.ops.block_attention import BlockLayout, block_attention
from megatron_spec.ops.visibility import Visibility
from megatron_spec.quantization.attach import quantised_linears
from megatron_spec.quantization.rounding import scale_of
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.files import read_object

STARTING_POINT = {"initializer_range", "init_from_base_layer", "init_attention", "frozen_head", "fc_init"}
_NOT_EXPORTED = {*STARTING_POINT, "max_position_embeddings"}
"""Fields of EagleConfig that are not compared: those of training, and one that may be raised to the base's."""


_WRITTEN = ("rope_theta", "head_dim", "draft_vocab_size")
"""Keys for which engines have defaults of their own when they are missing."""


class ExportedFolder:
    """A folder written by this package, read by the common reader of drafts.

    Raises UserError when it cannot be read completely as a draft.
    """

    def __init__(self, folder: Path, base: BaseConfig, trained: EagleConfig) -> None:
        self.folder = folder
        self.json: dict[str, Any] = read_object(folder / "config.json")
        self.reading = read_draft(folder, base)
        found = self.reading.config
        if found.own_embed_tokens and not trained.own_embed_tokens:
            self.reading.without_embedding("the target's embedding, on request")
        self.config: EagleConfig = self.reading.config  # type: ignore[assignment]
        self.tensors = StoredTensors(self.reading)
        self.names = set(self.reading.source.entries)

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, on the CPU."""
        return self.tensors.stored(name)

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter in `dtype`; fp8 and nvfp4 are dequantised."""
        return self.tensors.weight(name, dtype)


def verify_draft(
    folder: Path | str,
    draft: nn.Module,
    base: BaseConfig,
    world: World,
    *,
    dtype: str = "bfloat16",
    features: Features | None = None,
    ends: BaseEnds | None = None,
) -> None:
    """Compare an exported folder with `draft`: names, shapes, dtypes, vocabulary, scales, config, values, logits.

    Collective over all ranks. Every rank checks its own shard; ranks outside the draft's first replica only check the
    files. Without `features`, the base in `ends` computes captures of random tokens; without it, captures are random.

    Raises:
        VerificationError: with all differences.
    """
    if features is None and isinstance(ends, FrozenBase):
        features = own_features(ends)
    together(lambda: _check_folder(folder, draft, base, world, dtype))

    def logits() -> None:
        """Compare logits on the ranks of the first replica."""
        if world.draft_dp.rank() == 0:
            check_logits(Path(folder), draft, base, world, parse_dtype(dtype), features, ends)

    together(logits)


def _check_folder(folder: Path | str, draft: nn.Module, base: BaseConfig, world: World, dtype: str) -> None:
    try:
        exported = ExportedFolder(Path(folder), base, draft.config)  # type: ignore[arg-type]
        problems = check_config(exported, draft.config, base)  # type: ignore[arg-type]
        problems += check_tensors(exported, dtype, set(quantised_linears(draft)), form_of(draft))
        problems = problems or _check_vocab(exported, draft)
    except UserError as e:
        raise VerificationError(f"{folder}: {e}") from e
    if not problems and world.draft_dp.rank() == 0:
        problems = check_values(exported, draft, world, parse_dtype(dtype))
    if problems:
        raise VerificationError(f"{folder} differs from the draft in memory: " + "; ".join(problems[:12]))


def form_of(draft: nn.Module) -> str:
    """'fp8', or 'nvfp4' for a draft with only weights rounded."""
    forms = {linear.weight_quantizer.form for linear in quantised_linears(draft).values()}
    assert len(forms) <= 1, forms
    return str(next(iter(forms), "fp8"))


def check_config(exported: ExportedFolder, trained: EagleConfig, base: BaseConfig) -> list[str]:
    """Differences between config.json and the trained configuration."""
    problems = [
        f"config.json gives {f.name} {getattr(exported.config, f.name)!r}, trained with {getattr(trained, f.name)!r}"
        for f in dataclasses.fields(trained)
        if f.name not in _NOT_EXPORTED and getattr(exported.config, f.name) != getattr(trained, f.name)
    ]
    if exported.config.max_position_embeddings < base.max_position_embeddings:
        problems.append(
            f"max_position_embeddings {exported.config.max_position_embeddings} is less than the base's "
            f"{base.max_position_embeddings}"
        )
    lacking = [k for k in _WRITTEN if k not in exported.json and not trained.of_base]
    problems += [f"config.json: missing {', '.join(lacking)}"] if lacking else []
    if nulls := [k for k, v in exported.json.items() if v is None]:
        problems.append(f"config.json holds null for {', '.join(nulls)}")
    return problems


def check_tensors(exported: ExportedFolder, dtype: str, fp8: set[str], form: str = "fp8") -> list[str]:
    """Names, shapes and dtypes that differ from the format; unusable scales."""
    embeddings = bool(layout.end_shapes(exported.config).keys() & exported.names)
    expected = layout.expected_tensors(exported.config, dtype, fp8, embeddings, form)
    problems = [f"missing {n}" for n in sorted(expected.keys() - exported.names)]
    problems += [f"unexpected {n}" for n in sorted(exported.names - expected.keys())]
    for name in sorted(expected.keys() & exported.names):
        tensor = exported.tensor(name)
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != expected[name]:
            kind, shape = expected[name]
            problems.append(f"{name} is {found[0]} {list(found[1])}, expected {kind} {list(shape)}")
        elif name.endswith(("_scale", "_scale_2")) and tensor.numel() == 1 and not 0 < float(tensor) < float("inf"):
            problems.append(f"{name} is {float(tensor)}")
        elif tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            problems.append(f"{name} holds values that are not finite")
    return problems or _check_metadata(exported, fp8) + _check_shared_scales(exported, fp8)


def _check_metadata(exported: ExportedFolder, fp8: set[str]) -> list[str]:
    sidecar = exported.folder / "hf_quant_config.json"
    inside = exported.json.get("quantization_config")
    if not fp8:
        return ["fp8 metadata with a draft that is not fp8"] if inside or sidecar.exists() else []
    if not inside or not sidecar.is_file():
        return ["fp8 tensors without hf_quant_config.json and quantization_config"]
    outside = read_object(sidecar)["quantization"]
    if outside["quant_algo"] != inside["quant_algo"] or outside["exclude_modules"] != inside["ignore"]:
        return ["hf_quant_config.json and quantization_config in config.json disagree"]
    return []


def _check_shared_scales(exported: ExportedFolder, fp8: set[str]) -> list[str]:
    problems = []
    for layer in layer_names(exported.config):
        for group in layout.SHARED_SCALE:
            members = [f"{layer}.{name}" for name in group if f"{layer}.{name}" in fp8]
            for kind in ("weight_scale", "input_scale", "weight_scale_2"):
                found = [exported.tensor(f"{m}.{kind}") for m in members if f"{m}.{kind}" in exported.names]
                if len({float(scale) for scale in found if scale.numel() == 1}) > 1:
                    problems.append(f"{kind} differs between {', '.join(members)}, which engines fuse")
    return problems


def _check_vocab(exported: ExportedFolder, draft: Any) -> list[str]:
    same = exported.tensors.vocab == draft.vocab  # the reader checked that ids are distinct and in range
    return [] if same else ["d2t lists different tokens than the draft was trained with"]


def check_values(exported: ExportedFolder, draft: nn.Module, world: World, dtype: torch.dtype) -> list[str]:
    """Parameters of this rank that differ in any bit from the file."""
    linears, problems = quantised_linears(draft), []
    for name, parameter in parameters_by_file_name(draft):
        linear = linears.get(name.removesuffix(".weight"))  # biases stay in high precision
        if linear is None:
            kept = dtype_of(name, "") == "float32"
            expected = parameter.detach() if kept else parameter.detach().to(dtype)
            found = exported.tensor(name)
        else:
            expected = linear.weight_quantizer.rounded(parameter)
            found = exported.weight(name, parameter.dtype)
        if not torch.equal(shard(found, parameter, world.tp), expected.cpu()):
            problems.append(f"{name} differs from the draft in memory")
    for name in layout.zero_shapes(exported.config):
        if exported.tensor(name).any():
            problems.append(f"{name} is not zero")
    return problems + _check_scale_values(exported, linears)


def _check_scale_values(exported: ExportedFolder, linears: dict[str, Any]) -> list[str]:
    return [
        f"{name}.{kind}_scale differs from the draft in memory"
        for name, module in linears.items()
        for kind in ("weight", "input")
        if module.weight_quantizer.form == "fp8"  # the scales of nvfp4 are compared with its values
        and not torch.equal(
            exported.tensor(f"{name}.{kind}_scale"), scale_of(getattr(module, f"{kind}_quantizer").amax).cpu()
        )
    ]


@contextmanager
def _rounded(draft: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round the draft's parameters that are not exported as fp8 to `dtype` inside the block."""
    quantised = {id(linear.weight) for linear in quantised_linears(draft).values()}
    kept = {
        p: p.data for n, p in draft.named_parameters() if id(p) not in quantised and dtype_of(n, "") != "float32"
    }  # fmt: skip
    try:
        for parameter, value in kept.items():
            parameter.data = value.to(dtype).to(value.dtype)
        yield
    finally:
        for parameter, value in kept.items():
            parameter.data = value


@torch.no_grad()
def check_logits(
    folder: Path,
    draft: nn.Module,
    base: BaseConfig,
    world: World,
    dtype: torch.dtype,
    features: Features | None,
    ends: BaseEnds | None,
) -> None:
    """Compare two draft steps of the re-read draft with the draft in memory, on the same captures.

    The draft in memory runs with its high-precision parameters rounded to the export's dtype: fp8 inputs are coarsely
    quantised, so that rounding alone changes logits by several percent, and a bound this loose would hide real bugs.

    Raises VerificationError for differences larger than the order of summation explains.
    """
    memory: torch.dtype = next(draft.parameters()).dtype
    fresh = load_exported_draft(folder, base, world, memory)
    inputs: Any
    if isinstance(draft, DFlashDraft):
        inputs = _BlockInputs.of(draft, world, memory, features)
    else:
        inputs = _Inputs.of(draft, world, memory, features, ends)
    tolerance = 1e-4 if memory in (torch.float32, torch.float64) else 0.05
    with _rounded(draft, dtype):
        in_memory = inputs.run(draft)
    for step, (found, expected) in enumerate(zip(inputs.run(fresh), in_memory, strict=True)):
        error = _relative_error(found, expected)
        if not error <= tolerance:
            raise VerificationError(
                f"{folder}: logits of the re-read draft differ at step {step} by {error:.2e} (relative), "
                f"allowed {tolerance:.0e}"
            )


def own_features(base: FrozenBase) -> Features:
    """The base's captures of random tokens, on every rank. Collective over TP and PP ranks."""
    world = base.world
    rows = 16 * world.tp_size
    tokens = torch.randint(base.vocab_size, (1, rows), generator=torch.Generator().manual_seed(0)).to(world.device)
    zeros = torch.zeros_like(tokens, dtype=torch.int32)
    batch = Batch(tokens, torch.arange(rows, device=world.device)[None], zeros, zeros)
    captures, state = run_base_everywhere(base, batch, Visibility.causal())
    return Features(batch, captures, state)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative error of logits. Entries that are -inf in both (vocabulary padding of a rank) count as equal."""
    found, expected = found.float(), expected.float()
    difference = torch.where(found == expected, 0, found - expected)
    norm = float(expected[expected.isfinite()].norm())
    return float(difference.norm()) / (norm or 1.0)


@dataclasses.dataclass
class _Inputs:
    """Inputs of two draft steps: a micro-batch's captures, state, embeddings and positions, and the base's ends."""

    captures_SBC: Tensor
    state_SBH: Tensor
    embedding_SBH: Tensor
    positions_BS: Tensor
    ends: BaseEnds | None

    @staticmethod
    def of(draft: Any, world: World, dtype: torch.dtype, features: Features | None, ends: BaseEnds | None) -> _Inputs:
        """Inputs from a micro-batch, or random ones without it."""
        if features is not None and ends is not None:
            batch = features.batch
            embedding = draft.embed(shift(batch.tokens_BS, 1, dim=1), ends).to(dtype)
            tensors = (features.captures_SBC.to(dtype), features.state_SBH.to(dtype), embedding, batch.positions_BS)
            return _Inputs(*tensors, ends)
        config: EagleConfig = draft.config
        rows, split = 8 * world.tp_size, world.tp_size if world.parallel.sequence_parallel else 1
        random = torch.Generator().manual_seed(0)
        H = config.target_hidden_size
        widths = (len(config.capture_layer_ids) * H, H, config.hidden_size)  # captures, state, embedding
        drawn = [torch.randn(rows // split, 1, n, generator=random).to(world.device, dtype) for n in widths]
        return _Inputs(drawn[0], drawn[1], drawn[2], torch.arange(rows, device=world.device)[None], ends)

    def run(self, draft: Any) -> list[Tensor]:
        """`two_steps` of a draft."""
        return two_steps(draft, self.captures_SBC, self.embedding_SBH, self.positions_BS, self.state_SBH, self.ends)


@dataclasses.dataclass
class _BlockInputs:
    """Inputs of a block after a micro-batch: its captures, and a state for the slots."""

    captures_SBC: Tensor
    positions_BS: Tensor
    state_PCH: Tensor

    @staticmethod
    def of(draft: DFlashDraft, world: World, dtype: torch.dtype, features: Features | None) -> _BlockInputs:
        """Inputs from the first sequence of a micro-batch, or random ones without it."""
        config, random = draft.config, torch.Generator().manual_seed(0)
        state = torch.randn(1, config.block_size, config.hidden_size, generator=random).to(world.device, dtype)
        if features is not None:
            return _BlockInputs(features.captures_SBC[:, :1].to(dtype), features.batch.positions_BS[:1], state)
        rows, split = 8 * world.tp_size, world.tp_size if world.parallel.sequence_parallel else 1
        captures = torch.randn(rows // split, 1, draft.fc.weight.shape[1], generator=random)
        return _BlockInputs(captures.to(world.device, dtype), torch.arange(rows, device=world.device)[None], state)

    def run(self, draft: Any) -> list[Tensor]:
        """States that the LM head reads and, for DSpark, Markov logits along the block and any confidences."""
        context_SBH = draft.context(self.captures_SBC)
        rotation = draft.rotation(self.positions_BS.t(), context_SBH)
        after = self.positions_BS.new_tensor([len(context_SBH)])
        layout = BlockLayout(after * 0, after)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attention of slots that see the complete micro-batch."""
            keys, values = draft.decoder_layers[layer].self_attn.keys_values(context_SBH, rotation)
            return block_attention(q, k, v, keys[:, 0], values[:, 0], layout.masked(*draft.config.mask_of(layer)))

        states = draft.run_layers(self.state_PCH, draft.block_rotation(after, self.state_PCH), attention)[0]
        if not isinstance(draft, DSparkDraft):
            return [states]
        m = draft.markov(torch.arange(len(states), device=states.device))
        latent = draft.markov_head.steps(m.split(1), states.split(1), [after * 0] * len(states), 1)
        sure = [draft.confidence(states, m)] if draft.config.has_confidence_head else []
        return [states, draft.markov_logits(latent), *sure]


def two_steps(
    draft: Any, captures_SBC: Tensor, embedding_SBH: Tensor, positions_BS: Tensor, state_SBH: Tensor | None = None,
    ends: BaseEnds | None = None,
) -> list[Tensor]:  # fmt: skip
    """Logits of the first draft step and of a second one on the fed-back state.

    Without the base, a draft that uses its LM head returns the states that the LM head would read.
    """
    visibility = Visibility.causal()
    logits = []
    hidden = draft.start(captures_SBC, captures_SBC if state_SBH is None else state_SBH)
    for step in range(2):
        if step and isinstance(draft, PEagleDraft):  # P-EAGLE reads mask_hidden in place of a state
            hidden = draft.project(draft.mask_hidden).expand_as(hidden)
        attention = draft.cached_attention(visibility)
        hidden, normed = draft.layer_step(hidden, embedding_SBH, positions_BS + step, attention)
        silent = ends is None and isinstance(draft, SharedHeadDraft)
        logits.append(normed if silent else draft.logits(normed, ends))
    return logits
