"""Logs and progress: stderr only, plain when not a terminal, one rank's voice."""

from __future__ import annotations

import re

import pytest
from support import pseudo_terminal

from dtt.base.log import log, progress, setup_logging
from dtt.base.ranks import Ranks


def test_lines_go_to_stderr_with_date_and_time_and_stdout_stays_clean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging(Ranks())
    log.info("reading %d files", 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d{4}(-\d\d){2} \d\d:\d\d:\d\d reading 3 files\n", err)


def test_a_second_set_up_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Ranks())
    setup_logging(Ranks())
    log.info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_other_ranks_log_only_warnings_with_their_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging(Ranks(1, 2, 1, 2, "pmi"))
    log.info("hidden")
    log.warning("shown")
    assert re.fullmatch(r"\S+ \S+ \[rank 1\] shown\n", capsys.readouterr().err)


def test_progress_without_a_terminal_is_periodic_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("dtt.base.log.time.monotonic", lambda: clock[0])
    setup_logging(Ranks())
    with progress("tokenizing", 4_000_000) as advance:
        for clock[0] in (104.0, 110.0, 115.0):
            advance(1_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[20:] for line in err.splitlines()] == [
        "tokenizing: 1 of 4 MB, 12 s left",  # soon, to say what takes long
        "tokenizing: 3 of 4 MB, 5 s left",
    ]


def test_progress_of_other_ranks_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Ranks())
    with progress("tokenizing", 10, shown=False) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_is_a_transient_bar_on_stderr() -> None:
    code = (
        "from dtt.base.log import progress, setup_logging\n"
        "from dtt.base.ranks import Ranks\n"
        "setup_logging(Ranks())\n"
        "with progress('tokenizing', 4, 'files') as advance:\n    advance(4)\n"
        "print('result')"
    )
    stdout, seen = pseudo_terminal.run_python(code, TERM="xterm", COLUMNS="80")
    assert stdout == "result\n"
    assert "tokenizing" in seen
    assert "4/4" in seen
    assert seen.rstrip().endswith("\x1b[2K")  # the line is erased at the end
