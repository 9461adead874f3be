"""`dtt download` prints where the corpus is, and tells mistakes without a traceback."""

from __future__ import annotations

from pathlib import Path

from support.running import Done, Dtt


def dtt(folder: Path, *arguments: str, code: int = 0) -> Done:
    return Dtt(folder)("download", *arguments, expect=code)


def test_results_go_to_stdout_and_a_rerun_reports_completion(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Once upon a time.\n" * 10)
    first = dtt(tmp_path, "-d", "book.txt")
    assert "data/corpus/book" in first.stdout
    assert "1 txt" in first.stdout
    second = dtt(tmp_path, "-d", "book.txt")
    assert second.stdout == first.stdout
    assert "already done" in second.stderr
    assert "already done" not in first.stderr
