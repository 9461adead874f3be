"""Retries of a file system that fails for a while, or for good."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial

import pytest

from dtt.base import reading


def test_the_retries_of_a_training_process_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of a folder that fails for good would otherwise have its own patience."""
    clock = [0.0]
    monkeypatch.setattr(reading.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(reading.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    calls: list[int] = []

    def fails() -> None:
        calls.append(0)
        raise OSError(errno.EIO, "gone")

    def calls_of(actions: int) -> int:
        calls.clear()
        for _ in range(actions):
            with pytest.raises(OSError, match="gone"):
                reading.retrying(fails)
        return len(calls)

    assert calls_of(9) == 9 * 4
    with reading.outages_limited():
        before = clock[0]
        assert calls_of(1) == 4
        calls_of(9)
        assert clock[0] - before <= reading.OUTAGE
        assert calls_of(9) == 9  # each at once
        clock[0] += reading.APART + 1
        assert calls_of(1) == 4

        def recovers(outcomes: Iterator[OSError | None]) -> None:
            if (error := next(outcomes)) is not None:
                raise error

        clock[0] += reading.APART + 1
        gone = OSError(errno.EIO, "gone")
        reading.retrying(partial(recovers, iter([gone, None])))
        assert calls_of(1) == 4  # another outage
        clock[0] += reading.APART + 1
        with pytest.raises(FileNotFoundError):  # an answer, too
            reading.retrying(partial(recovers, iter([gone, FileNotFoundError(errno.ENOENT, "")])))
        clock[0] += reading.OUTAGE
        assert calls_of(1) == 4
