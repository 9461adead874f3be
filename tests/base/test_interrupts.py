"""Signals: Ctrl-C while the command line is still being imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
import dtt.main
"""


def test_ctrl_c_during_the_first_imports_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")
