"""Processes that are forked from a clean one, which has imported the slow libraries and run
nothing: half of a short run of dtt is the import of torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "dtt.main", "dtt.config.run", "pyarrow.parquet", "tokenizers", "torch._dynamo",
        "dtt.model.decoder", "dtt.runtime.dist",
    ]
)  # fmt: skip
READ_AT_IMPORT = ("OMP_", "PYTHON", "TORCH", "DTT_")
"""Variables that have had their effect on what is imported already."""


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether a run with these variables, on top of our own, may be forked."""
    return "coverage" not in sys.modules and not any(
        name.startswith(READ_AT_IMPORT) for name in env
    )


def run_dtt(
    arguments: list[str], folder: Path, env: Mapping[str, str], timeout: float
) -> tuple[int, str, str]:
    """`dtt ARGUMENTS` in `folder`: exit code, standard output, standard error."""
    with tempfile.TemporaryDirectory() as said:
        out, err = Path(said, "out"), Path(said, "err")
        everything = dict(os.environ) | dict(env)
        process = CONTEXT.Process(target=_run, args=(arguments, folder, everything, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"dtt {' '.join(arguments)}")
        return process.exitcode, out.read_text("utf-8"), err.read_text("utf-8")


def _run(arguments: list[str], folder: Path, env: dict[str, str], out: Path, err: Path) -> None:
    """Become the process that a shell would start."""
    import dtt.main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((0, Path(os.devnull)), (1, out), (2, err)):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.argv = ["dtt", *arguments]
    dtt.main.main()
