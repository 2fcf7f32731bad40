"""Options of the scripts: one dataclass per script, whose fields are its flags and help text. No torch here.

Every command takes its run, or the run's fields: `convert(ConvertRun("base", "draft"))` and `convert("base", "draft")`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_spec.cli import json_object
from megatron_spec.config import (
    BaseLayers,
    Config,
    DecodeConfig,
    EagleAlgorithm,
    Fp8Recipe,
    ObjectiveConfig,
    ParallelConfig,
    TrainConfig,
    TransformerImpl,
    UserError,
    flag_name,
    group,
    option,
    require,
)
from megatron_spec.runtime.files import sha256_of

R = TypeVar("R")


def takes(cls: type[Config]) -> Callable[[Callable[[Any], R]], Callable[..., R]]:
    """Decorate a command so that it takes a run of `cls`, or its fields as arguments."""

    def decorate(command: Callable[[Any], R]) -> Callable[..., R]:
        """The decorated command."""

        @functools.wraps(command)
        def call(*args: Any, **fields: Any) -> R:
            """Run the command with a run of `cls`, constructed from the fields unless given."""
            return command(args[0] if args and isinstance(args[0], cls) else cls(*args, **fields))

        return call

    return decorate


def settings_of(run: Config, **known: Any) -> dict[str, Any]:
    """Flag -> value of a run, and the hashes of the files it names: what must be equal on all ranks.

    Args:
        known: known hashes of files, by field; other entries are added unchanged.
    """
    found = dict(_flags(run))
    for flag, value in list(found.items()):
        name = flag.removeprefix("--").replace("-", "_")
        if isinstance(value, str) and Path(value).is_file() and name not in known:
            found[f"{flag} (content)"] = sha256_of(value)
    return {**found, **{f"--{name.replace('_', '-')} (content)": value for name, value in known.items()}}


def _flags(run: Config) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if isinstance(value, Config):
            yield from _flags(value)
        else:
            yield f"--{flag_name(field)}", value


@dataclass(frozen=True, kw_only=True)
class ScriptRun(Config):
    """Fields of every command."""

    base_shapes: tuple[tuple[str, ...], ...] = option((), hidden=True)
    """(flag, value) pairs of Megatron-LM's architecture flags, which must match the base."""


@dataclass(frozen=True, kw_only=True)
class ModelRun(ScriptRun):
    """Fields of a command that runs base or draft."""

    plain: bool = False
    """Turn off all fast paths (docs/performance.md): run plain code everywhere, for comparison."""


@dataclass(frozen=True, kw_only=True)
class Layers(Config):
    """Fields of a command that builds the base's layers."""

    layers: BaseLayers = group(BaseLayers, only=("transformer_impl",))
    """Layers of the base."""


@dataclass(frozen=True, kw_only=True)
class Parallel(Config):
    """Fields of a command that runs under torchrun."""

    parallel: ParallelConfig = group(ParallelConfig)
    """Parallel layout."""


@dataclass(frozen=True, kw_only=True)
class Precision(Config):
    """Fields of a command that loads weights."""

    bf16: bool = False
    """Hold weights in bfloat16 instead of float32."""


@dataclass(frozen=True, kw_only=True)
class DraftModules(Config):
    """Fields of a command that computes with a draft."""

    draft_transformer_impl: TransformerImpl = "local"
    """Modules of the draft's linears and norms: this package's, or Transformer Engine's, slower but for all GPUs it
    supports; checkpoints are the same (docs/transformer_engine.md#drafts)."""


@dataclass(frozen=True, kw_only=True)
class MovedBase(Config):
    """Fields of a command that reads a draft checkpoint."""

    base: str | None = option(None, "DIR")
    """Path of the base, if it has moved since convert_model.py."""


@dataclass(frozen=True, kw_only=True)
class ChatText(Config):
    """Fields of a command that tokenises conversations or prompts."""

    tokenizer: str | None = option(None, "DIR")
    """Tokenizer folder (default: the base's)."""
    chat_template_kwargs: dict[str, Any] | None = option(None, "JSON", parse=json_object)
    """Arguments of the chat template, such as {"enable_thinking": false}; a line's own chat_template_kwargs win."""


@dataclass(frozen=True, kw_only=True)
class DraftRequest(ScriptRun):
    """The draft that convert_model.py creates; None for flags that were not given."""

    algorithm: Literal["eagle", "medusa", "dflash", "dspark"] = option("eagle", flag="export-algorithm", once=True)
    """Kind of draft."""
    eagle_algorithm: EagleAlgorithm | None = option(None, flag="export-eagle-algorithm", once=True)
    """EAGLE variant; eagle-mtp is multi-token prediction (default: eagle3)."""
    eagle_config: str | None = option(None, "JSON")
    """File with overrides of the draft's architecture."""
    draft_vocab: str | None = option(None, "DIR")
    """Calibrated draft vocabulary, from tools/calibrate_draft_vocab.py (default: the whole vocabulary)."""
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
        eagle = ("eagle_algorithm", "eagle_config", "draft_vocab", "mtp_from_base")
        medusa = ("num_medusa_heads", "num_medusa_layers", "share_base_head")
        block = ("draft_config",)
        given = self._given((*eagle, *medusa, *block)) if self.draft is not None else []
        if given:
            raise UserError(f"--draft takes the draft as its folder has it: leave {', '.join(given)} out")
        owners = {"eagle": eagle, "medusa": medusa, "dflash": block, "dspark": block}
        for owner, names in owners.items():
            given = self._given(names) if names is not owners[self.algorithm] else []
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
            raise UserError(f"--mtp-from-base: the module is as the base has it: leave {', '.join(taken)} out")

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
    seed: int = 1234
    """Seed of the draft's initial values."""

    def validate(self) -> None:
        """Raise UserError for flags that contradict one another."""
        super().validate()
        flag = "--mtp-from-base" if self.mtp_from_base else "--draft"
        if (self.mtp_from_base or self.draft is not None) and self.seed != type(self).seed:
            raise UserError(f"--seed does nothing with {flag}: no value is drawn; leave it out")


@dataclass(frozen=True)
class EvalRequest(Config):
    """Acceptance on held-out prompts while a draft trains."""

    data: str | None = option(None, "JSONL", flag="eval-data")
    """Held-out prompts for --eval-acceptance-interval; only first turns are used."""
    interval: int = option(0, "N", flag="eval-acceptance-interval", least=0)
    """Decode the held-out prompts with the draft every N steps and at the end; SAVE/best keeps the draft with the
    highest acceptance length. 0: never."""
    num_prompts: int = option(32, "N", flag="eval-prompts", least=1)
    """Number of held-out prompts, from the start of the file."""
    max_draft_len: int = option(3, "N", flag="eval-draft-len", least=1)
    """Draft tokens of the evaluation."""
    max_new_tokens: int = option(64, "N", flag="eval-tokens", least=1)
    """Maximum tokens per answer in the evaluation."""

    def validate(self) -> None:
        """Raise UserError for options without an evaluation."""
        if (self.data is None) != (self.interval == 0):
            raise UserError("--eval-data and --eval-acceptance-interval belong together: give both, or neither")
        if self.interval:
            return
        for name in ("num_prompts", "max_draft_len", "max_new_tokens"):
            field = self.__dataclass_fields__[name]
            if getattr(self, name) != field.default:
                raise UserError(
                    f"--{flag_name(field)} does nothing without --eval-data and --eval-acceptance-interval: give them, "
                    "or leave it out"
                )


@dataclass(frozen=True)
class FinetuneRun(Parallel, ChatText, MovedBase, DraftModules, ModelRun):
    """finetune.py: train the draft of a checkpoint; on a quantised one this is quantisation-aware training."""

    load: str = option(metavar="DIR")
    """Draft checkpoint to start from."""
    save: str = option("", "DIR")
    """Folder of this run: checkpoints and metrics.jsonl. If it already holds the run, the run resumes."""
    data: str | None = option(None, "JSONL")
    """Conversations, one JSON object per line."""
    train: TrainConfig = group(TrainConfig)
    """Training loop."""
    objective: ObjectiveConfig = group(ObjectiveConfig)
    """Objective of the draft."""
    seq_length: int | None = option(None, least=1)
    """Truncate conversations to this many tokens (default: 2048, or the length of stored features)."""
    data_cache_path: str | None = option(None, "DIR")
    """Folder for tokenised conversations (default: next to the data)."""
    feature_cache: str | None = option(None, "DIR")
    """Compute the base's features once and keep them in this folder."""
    offline_data: str | None = option(None, "DIR")
    """Instead of --data: features written by offline_feature_extract.py. The base's layers are not loaded."""
    base_fp8: bool = False
    """Run the base's linears, and its head for the teacher, in fp8 (Hopper or newer, with --bf16)."""
    draft_fp8: bool = False
    """Run the draft's layer and LM head in fp8 (Hopper or newer, with --bf16)."""
    draft_fp8_recipe: Fp8Recipe | None = None
    """With --draft-transformer-impl transformer_engine: train the linears of the draft's layers in fp8 by this recipe
    of Transformer Engine."""
    layers: BaseLayers = group(BaseLayers)
    """Layers of the base."""
    teacher: Literal["quantised", "original"] = "quantised"
    """For a checkpoint with a quantised base: train on the base as served, or on the original one."""
    train_epochs: int | None = option(None, "N", least=1)
    """Instead of --train-iters: passes over the data."""
    override_opt_param_scheduler: bool = False
    """On resume, take learning rate, decay, betas and other optimizer settings from the flags instead of the
    checkpoint. Without this flag, settings that differ from the checkpoint's are refused."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, take optimizer settings from the checkpoint and ignore the flags."""
    tensorboard_dir: str | None = option(None, "DIR")
    """Write TensorBoard events to this folder."""
    wandb_project: str | None = option(None, "NAME")
    """Log to this project of Weights & Biases."""
    evaluation: EvalRequest = group(EvalRequest)
    """Acceptance on held-out prompts while the draft trains."""
    dry_run: bool = False
    """Print layout, placement, memory and work, and exit. --load may be a folder with only a config.json."""
    num_nodes: int | None = option(None, "N", least=1)
    """--dry-run: number of machines (default: 1)."""
    gpus_per_node: int | None = option(None, "N", least=1)
    """--dry-run: GPUs per machine (default: 8)."""
    gpu_memory_gib: float | None = option(None, "GIB", least=1)
    """--dry-run: memory of a GPU (default: 80)."""

    def validate(self) -> None:
        """Raise UserError for flags that are missing or contradict one another."""
        if self.dry_run:
            return
        require(bool(self.save), "--save is required")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise UserError(
                "found --override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler, expected one of them"
            )
        if bool(self.train_epochs) == bool(self.train.train_iters):
            found = "both" if self.train_epochs else "neither"
            raise UserError(f"found {found} of --train-iters and --train-epochs, expected one")
        if self.num_nodes or self.gpus_per_node or self.gpu_memory_gib:
            raise UserError(
                "--num-nodes, --gpus-per-node and --gpu-memory-gib belong to --dry-run; torchrun starts processes"
            )

    def check_features(self) -> None:
        """Raise UserError for flags that conflict with the source of the features, also with --dry-run."""
        fp8 = "--base-fp8" if self.base_fp8 else "--fp8-format" if self.layers.recipe else None
        if self.offline_data is not None:
            self._check_offline()
        if fp8 and self.feature_cache is not None:
            raise UserError(f"{fp8} is for features computed as training goes: leave it out with --feature-cache")
        left_out = fp8 or ("--offline-data" if self.offline_data is not None else None)
        if self.evaluation.interval and left_out:
            raise UserError(
                f"--eval-acceptance-interval decodes with the base, which {left_out} leaves out: drop one of them"
            )

    def _check_offline(self) -> None:
        """Raise UserError for flags without effect if the base does not run and nothing is tokenised."""
        given = {
            "--feature-cache": self.feature_cache, "--tokenizer": self.tokenizer,
            "--data-cache-path": self.data_cache_path, "--chat-template-kwargs": self.chat_template_kwargs,
            "--base-fp8": self.base_fp8, "--transformer-impl": self.layers.engine,
        }  # fmt: skip
        wrong = [flag for flag, value in given.items() if value]
        if wrong:
            raise UserError(f"{', '.join(wrong)} with --offline-data: the base does not run there; leave it out")
        if self.objective.replay_weight != 1:
            raise UserError("--replay-weight with --offline-data: stored features hold no rejections; give --data")


@dataclass(frozen=True)
class QuantizeRun(Parallel, Precision, Layers, ChatText, MovedBase, DraftModules, ModelRun):
    """quantize.py: attach fake quantisers to base and draft and calibrate their ranges."""

    load: str = option(metavar="DIR")
    """Draft checkpoint to quantise."""
    save: str = option(metavar="DIR")
    """New or empty folder for the quantised checkpoint, or that of --load, where it becomes the next iteration."""
    data: str = option(metavar="JSONL")
    """Conversations to calibrate on."""
    policy: str = option("fp8", "POLICY", flag="export-quant-cfg")
    """fp8 (base and draft), fp8_draft_only, fp8_base_only, nvfp4_draft_only, none, or a JSON or YAML file with fields
    of QuantConfig: exclude, exclude_base, exclude_draft, calibration, ..."""
    kv_cache: Literal["none", "fp8"] | None = option(None, flag="export-kv-cache-quant")
    """Quantisation of the base's keys and values (default: the policy's)."""
    samples: int = option(256, "N", flag="calib-samples", least=1)
    """Number of conversations to calibrate on, from the start of the file."""
    seq_length: int = 2048
    """Truncate conversations to this many tokens."""
    micro_batch_size: int = option(4, least=1)
    """Conversations per forward pass."""
    objective: ObjectiveConfig = group(ObjectiveConfig, only=("ttt_steps", "alignment"))
    """Draft steps to calibrate."""


@dataclass(frozen=True)
class ExportRun(Parallel, Precision, Layers, MovedBase, DraftModules, ModelRun):
    """export.py: export a draft, and its base on request, for serving engines."""

    load: str = option(metavar="DIR")
    """Draft checkpoint."""
    export_dir: str = option(metavar="OUT")
    """New or empty folder."""
    extra_modules: bool = option(False, flag="export-extra-modules")
    """Write the draft (default: only a quantised base is written)."""
    with_base: bool = option(False, flag="export-base")
    """Write the base next to the draft even if it is not quantised."""
    max_draft_len: int | None = option(None, "N", least=1)
    """Draft length in the serving configuration (default: 3)."""
    format: Literal["hf", "trtllm-legacy", "speculators"] = option("hf", flag="export-format")
    """Format of the draft; vLLM, SGLang and TensorRT-LLM load hf."""
    trtllm_tp: int = option(1, "N", least=1)
    """trtllm-legacy: number of ranks."""
    medusa_pt: bool = option(False, flag="export-medusa-pt")
    """Medusa: also write medusa_lm_head.pt."""
    export_embeddings: bool = False
    """Also write the base's embedding into the draft."""
    yarn_factor: float | None = option(None, "F", flag="export-yarn-factor")
    """Write the draft with YaRN, for contexts up to F times as long as in training. This changes acceptance at every
    length: measure the export with validate.py --speculative-model."""
    yarn_original: int | None = option(None, "N", flag="export-yarn-original", least=1)
    """With --export-yarn-factor: --seq-length of the training."""


def _part(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError
    return index, count


@dataclass(frozen=True)
class ExtractRun(Parallel, Precision, Layers, ChatText, MovedBase, ModelRun):
    """offline_feature_extract.py: run the base over conversations and store its features."""

    load: str = option(metavar="DIR")
    """Draft checkpoint; it names the base and the captured layers."""
    output_dir: str = option(metavar="DIR")
    """Folder of the features."""
    data: str = option(metavar="JSONL")
    """Conversations."""
    seq_length: int = 2048
    """Truncate conversations to this many tokens."""
    micro_batch_size: int = option(4, least=1)
    """Conversations per forward pass."""
    features_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] | None = None
    """Type on disk (default: the base's); fp8 halves bfloat16 and has a scale per row and layer."""
    part: tuple[int, ...] = option((0, 1), "I/N", parse=_part)
    """Part I of N of the work, from 0: this run writes shards I, I + N, ... (default: 0/1)."""


@dataclass(frozen=True)
class ImportRun(Precision, MovedBase, ScriptRun):
    """tools/import_features.py: convert features from another program to a store."""

    load: str = option(metavar="DIR")
    """Draft checkpoint; it names the base and the captured layers."""
    dumps: str = option(metavar="DIR")
    """Folder of the dumps (subfolders included)."""
    output_dir: str = option(metavar="DIR")
    """Folder of the features."""
    final_norm: Literal["applied", "missing"] = option()
    """Whether hidden_states includes the base's final norm (the last one that transformers returns does)."""
    seq_length: int = 2048
    """Truncate samples to this many tokens."""
    check: int = option(2, "N", flag="check-samples", least=0)
    """Compare the first N samples with the base's own features; 0 loads only embedding and LM head."""
    features_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None
    """Type on disk (default: that of the first dump)."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@dataclass(frozen=True)
class ValidateRun(Parallel, Precision, Layers, ChatText, DraftModules, ModelRun):
    """validate.py: decode with and without the draft; report acceptance length and whether the texts are identical."""

    data: str = option(metavar="JSONL")
    """Prompts."""
    load: str | None = option(None, "DIR")
    """Draft checkpoint (plain or quantised)."""
    base: str | None = option(None, "DIR")
    """Base for drafts without one; with --load: path of the base, if it has moved."""
    output: str | None = option(None, "JSON")
    """Report (default: validate.json in the checkpoint)."""
    html_output: str | None = option(None, "HTML", flag="html")
    """Also write the report as a page with plots."""
    draft_lens: tuple[int, ...] | None = option(None, "N[,N...]", flag="max-draft-len", parse=_numbers, once=True)
    """Draft tokens of a chain, or depth of a tree; several are measured in one run (default: 3)."""
    num_prompts: int | None = option(None, "N", least=1)
    """Use the first N prompts (default: all)."""
    fp64: bool = False
    """Compute in float64, where the text of a fake-quantised base does not depend on batch shapes."""
    decode: DecodeConfig = group(DecodeConfig, skip=("max_draft_len",))
    """Decoding."""

    def validate(self) -> None:
        """Raise UserError for flags that contradict one another."""
        require(not (self.bf16 and self.fp64), "--bf16 and --fp64: expected one of them")
        require(
            not (self.fp64 and self.layers.engine),
            "--fp64: Transformer Engine does not compute in float64: use --transformer-impl local",
        )
        lens = self.draft_lens
        if lens is not None and (not lens or min(lens) < 1 or len(set(lens)) < len(lens)):
            raise UserError(f"--max-draft-len: found {list(lens)}, expected different numbers from 1")


@dataclass(frozen=True)
class GenerateRun(Parallel, Precision, Layers, ChatText, DraftModules, ModelRun):
    """generate.py: generate a base's answers to prompts, with or without a draft."""

    data: str | None = option(metavar="JSONL")
    """Prompts."""
    output: str = option(metavar="JSONL")
    """Conversations with answers."""
    load: str | None = option(None, "DIR")
    """Draft checkpoint to speculate with."""
    base: str | None = option(None, "BASE")
    """Base (needed without --load, or if it has moved)."""
    num_prompts: int | None = option(None, "N", least=1)
    """Use the first N prompts (default: all)."""
    decode: DecodeConfig = group(DecodeConfig)
    """Decoding."""
    synthesize: int | None = option(None, "N", least=1)
    """Instead of --data: have the base write N questions into OUTPUT.questions.jsonl."""
    question_temperature: float | None = option(None, "T", least=0)
    """Temperature of the questions (--synthesize; default: 1)."""
    question_batch_size: int | None = option(None, "N", least=1)
    """Questions that are drawn together (--synthesize; default: --batch-size, on a GPU up to 1024 as its memory
    allows). They do not depend on it."""
    save_rejections: bool = False
    """Record in every line which tokens the base put in place of a rejected draft token, for --replay-weight."""

    def validate(self) -> None:
        """Raise UserError for flags that are missing or contradict one another."""
        if self.load is None and self.base is None:
            raise UserError("give --base for a base model alone, or --load for a draft checkpoint")
        if (self.data is None) == (self.synthesize is None):
            raise UserError("expected one of --data (prompts) and --synthesize (the base writes them)")
        for name in ("question_temperature", "question_batch_size"):
            if self.synthesize is None and getattr(self, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} is for --synthesize: leave it out with --data")
        if self.synthesize is not None and self.num_prompts is not None:
            raise UserError("--num-prompts is for --data: --synthesize already says how many questions are written")
