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

from dtt.commands.submit import agreed
from dtt.config.profile import Kind
from dtt.errors import ConfigError, DttError, EnvironmentUnfit, InputError
from dtt.launch import ledger, squeue, submissions
from dtt.launch.evidence import newest_log, requester
from dtt.launch.ledger import State, Status
from dtt.launch.sweep import SweepManifest
from dtt.reading import fits, read_record
from dtt.runtime.files import exclusive, remove, write_atomically
from dtt.runtime.jobdir import ANSWER, JobDir
from dtt.runtime.log import log
from dtt.track import jsonl
from dtt.train.clock import in_words
from dtt.train.goodput import goodput

POLL_SECONDS = 0.1
BAD_STEP = {"why": str, "action": str}
"""Fields, with their types, of an anomaly guard's record that are shown."""
THEN = {
    "stop": "it saves and stops",
    "save": "it saves and goes on",
    "profile": "the next steps are recorded into its folder profiles/",
}
"""Action of a job after it acknowledged a request, by request."""


def ls(folder: Path, *, as_json: bool, tree: bool) -> None:
    """Print the state of every job in a folder, the most recently changed first.

    With `tree`, branches follow the job they branched from, indented.
    """
    statuses = ledger.examine(ledger.find(folder))
    statuses.sort(key=lambda status: status.changed, reverse=True)
    if as_json:
        print(json.dumps([_facts(status) for status in statuses]))
        return
    for silence in {status.silence for status in statuses if status.silence}:
        log.warning("Slurm gives no answer: %s", silence)
    ordered = _tree(statuses) if tree else ((0, status) for status in statuses)
    rows = [
        (f"{'  ' * depth}{s.job.root}", s.state.value, _step(s), _short(s.detail))
        for depth, s in ordered
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for row in rows:
        print("  ".join(map(str.ljust, row, [*widths, 0])).rstrip())


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
    """Print the state of a job: progress, losses, heartbeat, Slurm state and the end of its log."""
    (found,) = ledger.examine([ledger.open_job(path)])
    bad = [r for r in jsonl.read(found.job.metrics, "guard") if fits(r, BAD_STEP)]
    if as_json:
        print(json.dumps(_facts(found) | {"bad_steps": bad}))
        return
    print("\n".join(_report(found)))
    if bad:
        last, plural = bad[-1], "s" if len(bad) > 1 else ""
        how = f"the last {last['step']} ({last['why']}, {last['action']})"
        print(f"guard       {len(bad)} step{plural} changed nothing, {how}")


def _facts(status: Status) -> dict[str, Any]:
    own, found = status.own, status.slurm
    return {
        "job": str(status.job.root),
        "state": status.state.value,
        "detail": status.detail,
        "changed": status.changed,
        "attempt": own.attempt,
        "step": own.step,
        "steps": own.steps,
        **own.measured(),
        "seconds_left": status.seconds_left,
        "parent": status.job.parent_record(),
        "checkpoint": status.job.newest_checkpoint_name(),
        "goodput": useful.record() if (useful := goodput(status.job)) is not None else None,
        "heartbeat": own.heartbeat,
        "heartbeat_age": own.now - own.heartbeat["time"] if own.heartbeat else None,
        "acknowledged": own.acknowledged,
        "ending": own.ending,
        "slurm": found
        and {"id": found.id, "state": found.state, "reason": found.reason, "nodes": found.nodes},
        "slurm_silence": status.silence,
        "log": status.log_tail,
    }


def _report(status: Status) -> Iterator[str]:
    own, found = status.own, status.slurm
    yield f"job         {status.job.root}"
    yield f"state       {status.state}{': ' if status.detail else ''}{status.detail}"
    if own.step is not None:
        yield f"step        {_step(status)}{_speed(status)}"
        yield from _losses(own.measured())
    if own.heartbeat is not None and own.beats:
        beat = own.heartbeat
        age = f"{max(0.0, own.now - beat['time']):.0f} s ago"
        yield f"heartbeat   {age}, {beat['world_size']} processes, the first on {beat['node']}"
    if own.attempt:
        yield f"attempt     {own.attempt}, began {in_words(own.now - own.began)} ago"
        if (parent := status.job.parent_record()) is not None:
            where = os.path.normpath(status.job.root / parent["job"])
            yield f"parent      {where}@{parent['step']}"
        yield f"checkpoint  {status.job.newest_checkpoint_name() or 'none'}"
        if (useful := goodput(status.job)) is not None:
            yield f"goodput     {useful.describe()}"
    if found is not None:
        where = f" on {found.nodes}" if found.nodes else ""
        why = f" ({found.reason})" if found.reason else ""
        yield f"slurm       job {found.id}: {found.state}{where}{why}"
    elif status.silence:
        yield f"slurm       no answer: {status.silence}"
    if own.ending is not None and not status.alive and status.state is not State.DONE:
        yield "ending      " + "\n            ".join(own.ending["reason"].splitlines())
    for i, line in enumerate(status.log_tail):
        yield f"{'' if i else 'log':<12}{line}"


def _step(status: Status) -> str:
    own = status.own
    if own.step is None:
        return "-"
    return f"{own.step} of {own.steps}" if own.steps else str(own.step)


def _speed(status: Status) -> str:
    rate, left = status.own.measured()["tokens_per_second"], status.seconds_left
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

    Cancels a queued job (with `yes`), and a running one of another command, which handles no
    requests; raises EnvironmentUnfit if the state of such a job is unknown. A suspended training
    job finds the request when it runs again. `wait` is the maximum number of seconds to wait for an
    acknowledgement.
    """
    job = ledger.open_job(path)
    (found,) = ledger.examine([job])
    command = submissions.argv(job)[0]
    if found.queued and found.slurm is not None:
        _cancel(found, found.slurm.id, yes=yes)
    elif found.alive and found.slurm is not None and command != "train":
        print(f"dtt {command} cannot save and stop; what it has finished is kept")
        squeue.cancel(found.slurm.id)
        print(f"cancelled Slurm job {found.slurm.id}")
    elif command == "train" and found.state in (State.SUSPENDED, State.UNKNOWN):
        _request(found, "stop")
        print(f"{job.root} is {found.state}: {found.detail}")
        print("the request stays: it saves and stops as soon as it runs")
    elif found.state is State.UNKNOWN:
        raise EnvironmentUnfit(
            f"cannot tell whether {job.root} runs",
            why=found.detail,
            next=f"dtt job stop {job.root} again, once Slurm answers",
        )
    elif found.alive:
        _ask(found, "stop", wait)
    else:
        print(f"nothing to stop: {job.root} is {found.state}")


def _cancel(found: Status, id: str, *, yes: bool) -> None:
    if not yes:
        raise ConfigError(
            f"{found.job.root} does not run: it is {found.state} as Slurm job {id}",
            why=found.detail,
            next=f"dtt job stop {found.job.root} -y, or scancel {id}, cancels it",
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
    job = ledger.open_job(path)
    (found,) = ledger.examine([job])
    if not found.alive:
        raise ConfigError(f"{job.root} does not run: it is {found.state}", why=found.detail or None)
    if (command := submissions.argv(job)[0]) != "train":
        raise ConfigError(f"{job.root} has nothing to {what}: it runs dtt {command}")
    return found


def _ask(
    found: Status, what: Literal["stop", "save", "profile"], wait: float, more: str = ""
) -> None:
    """Write the trigger file of a request, and wait until the job acknowledges it or ends.

    `more` is the second line of the trigger file. Raises DttError if there is no answer within
    `wait` seconds.
    """
    job, before = found.job, _answer(found.job)
    trigger = _request(found, what, more)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        answer = _answer(job)
        if (
            answer is not None
            and answer["request"] == what
            and (answer != before or found.state is State.STOPPING)
        ):
            print(f"acknowledged at step {answer['step']}: {THEN[what]}")
            if what == "stop" and answer["by"].startswith("slurm:"):
                print(
                    f"it was stopping by itself ({answer['by']}), to go on; now it does not go on"
                )
            return
        if job.exit_record(job.attempt()) is not None and found.own.ending is None:
            (ended,) = ledger.examine([job])
            print(f"{job.root} has ended meanwhile: it is {ended.state}. {ended.detail}".rstrip())
            return
        time.sleep(POLL_SECONDS)
    raise DttError(
        f"{job.root} has not answered within {wait:.0f} s",
        where=trigger,
        why=f"it was {found.state}{', ' if found.detail else ''}{found.detail}; "
        "the request stays: a start, a long evaluation or a slow step hears it at its end",
        next=_if_nobody_answers(found),
    )


def _request(found: Status, what: Literal["stop", "save", "profile"], more: str = "") -> Path:
    """Write the trigger file of a request, with `more` as its second line; return its path."""
    job = found.job
    trigger = {"stop": job.stop, "save": job.save, "profile": job.profile}[what]
    # Keep the name of the first requester. A request from Slurm is replaced, because a job that
    # stops for Slurm is submitted again and resumes, which a person's request must prevent.
    if not trigger.exists() or requester(trigger).startswith("slurm:"):
        write_atomically(trigger, f"{getpass.getuser()}: dtt job {what}\n{more}")
    return trigger


def _answer(job: JobDir) -> dict[str, Any] | None:
    return read_record(job.acknowledged, ANSWER)


def _if_nobody_answers(found: Status) -> str:
    look = f"dtt job status {found.job.root} tells whether it lives"
    if found.slurm is not None:
        return f"{look}; scancel {found.slurm.id} ends it, after a last chance to save"
    return look


def rm(path: Path, *, yes: bool) -> None:
    """Delete a job directory; raise ConfigError if the job is or may be running or queued."""
    job = ledger.open_job(path)
    if SweepManifest.exists(job.root.parent):
        raise ConfigError(
            f"{job.root} is a trial of the sweep {job.root.parent}",
            why="its results are those of all its trials",
            next=f"rm -r {job.root.parent} deletes the sweep, once dtt sweep status shows it ended",
        )
    (found,) = ledger.examine([job])
    found.check_idle()
    if found.state is State.UNKNOWN:
        raise ConfigError(
            f"{job.root} may run or be queued", why=found.detail, next="ask again later"
        )
    folder = job.root.resolve()  # it may be a link to another disk
    size = sum(path.lstat().st_size for path in folder.rglob("*")) / 1e9
    steps = len(list(job.checkpoints.glob("step-*")))
    what = f"{job.root}: {found.state}, {steps} checkpoints, {size:.2f} GB"
    asks = sys.stdin.isatty() and sys.stderr.isatty()  # elsewhere `agreed` takes yes for granted
    if not yes and not (asks and agreed(f"delete {what}?")):
        raise ConfigError(f"nothing was deleted of {what}", next=f"dtt job rm {job.root} -y")
    with exclusive(folder, "dtt"):
        # Rename first: the rest of an interrupted deletion must not be mistaken for a job.
        aside = folder.with_name(f".removed-{folder.name}-{secrets.token_hex(4)}")
        folder.rename(aside)
    if job.root.is_symlink():
        job.root.unlink()
    shutil.rmtree(aside)
    print(f"deleted {what}")


def resume(path: Path) -> None:
    """Submit a stopped job's script again; without Slurm, print the command that resumes it."""
    job = ledger.open_job(path)
    (found,) = ledger.examine([job])
    if found.state is State.DONE:
        raise ConfigError(f"{job.root} is done", next="name=ANOTHER starts a new job")
    found.check_idle()
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
    job = ledger.open_job(path)
    found = newest_log(job, node)
    if found is None:
        there = sorted(p.name[7:-4] for p in job.logs.glob("latest-*.log"))
        raise InputError(
            f"no log{f' of node {node}' if node else ''} in {job.logs}",
            next=f"--node takes {', '.join(there)}" if there else "it began without Slurm, or not",
        )
    log.info("%s", found.resolve())
    _print_log(found, lines, lambda: newest_log(job, node), follow=follow)


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
