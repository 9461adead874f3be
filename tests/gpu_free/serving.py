"""Programs that answer questions of tests, one a line: their processes import torch in their own
way, and compile only once what several tests ask about."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Ask = Callable[[str], Any]


@contextlib.contextmanager
def asking(program: str, **environment: str) -> Iterator[Ask]:
    """Start a program of this folder; yield a function that asks it."""
    file = Path(__file__).with_name(program)
    with subprocess.Popen(
        [sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment or None,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(question: str) -> Any:
            print(question, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, f"{program} has ended; its error is above"
            return json.loads(answer)

        yield ask
        process.stdin.close()


def serve(answer: Ask) -> None:
    """Answer all lines of stdin, in JSON; whatever is printed meanwhile goes to stderr."""
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            found = answer(line.strip())
        print(json.dumps(found), flush=True)
