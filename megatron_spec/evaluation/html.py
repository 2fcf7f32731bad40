"""Validation reports as one self-contained HTML file: tables, and plots as inline SVG.

Several reports are shown side by side: different drafters, or one draft before and after quantisation.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.files import require_own, write_text

Reports = Mapping[str, dict[str, Any]]
"""Name -> content of a validate.json."""

_TITLE = "Acceptance of "
_HEAD = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_TITLE}'

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; }
td { text-align: right; font-variant-numeric: tabular-nums; } td:first-child, th:first-child { text-align: left; }
figure { display: inline-block; margin: 0; } figure svg { max-width: 100%; height: auto; }
.good { color: #06703a; } .bad { color: #b00020; } .note { color: #666; }
"""


def require_matplotlib() -> None:
    """Raise UserError when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise UserError(f"the HTML report needs matplotlib: pip install megatron-spec[demo] ({e})") from None


def require_page(path: Path | str) -> None:
    """Raise UserError when matplotlib is missing, or if the page's file is something else, which would be lost."""
    require_matplotlib()
    require_own(path, _is_page, "a page of reports", "--html")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD.encode()


def write_html(path: Path | str, reports: Reports) -> None:
    """Write the page. Raises UserError when matplotlib is missing or there is no report."""
    if not reports:
        raise UserError("expected at least one report, found none")
    require_matplotlib()
    write_text(path, render(reports))


def render(reports: Reports) -> str:
    """The HTML of the page."""
    title = _TITLE + (next(iter(reports)) if len(reports) == 1 else f"{len(reports)} drafts")
    several = any(len(r["sweep"]) > 1 for r in reports.values())
    longest, first = (" (longest draft)", " (first draft length)") if several else ("", "")
    length, share = "tokens per base forward", "share of steps"
    figures = [
        _figure("Accepted at each draft position", f"draft position{longest}", share, _per_position, reports),
        _figure("Acceptance length by category", f"category{first}", length, _by_category, reports),
        _figure("Acceptance length by prompt length", f"prompt tokens{first}", length, _by_length, reports),
        _figure("Acceptance length by context", f"tokens before the step{first}", length, _by_context, reports),
        _figure("Draft tokens accepted in a step", f"accepted tokens{first}", share, _distribution, reports),
    ]
    if several:
        figures += [
            _figure("Draft length", "draft length", length, _sweep, reports),
            _figure("Speed-up predicted from costs", "draft length", "times the base alone", _speedups, reports),
        ]
    body = [
        f"<h1>{html.escape(title)}</h1>",
        _summary(reports),
        *figures,
        *(_details(n, r) for n, r in reports.items()),
    ]
    return (
        f"{_HEAD}{html.escape(title.removeprefix(_TITLE))}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


# ---- tables


def _number(value: float | None, form: str = ".3f") -> str:
    return "&ndash;" if value is None else format(value, form)


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = ["<tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"


def _summary(reports: Reports) -> str:
    head = [
        "draft", "draft length", "acceptance length", "95 % interval", "as engines count",
        "all accepted", "tokens/s alone", "with draft",
        "speed-up", "predicted", "text",
    ]  # fmt: skip
    rows = []
    for name, report in reports.items():
        for run in report["sweep"]:
            found = run["acceptance"]
            low, high = found["acceptance_length_ci95"] or (None, None)
            rows.append([
                html.escape(name), str(run["max_draft_len"]), _number(found["acceptance_length"]),
                f"{_number(low)} to {_number(high)}", _number(found.get("engine_acceptance_length")),
                _number(found["full_acceptance_share"], ".1%"),
                _number(report["base"]["tokens_per_second"], ".1f"),
                _number(run["speculative"]["tokens_per_second"], ".1f"), _number(run["speedup"], ".2f"),
                _number(run["predicted_speedup"], ".2f"), _text(run, report["answers"]),
            ])  # fmt: skip
    note = (
        '<p class="note">Acceptance length: tokens per base forward after the prefill, the base\'s own included; mean '
        "over steps, interval by bootstrap over answers. As engines count: 1 + accepted tokens per step that drafted, "
        "tokens after the end of an answer included. Exact tie: both tokens have the largest logit. Speed-up: tokens "
        "per second, prefill included; predicted: from acceptance length and the measured cost of a step, prefill left "
        "out.</p>"
    )
    return _table(head, rows) + note


def _text(run: dict[str, Any], answers: int) -> str:
    """HTML of the comparison with the base's own text."""
    ties = f", {run['exact_ties']} exact ties" if run.get("exact_ties") else ""
    if run["text_identical"] is None:
        return "not compared"
    if run["text_identical"]:
        return f'<span class="good">identical</span>{ties}'
    different = run.get("differences", len(run["mismatches"]))
    return f'<span class="bad">{different} of {answers} differ</span>, {run["near_ties"]} near ties{ties}'


def _memory(memory: dict[str, int]) -> str:
    cache = f"KV cache of {memory['sequences']} texts of {memory['tokens']} tokens"
    names = {"base": "weights", "draft": "weights", "base_cache": cache, "draft_cache": cache}
    rows = [[k.removesuffix("_cache"), what, f"{memory[k] / 2**20:,.1f}"] for k, what in names.items()]
    return _table(["memory of", "", "MiB"], rows)


def _details(name: str, report: dict[str, Any]) -> str:
    parts = [f"<h2>{html.escape(name)}</h2>"]
    about = {**report["about"], "answers": report["answers"], "truncated": report["truncated"]}
    parts.append(_table(["measured", ""], [[html.escape(str(k)), html.escape(str(v))] for k, v in about.items()]))
    if "memory" in report:
        parts.append(_memory(report["memory"]))
    if len(report["sweep"]) > 1:
        parts.append(f'<p class="note">With draft length {report["max_draft_len"]}, the first:</p>')
    rows = [
        [html.escape(c), str(s["prompts"]), str(s["steps"]), _number(s["acceptance_length"]),
         " ".join(_number(x, ".0%") for x in s["acceptance_per_position"])]
        for group in ("acceptance_by_category", "acceptance_by_prompt_length", "acceptance_by_context_length")
        for c, s in report.get(group, {}).items()
    ]  # fmt: skip
    parts.append(
        _table(
            [
                "category, prompt tokens, or tokens before the step",
                "answers",
                "steps",
                "acceptance length",
                "per position",
            ],
            rows,
        )
    )
    if report["mismatches"]:
        head = ["prompt", "round", "position", "base", "draft", "gap of logits", "near tie", "exact tie"]
        names = (
            "identifier",
            "round",
            "position",
            "base_token",
            "speculative_token",
            "top_gap",
            "near_tie",
            "exact_tie",
        )
        parts.append(_table(head, [[html.escape(str(m.get(n))) for n in names] for m in report["mismatches"][:50]]))
    if report["skipped"]:
        parts.append(f'<p class="note">Not asked: {html.escape("; ".join(report["skipped"][:20]))}</p>')
    return "\n".join(parts)


# ---- plots


def _figure(title: str, x: str, y: str, draw: Callable[[Any, Reports], None], reports: Reports) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A dollar sign in a name is no formula.
    with rc_context(
        {"svg.hashsalt": title, "svg.fonttype": "none", "font.family": "sans-serif", "text.parse_math": False}
    ):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.subplots()
        # matplotlib leaves names that begin with an underscore out of the legend
        draw(axes, {f" {name}" if name.startswith("_") else name: report for name, report in reports.items()})
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(axis="y", alpha=0.3)
        if len(reports) > 1:
            axes.legend(fontsize="small")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = out.getvalue()
    return f'<figure role="img" aria-label="{html.escape(title)}">{svg[svg.index("<svg") :]}</figure>'


def _per_position(axes: Any, reports: Reports) -> None:
    for name, report in reports.items():
        longest = max(report["sweep"], key=lambda run: run["max_draft_len"])
        shares = longest["acceptance"]["acceptance_per_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _bars(axes: Any, reports: Reports, group: str) -> None:
    labels = sorted({label for report in reports.values() for label in report.get(group, {})})
    width = 0.8 / len(reports)
    for i, (name, report) in enumerate(reports.items()):
        stats = [report.get(group, {}).get(label) or {} for label in labels]
        heights = [s.get("acceptance_length") or 0.0 for s in stats]
        bounds = [s.get("acceptance_length_ci95") or (h, h) for s, h in zip(stats, heights, strict=True)]
        errors = [[max(0.0, h - low) for h, (low, _) in zip(heights, bounds, strict=True)],
                  [max(0.0, high - h) for h, (_, high) in zip(heights, bounds, strict=True)]]  # fmt: skip
        places = [x + (i - (len(reports) - 1) / 2) * width for x in range(len(labels))]
        axes.bar(places, heights, width, yerr=errors, capsize=2, label=name)
    axes.set_xticks(range(len(labels)), labels, rotation=30 if len(labels) > 4 else 0)
    axes.set_ylim(bottom=0.8)


def _by_category(axes: Any, reports: Reports) -> None:
    _bars(axes, reports, "acceptance_by_category")


def _by_length(axes: Any, reports: Reports) -> None:
    _bars(axes, reports, "acceptance_by_prompt_length")


def _by_context(axes: Any, reports: Reports) -> None:
    _bars(axes, reports, "acceptance_by_context_length")


def _distribution(axes: Any, reports: Reports) -> None:
    width = 0.8 / len(reports)
    for i, (name, report) in enumerate(reports.items()):
        shares = report["acceptance_distribution"]
        axes.bar([x + (i - (len(reports) - 1) / 2) * width for x in range(len(shares))], shares, width, label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _over_lengths(axes: Any, reports: Reports, value: Callable[[dict[str, Any]], float | None]) -> None:
    for name, report in reports.items():
        runs = sorted(report["sweep"], key=lambda run: run["max_draft_len"])
        points = [(run["max_draft_len"], v) for run in runs if (v := value(run)) is not None]
        axes.plot([x for x, _ in points], [v for _, v in points], marker="o", label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _sweep(axes: Any, reports: Reports) -> None:
    _over_lengths(axes, reports, lambda run: run["acceptance_length"])


def _speedups(axes: Any, reports: Reports) -> None:
    _over_lengths(axes, reports, lambda run: run["predicted_speedup"])
    axes.axhline(1.0, color="#888", linewidth=1)
