"""The tables of layouts and of fast paths, from megatron_spec/planning: python tools/support_table.py [--write].

README.md shows the supported layouts, docs/scale.md also the reasons; docs/performance.md shows the fast paths, and
docs/transformer_engine.md where Transformer Engine's modules run.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import FAMILIES, family_shape  # noqa: E402
from megatron_spec.commands import runs  # noqa: E402
from megatron_spec.config import ENGINE, BaseConfig, ParallelConfig  # noqa: E402
from megatron_spec.config.machine import H100  # noqa: E402
from megatron_spec.planning import paths  # noqa: E402
from megatron_spec.planning.layouts import ROWS, table  # noqa: E402

_BETWEEN = re.compile(r"(<!--support-->\n).*?(<!--/support-->)", re.DOTALL)
_DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", _DOCS / "scale.md", _DOCS / "performance.md", _DOCS / "transformer_engine.md")
_ENGINE_PATHS = ("te_attention", "te_experts", "te_fp8")
_SCRIPTS = {
    "convert_model.py": runs.ConvertRun, "finetune.py": runs.FinetuneRun, "quantize.py": runs.QuantizeRun,
    "offline_feature_extract.py": runs.ExtractRun, "validate.py": runs.ValidateRun, "generate.py": runs.GenerateRun,
    "export.py": runs.ExportRun, "tools/import_features.py": runs.ImportRun,
}  # fmt: skip
_LAYOUTS = {
    "TP": {"tensor_model_parallel_size": 2},
    "TP with SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP": {"pipeline_model_parallel_size": 2},
    "CP": {"context_parallel_size": 2},
    "EP": {"expert_model_parallel_size": 2},
}


def short_table() -> str:
    """The table without its notes."""
    return re.sub(r"no \(\d+\)", "no", table().split("\n\n")[0]) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _engine_cells(base: BaseConfig, parallel: ParallelConfig) -> list[str]:
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


def engine_table() -> str:
    """Transformer Engine's modules by script, family and layout."""
    lines = [
        _row("script", "`--transformer-impl transformer_engine`", "`--fp8-format`", "layouts"),
        "|---|---|---|---|",
    ]
    rows = {"convert_model.py": "convert", "quantize.py": "quantize", "export.py": "export"}
    rows |= {"offline_feature_extract.py": "extract", "validate.py": "decode", "generate.py": "decode"}
    for script, run in _SCRIPTS.items():
        field = run.__dataclass_fields__.get("layers")
        fp8 = field is not None and not field.metadata["only"]
        refused = ", ".join(ROWS[rows.get(script, "finetune")].refused)
        layouts = "" if field is None else f"all but {refused}" if refused else "all"
        lines.append(
            _row(f"`{script}`", "no: local layers" if field is None else "yes", "yes" if fp8 else "no", layouts)
        )
    head = ("attention", "experts", "fp8 by tensor", "fp8 by block")
    lines += ["", _row("family", "norms inside linears", *head), "|---" * 6 + "|"]
    for family in FAMILIES:
        base = family_shape(family)
        norms = "before dense MLPs" if base.mla else "before attention" if base.moe else "all"
        if base.moe and base.moe.dense_layers and not base.mla:
            norms += " and dense MLPs"
        lines.append(_row(family, norms, *_engine_cells(base, ParallelConfig())))
    lines += ["", _row("layout", *head), "|---" * 5 + "|"]
    mixture = family_shape("mixtral")
    lines += [_row(name, *_engine_cells(mixture, ParallelConfig(**values))) for name, values in _LAYOUTS.items()]
    return "\n".join(lines) + "\n"


def updated(page: Path) -> str:
    """The text of a page with the current table."""
    text = page.read_text(encoding="utf-8")
    assert _BETWEEN.search(text), f"{page.name} lacks <!--support--> and <!--/support-->"
    makers = {"README.md": short_table, "scale.md": table, "performance.md": paths.table}
    shown = makers.get(page.name, engine_table)()
    return _BETWEEN.sub(lambda m: m[1] + shown + m[2], text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write it into the pages; default: print it, exit code 1 if outdated"
    )
    args = parser.parse_args()
    outdated = [page for page in PAGES if updated(page) != page.read_text(encoding="utf-8")]
    if args.write:
        for page in outdated:
            page.write_text(updated(page), encoding="utf-8")
    else:
        print(table(), end="")
        sys.exit(bool(outdated))
