"""Options of validate.py and generate.py."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_spec.cli import numbers
from megatron_spec.commands.runs.common import ChatText, DraftModules, Layers, ModelRun, Parallel, Precision
from megatron_spec.config import DecodeConfig, UserError, group, option, require


def _check_seed(decode: DecodeConfig) -> None:
    """Raise UserError for a seed without effect. A user's drafter may sample at any temperature."""
    require(
        not decode.sets("seed") or decode.temperature > 0 or decode.decoding_type == "User",
        "--seed has no effect at temperature 0, where nothing is sampled: give --temperature, or leave it out",
    )


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
    """Report (default: validate.json in the folder of --load)."""
    html_output: str | None = option(None, "HTML", flag="html")
    """Also write the report as a page with plots."""
    draft_lens: tuple[int, ...] | None = option(None, "N[,N...]", flag="max-draft-len", parse=numbers, once=True)
    """Draft tokens of a chain, or depth of a tree; several are measured in one run (default: 3, or all that the
    draft proposes if these are fewer)."""
    num_prompts: int | None = option(None, "N", least=1)
    """Use the first N prompts (default: all)."""
    fp64: bool = False
    """Compute in float64, where the text of a fake-quantised base does not depend on batch shapes."""
    decode: DecodeConfig = group(DecodeConfig, skip=("max_draft_len",))
    """Decoding."""

    def validate(self) -> None:
        """Raise UserError for flags that contradict one another."""
        _check_seed(self.decode)
        require(not (self.bf16 and self.fp64), "--bf16 and --fp64 contradict each other: give one of them")
        require(
            not (self.fp64 and self.layers.engine),
            "--fp64: Transformer Engine does not compute in float64: use --transformer-impl local",
        )
        lens = self.draft_lens
        if lens is not None and (not lens or min(lens) < 1 or len(set(lens)) < len(lens)):
            raise UserError(f"--max-draft-len: found {list(lens)}, expected distinct numbers of at least 1")


@dataclass(frozen=True)
class GenerateRun(Parallel, Precision, Layers, ChatText, DraftModules, ModelRun):
    """generate.py: generate a base's answers to prompts, with or without a draft."""

    data: str | None = option(metavar="JSONL")
    """Prompts (not needed with --synthesize)."""
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
    synthesize: int | None = option(None, "N", least=1, most=10**9)
    """Have the base write N questions (kept in OUTPUT.questions.jsonl) and answer them; with --data, besides the
    prompts."""
    question_temperature: float | None = option(None, "T", least=0)
    """Temperature of the questions (--synthesize; default: 1)."""
    question_batch_size: int | None = option(None, "N", least=1)
    """Questions drawn at a time (--synthesize; default: --batch-size, on a GPU up to 1024 if memory allows); up to
    rounding, this does not change them."""
    save_rejections: bool = False
    """Record which tokens of an answer replaced a rejected draft token, for finetune.py --replay-weight."""

    def validate(self) -> None:
        """Raise UserError for flags that are missing or contradict one another."""
        if self.load is None and self.base is None:
            raise UserError("give --base for a base model alone, or --load for a draft checkpoint")
        if self.data is None and self.synthesize is None:
            raise UserError("expected --data (prompts), --synthesize (the base writes them), or both")
        for name in ("question_temperature", "question_batch_size"):
            if self.synthesize is None and getattr(self, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} is for --synthesize: leave it out")
        if self.synthesize is None:  # else it is that of the questions, too
            _check_seed(self.decode)
        if self.data is None and self.num_prompts is not None:
            raise UserError("--num-prompts is for --data: --synthesize already says how many questions are written")
