"""Job directories of older versions, read as the records that dtt writes now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtt.base.ranks import slurm_id
from dtt.base.reading import Kind, fits, is_kind, read_record, read_records, read_text

EXIT: dict[str, Kind] = {
    "code": int, "reason": str, "step": (int, type(None)), "rank": int, "node": str,
}  # fmt: skip
"""Fields of `exit.json`, in which an attempt recorded how it ended."""
LINE: dict[str, Kind] = {"time": float, "job_id": (str, int, type(None))}
"""Fields of a line of `submissions.jsonl`."""
TAIL = 2**16


def start(folder: Path) -> dict[str, Any]:
    """Return the start of an attempt without a record of it, from the times of its files."""
    # Written by rank 0 at its start. The time of the folder changes with each file in it.
    started = _modified(folder / "ranks/00000.json") or _modified(folder)
    path = folder.parents[1] / "env.json"  # of the newest attempt, unless it is older than that
    env = read_record(path, {"environment": dict})
    known = env is not None and _modified(path) >= started and env.get("batch") is not False
    slurm = slurm_id(env["environment"]) if known and env is not None else None
    return {"started": started, "slurm": slurm, "launch": "", "ranks": 1}


def ending(folder: Path) -> dict[str, Any]:
    """Return how an attempt ended, from `exit.json`, and what the job script decided then.

    Empty for an attempt that runs. The newest attempt has the submission of its successor, too.
    """
    root, found = folder.parents[1], dict[str, Any]()
    path = folder / "exit.json"
    if (record := read_record(path, EXIT)) is not None:
        when = record.get("time")
        ended = when if is_kind(when, float) else _modified(path)
        found |= {"checkpoint": None, "asked_by": "", **record, "ended": ended}
    decision, _, when = (read_text(root / "decision") or "").partition("\n")
    if decision:
        try:
            found |= {"decision": decision, "decided": float(when)}
        except ValueError:  # still older versions wrote no time
            found |= {"decision": decision, "decided": _modified(root / "decision")}
    if (lines := _submissions(root)) and "argv" not in lines[-1]:
        found["successor"] = str(lines[-1]["job_id"])
    return found


def submission(root: Path) -> dict[str, Any] | None:
    """Return the newest line of `submissions.jsonl` that a user's command wrote; None without."""
    own = [one for one in _submissions(root) if fits(one, {"argv": list, "directory": str})]
    if not own:
        return None
    id = own[-1]["job_id"]
    return own[-1] | {"job_id": None if id is None else str(id)}


def _submissions(root: Path) -> list[dict[str, Any]]:
    return list(read_records(root / "submissions.jsonl", LINE, last=TAIL))


def _modified(path: Path) -> float:
    """Return the Unix time at which a file was last modified; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
