"""Calibration report per tensor, as a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_spec.quantization.quantizer import TensorQuantizer
from megatron_spec.runtime.files import replacing, write_json, write_text


@dataclass(frozen=True)
class LayerReport:
    """One linear (nvfp4 rounds only its weight), or keys or values of one layer; None: not quantised."""

    name: str
    amax_input: float | None
    amax_weight: float | None
    weight_error: float | None
    """|w - q(w)| / |w| over the whole weight; about 0.02-0.04 for bell-shaped weights."""
    input_error: float | None
    """|x - q(x)| / |x| over all observed inputs."""
    clipped: float
    """Share of the observed inputs outside +-amax_input; 0 with max calibration."""


def lines_of(owner: str, linears: dict[str, Any], others: dict[str, TensorQuantizer]) -> list[LayerReport]:
    """Report lines of the linears with quantisers, and of the quantisers in `others`, which belong to no linear."""
    found = []
    seen: set[str] = set()
    for name, module in linears.items():
        weight, x = getattr(module, "weight_quantizer", None), getattr(module, "input_quantizer", None)
        if weight is None:
            continue
        if x is None:  # nvfp4: only weights
            found.append(LayerReport(f"{owner}.{name}", None, float(weight.amax), weight.relative_error, None, 0.0))
            continue
        seen |= {weight.name, x.name}
        found.append(
            LayerReport(
                f"{owner}.{name}", float(x.amax), float(weight.amax), weight.relative_error, x.relative_error,
                x.clipped_share,
            )
        )  # fmt: skip
    for name, q in others.items():
        if name not in seen:
            line = LayerReport(f"{owner}.{name}", float(q.amax), None, None, q.relative_error, q.clipped_share)
            found.append(line)
    return found


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(report: Sequence[LayerReport]) -> str:
    """The report as a Markdown table."""
    head = "| linear | amax input | clipped | input error | amax weight | weight error |\n|---|---|---|---|---|---|\n"
    rows = [
        f"| {r.name} | {_cell(r.amax_input, '.4g')} | {r.clipped:.2e} | "
        f"{_cell(r.input_error, '.4f')} | {_cell(r.amax_weight, '.4g')} | "
        f"{_cell(r.weight_error, '.4f')} |\n"
        for r in report
    ]
    return head + "".join(rows)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def plot(report: Sequence[LayerReport], path: Path) -> None:
    """Plot range and error of every line, in order. Does nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(max(8.0, 0.09 * len(report)), 8), sharex=True, layout="constrained")
    x = range(len(report))
    axes[0].semilogy(x, [_number(r.amax_input) for r in report], ".-", label="input")
    axes[0].semilogy(x, [_number(r.amax_weight) for r in report], ".-", label="weight")
    axes[0].set_ylabel("amax")
    axes[1].plot(x, [_number(r.input_error) for r in report], ".-", label="input")
    axes[1].plot(x, [_number(r.weight_error) for r in report], ".-", label="weight")
    axes[1].set_ylabel("relative error")
    axes[2].plot(x, [100 * r.clipped for r in report], ".-", label="input")
    axes[2].set_ylabel("clipped, %")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    if len(report) <= 80:
        axes[2].set_xticks(list(x), [r.name for r in report], rotation=90, fontsize=5)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


FILES = ("calibration.json", "calibration.md", "calibration.png")


def write(report: Sequence[LayerReport], folder: Path) -> None:
    """Write calibration.json, calibration.md and, if matplotlib is installed, calibration.png."""
    write_json(folder / "calibration.json", [asdict(line) for line in report])
    write_text(folder / "calibration.md", table(report))
    plot(report, folder / "calibration.png")
