"""Tables of docs/transformer_engine.md: what ran (test results), and which modules run (megatron_spec/planning).

`tools/support_table.py` writes them. Results: tests/support_results.json ("scripts"), from CPUs with stand-ins, and
tests/te_gpu_results.json, from GPUs (`tests/te_results.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.shapes import FAMILIES, family_shape
from megatron_spec.config import ENGINE, BaseConfig, ParallelConfig
from megatron_spec.config.machine import H100
from megatron_spec.planning import paths
from megatron_spec.planning.layouts import ROWS

TESTS = Path(__file__).resolve().parents[1] / "tests"
SCRIPTS = {
    "convert": "convert_model.py", "finetune": "finetune.py", "quantize": "quantize.py",
    "extract": "offline_feature_extract.py", "validate": "validate.py", "generate": "generate.py",
    "export": "export.py",
}  # fmt: skip
OF_DRAFT = ("finetune", "quantize", "validate", "generate", "export")
"""Scripts that compute with a draft."""
LAYOUTS = {"one": "one rank", "TP": "TP", "TP SP": "TP with SP", "PP": "PP", "DP": "DP", "CP": "CP", "EP": "EP"}
MIXTURES = {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"}
IMPLEMENTATIONS = {
    "local": "Local modules", "transformer_engine base": "Base of Transformer Engine's modules",
    "transformer_engine draft": "Draft of Transformer Engine's modules",
}  # fmt: skip
_ROW = {"validate": "decode", "generate": "decode"}
_ENGINE_PATHS = ("te_attention", "te_experts", "te_fp8")
_PARALLEL = {
    "TP": {"tensor_model_parallel_size": 2},
    "TP with SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP": {"pipeline_model_parallel_size": 2},
    "CP": {"context_parallel_size": 2},
    "EP": {"expert_model_parallel_size": 2},
}


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _head(*titles: str) -> list[str]:
    return [row(*titles), "|---" * len(titles) + "|"]


# What ran


def results() -> tuple[dict[str, Any], dict[str, Any]]:
    """(on CPUs, on a GPU): {implementation: {script: {family: layouts}}}; the second with card and versions."""
    gpu = TESTS / "te_gpu_results.json"
    cpu = json.loads((TESTS / "support_results.json").read_text(encoding="utf-8"))["scripts"]
    return cpu, json.loads(gpu.read_text(encoding="utf-8")) if gpu.is_file() else {"ran": {}}


def _families(ran: dict[str, Any], implementation: str, script: str, layout: str) -> str:
    by_family = ran.get(implementation, {}).get(script, {})
    found = [family for family, layouts in by_family.items() if layout in layouts]
    every = MIXTURES if layout == "EP" else set(FAMILIES)
    return "all" if every <= set(found) else ", ".join(sorted(found))


def refusal(script: str, layout: str) -> str | None:
    """Why a script does not take a layout, of local modules or others."""
    refused = ROWS[_ROW.get(script, script)].refused
    return next((reason for axis, reason in refused.items() if axis in layout.split()), None)


def ran_tables(cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    """A table for each implementation, and the reasons of what is refused."""
    lines: list[str] = []
    reasons: list[str] = []
    for implementation, title in IMPLEMENTATIONS.items():
        lines += ["", f"{title}:", "", *_head("script", *LAYOUTS.values())]
        for script, name in SCRIPTS.items():
            if implementation.endswith("draft") and script not in OF_DRAFT:
                continue
            cells = []
            for layout in LAYOUTS:
                reason = refusal(script, layout)
                if reason is not None:
                    reasons += [reason] if reason not in reasons else []
                    cells.append(f"no ({reasons.index(reason) + 1})")
                    continue
                places = (("C", cpu), ("G", gpu["ran"]))
                marks = [(mark, _families(ran, implementation, script, layout)) for mark, ran in places]
                cells.append("; ".join(f"{mark}: {found}" for mark, found in marks if found) or "-")
            lines.append(row(f"`{name}`", *cells))
    versions = ", ".join(f"{name} {version}" for name, version in gpu.get("versions", {}).items())
    where = f"G: {gpu['card']}, {versions}." if gpu["ran"] else "G: no run has been recorded yet."
    return "\n".join([*lines[1:], "", where, "", *(f"({i}) {reason}.  " for i, reason in enumerate(reasons, 1))])


# Which modules run


def _cells(base: BaseConfig, parallel: ParallelConfig) -> list[str]:
    """What of Transformer Engine runs in training: attention, experts, fp8 by tensor and by block."""
    cells: list[str] = []
    for recipe in ("delayed", "blockwise"):
        layers = ENGINE.replace(fp8_format="e4m3", fp8_recipe=recipe)
        setting = paths.Setting(H100, "bfloat16", parallel, base, layers=layers, wanted=("te_fp8",))
        blocked = paths.Paths(setting).blocked
        found = ["yes" if name not in blocked else f"no: {blocked[name]}" for name in _ENGINE_PATHS]
        found[1] = found[1] if base.moe else ""
        cells = found if not cells else [*cells, found[-1]]
    return cells


def module_tables() -> str:
    """Transformer Engine's modules by family and layout."""
    head = ("attention", "experts", "fp8 by tensor", "fp8 by block")
    lines = _head("family", "norms inside linears", *head)
    for family in FAMILIES:
        base = family_shape(family)
        norms = "before dense MLPs" if base.mla else "before attention" if base.moe else "all"
        if base.moe and base.moe.dense_layers and not base.mla:
            norms += " and dense MLPs"
        lines.append(row(family, norms, *_cells(base, ParallelConfig())))
    lines += ["", *_head("layout", *head)]
    mixture = family_shape("mixtral")
    lines += [row(name, *_cells(mixture, ParallelConfig(**values))) for name, values in _PARALLEL.items()]
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with the current tables between its marks."""
    for name, shown in (("ran", ran_tables(*results())), ("support", module_tables())):
        between = re.compile(rf"(<!--{name}-->\n).*?(<!--/{name}-->)", re.DOTALL)
        assert between.search(page), f"docs/transformer_engine.md lacks <!--{name}--> and <!--/{name}-->"
        page = between.sub(lambda m, shown=shown: f"{m[1]}{shown}\n{m[2]}", page)  # type: ignore[misc]
    return page
