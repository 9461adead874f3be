"""Appended lines are those bytes that were appended: complete, in order, and without secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtt.report import appended_lines
from dtt.report.appended_lines import LOOKS_PER_OPEN, AppendedLines, redacted_json

SECRET = "hf_" + "A1b2C3d4" * 4


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("one\ntwo\n")
    return path


def append(path: Path, content: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def test_lines_after_the_offset_come_once_and_in_order(metrics: Path) -> None:
    lines = AppendedLines(metrics, 4)
    assert lines.read() == ["two"]
    assert lines.read() == []
    append(metrics, "three\nfour\n")
    assert lines.read() == ["three", "four"]
    assert lines.read() == []


def test_an_incomplete_line_is_held_back(metrics: Path) -> None:
    lines = AppendedLines(metrics, 8)
    append(metrics, "three\nfo")
    assert lines.read() == ["three"]
    assert lines.read() == []
    append(metrics, "u")
    assert lines.read() == []
    append(metrics, "r\n")
    assert lines.read() == ["four"]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_much_that_was_appended_comes_in_pieces(
    metrics: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended_lines, "PIECE", size)
    written = [f"{'é' * (i % 13)}{i}" for i in range(50)]
    append(metrics, "".join(f"{line}\n" for line in written) + "incomplete")
    lines, read = AppendedLines(metrics, 8), []
    while piece := lines.read():
        read += piece
    assert read == written
    assert lines.read() == []


def test_a_file_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = AppendedLines(path, 0)
    assert lines.read() == []
    append(path, "one\n")
    assert lines.read() == ["one"]
    assert AppendedLines(tmp_path / "other", 1).read() is None


def test_an_empty_file_is_followed_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    lines = AppendedLines(path, 0)
    assert lines.read() == []
    append(path, "one\n")
    assert lines.read() == ["one"]


@pytest.mark.parametrize("offset", [1, 3, 7, 9, 10**17])
def test_an_offset_at_which_no_line_starts_is_a_rewritten_file(metrics: Path, offset: int) -> None:
    assert AppendedLines(metrics, offset).read() is None


@pytest.mark.parametrize("content", ["one\ntwo\n", "one\ntwo\nthree\n", "", "one\n"])
def test_a_replaced_file_is_a_rewritten_file(metrics: Path, content: str) -> None:
    lines = AppendedLines(metrics, 8)
    assert lines.read() == []
    other = metrics.with_name("other")
    other.write_text(content)
    other.replace(metrics)
    assert lines.read() is None


def test_a_file_that_was_cut_off_or_deleted_is_a_rewritten_file(metrics: Path) -> None:
    lines, others = AppendedLines(metrics, 8), AppendedLines(metrics, 8)
    assert (lines.read(), others.read()) == ([], [])
    os.truncate(metrics, 4)
    assert lines.read() is None
    metrics.unlink()
    assert others.read() is None


def test_something_that_is_not_a_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    assert AppendedLines(tmp_path / "folder", 0).read() == []
    assert AppendedLines(tmp_path / "fifo", 0).read() == []


def test_a_line_without_end_is_not_read_again_and_again(
    metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended_lines, "PIECE", 10)
    monkeypatch.setattr(appended_lines, "SMALL", 20)
    lines = AppendedLines(metrics, 8)
    append(metrics, "x" * 19)
    assert lines.read() == []
    append(metrics, "y\n")
    assert lines.read() == []
    assert lines.read() == []


def test_a_growing_file_is_noticed_although_stat_answers_from_a_cache(
    metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, cached = AppendedLines(metrics, 8), metrics.stat()
    assert lines.read() == []
    append(metrics, "three\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda path: cached)  # as NFS does for up to a minute
        read = [lines.read() for _ in range(LOOKS_PER_OPEN)]
    assert [line for piece in read for line in piece or ()] == ["three"]


def test_bytes_that_are_not_utf8_are_replaced(metrics: Path) -> None:
    lines = AppendedLines(metrics, 8)
    append(metrics, b'{"text": "\xff\xe9"}\n\xc3\nnext\n')
    assert lines.read() == ['{"text": "��"}', "�", "next"]


def test_only_line_feeds_end_a_line(metrics: Path) -> None:
    lines = AppendedLines(metrics, 8)
    append(metrics, "a\rb\x0b\x1c\x85\u2028c\n")
    assert lines.read() == ["a\rb\x0b\x1c\x85\u2028c"]


def test_lines_without_secrets_are_verbatim(metrics: Path) -> None:
    lines = AppendedLines(metrics, 8)
    written = ['{"a":1.50,  "b": "\\u00e9\\n"}', "not JSON \\", '{"a": NaN}', "[" * 9999]
    append(metrics, "".join(f"{line}\n" for line in written))
    assert lines.read() == written


def test_secrets_are_redacted_and_the_line_remains_json(
    metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quoted = 'pass"word\\with\nescapes'
    monkeypatch.setenv("SOME_PASSWORD", quoted)
    monkeypatch.setenv("SOME_API_KEY", "123456789012")
    records: list[Any] = [
        {"text": SECRET, "n": 0.123456789012},
        {"url": "https://host/x?token=abc", "next": 1},
        {"deep": [{"er": f"a {quoted} b"}], quoted: None},
        {"auth": "Bearer abcdefghijklmnop", "last": True},
    ]
    append(metrics, "".join(json.dumps(record) + "\n" for record in records))
    append(metrics, f"not JSON: {SECRET}\n")
    read = AppendedLines(metrics, 8).read() or []
    assert [json.loads(line) for line in read[:-1]] == [
        {"text": "[secret]", "n": 0.123456789012},
        {"url": "https://host/x[secret]", "next": 1},
        {"deep": [{"er": "a [secret] b"}], "[secret]": None},
        {"auth": "[secret]", "last": True},
    ]
    assert read[-1] == "not JSON: [secret]"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(value=JSON, before=st.text(), after=st.text())
def test_any_json_remains_the_same_json_without_its_secret(
    value: Any, before: str, after: str
) -> None:
    record = {"value": value, "text": f"{before} {SECRET} {after}"}
    clean = redacted_json(json.dumps(record))
    assert SECRET not in clean
    assert json.loads(clean)["value"] == value
    plain = json.dumps({"value": value})
    assert redacted_json(plain) == plain
