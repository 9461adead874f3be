"""`dtt download` prints where the corpus is, and tells mistakes without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def dtt(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtt.main", "download", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_results_go_to_stdout_and_a_rerun_says_why_it_is_done(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Once upon a time.\n" * 10)
    first = dtt(tmp_path, "-d", "book.txt")
    assert first.returncode == 0, first.stderr
    assert "data/corpus/book" in first.stdout
    assert "1 txt" in first.stdout
    second = dtt(tmp_path, "-d", "book.txt")
    assert second.stdout == first.stdout
    assert "already done" in second.stderr
    assert "already done" not in first.stderr


def test_mistakes_are_one_message_and_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "x", "b": "y"}\n')
    (tmp_path / "empty").mkdir()
    for arguments, code, word in (
        (["-d", "nowhere"], 66, "no dataset 'nowhere'"),
        (["-d", "empty"], 66, "no file of"),
        (["-d", "a.jsonl"], 2, "download.text_column=a"),
        ([], 2, "-d DATASET"),
    ):
        run = dtt(tmp_path, *arguments)
        assert run.returncode == code, run.stderr
        assert word in run.stderr
        assert "Traceback" not in run.stderr
        assert run.stdout == ""
