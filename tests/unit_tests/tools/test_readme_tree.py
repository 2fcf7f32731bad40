"""The README's tree lists the files that are there."""

from tools.readme_tree import ROOT, insert


def test_the_readme_lists_every_file() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert insert(readme) == readme, "run: python tools/readme_tree.py --write"
    assert "unroll.py" in readme and "export.py" in readme
