"""Jobs handed to Slurm, and what each job directory keeps of that."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dtt.errors import DttError
from dtt.launch import slurm
from dtt.launch.evidence import tail
from dtt.launch.slurm import Script
from dtt.reading import read_small, tolerant
from dtt.runtime.files import append, remove, write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.secrets import redacted


def submit(script: Script) -> str:
    """Write the job script and hand it to Slurm; returns the job id, of an array that of all."""
    folder = JobDir(script.job)
    folder.logs.mkdir(parents=True, exist_ok=True)  # Slurm makes none
    write_atomically(folder.script, slurm.render(script))
    folder.script.chmod(0o755)
    jobs = [JobDir(path) for path in script.array.trials] if script.array else [folder]
    with _requests_taken_back(jobs):
        id = slurm.submit(folder.script)
    for task, job in enumerate(jobs):
        argv = [*script.argv, *([str(job.root)] if script.kind == "train" else [])]
        _record(job, f"{id}_{task}" if script.array else id, argv, script.directory)
    return id


def submit_again(job: JobDir) -> str:
    """Hand a job's script to Slurm once more, to run where it ran before; returns the job id."""
    argv, directory = _last(job)
    with _requests_taken_back([job]):
        id = slurm.submit(job.script, *([f"--chdir={directory}"] if directory else []))
    _record(job, id, argv, directory)
    return id


def argv(job: JobDir) -> list[str]:
    """The arguments of dtt that a job runs."""
    return _last(job)[0]


def _last(job: JobDir) -> tuple[list[str], Path | None]:
    """Arguments and working directory of the newest submission that tells them."""
    told = list(tail(job.submissions, {"argv": list, "directory": str}))
    if not told:  # trained by hand so far
        return ["train", str(job.root)], None
    return [str(argument) for argument in told[-1]["argv"]], Path(told[-1]["directory"])


def _record(job: JobDir, id: str, argv: Sequence[str], directory: Path | None) -> None:
    record = {
        "time": int(time.time()),
        "job_id": id,
        "command": redacted(shlex.join(["dtt", *sys.argv[1:]])),
        "argv": list(argv),
        "directory": str(directory or Path.cwd()),
    }
    append(job.submissions, json.dumps(record) + "\n")


@contextmanager
def _requests_taken_back(jobs: Sequence[JobDir]) -> Iterator[None]:
    """Remove requests that nobody was left to hear; put them back if Slurm refuses the jobs."""
    paths = [path for job in jobs for path in (job.stop, job.save) if path.exists()]
    said = {path: tolerant(path, read_small) or b"" for path in paths}
    for path in said:
        remove(path)
    try:
        yield
    except DttError:
        for path, text in said.items():
            write_atomically(path, text)
        raise
