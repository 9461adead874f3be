"""`dtt job …`: control, resume and delete jobs, and print their logs."""

from __future__ import annotations

import getpass
import secrets
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dtt.artifacts.jobdir import ANSWER, JobDir
from dtt.base.errors import ConfigError, DttError, EnvironmentUnfit, InputError
from dtt.base.files import exclusive, in_size, remove, write_atomically
from dtt.base.log import log
from dtt.base.reading import read_record
from dtt.base.terminal import Message
from dtt.jobs import chain_steps, job_state
from dtt.jobs.chain_steps import LinkedStep
from dtt.jobs.job_files import job_argv, newest_log, trigger_lines
from dtt.jobs.job_state import State, Status
from dtt.jobs.slurm import squeue, submissions
from dtt.jobs.sweeps import SweepManifest
from dtt.launch.checks import raise_all, sbatch_problems
from dtt.launch.submit import confirmed

POLL_SECONDS = 0.1
ACKNOWLEDGED = {
    "stop": "the job saves and stops",
    "save": "the job saves and continues",
    "profile": "the job profiles its next steps, into profiles/",
}
"""Action of a job after it acknowledged a request, by request."""
CONTINUES = (State.QUEUED, State.RUNNING, State.PREEMPTED, State.SUSPENDED)
"""States of a job for whose success another one can wait."""


def stop(path: Path, *, yes: bool, wait: float) -> None:
    """Ask a running training job to save and stop.

    Cancels a queued job (with `yes`), and a running job of another command, because it handles no
    requests; raises EnvironmentUnfit if the state of such a job is unknown. A suspended training
    job finds the request when it runs again. `wait` is the maximum number of seconds to wait for an
    acknowledgement.
    """
    if steps := chain_steps.read(path):
        _stop_chain(steps, wait)
        return
    job = job_state.open_job(path)
    (status,) = job_state.examine([job])
    command = job_argv(job)[0]
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


def _stop_chain(steps: Sequence[LinkedStep], wait: float) -> None:
    """Cancel the steps that wait, the last one first, and stop the one that runs."""
    examined = chain_steps.examine(steps)
    for one in reversed(examined):
        if one.status.alive:
            stop(one.status.job.root, yes=True, wait=wait)
        elif (id := one.slurm_id) is not None:
            _cancel(one.status, id, yes=True)
    if not any(one.status.alive or one.status.queued for one in examined):
        print("nothing to stop: no step runs or waits")


def _cancel(status: Status, id: str, *, yes: bool) -> None:
    if not yes:
        raise ConfigError(
            f"{status.job.root} is not running: it is {status.state} as Slurm job {id}",
            why=status.detail,
            next=f"cancel it with dtt job stop {status.job.root} -y, or scancel {id}",
        )
    squeue.cancel(id)
    print(f"cancelled Slurm job {id}")


def ask(path: Path, what: Literal["save", "profile"], *, wait: float, more: str = "") -> None:
    """Ask a running training job to save, or to profile its next steps.

    Raises ConfigError if it does not train now. `more` is the second line of the trigger file: the
    profiler, empty for the configured one.
    """
    job = job_state.open_job(path)
    (status,) = job_state.examine([job])
    if not status.alive:
        raise ConfigError(
            f"{job.root} is not running: it is {status.state}", why=status.detail or None
        )
    if (command := job_argv(job)[0]) != "train":
        raise ConfigError(f"cannot {what} {job.root}: it runs dtt {command}")
    _ask(status, what, wait, more)


def _ask(
    status: Status, what: Literal["stop", "save", "profile"], wait: float, more: str = ""
) -> None:
    """Write the trigger file of a request, and wait until the job acknowledges it or ends.

    Raises DttError if there is no answer within `wait` seconds.
    """
    job = status.job
    before = read_record(job.acknowledged, ANSWER)
    trigger = _request(status, what, more)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        answer = read_record(job.acknowledged, ANSWER)
        new = answer != before or status.state is State.STOPPING
        if answer is not None and answer["request"] == what and new:
            print(f"acknowledged at step {answer['step']}: {ACKNOWLEDGED[what]}")
            if what == "stop" and answer["by"].startswith("slurm:"):
                print(f"it was already stopping ({answer['by']}); now it will not resume by itself")
            return
        if job.exit_record(job.attempt()) is not None and status.files.ending is None:
            (ended,) = job_state.examine([job])
            print(f"{job.root} has ended: it is {ended.state}. {ended.detail}".rstrip())
            return
        time.sleep(POLL_SECONDS)
    hint = f"dtt job status {job.root} shows whether it is running"
    if status.slurm is not None:
        hint += f"; scancel {status.slurm.id} ends it after SIGTERM, on which it may still save"
    raise DttError(
        f"{job.root} did not acknowledge the request within {wait:.0f} s",
        where=trigger,
        why=f"it was {status.state}{', ' if status.detail else ''}{status.detail}; "
        "the request remains: the job reads it after its start, evaluation or current step",
        next=hint,
    )


def _request(status: Status, what: Literal["stop", "save", "profile"], more: str = "") -> Path:
    """Write the trigger file of a request, with `more` as its second line; return its path."""
    job = status.job
    trigger = {"stop": job.stop, "save": job.save, "profile": job.profile}[what]
    # Keep the name of the first requester. A request from Slurm is replaced, because a job that
    # stops for Slurm is submitted again and resumes, which a user's request must prevent.
    if not trigger.exists() or trigger_lines(trigger)[0].startswith("slurm:"):
        try:
            write_atomically(trigger, f"{getpass.getuser()}: dtt job {what}\n{more}")
        except PermissionError:
            owner = trigger.parent.owner()
            raise EnvironmentUnfit(
                f"you may not ask {job.root} to {what}",
                where=trigger.parent,
                why=f"only {owner} may write there: the job is not in a folder of a team",
                next=f"ask {owner}, who can open it to the group: chmod g+ws {trigger.parent}; and "
                f"for new jobs: chmod g+ws {job.root.parent}",
            ) from None
    return trigger


def rm(path: Path, *, yes: bool) -> None:
    """Delete a job directory; raise ConfigError if the job is or may be running or queued.

    Of a chain, deletes its folder and those of its steps, but not that of the training.
    """
    if steps := chain_steps.read(path):
        _rm_chain(path, steps, yes=yes)
        return
    job = job_state.open_job(path)
    if SweepManifest.exists(job.root.parent):
        raise ConfigError(
            f"{job.root} is a trial of the sweep {job.root.parent}",
            why="the results of a sweep need all of its trials",
            next=f"rm -r {job.root.parent} deletes the sweep; check dtt sweep status first",
        )
    from dtt.checkpoint.retention import check_dependents  # slow to import

    check_dependents(job)
    (status,) = job_state.examine([job])
    status.check_idle()
    if status.state is State.UNKNOWN:
        raise ConfigError(f"{job.root} may be running or queued", why=status.detail)
    folder = job.root.resolve()  # it may be a link to another disk
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    checkpoints = len(list(job.checkpoints.glob("step-*")))
    what = f"{job.root}: {status.state}, {checkpoints} checkpoints, {in_size(size)}"
    _confirm_deletion(what, path, yes=yes)
    with exclusive(folder, "dtt"):
        # Rename first: the rest of an interrupted deletion must not be mistaken for a job.
        aside = folder.with_name(f".removed-{folder.name}-{secrets.token_hex(4)}")
        folder.rename(aside)
    if job.root.is_symlink():
        job.root.unlink()
    shutil.rmtree(aside)
    print(f"deleted {what}")


def _confirm_deletion(what: str, path: Path, *, yes: bool) -> None:
    """Raise ConfigError unless the user agrees, or has said so before."""
    asks = sys.stdin.isatty() and sys.stderr.isatty()  # else `confirmed` returns True
    if not yes and not (asks and confirmed(f"delete {what}?")):
        raise ConfigError(f"not deleted: {what}", next=f"dtt job rm {path} -y")


def _rm_chain(path: Path, steps: Sequence[LinkedStep], *, yes: bool) -> None:
    """Delete the folder of a chain and those of its steps, whose results are elsewhere."""
    for one in chain_steps.examine(steps):
        one.status.check_idle()
    others = [one.job for one in steps if one.job is not None and one.title != "train"]
    folders = [job.root for job in others if job.root.exists()]
    _confirm_deletion(f"{path} and its {len(folders)} steps, not the training", path, yes=yes)
    for folder in folders:
        rm(folder, yes=True)
    shutil.rmtree(path)
    print(f"deleted {path}")


def _resume_chain(path: Path, steps: Sequence[LinkedStep]) -> None:
    """Submit the steps again that are neither done nor in the queue."""
    raise_all(list(sbatch_problems()))
    with exclusive(path, "dtt submit"):
        queued, submitted = dict[str, str](), False
        for one in chain_steps.examine(steps):
            if one.done:
                continue
            state, why = one.status.state, one.status.detail
            if state is State.UNKNOWN:
                raise EnvironmentUnfit(f"the state of {one.job.root} is unknown", why=why)
            id = one.slurm_id
            if id is not None and state not in CONTINUES:
                one.status.check_idle()  # it is ending, and nothing can wait for its success
            if id is None:
                waits = chain_steps.dependencies(one.title, queued)
                id = submissions.submit_again(one.job, *waits)
                submitted = True
                print(f"submitted  {one.title}: {id}")
            queued[one.title] = id
    if not submitted:
        what = "its steps are in the queue" if queued else "it is done"
        raise ConfigError(f"nothing to resume in {path}: {what}")


def resume(path: Path) -> None:
    """Submit a stopped job's script again; without Slurm, print the command that resumes it.

    A stage that was submitted with the others resumes by the script of all stages.
    """
    if steps := chain_steps.read(path):
        _resume_chain(path, steps)
        return
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
        with exclusive(job.root, "dtt train or dtt submit"):
            job_state.examine([job])[0].check_idle()  # another terminal may have been faster
            print(f"submitted  {submissions.submit_again(job)}")
        return
    # Requests that arrived after the last attempt ended are not meant for the next attempt.
    for trigger in (job.stop, job.save, job.profile):
        remove(trigger)
    argv = job_argv(job)
    folder = submissions.directory(job)
    elsewhere = folder.is_dir() and folder != Path.cwd()  # no folder if the project was moved
    there = f"cd {shlex.quote(str(folder))} && " if elsewhere else ""
    if SweepManifest.exists(job.root.parent):
        there, argv = "", ["sweep", "retry", str(job.root.parent), job.root.name]
    print(there + shlex.join(["dtt", *argv]))


def logs(path: Path, *, follow: bool, node: str | None, lines: int) -> None:
    """Print the last `lines` lines of the newest attempt's log; with `follow`, also new lines."""
    if steps := chain_steps.read(path):
        # The last step that has started, but not the evaluation, which runs beside the training.
        steps = [one for one in steps if one.title != chain_steps.EVAL]
        jobs = [one.status.job for one in chain_steps.examine(steps)]
        job = next((job for job in reversed(jobs) if job.attempt()), jobs[0])
    else:
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
    shown = newest.resolve()
    log.info("%s", shown)
    file = newest.open(encoding="utf-8", errors="replace")
    try:
        print(Message("".join(deque(file, maxlen=lines))), end="", flush=True)
        while follow:
            print(Message(file.read()), end="", flush=True)
            now = newest_log(job, node)
            if now is not None and now.resolve() != shown:  # another attempt has started
                print(Message(file.read()), end="")
                file.close()
                file, shown = now.open(encoding="utf-8", errors="replace"), now.resolve()
                log.info("%s", shown)
            else:
                time.sleep(POLL_SECONDS)
    finally:
        file.close()
