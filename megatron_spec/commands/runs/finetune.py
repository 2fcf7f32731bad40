"""Options of finetune.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_spec.commands.runs.common import ChatText, DraftModules, ModelRun, MovedBase, Parallel
from megatron_spec.config import (
    BaseLayers,
    Config,
    Fp8Recipe,
    ObjectiveConfig,
    TrainConfig,
    UserError,
    flag_name,
    group,
    option,
    require,
)

DEFAULT_LENGTH = 2048
"""Longest row in tokens, without --seq-length or stored features."""


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
    """Draft tokens per proposal in the evaluation; if not given, no more than the draft proposes."""
    max_new_tokens: int = option(64, "N", flag="eval-tokens", least=1)
    """Maximum tokens per answer in the evaluation."""

    def validate(self) -> None:
        """Raise UserError for options without an evaluation."""
        if (self.data is None) != (self.interval == 0):
            raise UserError("--eval-data and --eval-acceptance-interval belong together: give both, or neither")
        if self.interval:
            return
        for name in ("num_prompts", "max_draft_len", "max_new_tokens"):
            if self.sets(name):
                flag = flag_name(self.__dataclass_fields__[name])
                raise UserError(
                    f"--{flag} does nothing without --eval-data and --eval-acceptance-interval: give them, or leave it "
                    "out"
                )


@dataclass(frozen=True)
class FinetuneRun(Parallel, ChatText, MovedBase, DraftModules, ModelRun):
    """finetune.py: train the draft of a checkpoint; on a quantised one this is quantisation-aware training."""

    load: str = option(metavar="DIR")
    """Draft checkpoint to start from."""
    save: str = option("", "DIR")
    """Folder of this run: checkpoints and metrics.jsonl. If it already holds the run, the run resumes. Not needed with
    --dry-run."""
    data: str | None = option(None, "JSONL")
    """Conversations, one JSON object per line; or give --offline-data."""
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
    """Print the layout, the placement and estimates of memory and compute, and exit. --load may be a folder with only a
    config.json."""
    num_nodes: int | None = option(None, "N", least=1)
    """--dry-run: number of machines (default: 1)."""
    gpus_per_node: int | None = option(None, "N", least=1)
    """--dry-run: GPUs per machine (default: 8)."""
    gpu_memory_gib: float | None = option(None, "GIB", least=1)
    """--dry-run: memory of a GPU (default: 80)."""

    def validate(self) -> None:
        """Raise UserError for flags that are missing or contradict one another."""
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise UserError(
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other"
            )
        if self.data is not None and self.offline_data is not None:
            raise UserError("give one of --data and --offline-data (which contains its samples): found both")
        if self.train_epochs and self.train.train_iters:
            raise UserError("give one of --train-iters and --train-epochs: found both")
        if self.dry_run:
            return
        require(bool(self.save), "--save is required")
        if not (self.train_epochs or self.train.train_iters):
            raise UserError("give one of --train-iters and --train-epochs: found neither")
        if self.num_nodes or self.gpus_per_node or self.gpu_memory_gib:
            raise UserError(
                "--num-nodes, --gpus-per-node and --gpu-memory-gib belong to --dry-run; torchrun starts processes"
            )

    @property
    def layout_row(self) -> str:
        """Row of `layouts.ROWS`."""
        if self.base_fp8:
            return "base_fp8"
        if self.offline_data is not None:
            return "offline"
        return "finetune" if self.feature_cache is None else "extract"

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
