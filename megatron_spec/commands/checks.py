"""Checks of flags against the architecture, the layout and each other, for a run and for its plan. No torch here."""

from __future__ import annotations

import operator

from megatron_spec.base.placement import check_parallel
from megatron_spec.commands.runs import EvalRequest, FinetuneRun
from megatron_spec.commands.runs.common import ScriptRun
from megatron_spec.config import (
    BaseConfig,
    DecodeConfig,
    DraftConfig,
    ObjectiveConfig,
    QuantConfig,
    UserError,
    megatron_flags,
)
from megatron_spec.decoding.options import check_lengths, default_length
from megatron_spec.planning import layouts


def check_seq_length(seq_length: int, base: BaseConfig) -> None:
    """Raise UserError if the length exceeds the base's max_position_embeddings."""
    longest = base.max_position_embeddings
    if not 0 < seq_length <= longest:
        raise UserError(f"--seq-length {seq_length} must be between 1 and the base's max_position_embeddings {longest}")


def check_steps(objective: ObjectiveConfig, seq_length: int) -> None:
    """Raise UserError for more draft steps than a row has tokens."""
    if objective.ttt_steps > seq_length:
        raise UserError(f"--ttt-steps {objective.ttt_steps}: rows have at most {seq_length} tokens (--seq-length)")


def check_base_shapes(run: ScriptRun, base: BaseConfig) -> None:
    """Raise UserError if Megatron-LM's flags describe another architecture than the base's."""
    wrong = []
    for name, text in run.base_shapes:
        found = operator.attrgetter(megatron_flags.FLAGS[name].attribute)(base)
        try:
            same = float(text) == float(found)
        except ValueError:
            same = False
        if not same:
            wrong.append(f"{name} {text}, but the base has {found}")
    if wrong:
        raise UserError(f"the architecture is that of the base in --load: {'; '.join(wrong)}")


def eval_length(request: EvalRequest, base: BaseConfig, draft: DraftConfig, objective: ObjectiveConfig) -> int:
    """--eval-draft-len; if it is not given, no more than the draft proposes."""
    if request.sets("max_draft_len"):
        return request.max_draft_len
    return default_length(DecodeConfig(), draft, objective.ttt_steps, base.max_position_embeddings)


def check_training(
    run: FinetuneRun, base: BaseConfig, draft: DraftConfig, quant: QuantConfig | None, objective: ObjectiveConfig,
    seq_length: int,
) -> None:  # fmt: skip
    """Raise UserError for flags of finetune.py that conflict with base, draft, layout or other flags."""
    check_base_shapes(run, base)
    layouts.check(run.layout_row, run.parallel, base.num_experts)
    check_parallel(base, run.parallel)
    layouts.check_draft_parallel(draft, run.parallel)
    check_seq_length(seq_length, base)
    check_steps(objective, seq_length)
    run.check_features()
    if run.evaluation.interval:
        layouts.check("decode", run.parallel)
        length = eval_length(run.evaluation, base, draft, objective)
        check_lengths(
            DecodeConfig(), (length,), draft, objective.ttt_steps, "--eval-draft-len", base.max_position_embeddings
        )
    if run.teacher == "original" and (quant is None or quant.base == "none"):
        raise UserError("--teacher original: the base of this checkpoint is not quantised; leave the flag out")
