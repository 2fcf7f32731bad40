import json

import pytest

from megatron_spec.config import UserError
from tools import plot_run


def row(iteration, steps=3):
    return {
        "iteration": iteration,
        "loss_per_step": [5.0 / iteration + k for k in range(steps)],
        "accuracy_per_step": [0.5 - 0.1 * k for k in range(steps)],
        "predicted_acceptance_length": 1.5,
    }


def write(folder, lines):
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def draw(*flags):
    plot_run.main(plot_run.make_parser().parse_args([str(flag) for flag in flags]))


def test_draws_every_step(tmp_path, monkeypatch):
    write(tmp_path, [json.dumps(row(i)) for i in (1, 2, 3)] + ['{"iterat'])
    drawn = []
    from matplotlib import figure

    original = figure.Figure.savefig

    def look(self, *arguments, **options):
        drawn.append([[list(line.get_ydata()) for line in axis.get_lines()] for axis in self.axes])
        return original(self, *arguments, **options)

    monkeypatch.setattr(figure.Figure, "savefig", look)
    draw(tmp_path, "--output", tmp_path / "new" / "run.png")
    assert (tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")
    (loss, accuracy, length) = drawn[0]
    assert loss == [[5.0 / i + k for i in (1, 2, 3)] for k in range(3)]
    assert accuracy == [[0.5 - 0.1 * k] * 3 for k in range(3)] and length == [[1.5] * 3]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["run.png"]


def test_default_place_and_a_single_point(tmp_path):
    write(tmp_path, [json.dumps(row(1, steps=1))])
    draw(tmp_path / "metrics.jsonl", "--smooth", 4)
    assert (tmp_path / "metrics.png").stat().st_size > 1000


def test_smoothing_is_the_mean_of_the_last_points():
    assert plot_run.smooth([1.0, 3.0, 5.0, 1.0], 2) == [1.0, 2.0, 4.0, 3.0]
    assert plot_run.smooth([1.0, 3.0], 1) == [1.0, 3.0]


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"does not exist: expected the --save folder"):
        draw(tmp_path)
    for lines, words in (
        (["{", json.dumps(row(1))], "line 1: malformed"),
        ([json.dumps({"iteration": 1, "loss_per_step": []})], "line 1: missing accuracy_per_step"),
        (["{"], "no metrics yet"),
    ):
        with pytest.raises(UserError, match=words):
            draw(write(tmp_path, lines))
    with pytest.raises(UserError, match=r"ending in .png"):
        draw(write(tmp_path, [json.dumps(row(1))]), "--output", tmp_path / "x.pdf")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written"):
        draw(tmp_path, "--output", tmp_path / "metrics.jsonl" / "x.png")
    (tmp_path / "metrics.jsonl").write_bytes(b"\x80")
    with pytest.raises(UserError, match="is not valid JSON"):
        draw(tmp_path)


def test_a_run_that_went_on_with_other_draft_steps(tmp_path, monkeypatch):
    """A step is drawn where it was trained."""
    write(tmp_path, [json.dumps(row(i, steps)) for i, steps in ((1, 2), (2, 3), (3, 1))])
    drawn = []
    from matplotlib import figure

    def look(self, path, **options):
        drawn.extend([list(line.get_xdata()) for line in axis.get_lines()] for axis in self.axes)
        path.touch()

    monkeypatch.setattr(figure.Figure, "savefig", look)
    draw(tmp_path)
    assert drawn[0] == drawn[1] == [[1, 2, 3], [1, 2], [2]] and drawn[2] == [[1, 2, 3]]
