"""Plot the metrics of a run: loss and accuracy of each draft step, and the predicted acceptance length.

    python tools/plot_run.py RUN_DIR                       # -> RUN_DIR/metrics.png
    python tools/plot_run.py RUN_DIR --output run.png --smooth 20

RUN_DIR is the --save folder of finetune.py (or a metrics.jsonl). Needs matplotlib (megatron-spec[demo]).
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.runtime.files import read_text, replacing, require_own

REQUIRED = ("iteration", "loss_per_step", "accuracy_per_step", "predicted_acceptance_length")


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("run", metavar="RUN_DIR", help="folder with metrics.jsonl, or that file")
    p.add_argument("--output", metavar="FILE.png", help="default: metrics.png beside metrics.jsonl")
    p.add_argument("--smooth", type=int, default=1, metavar="N", help="moving average over N points (default: 1)")
    return p


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; an incomplete last line is skipped. Raises UserError if there is nothing to plot."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: expected the --save folder of finetune.py")
    lines = read_text(path, "JSON").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                continue  # the run is being written, or was killed while it wrote
            raise UserError(f"{path} line {number}: malformed JSON") from None
        missing = [key for key in REQUIRED if not isinstance(row, dict) or key not in row]
        if missing:
            raise UserError(f"{path} line {number}: missing {', '.join(missing)}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} has no metrics yet")
    return rows


def smooth(values: list[float], window: int) -> list[float]:
    """Mean over the last `window` values at every point."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


def draw(rows: list[dict[str, Any]], output: Path, window: int = 1) -> None:
    """Three panels in a row, with one line per draft step in the first two."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("matplotlib is not installed: pip install 'megatron-spec[demo]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = max(len(row["loss_per_step"]) for row in rows)  # a run that went on with other --ttt-steps has several
    x = [row["iteration"] for row in rows]
    marker = "o" if len(rows) == 1 else None
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for axis, key, title in zip(axes, REQUIRED[1:3], ("loss per draft step", "accuracy per draft step"), strict=False):
        for k in range(steps):
            colour = plt.get_cmap("viridis")(0.9 * k / max(steps - 1, 1))
            of_step = [row for row in rows if k < len(row[key])]
            y = smooth([row[key][k] for row in of_step], window)
            at = [row["iteration"] for row in of_step]
            axis.plot(at, y, color=colour, label=f"step {k}", linewidth=1.5, marker=marker)
        axis.set_title(title)
    axes[1].set_ylim(0, 1)
    axes[0].legend(fontsize="small", title="draft step" if steps > 1 else None)
    length = smooth([row["predicted_acceptance_length"] for row in rows], window)
    axes[2].plot(x, length, color="tab:red", linewidth=1.8, marker=marker)
    axes[2].set_title(f"predicted acceptance length (last: {length[-1]:.2f})")
    axes[2].set_ylim(bottom=1)
    for axis in axes:
        axis.set_xlabel("iteration")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    try:
        with replacing(output) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
    finally:
        plt.close(figure)


def is_png(path: Path) -> bool:
    """True for an image as this tool writes it."""
    with path.open("rb") as file:
        return file.read(4) == b"\x89PNG"


def main(args: Namespace) -> None:
    """Read the metrics, plot them, print the path."""
    path = Path(args.run)
    path = path / "metrics.jsonl" if path.is_dir() or path.suffix != ".jsonl" else path
    if args.smooth < 1:
        raise UserError(f"--smooth {args.smooth}: expected at least 1")
    output = Path(args.output) if args.output else path.with_name("metrics.png")
    if output.suffix != ".png":
        raise UserError(f"--output {output}: expected a file name ending in .png")
    require_own(output, is_png, "a plot")
    draw(read_metrics(path), output, args.smooth)
    sys.stdout.write(f"{output}\n")


if __name__ == "__main__":
    cli.run(make_parser(), main)
