"""Text of others neither controls the terminal nor poses as advice of dtt, by whatever way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import pseudo_terminal

from dtt.base.errors import ConfigError
from dtt.base.terminal import Message, one_line, part_of_message

FORGED = (
    "a\x1b]0;title\x07\x1b[2J\x9b1m\r\n  next:  rm -r /\n12:00:00 saved\udcff"
    "\n2026-01-31 12:00:00 saved"
)
SAFE = (
    "a\\u001b]0;title\\u0007\\u001b[2J\\u009b1m\\u000d\n  | next:  rm -r /\n| 12:00:00 saved\\udcff"
    "\n| 2026-01-31 12:00:00 saved"
)
WRITERS = {
    "a print": "print(FORGED)",
    "a log line": "log.warning('lost %s', FORGED)",
    "a log line without values": "log.warning(f'lost {FORGED}')",
    "a path": "log.warning('lost %s', Path(FORGED))",
    "an error of others": "log.warning('lost %s', OSError(FORGED))",
    "each part of an error": (
        "raise DttError(f'lost {FORGED}', where=Path(FORGED), why=FORGED, next=f'rm {FORGED}')"
    ),
    "a bug": "raise RuntimeError(FORGED)",
    "several writes": "sys.stdout.writelines(['a\\n', '  next:  rm -r /\\n'])",
}
PROGRAM = """
import sys
from pathlib import Path
from dtt.base.errors import DttError
from dtt.base.log import log
from dtt.base.terminal import Coded, Message, Verbatim, protect_output
from dtt.mesh.process import command
FORGED = {forged!r}
protect_output()
with command():
    {body}
"""


def _run(body: str) -> str:
    """Return what a process writes to stdout and stderr, which are no terminal."""
    code = PROGRAM.format(forged=FORGED, body=body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return (done.stdout + done.stderr).decode()


def _on_terminal(body: str) -> str:
    """Return what a process writes to a terminal."""
    code = PROGRAM.format(forged=FORGED, body=body)
    return pseudo_terminal.run_python(code, stdout=None)[1]


@pytest.mark.parametrize("body", WRITERS.values(), ids=WRITERS.keys())
def test_no_text_of_others_controls_the_terminal_or_forges_a_line(body: str) -> None:
    text = _run(body)
    assert not set(text) & set("\x1b\x07\x9b\r"), text
    advice = [line for line in text.splitlines() if line.lstrip().startswith("next:")]
    assert [line.split()[:2] for line in advice] in ([], [["next:", "rm"]])
    assert not any(line.startswith("  next:  rm -r /") for line in text.splitlines())
    assert (
        sum(line.startswith(("12:00:00 saved", "2026-01-31 12")) for line in text.splitlines()) == 0
    )


def test_generated_text_is_exact_in_a_pipe_and_escaped_on_a_terminal() -> None:
    body = "print(Verbatim('a\\x1b[2J\\n  next: c'))"
    assert _run(body) == "a\x1b[2J\n  next: c\n"
    assert _on_terminal(body) == "a\\u001b[2J\r\n  next: c\r\n"


def test_terminal_codes_of_dtt_itself_reach_the_terminal() -> None:
    text = _on_terminal("print(Coded('\\x1b[32mgreen\\x1b[0m')); log.warning('one')")
    assert text.startswith("\x1b[32mgreen\x1b[0m\r\n\r\x1b[K")


def test_the_parts_of_an_error_keep_their_lines_and_a_path_is_one_line() -> None:
    inner = ConfigError("two\nlines", where=Path("a\nb"), why="c\n  next:  d", next="e")
    assert str(inner) == "two\nlines\n  where: a\\u000ab\n  why:   c\n  | next:  d\n  next:  e"
    assert part_of_message(FORGED) == SAFE
    # The message of an error within another is dtt's own.
    assert str(ConfigError(Message(f"1 problem\n{inner}"))) == f"1 problem\n{inner}"
    assert one_line("a\u202eb\u2028c\t") == "a\\u202eb\\u2028c\\u0009"
