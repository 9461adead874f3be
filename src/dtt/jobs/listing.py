"""`dtt job ls` and `dtt job status`: the state of jobs, as tables, reports and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import MIRRORED, JobDir
from dtt.base.log import log
from dtt.base.reading import fits, read_record
from dtt.base.terminal import one_line
from dtt.jobs import chain_steps, job_state
from dtt.jobs.chain_steps import LinkedStep
from dtt.jobs.clock import goodput, in_words
from dtt.jobs.job_state import State, Status
from dtt.track import jsonl

COLUMNS = ("job", "state", "step", "loss", "tokens", "tokens/s", "time left", "detail")
GUARD_RECORD = {"why": str, "action": str}
"""Fields, with their types, of an anomaly guard's record that are shown."""


def ls(folder: Path, *, as_json: bool) -> None:
    """Print the state of every job in a folder, the most recently changed first.

    The stages of a configuration are listed together, in their order.
    """
    statuses = _by_change(job_state.examine(job_state.find(folder)))
    if as_json:
        print(json.dumps([_facts(status) for status in statuses]))
        return
    for error in {status.slurm_error for status in statuses if status.slurm_error}:
        log.warning("Slurm did not respond: %s", error)
    _print_table([(str(status.job.root), status) for status in statuses])


def _by_change(statuses: Sequence[Status]) -> list[Status]:
    """Return jobs by the time of their last change, newest first; stages are adjacent."""
    groups: dict[Path, list[tuple[int, Status]]] = {}
    for status in statuses:
        root, record = status.job.root, status.job.stage_record()
        names: list[str] = record["stages"] if record else []
        known = root.name in names
        groups.setdefault(root.parent if known else root, []).append(
            (names.index(root.name) if known else 0, status)
        )
    newest = sorted(groups.values(), key=lambda group: -max(s.changed for _, s in group))
    return [status for group in newest for _, status in sorted(group, key=lambda pair: pair[0])]


def _print_stages(folder: Path, jobs: Sequence[JobDir], *, as_json: bool) -> None:
    """Print the state of each stage, and of the Slurm job that trains them all, if there is one."""
    whole, *statuses = job_state.examine([JobDir(folder), *jobs])
    if as_json:
        slurm = whole.slurm and {"id": whole.slurm.id, "state": whole.slurm.state}
        facts = [_facts(status) for status in statuses]
        print(json.dumps({"job": str(folder), "slurm": slurm, "stages": facts}))
        return
    _print_table([(status.job.root.name, status) for status in statuses])
    if whole.slurm is not None:
        print(f"slurm job {whole.slurm.id}: {whole.slurm.state}")


def _print_chain(folder: Path, steps: Sequence[LinkedStep], *, as_json: bool) -> None:
    """Print the state of each step of a chain; steps that were done before have no job."""
    examined = chain_steps.examine(steps)
    if as_json:
        known = {one.title: _facts(one.status) for one in examined}
        done = {"job": None, "state": "done"}
        facts = [{"step": one.title} | known.get(one.title, done) for one in steps]
        print(json.dumps({"job": str(folder), "steps": facts}))
        return
    for one in steps:
        if one.job is None:
            print(f"{one.title}: done before this chain was submitted")
    _print_table([(one.title, one.status) for one in examined])


def _print_table(jobs: Sequence[tuple[str, Status]]) -> None:
    """Print a line for each job, given by its label and state, below a header.

    The columns of numbers are aligned to the right. The detail, which may be long, comes last.
    """
    if jobs:
        rows = [COLUMNS, *(_cells(label, status) for label, status in jobs)]
        print("\n".join(columns(rows, right=range(2, len(COLUMNS) - 1))))


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Format rows as lines of aligned columns, of which those with the numbers `right` end alike.

    A row may have fewer cells than the first one.
    """
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    widths[-1] = 0  # the last column is not padded
    lines = []
    for row in rows:
        cells = [f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cells(label: str, status: Status) -> tuple[str, ...]:
    """Return the cells of a job in the table; unknown numbers are `-`."""
    measured, left = status.files.measured(), status.seconds_left
    loss, tokens, rate = (measured[name] for name in ("loss", "tokens", "tokens_per_second"))
    detail = one_line(status.detail)
    return (
        one_line(label),
        status.state.value,
        _step(status),
        "-" if loss is None else f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.3g}",
        "-" if tokens is None else _scaled(tokens),
        "-" if rate is None else _scaled(rate),
        "-" if left is None else in_words(left),
        detail if len(detail) <= 100 else detail[:99] + "…",
    )


def _scaled(number: float) -> str:
    """Return a number with three digits and a suffix, such as `1.23B`; small integers exactly."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


def status(path: Path, *, as_json: bool) -> None:
    """Print the state of a job: progress, losses, heartbeat, Slurm state and the end of its log.

    For the folder of several stages of training, or of a chain, prints a line for each.
    """
    if steps := chain_steps.read(path):
        _print_chain(path, steps, as_json=as_json)
        return
    if jobs := job_state.stages(path):
        _print_stages(path, jobs, as_json=as_json)
        return
    (status,) = job_state.examine([job_state.open_job(path)])
    skipped = [r for r in jsonl.read(status.job.metrics, "guard") if fits(r, GUARD_RECORD)]
    if as_json:
        print(json.dumps(_facts(status) | {"bad_steps": skipped}))
        return
    print("\n".join(map(one_line, _report(status))))
    if skipped:
        last, plural = skipped[-1], "s" if len(skipped) > 1 else ""
        how = f"the last is step {last['step']} ({last['why']}, {last['action']})"
        print(f"guard       skipped {len(skipped)} step{plural}; {how}")


def _facts(status: Status) -> dict[str, Any]:
    files, slurm = status.files, status.slurm
    return {
        "job": str(status.job.root),
        "state": status.state.value,
        "detail": status.detail,
        "changed": status.changed,
        "attempt": files.attempt,
        "step": files.step,
        "steps": files.steps,
        **files.measured(),
        "seconds_left": status.seconds_left,
        "parent": status.job.parent_record(),
        "checkpoint": status.job.newest_checkpoint_name(),
        "mirror": read_record(status.job.mirror, MIRRORED),
        "goodput": useful.record() if (useful := goodput(status.job)) is not None else None,
        "heartbeat": files.heartbeat,
        "heartbeat_age": files.now - files.heartbeat["time"] if files.heartbeat else None,
        "acknowledged": files.acknowledged,
        "ending": files.ending,
        "slurm": slurm
        and {"id": slurm.id, "state": slurm.state, "reason": slurm.reason, "nodes": slurm.nodes},
        "slurm_silence": status.slurm_error,
        "log": status.log_tail,
    }


def _report(status: Status) -> Iterator[str]:
    files, slurm = status.files, status.slurm
    yield f"job         {status.job.root}"
    yield f"state       {status.state}{': ' if status.detail else ''}{status.detail}"
    if files.step is not None:
        yield from _progress(status)
    if files.heartbeat is not None and files.alive:
        beat = files.heartbeat
        age = f"{max(0.0, files.now - beat['time']):.0f} s ago"
        yield f"heartbeat   {age}, {beat['world_size']} ranks, rank 0 on {beat['node']}"
    if files.attempt:
        yield f"attempt     {files.attempt}, started {in_words(files.now - files.started)} ago"
        if (parent := status.job.parent_record()) is not None:
            where = os.path.normpath(status.job.root / parent["job"])
            yield f"parent      {where}@{parent['step']}"
        yield f"checkpoint  {status.job.newest_checkpoint_name() or 'none'}"
        yield from _mirror(status)
        if (useful := goodput(status.job)) is not None:
            yield f"goodput     {useful.describe()}"
    if slurm is not None:
        where = f" on {slurm.nodes}" if slurm.nodes else ""
        why = f" ({slurm.reason})" if slurm.reason else ""
        yield f"slurm       job {slurm.id}: {slurm.state}{where}{why}"
    elif status.slurm_error:
        yield f"slurm       no response: {status.slurm_error}"
    if files.ending is not None and not status.alive and status.state is not State.DONE:
        for i, line in enumerate(files.ending["reason"].splitlines()):
            yield f"{'' if i else 'ending':<12}{line}"
    for i, line in enumerate(status.log_tail):
        yield f"{'' if i else 'log':<12}{line}"


def _mirror(status: Status) -> Iterator[str]:
    """Yield the copies in `checkpoint.mirror`, what is not there yet, and the last failure."""
    if (record := read_record(status.job.mirror, MIRRORED)) is None:
        return
    steps = ", ".join(map(str, record["steps"]))
    yield f"mirror      {record['url']}: " + (f"step {steps}" if steps else "no complete copy")
    missing = {step for step in (*record["pending"], record["uploading"]) if step is not None}
    if missing:
        yield f"            not there yet: step {', '.join(map(str, sorted(missing)))}"
    failure = record["failure"]
    if failure is not None and fits(failure, {"reason": str, "tries": int, "step": int}):
        times = "once" if failure["tries"] == 1 else f"{failure['tries']} times"
        yield f"            step {failure['step']} failed {times}: {failure['reason']}"


def _step(status: Status) -> str:
    files = status.files
    if files.step is None:
        return "-"
    return f"{files.step} of {files.steps}" if files.steps else str(files.step)


def _progress(status: Status) -> Iterator[str]:
    """Yield the step, speed and time left, the newest losses and the tokens trained on."""
    measured, left = status.files.measured(), status.seconds_left
    loss, validation, tokens = (measured[name] for name in ("loss", "eval_loss", "tokens"))
    rate = measured["tokens_per_second"]
    speed = f", {rate:,.0f} tokens/s" if rate is not None else ""
    speed += f", {in_words(left)} left" if left is not None else ""
    yield f"step        {_step(status)}{speed}"
    if loss is not None and tokens is not None:
        yield f"loss        {loss:.4f} after {tokens:,} tokens"
    if validation is not None:
        yield f"validation  {validation:.4f}"
