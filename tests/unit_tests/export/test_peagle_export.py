"""P-EAGLE on disk: round trip of our export, other formats, and the engines that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.export.check import check_folder
from megatron_spec.export.load import load_draft, open_draft
from megatron_spec.export.rewrite import rewrite
from megatron_spec.export.speculators import check as check_speculators
from megatron_spec.runtime.provenance import trained_steps, write_run_json
from megatron_spec.serving.draft import exported
from megatron_spec.serving.sglang import sglang_command
from megatron_spec.serving.trtllm import trtllm_config
from megatron_spec.serving.vllm import speculative_config
from tests.unit_tests.export.test_drafts_of_others import (
    IDS,
    Change,
    Home,
    Json,
    Tensors,
    drop,
    home,  # noqa: F401
    prefixed,
    same,
    shuffled,
    speculators,
    write,
)

MASK = 5


def ours(home: Home) -> tuple[Json, Tensors]:  # noqa: F811
    return home.export("p-eagle", "p-eagle", mask_token_id=MASK)


def test_export_round_trip(home: Home) -> None:  # noqa: F811
    raw, tensors = ours(home)
    assert raw["ptd_token_id"] == MASK and raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["num_hidden_layers"] == 2 and tensors["mask_hidden"].shape == (1, 1, len(IDS) * 32)
    found: Any = load_draft(open_draft(home.root / "p-eagle", home.reference), home.world)
    same(found, home.drafts["p-eagle"])
    assert found.config.parallel_drafting and found.config.mask_token_id == MASK
    broken = {f.rule: f.engines for f in check_folder(home.root / "p-eagle", base=home.base) if not f.warning}
    assert broken == {"parallel_drafting": ("trtllm", "sglang")}


def reshaped(tensors: Tensors, *shape: int) -> Tensors:
    vector: Tensor = tensors["mask_hidden"]
    return {**tensors, "mask_hidden": vector.reshape(shape)}


def peagle_of_speculators(raw: Json) -> Json:
    return {**speculators(raw), "speculators_model_type": "peagle", "mask_token_id": MASK}


READ: dict[str, Change] = {
    "speculators": lambda c, t: (peagle_of_speculators(c), shuffled(t)),
    "specforge": lambda c, t: (
        {**drop(c, "ptd_token_id"), "architectures": ["PEagleDraftModel"], "mask_token_id": MASK}, drop(t, "t2d")
    ),
    "pard_token, one axis": lambda c, t: ({**drop(c, "ptd_token_id"), "pard_token": MASK}, reshaped(t, -1)),
    "two names, prefix": lambda c, t: ({**c, "mask_token_id": MASK, "parallel_drafting": True}, prefixed(t)),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_drafts_in_other_formats_load_unchanged(home: Home, tmp_path: Path, name: str) -> None:  # noqa: F811
    folder = write(tmp_path / "d", *READ[name](*ours(home)))
    same(load_draft(open_draft(folder, home.reference), home.world), home.drafts["p-eagle"])
    assert exported(folder).parallel
    rewrite(folder, home.reference, tmp_path / "fixed")
    same(load_draft(open_draft(tmp_path / "fixed", home.reference), home.world), home.drafts["p-eagle"])
    assert not [f for f in check_folder(tmp_path / "fixed", "vllm", home.base) if not f.warning]


REFUSED: dict[str, tuple[Change, str]] = {
    "no mask token": (lambda c, t: (drop(c, "ptd_token_id"), t), "names no mask token"),
    "two mask tokens": (lambda c, t: ({**c, "pard_token": MASK + 1}, t), "found mask tokens"),
    "a mask token without a row": (lambda c, t: ({**c, "ptd_token_id": 64}, t), "not in the base's vocabulary"),
    "no vector": (lambda c, t: (c, drop(t, "mask_hidden")), "missing mask_hidden"),
    "half a vector": (lambda c, t: (c, {**t, "mask_hidden": t["mask_hidden"][..., :48]}), "mask_hidden is"),
    "norms before fc": (lambda c, t: ({**c, "norm_before_fc": True}, t), "options of eagle3.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_drafts_are_refused_by_reader_and_checker(home: Home, tmp_path: Path, name: str) -> None:  # noqa: F811
    change, message = REFUSED[name]
    folder = write(tmp_path / "d", *change(*ours(home)))
    with pytest.raises(UserError, match=message):
        open_draft(folder, home.reference)
    assert [f for f in check_folder(folder, "vllm", home.base) if not f.warning]


def test_mask_token_under_a_name_unknown_to_vllm(home: Home, tmp_path: Path) -> None:  # noqa: F811
    raw, tensors = ours(home)
    folder = write(tmp_path / "d", {**drop(raw, "ptd_token_id"), "mask_token_id": MASK}, tensors)
    [found] = [f for f in check_folder(folder, "vllm", home.base) if not f.warning]
    assert found.rule == "mask_token" and f'"ptd_token_id": {MASK}' in found.fix


def test_no_more_tokens_are_served_than_trained(home: Home, tmp_path: Path) -> None:  # noqa: F811
    folder = write(tmp_path / "d", *ours(home))
    assert trained_steps(folder) is None and exported(folder, 9).max_draft_len == 9
    write_run_json(folder, {"ttt_steps": 2})
    assert trained_steps(folder) == exported(folder).max_draft_len == exported(folder, 2).max_draft_len == 2
    with pytest.raises(UserError, match="--max-draft-len 3, but this P-EAGLE draft was trained to propose 2 tokens"):
        exported(folder, 3)


def test_only_vllm_serves_it(home: Home) -> None:  # noqa: F811
    ours(home)
    plan = exported(home.root / "p-eagle", 4)
    expected = {"method": "eagle3", "model": plan.model, "parallel_drafting": True, "num_speculative_tokens": 4}
    assert speculative_config(plan) == expected
    for refuses in (lambda: sglang_command(plan, "/b"), lambda: trtllm_config(plan)):
        with pytest.raises(UserError, match="P-EAGLE"):
            refuses()
    with pytest.raises(UserError, match="P-EAGLE"):
        check_speculators(home.drafts["p-eagle"].config, fp8=False)
