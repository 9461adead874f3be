"""Small files, and commands of Slurm: a full disk or a silent controller must not end the job."""

import glob
import json
import os
import re
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence


def message(text: str) -> None:
    """Write a line to the log of this script."""
    with suppress(OSError):
        os.write(1, "{} slurm: {}\n".format(time.strftime("%Y-%m-%d %H:%M:%S"), text).encode())


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Report that a file could not be written, and continue."""
    try:
        yield
    except OSError as error:
        message(f"cannot write {path}: {error}")


def read(path: Path) -> str:
    """Return the text of a small file; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def write(path: Path, text: str) -> None:
    """Write a small file, in one piece for those who read it."""
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name("." + path.name)
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def remove(path: Path) -> None:
    """Remove a file if there is one."""
    with suppress(OSError):
        path.unlink()


def link(path: Path, target: str) -> None:
    """Let a symbolic link point to `target`."""
    remove(path)
    with reported(path):
        path.symlink_to(target)


def largest(folder: Path, prefix: str = "") -> int:
    """Return the largest number after `prefix` among the names in a folder; -1 if there is none."""
    names: List[str] = []
    with suppress(OSError):
        names = [path.name for path in folder.iterdir()]
    # Nine digits, as dtt itself counts: a folder of a longer name is nobody's attempt.
    found = (re.match(re.escape(prefix) + "([0-9]{1,9})$", name) for name in names)
    return max((int(match.group(1)) for match in found if match), default=-1)


def finished_bytes(patterns: Sequence[str]) -> int:
    """Return the size of the files that match any of these patterns."""
    count = 0
    for path in [path for pattern in patterns for path in glob.glob(pattern, recursive=True)]:
        with suppress(OSError):
            count += 0 if os.path.isdir(path) else os.path.getsize(path)
    return count


def parsed(path: Path) -> Dict[str, Any]:
    """Return a small file of JSON; empty if it cannot be read."""
    with suppress(ValueError):
        found = json.loads(read(path))
        return found if isinstance(found, dict) else {}
    return {}


def attempt_record(job: Path) -> Dict[str, Any]:
    """Return attempt.json of the newest attempt of a job; empty if there is none yet."""
    return parsed(job / "attempts" / str(largest(job / "attempts")) / "attempt.json")


def run(*argv: str, silent: bool = False) -> Optional[str]:
    """Return the output of a command of Slurm; None if it fails."""
    env = dict(os.environ, SLURM_TIME_FORMAT="%s")  # seconds, whatever format the user prefers
    stderr = subprocess.DEVNULL if silent else None
    try:
        return subprocess.run(
            argv,
            env=env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            universal_newlines=True,
            check=True,
        ).stdout
    except subprocess.CalledProcessError:  # which has said why
        return None
    except OSError as error:
        message(f"{argv[0]}: {error}")
        return None


def slurm_record(job_id: str) -> Dict[str, str]:
    """Return the fields of Slurm's record of a job; empty if Slurm does not answer."""
    answer = run("scontrol", "show", "job", job_id, silent=True) or ""
    # The first value of a name counts: an array has a record for every task.
    return dict(reversed(re.findall(r"(\w+)=(\S*)", answer)))


def nodes_of_job() -> List[str]:
    """Return the names of the nodes of this job; the supervisor runs on the first one."""
    names = run("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", ""))
    return (names or "").split() or [socket.gethostname()]


def first_free_port(port: int) -> int:
    """Return the first port of this node, from `port` on, at which nothing listens."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
        port += 1
