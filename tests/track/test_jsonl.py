"""metrics.jsonl after a crash and a resume is what an undisturbed run would have written."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from pathlib import Path

import pytest

from dtt.track import jsonl
from dtt.track.base import Record
from dtt.track.jsonl import JsonlTracker

RECORDS: list[Record] = [
    {"kind": "eval", "step": 0, "loss": 5.6},
    {"kind": "train", "step": 1, "loss": 5.5, "lr": 1e-3},
    {"kind": "sample", "step": 1, "text": 'def f():\n    return "é ∑ 日本 \u2028 😀"'},
    {"kind": "train", "step": 2, "loss": 5.4, "lr": 1e-3},
    {"kind": "perf", "step": 2, "mfu": None},
    {"kind": "train", "step": 3, "loss": 0.1 + 0.2, "lr": 1e-3},
]


def write(path: Path, resume_step: int | None, records: list[Record]) -> None:
    tracker = JsonlTracker(path, resume_step)
    for record in records:
        tracker.log(record)
    tracker.close()


def timeless(path: Path) -> bytes:
    """The bytes of a file but for the time stamps."""
    return re.sub(rb', "time": [0-9.]+}', b"}", path.read_bytes())


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    write(path, None, RECORDS)
    return path


def test_records_come_back_as_they_were_one_a_line(metrics: Path) -> None:
    assert list(jsonl.read(metrics)) == RECORDS
    assert metrics.read_bytes().count(b"\n") == len(RECORDS)


def test_every_record_has_the_time_at_which_it_was_written_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = time.time()
    write(path, None, RECORDS)
    stamped = [json.loads(line) for line in path.open(encoding="utf-8")]
    times = [record.pop("time") for record in stamped]
    assert stamped == RECORDS
    assert before - 0.001 <= times[0] <= times[-1] <= time.time() + 0.001
    write(path, 2, [])  # a resume writes the file anew
    assert [r["time"] for r in jsonl.read(path, timed=True)] == times[:5]
    assert list(jsonl.read(path)) == RECORDS[:5]


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = {"a": 1.5, "b": math.inf}
    write(path, None, [{"kind": "eval", "step": 4, "loss": math.nan, "losses": losses}])
    nulls = {"kind": "eval", "step": 4, "loss": None, "losses": {"a": 1.5, "b": None}}
    assert list(jsonl.read(path)) == [nulls]


def test_no_file_has_no_records(tmp_path: Path) -> None:
    assert list(jsonl.read(tmp_path / "absent")) == []


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_resume_keeps_exactly_the_records_up_to_its_step(metrics: Path, step: int) -> None:
    write(metrics, step, [])
    assert list(jsonl.read(metrics)) == [r for r in RECORDS if r["step"] <= step]


def test_a_crashed_and_resumed_run_equals_an_uninterrupted_one(metrics: Path) -> None:
    undisturbed = timeless(metrics)
    write(metrics, 1, [r for r in RECORDS if r["step"] > 1])
    assert timeless(metrics) == undisturbed


def test_a_fresh_start_drops_old_records(metrics: Path) -> None:
    write(metrics, None, RECORDS[:1])
    assert list(jsonl.read(metrics)) == RECORDS[:1]


def test_a_line_truncated_at_any_byte_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, None, RECORDS[:3])
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for length in range(start, len(whole)):
        path.write_bytes(whole[:length])
        assert list(jsonl.read(path)) == RECORDS[:2]
    write(path, 3, RECORDS[3:])
    assert list(jsonl.read(path)) == [*RECORDS[:2], *RECORDS[3:]]


@pytest.mark.parametrize(("step", "lost"), [(3, 0), (9, 6)])
def test_a_resume_reports_how_many_steps_have_no_record(
    metrics: Path, caplog: pytest.LogCaptureFixture, step: int, lost: int
) -> None:
    write(metrics, step, [])
    assert list(jsonl.read(metrics)) == RECORDS
    assert (f"lacks the records of {lost} steps" in caplog.text) == bool(lost)


def test_flush_puts_the_records_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, None)
    monkeypatch.setattr(jsonl.os, "fsync", lambda fd: synced.append(path.read_bytes()))
    tracker.log(RECORDS[0])
    tracker.flush()
    assert synced == [path.read_bytes()]
    assert list(jsonl.read(path)) == RECORDS[:1]
    tracker.close()


def test_records_that_a_full_disk_rejected_are_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, None)
    room, file = [0], tracker._file

    class Full:
        fileno, close = file.fileno, file.close

        def write(self, data: bytes) -> int:
            if room[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return file.write(data[: room[0]])

    tracker._file = Full()  # type: ignore[assignment]
    for record in RECORDS[:4]:
        tracker.log(record)
    assert caplog.text.count("its lines are kept") == 1
    with pytest.raises(OSError, match="No space"):
        tracker.flush()
    room[0] = 7  # bytes at a time
    tracker.log(RECORDS[4])
    tracker.close()
    assert list(jsonl.read(path)) == RECORDS[:5]


def test_an_evaluation_that_will_be_repeated_is_dropped(metrics: Path) -> None:
    JsonlTracker(metrics, 1, again=("eval", "sample")).close()
    assert list(jsonl.read(metrics)) == RECORDS[:2]


def test_an_invalid_line_is_reported_and_skipped(
    metrics: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*lines[:2], b"\0" * 50 + b"\n", *lines[2:]]))
    assert list(jsonl.read(metrics)) == RECORDS
    assert "metrics.jsonl:3 is not a record" in caplog.text
