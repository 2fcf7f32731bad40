"""The table of layouts, shown in README.md and docs/scale.md and enforced by the scripts."""

from __future__ import annotations

import pytest

from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.planning import layouts
from tools.support_table import PAGES, updated


def test_the_pages_show_the_table() -> None:
    for page in PAGES:
        assert updated(page) == page.read_text(encoding="utf-8"), "run: python tools/support_table.py --write"


@pytest.mark.parametrize(
    ("row", "values", "message"),
    [
        ("decode", {"context_parallel_size": 2}, "--context-parallel-size does not work with validate.py, generate.py"),
        ("decode", {"sequence_parallel": True, "tensor_model_parallel_size": 2}, "few tokens at a time"),
        ("base_fp8", {"expert_model_parallel_size": 2}, "are dense"),
        ("quantize", {"context_parallel_size": 2}, "trains under any layout"),
        ("finetune", {"num_layers_per_virtual_pipeline_stage": 2}, "that were trained with it can be loaded"),
        ("decode", {"num_virtual_stages_per_pipeline_rank": 0}, "--num-virtual-stages-per-pipeline-rank: the inter"),
    ],
)
def test_refuses_what_the_table_refuses(row: str, values: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        layouts.check(row, ParallelConfig(**values))


def test_accepts_what_the_table_accepts() -> None:
    everything = {
        "TP": {"tensor_model_parallel_size": 2}, "SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "PP": {"pipeline_model_parallel_size": 2}, "DP": {}, "CP": {"context_parallel_size": 2},
        "EP": {"expert_model_parallel_size": 2},
    }  # fmt: skip
    for name, row in layouts.ROWS.items():
        for axis, values in everything.items():
            if axis not in row.refused:
                layouts.check(name, ParallelConfig(**values))


def test_experts_are_split_evenly_over_ranks() -> None:
    parallel = ParallelConfig(expert_model_parallel_size=4)
    layouts.check("finetune", parallel, experts=8)
    for experts in (0, 6):
        with pytest.raises(UserError, match="expected a multiple of 4"):
            layouts.check("finetune", parallel, experts=experts)
