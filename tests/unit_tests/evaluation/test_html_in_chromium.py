"""The HTML report in a headless Chromium: plots are visible, and the console has no messages."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.evaluation.test_validate import run_of
from tools import compare_reports

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MEASURE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; };
const figures = [...document.querySelectorAll("figure")].map(f => ({
  title: f.getAttribute("aria-label"), box: box(f.querySelector("svg")),
  paths: [...f.querySelectorAll("path")].filter(p => box(p)[2] + box(p)[3] > 0).length,
  words: [...f.querySelectorAll("text")].map(t => t.textContent) }));
const cells = [...document.querySelectorAll("table td")].map(t => t.textContent);
const pre = document.createElement("pre"); pre.id = "found";
pre.textContent = JSON.stringify({figures, cells, width: document.documentElement.scrollWidth});
document.body.append(pre);
</script>"""


def chromium() -> str | None:
    """Path of the program: $CHROMIUM, what tools/get_chromium.sh unpacked, or one that is installed."""
    own = [os.environ.get("CHROMIUM", ""), str(ROOT / ".cache" / "chromium" / "chromium")]
    return next((path for name in (*own, *NAMES) if name and (path := shutil.which(name))), None)


def browse(page: Path, *flags: str) -> tuple[str, list[str]]:
    """(what it prints, lines of its console)."""
    program = chromium()
    assert program is not None
    done = subprocess.run(
        [program, "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,3000",
         f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(chromium() is None, reason="no Chromium: tools/get_chromium.sh unpacks one")
def test_the_page_is_drawn(chat: Any, tmp_path: Path) -> None:
    from matplotlib import image

    reports = [tmp_path / "ngram <2>.json", tmp_path / "long.json"]
    run_of(chat, reports[0], draft_lens=(1, 3))
    run_of(chat, reports[1], draft_lens=(1, 2, 4), max_draft_len=4)
    page = tmp_path / "compare.html"
    flags = [*map(str, reports), "--names", "n-grams <2>", "other", "--html", str(page)]
    compare_reports.main(compare_reports.make_parser().parse_args(flags))
    measured = tmp_path / "measured.html"
    measured.write_text(page.read_text() + MEASURE)
    dom, console = browse(measured, "--dump-dom")
    assert console == []
    found = json.loads(html.unescape(re.findall(r'<pre id="found">(.*?)</pre>', dom, flags=re.DOTALL)[0]))
    assert [f["title"] for f in found["figures"]] == [
        "Accepted at each draft position", "Acceptance length by category", "Acceptance length by prompt length",
        "Acceptance length by context", "Draft tokens accepted in a step", "Draft length",
        "Speed-up predicted from costs",
    ]  # fmt: skip
    assert {"n-grams <2>", "other"} <= set(found["cells"]) and found["width"] <= 1100
    for figure in found["figures"]:
        assert min(figure["box"][2:]) > 150 and figure["paths"] > 10, figure["title"]
        assert {"n-grams <2>", "other", figure["title"]} <= set(figure["words"])
    _, console = browse(page, f"--screenshot={tmp_path / 'page.png'}", "--hide-scrollbars")
    assert console == []
    pixels = image.imread(tmp_path / "page.png")[..., :3]
    for figure in found["figures"]:
        left, top, width, height = map(int, figure["box"])
        seen = pixels[top : top + height, left : left + width].reshape(-1, 3)
        coloured = (seen.max(axis=1) - seen.min(axis=1)) > 0.2  # lines and bars; frame and words are grey
        assert 0.001 < coloured.mean() < 0.9, figure["title"]
        assert (seen.min(axis=1) > 0.95).mean() > 0.3, figure["title"]


@pytest.mark.skipif(chromium() is None, reason="no Chromium: tools/get_chromium.sh unpacks one")
def test_a_console_error_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    page.write_text("<!doctype html><title>x</title><script>nothing.at.all()</script>")
    assert any("nothing is not defined" in line for line in browse(page, "--dump-dom")[1])
