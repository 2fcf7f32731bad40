"""`tools/file_tree.py` prints every source file with a summary."""

from tools.file_tree import ROOT, summary, tree


def test_every_file_has_a_summary() -> None:
    lines = tree().splitlines()
    for path in (ROOT / "megatron_spec").rglob("*.py"):
        if path.read_text(encoding="utf-8").strip():
            text = summary(path)
            assert text and f"  {path.name:<26} {text}" in lines, path


def test_shell_scripts_are_described_by_their_comment() -> None:
    assert "  test.sh                    Set up and run the tests" in tree().splitlines()
