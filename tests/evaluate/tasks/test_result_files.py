"""Result files are complete or continued, never wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtt.base.errors import InUse
from dtt.evaluate.tasks.metrics import AnswerRecord, TaskResult, task_result
from dtt.evaluate.tasks.result_files import ResultFile, read, read_sealed

SETTINGS: dict[str, Any] = {"task": "sums", "type": "generation", "chance": None, "weights": "a"}
BLOCKS = [[{"id": f"{block}-{i}", "answer": "ä", "exact_match": i > 0} for i in range(block + 1)]
          for block in range(4)]  # fmt: skip


def result_of(records: list[AnswerRecord]) -> TaskResult:
    """The result of some records."""
    return task_result("sums", "generation", None, records)


def fill(file: ResultFile) -> list[int]:
    """Continue the file to its end; return the numbers of the blocks that were written."""
    written = []
    with file.writing() as writer:
        if writer.result is not None:
            return []
        while writer.blocks < len(BLOCKS):
            written.append(writer.blocks)
            writer.append(BLOCKS[writer.blocks])
        writer.seal(result_of(writer.records))
    return written


@pytest.fixture
def file(tmp_path: Path) -> ResultFile:
    """A sealed file."""
    found = ResultFile.of(tmp_path, SETTINGS)
    assert fill(found) == [0, 1, 2, 3]
    return found


def test_a_sealed_file_has_all_records_and_the_result(file: ResultFile) -> None:
    records = [record for block in BLOCKS for record in block]
    assert read(file.path).records == records
    assert file.result() == result_of(records)
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [line["id"] for line in lines if "id" in line] == [record["id"] for record in records]


def test_a_file_that_was_cut_off_anywhere_is_continued_to_the_same_bytes(
    file: ResultFile, caplog: pytest.LogCaptureFixture
) -> None:
    """An interrupted write is no damage; without a first line, the file may be of another kind."""
    complete = file.path.read_bytes()
    ends = [at + 1 for at in range(len(complete) - 1) if complete[at : at + 1] == b"\n"]
    for size in {*ends, *range(0, len(complete), 23)}:
        file.path.write_bytes(complete[:size])
        assert file.result() is None
        caplog.clear()
        fill(file)
        assert file.path.read_bytes() == complete, size
        assert "damaged" not in caplog.text or size < ends[0], size


def test_any_changed_byte_is_detected(file: ResultFile) -> None:
    complete = file.path.read_bytes()
    for position in range(len(complete)):
        damaged = bytearray(complete)
        damaged[position] ^= 1
        file.path.write_bytes(damaged)
        assert file.result() is None, position
        if position % 11 == 0:
            fill(file)
            assert file.path.read_bytes() == complete, position


DAMAGED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a line of the second block is missing": (lambda lines: lines[:4] + lines[5:], 1),
    "a record is in the third block": (lambda lines: [*lines[:7], lines[1], *lines[7:]], 2),
    "a record is at the end": (lambda lines: [*lines, lines[1]], 4),
}
"""Changes of the lines of a file, and the number of blocks that are kept."""


@pytest.mark.parametrize("case", DAMAGED)
def test_foreign_and_missing_lines_are_detected_and_the_blocks_before_are_kept(
    file: ResultFile, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    change, kept = DAMAGED[case]
    complete = file.path.read_bytes()
    file.path.write_bytes(b"".join(change(complete.splitlines(keepends=True))))
    assert file.result() is None
    assert fill(file) == list(range(kept, 4))
    assert file.path.read_bytes() == complete
    assert "is damaged" in caplog.text


def test_no_setting_shares_a_file_with_another_value(tmp_path: Path) -> None:
    file = ResultFile.of(tmp_path, SETTINGS)
    fill(file)
    other = ResultFile.of(tmp_path, SETTINGS | {"weights": "b"})
    assert other.path != file.path
    file.path.rename(other.path)  # even under its name, it is no answer
    assert other.result() is None
    assert fill(other) == [0, 1, 2, 3]
    sealed = read_sealed(other.path)
    assert sealed is not None
    assert sealed.header["weights"] == "b"


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    file = ResultFile.of(tmp_path, SETTINGS)
    another = ResultFile.of(tmp_path, SETTINGS | {"limit": 5})
    with file.writing():
        with pytest.raises(InUse, match="in use"), file.writing():
            pass
        with another.writing():
            pass


def test_a_file_of_another_kind_is_replaced_by_one_of_results(tmp_path: Path) -> None:
    file = ResultFile.of(tmp_path, SETTINGS)
    file.path.write_text('[]\n{"step": 1}\n')
    assert file.result() is None
    assert fill(file) == [0, 1, 2, 3]
    assert file.result() is not None
