"""Training metrics: sums over supervised rows, reduced over all ranks, then named.

T draft steps. The predicted acceptance length under greedy decoding is 1 + a_0 + a_0 a_1 + ..., with a_k the share of
rows of step k whose draft argmax is the base's argmax, given that all earlier steps were correct; the unconditional
accuracy of training-time test is the estimate of a_k.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.drafts.contract import DraftLosses
from megatron_spec.runtime.files import write_text

log = logging.getLogger(__name__)


def pack(losses: DraftLosses) -> Tensor:
    """fp64 [5, T] sums of one micro-batch: loss, correct, overlap, rows, and rows in the loss (of the first step)."""
    counted_T = torch.zeros_like(losses.rows_T)
    counted_T[0] = losses.rows_T[0] if losses.counted is None else losses.counted
    found = (losses.loss_T, losses.correct_T, losses.overlap_T, losses.rows_T, counted_T)
    return torch.stack([x.detach().double() for x in found])


def warn_uncounted(rows: float, counted: float, describe: str) -> bool:
    """Whether the draft vocabulary leaves less than half of the supervised rows in the loss, which is a warning."""
    if counted >= rows / 2:
        return False
    log.warning(
        "only %.1f %% of %d supervised rows count in the loss at %s: in the others the base's choice is not in the "
        "draft vocabulary. Was it made for this base and data? tools/calibrate_draft_vocab.py --load measures it; "
        "counted_share in metrics.jsonl has the share of every step", 100 * counted / rows, rows, describe,
    )  # fmt: skip
    return True


def reduce_sums(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks of `group` in place (tensor parallel ranks already agree)."""
    dist.all_reduce(sums, group=group)
    return sums


def name_metrics(sums: Tensor) -> dict[str, Any]:
    """Reduced [5, T] sums as the dictionary that is logged."""
    loss, correct, overlap, rows, counted = sums.cpu()
    rows = rows.clamp(min=1)
    accuracy, expected = (correct / rows).tolist(), (overlap / rows).tolist()
    return {
        "loss_per_step": (loss / rows).tolist(),
        "accuracy_per_step": accuracy,
        "overlap_per_step": expected,
        "supervised_rows": int(sums[3, 0]),
        "counted_share": float(counted[0] / rows[0]),
        "predicted_acceptance_length": predicted_acceptance_length(accuracy),
        "predicted_acceptance_length_sampling": predicted_acceptance_length(expected),
    }


def predicted_acceptance_length(share_per_step: list[float]) -> float:
    """1 + a_0 + a_0 a_1 + ...: tokens per base forward if step k is accepted with probability a_k."""
    length, product = 1.0, 1.0
    for share in share_per_step:
        product *= share
        length += product
    return length


def truncate_log(path: Path, last_iteration: int) -> None:
    """Drop lines after `last_iteration` (and a half-written one) from metrics.jsonl before a resumed run appends."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["iteration"] <= last_iteration:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue
    write_text(path, "".join(k + "\n" for k in kept))
