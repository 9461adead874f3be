"""`dtt job …`: what jobs do, and what they are asked to."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dtt.config.profile import Kind
from dtt.errors import ConfigError, DttError, InputError
from dtt.launch import ledger, squeue, submissions
from dtt.launch.evidence import newest_log, requester
from dtt.launch.ledger import State, Status
from dtt.launch.sweep import SweepManifest
from dtt.runtime.files import write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log
from dtt.track import jsonl
from dtt.train.clock import in_words
from dtt.train.goodput import goodput

POLL_SECONDS = 0.1
THEN = {
    "stop": "it saves and stops",
    "save": "it saves and goes on",
    "profile": "the next steps are recorded into its folder profiles/",
}
"""What a job does that has heard a request."""


def ls(folder: Path, *, as_json: bool, tree: bool) -> None:
    """Print the state of every job in a folder, the newest first; or branches below parents."""
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
    """Each job, after the one it branched off, and how many there are above it."""
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
    """Print all that is known of a job."""
    (found,) = ledger.examine([ledger.open_job(path)])
    bad = list(jsonl.read(found.job.metrics, "guard"))
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
        "tokens_per_second": own.tokens_per_second if own.beats else None,
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
    if own.heartbeat is not None and own.beats:
        beat = own.heartbeat
        age = f"{own.now - beat['time']:.0f} s ago"
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
    rate, left = status.own.tokens_per_second, status.seconds_left
    fast = f", {rate:,.0f} tokens/s" if rate is not None and status.own.beats else ""
    return fast + (f", {in_words(left)} left" if left is not None else "")


def stop(path: Path, *, yes: bool, wait: float) -> None:
    """Ask a running training to save and stop; cancel what waits, or hears no request."""
    job = ledger.open_job(path)
    (found,) = ledger.examine([job])
    command = submissions.argv(job)[0]
    if found.queued and found.slurm is not None:
        _cancel(found, found.slurm.id, yes=yes)
    elif found.alive and found.slurm is not None and command != "train":
        print(f"dtt {command} cannot save and stop; what it has finished is kept")
        squeue.cancel(found.slurm.id)
        print(f"cancelled Slurm job {found.slurm.id}")
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
    """Ask a running job for a checkpoint; ConfigError if it does not run."""
    _ask(_training(path, "save"), "save", wait)


def profile(path: Path, *, kind: Kind | None, wait: float) -> None:
    """Ask a running job for a profile of its next steps; ConfigError if it does not run."""
    _ask(_training(path, "profile"), "profile", wait, kind or "")


def _training(path: Path, what: str) -> Status:
    """The state of a job that trains now; ConfigError if it does not."""
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
    """Touch the trigger file, and wait until somebody says that it was heard.

    `more`: a second line for it.
    """
    job, before = found.job, _answer(found.job)
    trigger = {"stop": job.stop, "save": job.save, "profile": job.profile}[what]
    # Who asked first is the one to be named. But after Slurm's own request the job would go on.
    if not trigger.exists() or requester(trigger).startswith("slurm:"):
        write_atomically(trigger, f"{getpass.getuser()}: dtt job {what}\n{more}")
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


def _answer(job: JobDir) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(job.acknowledged.read_bytes())
    except FileNotFoundError:
        return None
    return answer


def _if_nobody_answers(found: Status) -> str:
    look = f"dtt job status {found.job.root} tells whether it lives"
    if found.slurm is not None:
        return f"{look}; scancel {found.slurm.id} ends it, after a last chance to save"
    return look


def resume(path: Path) -> None:
    """Submit a stopped job's script again, or say how to go on without Slurm."""
    job = ledger.open_job(path)
    (found,) = ledger.examine([job])
    if found.state is State.DONE:
        raise ConfigError(f"{job.root} is done", next="name=ANOTHER starts a new job")
    found.check_idle()
    if job.script.is_file() and shutil.which("sbatch") is not None:
        print(f"submitted  {submissions.submit_again(job)}")
        return
    # A request that nobody was left to hear is not meant for the next attempt.
    job.stop.unlink(missing_ok=True)
    job.save.unlink(missing_ok=True)
    job.profile.unlink(missing_ok=True)
    argv = submissions.argv(job)
    folder = submissions.directory(job)
    elsewhere = folder.is_dir() and folder != Path.cwd()  # it is gone if the project was moved
    there = f"cd {shlex.quote(str(folder))} && " if elsewhere else ""
    if SweepManifest.exists(job.root.parent):
        there, argv = "", ["sweep", "retry", str(job.root.parent), job.root.name]
    print(there + shlex.join(["dtt", *argv]))


def logs(path: Path, *, follow: bool, node: str | None, lines: int) -> None:
    """Print the end of the newest attempt's log, and what comes, if asked to follow."""
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
    """The last lines of a file; then, until interrupted, what is appended or logged after it."""
    file = path.open(encoding="utf-8", errors="replace")
    try:
        print("".join(deque(file, maxlen=lines)), end="", flush=True)
        shown = path.resolve()
        while follow:
            print(file.read(), end="", flush=True)
            now = newest()
            if now is not None and now.resolve() != shown:  # another attempt has begun
                print(file.read(), end="")
                file.close()
                file, shown = now.open(encoding="utf-8", errors="replace"), now.resolve()
                log.info("%s", shown)
            else:
                time.sleep(POLL_SECONDS)
    finally:
        file.close()
