"""What a person sees while training: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support import pseudo_terminal

SCRIPT = """
from dtt.base.log import log, setup_logging
from dtt.base.ranks import Ranks
from dtt.track.console import ConsoleTracker
setup_logging(Ranks())
console = ConsoleTracker()
console.log({"kind": "eval", "step": 0, "loss": 5.5, "bits_per_byte": 2.25})
for step, mfu, rate in ((10, None, 12_345.0), (20, 0.4567, 1_234_567.0)):
    console.log({"kind": "train", "step": step, "loss": 4.0 - step / 100, "lr": 3e-4,
                 "grad_norm": 1.25, "tokens": 64 * step, "ledger": "ab",
                 **({"own/kl": 0.5, f"own/{'long' * 6}": 1.0} if step == 20 else {})})
    console.log({"kind": "perf", "step": step, "tokens_per_second": rate, "mfu": mfu,
                 "memory_gb": 1.5, "seconds_per_step": 2.0, "steps": 2000,
                 "seconds": {"data": 4.0, "forward_backward": 96.0},
                 "communication_seconds": {"gradients": 4.9},
                 "slowest_rank": None, "slowest_behind": None})
log.info("saved step-000020")
console.log({"kind": "task", "step": 20, "task": "piqa", "n": 8, "acc": 0.5, "acc_stderr": 0.0189,
             "acc_norm": None, "bits_per_byte": 1.25, "bits_per_byte_stderr": None})
console.log({"kind": "sample", "step": 20, "text": "def f():\\n    pass"})
ledger = {"ledger": "ab", "bad_step": 29}
for step, action in ((29, "skip"), (29, "stop")):
    console.log({"kind": "guard", "step": step, "why": "non_finite", "action": action, **ledger})
console.log({"kind": "train", "step": 30, "loss": None, "grad_norm": None, "lr": 3e-4})
console.log({"kind": "perf", "step": 30, "tokens_per_second": 1e3, "mfu": None, "memory_gb": 1.5,
             "seconds_per_step": 2.0, "steps": 2000, "seconds": {"data": 1.0, "other": 3.0},
             "communication_seconds": {}, "slowest_rank": 3, "slowest_node": "n2",
             "slowest_behind": 0.2})
console.close()
"""
FIRST = (
    "step 10/2000  loss 3.9000  lr 3.00e-04  grad 1.25  12.3ktok/s  mfu n/a  mem 1.5GB  eta 1h06m"
)
SECOND = (
    "step 20/2000  loss 3.8000  lr 3.00e-04  grad 1.25  1.23Mtok/s  mfu 45.7%  mem 1.5GB  eta 1h06m"
    "  kl 0.5000"
)
SAID = [
    "step 0: validation loss 5.5000, 2.2500 bits per byte",
    "saved step-000020",
    "step 20: piqa acc 0.500 ± 0.019, bits_per_byte 1.250",
    "step 20: sample",
]

LEFT_OUT = [
    "step 29: skipped (non-finite)",
    (
        "step 30/2000  loss n/a  lr 3.00e-04  grad n/a  1.0ktok/s  mfu n/a  mem 1.5GB  eta 1h05m"
        "  data 25%  rank 3 (n2) 20% slower"
    ),
]


def test_without_a_terminal_each_report_is_a_plain_line_on_stderr() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout == ""
    assert "\r" not in run.stderr
    assert "\x1b" not in run.stderr
    lines = [
        re.sub(r"^\d{4}(-\d\d){2} \d\d:\d\d:\d\d ", "", line) for line in run.stderr.splitlines()
    ]
    expected = [SAID[0], FIRST, SECOND, *SAID[1:], "    def f():", "        pass", *LEFT_OUT]
    assert lines == expected


def on_screen(output: str) -> list[str]:
    """The lines a terminal would show: `\\r` goes to the start, `ESC[K` erases to the end."""
    lines = []
    for line in output.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in re.split(r"(\r|\x1b\[K)", line):
            if part in ("\r", "\x1b[K"):
                shown = "" if part == "\x1b[K" else shown
            else:
                shown += part
        lines.append(re.sub(r"^\d\d:\d\d:\d\d ", "", shown))
    return lines


def test_on_a_terminal_the_progress_line_is_rewritten_and_reports_stay() -> None:
    stdout, seen = pseudo_terminal.run_python(SCRIPT)
    assert stdout == ""
    bar = "─" * 20  # ten of 2000 steps
    assert f"{bar} step 10/2000  loss 3.9000  12.3ktok/s  eta 1h06m" in seen
    screen = on_screen(seen)
    assert screen[:4] == SAID  # … and gave way
    assert screen[4:6] == ["    def f():", "        pass"]
    assert not any("/2000" in line for line in screen[:4])
    assert all(len(line) < 100 for line in screen)


@pytest.mark.parametrize("columns", [40, 80])
def test_the_progress_line_fits_the_terminal(columns: int) -> None:
    _, seen = pseudo_terminal.run_python(SCRIPT, COLUMNS=str(columns))
    lines = re.findall(r"\x1b\[K([━─]+ [^\r\n]*)", seen)
    assert lines
    assert max(map(len, lines)) == columns - 1
