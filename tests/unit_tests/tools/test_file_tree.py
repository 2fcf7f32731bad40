"""The file tree of docs/architecture.md lists the files that are there."""

from tools.file_tree import PAGE, insert


def test_the_page_lists_every_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert insert(page) == page, "run: python tools/file_tree.py --write"
    assert "unroll.py" in page and "export.py" in page
