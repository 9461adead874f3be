"""`dtt job …`: list, inspect, control, resume and delete jobs."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dtt.commands.submit import confirmed
from dtt.config.profile import Kind
from dtt.errors import ConfigError, DttError, EnvironmentUnfit, InputError
from dtt.launch.jobs import job_state
from dtt.launch.jobs.job_files import newest_log, requester
from dtt.launch.jobs.job_state import State, Status
from dtt.launch.slurm import squeue, submissions
from dtt.launch.sweep.trials import SweepManifest
from dtt.reading import fits, read_record
from dtt.runtime.files import exclusive, remove, write_atomically
from dtt.runtime.jobdir import ANSWER, JobDir
from dtt.runtime.log import log
from dtt.track import jsonl
from dtt.train.supervise.clock import in_words
from dtt.train.supervise.goodput import goodput

POLL_SECONDS = 0.1
GUARD_RECORD = {"why": str, "action": str}
"""Fields, with their types, of an anomaly guard's record that are shown."""
ACKNOWLEDGED = {
    "stop": "the job saves and stops",
    "save": "the job saves and continues",
    "profile": "the job profiles its next steps, into profiles/",
}
"""Action of a job after it acknowledged a request, by request."""


def ls(folder: Path, *, as_json: bool, tree: bool) -> None:
    """Print the state of every job in a folder, the most recently changed first.

    The stages of a configuration are listed together, in their order. With `tree`, branches follow
    the job they branched from, indented.
    """
    statuses = _by_change(job_state.examine(job_state.find(folder)))
    if as_json:
        print(json.dumps([_facts(status) for status in statuses]))
        return
    for error in {status.slurm_error for status in statuses if status.slurm_error}:
        log.warning("Slurm did not respond: %s", error)
    ordered = _tree(statuses) if tree else ((0, status) for status in statuses)
    rows = [
        (f"{'  ' * depth}{s.job.root}", s.state.value, _step(s), _short(s.detail))
        for depth, s in ordered
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for row in rows:
        print("  ".join(map(str.ljust, row, [*widths, 0])).rstrip())


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
    rows = [(s.job.root.name, s.state.value, _step(s), _short(s.detail)) for s in statuses]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(map(str.ljust, row, [*widths, 0])).rstrip())
    if whole.slurm is not None:
        print(f"slurm job {whole.slurm.id}: {whole.slurm.state}")


def _tree(statuses: Sequence[Status]) -> Iterator[tuple[int, Status]]:
    """Yield each job with its depth in the tree of branches; a branch follows its parent."""
    known = {status.job.root.resolve() for status in statuses}
    below: dict[Path | None, list[Status]] = {}
    for status in statuses:
        parent = _parent(status)
        below.setdefault(parent if parent in known else None, []).append(status)

    def walk(root: Path | None, depth: int) -> Iterator[tuple[int, Status]]:
        for status in below.get(root, ()):
            yield depth, status
            yield from walk(status.job.root.resolve(), depth + 1)

    return walk(None, 0)


def _parent(status: Status) -> Path | None:
    record = status.job.parent_record()
    return None if record is None else (status.job.root / record["job"]).resolve()


def _short(detail: str, most: int = 100) -> str:
    return detail if len(detail) <= most else detail[: most - 1] + "…"


def status(path: Path, *, as_json: bool) -> None:
    """Print the state of a job: progress, losses, heartbeat, Slurm state and the end of its log.

    For the folder of several stages of training, prints a line for each.
    """
    if jobs := job_state.stages(path):
        _print_stages(path, jobs, as_json=as_json)
        return
    (status,) = job_state.examine([job_state.open_job(path)])
    skipped = [r for r in jsonl.read(status.job.metrics, "guard") if fits(r, GUARD_RECORD)]
    if as_json:
        print(json.dumps(_facts(status) | {"bad_steps": skipped}))
        return
    print("\n".join(_report(status)))
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
        yield f"step        {_step(status)}{_speed(status)}"
        yield from _losses(files.measured())
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
        if (useful := goodput(status.job)) is not None:
            yield f"goodput     {useful.describe()}"
    if slurm is not None:
        where = f" on {slurm.nodes}" if slurm.nodes else ""
        why = f" ({slurm.reason})" if slurm.reason else ""
        yield f"slurm       job {slurm.id}: {slurm.state}{where}{why}"
    elif status.slurm_error:
        yield f"slurm       no response: {status.slurm_error}"
    if files.ending is not None and not status.alive and status.state is not State.DONE:
        yield "ending      " + "\n            ".join(files.ending["reason"].splitlines())
    for i, line in enumerate(status.log_tail):
        yield f"{'' if i else 'log':<12}{line}"


def _step(status: Status) -> str:
    files = status.files
    if files.step is None:
        return "-"
    return f"{files.step} of {files.steps}" if files.steps else str(files.step)


def _speed(status: Status) -> str:
    rate, left = status.files.measured()["tokens_per_second"], status.seconds_left
    fast = f", {rate:,.0f} tokens/s" if rate is not None else ""
    return fast + (f", {in_words(left)} left" if left is not None else "")


def _losses(measured: dict[str, float | None]) -> Iterator[str]:
    """Yield lines with the newest losses and the number of tokens trained on, if recorded."""
    loss, validation, tokens = (measured[name] for name in ("loss", "eval_loss", "tokens"))
    if loss is not None and tokens is not None:
        yield f"loss        {loss:.4f} after {tokens:,} tokens"
    if validation is not None:
        yield f"validation  {validation:.4f}"


def stop(path: Path, *, yes: bool, wait: float) -> None:
    """Ask a running training job to save and stop.

    Cancels a queued job (with `yes`), and a running job of another command, because it handles no
    requests; raises EnvironmentUnfit if the state of such a job is unknown. A suspended training
    job finds the request when it runs again. `wait` is the maximum number of seconds to wait for an
    acknowledgement.
    """
    job = job_state.open_job(path)
    (status,) = job_state.examine([job])
    command = submissions.argv(job)[0]
    if status.queued and status.slurm is not None:
        _cancel(status, status.slurm.id, yes=yes)
    elif status.alive and status.slurm is not None and command != "train":
        print(f"dtt {command} cannot save and stop on request; finished work is kept")
        squeue.cancel(status.slurm.id)
        print(f"cancelled Slurm job {status.slurm.id}")
    elif command == "train" and status.state in (State.SUSPENDED, State.UNKNOWN):
        _request(status, "stop")
        print(f"{job.root} is {status.state}: {status.detail}")
        print("the request remains: the job saves and stops as soon as it runs")
    elif status.state is State.UNKNOWN:
        raise EnvironmentUnfit(
            f"the state of {job.root} is unknown",
            why=status.detail,
            next=f"run dtt job stop {job.root} again when Slurm responds",
        )
    elif status.alive:
        _ask(status, "stop", wait)
    else:
        print(f"nothing to stop: {job.root} is {status.state}")


def _cancel(status: Status, id: str, *, yes: bool) -> None:
    if not yes:
        raise ConfigError(
            f"{status.job.root} is not running: it is {status.state} as Slurm job {id}",
            why=status.detail,
            next=f"cancel it with dtt job stop {status.job.root} -y, or scancel {id}",
        )
    squeue.cancel(id)
    print(f"cancelled Slurm job {id}")


def save(path: Path, *, wait: float) -> None:
    """Ask a running training job for a checkpoint; raise ConfigError if it does not run."""
    _ask(_training(path, "save"), "save", wait)


def profile(path: Path, *, kind: Kind | None, wait: float) -> None:
    """Ask a running training job to profile its next steps.

    Raises ConfigError if it does not run. `kind` is the profiler; None: as configured.
    """
    _ask(_training(path, "profile"), "profile", wait, kind or "")


def _training(path: Path, what: str) -> Status:
    """Return the state of a running training job; raise ConfigError if it does not train now."""
    job = job_state.open_job(path)
    (status,) = job_state.examine([job])
    if not status.alive:
        raise ConfigError(
            f"{job.root} is not running: it is {status.state}", why=status.detail or None
        )
    if (command := submissions.argv(job)[0]) != "train":
        raise ConfigError(f"cannot {what} {job.root}: it runs dtt {command}")
    return status


def _ask(
    status: Status, what: Literal["stop", "save", "profile"], wait: float, more: str = ""
) -> None:
    """Write the trigger file of a request, and wait until the job acknowledges it or ends.

    `more` is the second line of the trigger file. Raises DttError if there is no answer within
    `wait` seconds.
    """
    job, before = status.job, _answer(status.job)
    trigger = _request(status, what, more)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        answer = _answer(job)
        if (
            answer is not None
            and answer["request"] == what
            and (answer != before or status.state is State.STOPPING)
        ):
            print(f"acknowledged at step {answer['step']}: {ACKNOWLEDGED[what]}")
            if what == "stop" and answer["by"].startswith("slurm:"):
                print(f"it was already stopping ({answer['by']}); now it will not resume by itself")
            return
        if job.exit_record(job.attempt()) is not None and status.files.ending is None:
            (ended,) = job_state.examine([job])
            print(f"{job.root} has ended: it is {ended.state}. {ended.detail}".rstrip())
            return
        time.sleep(POLL_SECONDS)
    raise DttError(
        f"{job.root} did not acknowledge the request within {wait:.0f} s",
        where=trigger,
        why=f"it was {status.state}{', ' if status.detail else ''}{status.detail}; "
        "the request remains: the job reads it after its start, evaluation or current step",
        next=_unacknowledged_hint(status),
    )


def _request(status: Status, what: Literal["stop", "save", "profile"], more: str = "") -> Path:
    """Write the trigger file of a request, with `more` as its second line; return its path."""
    job = status.job
    trigger = {"stop": job.stop, "save": job.save, "profile": job.profile}[what]
    # Keep the name of the first requester. A request from Slurm is replaced, because a job that
    # stops for Slurm is submitted again and resumes, which a user's request must prevent.
    if not trigger.exists() or requester(trigger).startswith("slurm:"):
        write_atomically(trigger, f"{getpass.getuser()}: dtt job {what}\n{more}")
    return trigger


def _answer(job: JobDir) -> dict[str, Any] | None:
    return read_record(job.acknowledged, ANSWER)


def _unacknowledged_hint(status: Status) -> str:
    hint = f"dtt job status {status.job.root} shows whether it is running"
    if status.slurm is not None:
        return (
            f"{hint}; scancel {status.slurm.id} ends it after SIGTERM, on which it may still save"
        )
    return hint


def rm(path: Path, *, yes: bool) -> None:
    """Delete a job directory; raise ConfigError if the job is or may be running or queued."""
    job = job_state.open_job(path)
    if SweepManifest.exists(job.root.parent):
        raise ConfigError(
            f"{job.root} is a trial of the sweep {job.root.parent}",
            why="the results of a sweep need all of its trials",
            next=f"rm -r {job.root.parent} deletes the sweep; check dtt sweep status first",
        )
    (status,) = job_state.examine([job])
    status.check_idle()
    if status.state is State.UNKNOWN:
        raise ConfigError(
            f"{job.root} may be running or queued", why=status.detail, next="try again later"
        )
    folder = job.root.resolve()  # it may be a link to another disk
    size = sum(path.lstat().st_size for path in folder.rglob("*")) / 1e9
    steps = len(list(job.checkpoints.glob("step-*")))
    what = f"{job.root}: {status.state}, {steps} checkpoints, {size:.2f} GB"
    asks = sys.stdin.isatty() and sys.stderr.isatty()  # without one, `confirmed` returns True
    if not yes and not (asks and confirmed(f"delete {what}?")):
        raise ConfigError(f"not deleted: {what}", next=f"dtt job rm {job.root} -y")
    with exclusive(folder, "dtt"):
        # Rename first: the rest of an interrupted deletion must not be mistaken for a job.
        aside = folder.with_name(f".removed-{folder.name}-{secrets.token_hex(4)}")
        folder.rename(aside)
    if job.root.is_symlink():
        job.root.unlink()
    shutil.rmtree(aside)
    print(f"deleted {what}")


def resume(path: Path) -> None:
    """Submit a stopped job's script again; without Slurm, print the command that resumes it.

    A stage that was submitted with the others resumes by the script of all stages.
    """
    job = job_state.open_job(path)
    (status,) = job_state.examine([job])
    if status.state is State.DONE:
        raise ConfigError(f"{job.root} is done", next="start a new job with name=ANOTHER")
    status.check_idle()
    whole = JobDir(job.root.parent)  # its script trains all stages
    if job.stage_record() is not None and whole.script.is_file():
        job_state.examine([whole])[0].check_idle()
        job = whole
    if job.script.is_file() and shutil.which("sbatch") is not None:
        print(f"submitted  {submissions.submit_again(job)}")
        return
    # Requests that arrived after the last attempt ended are not meant for the next attempt.
    for trigger in (job.stop, job.save, job.profile):
        remove(trigger)
    argv = submissions.argv(job)
    folder = submissions.directory(job)
    elsewhere = folder.is_dir() and folder != Path.cwd()  # no folder if the project was moved
    there = f"cd {shlex.quote(str(folder))} && " if elsewhere else ""
    if SweepManifest.exists(job.root.parent):
        there, argv = "", ["sweep", "retry", str(job.root.parent), job.root.name]
    print(there + shlex.join(["dtt", *argv]))


def logs(path: Path, *, follow: bool, node: str | None, lines: int) -> None:
    """Print the last `lines` lines of the newest attempt's log; with `follow`, also new lines."""
    job = job_state.open_job(path)
    newest = newest_log(job, node)
    if newest is None:
        there = sorted(p.name[7:-4] for p in job.logs.glob("latest-*.log"))
        raise InputError(
            f"no log{f' of node {node}' if node else ''} in {job.logs}",
            next=f"use --node {' or '.join(there)}"
            if there
            else "only Slurm jobs and sweeps have logs",
        )
    log.info("%s", newest.resolve())
    _print_log(newest, lines, lambda: newest_log(job, node), follow=follow)


def _print_log(path: Path, lines: int, newest: Callable[[], Path | None], *, follow: bool) -> None:
    """Print the last lines of a log; with `follow`, print new lines until interrupted.

    When `newest` returns another file, because a new attempt started, continues with that one.
    """
    file = path.open(encoding="utf-8", errors="replace")
    try:
        print("".join(deque(file, maxlen=lines)), end="", flush=True)
        shown = path.resolve()
        while follow:
            print(file.read(), end="", flush=True)
            now = newest()
            if now is not None and now.resolve() != shown:  # another attempt has started
                print(file.read(), end="")
                file.close()
                file, shown = now.open(encoding="utf-8", errors="replace"), now.resolve()
                log.info("%s", shown)
            else:
                time.sleep(POLL_SECONDS)
    finally:
        file.close()
