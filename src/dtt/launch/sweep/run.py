"""`dtt sweep submit | status | cancel | retry | results`: run and evaluate sweeps."""

from __future__ import annotations

import getpass
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError, ExitCode
from dtt.base.files import exclusive, write_atomically
from dtt.base.log import log
from dtt.config.explain import dropped_lines
from dtt.config.load import load_job
from dtt.jobs import chain_steps, sweeps
from dtt.jobs.job_state import State
from dtt.jobs.listing import columns
from dtt.jobs.slurm import job_script, squeue, submissions
from dtt.jobs.sweeps import ResultRow, Sweep, SweepPlan, TrialProgress
from dtt.launch import checks
from dtt.launch.checks import raise_all
from dtt.launch.submit import confirmed, profile
from dtt.launch.sweep import local_trials
from dtt.report import run as report
from dtt.train.find_job import model_of

MAX_DROPPED_SHOWN = 20
"""Maximum number of dropped combinations that the plan lists; the others are counted."""


def _trials_at_a_time(local: int | None) -> int | None:
    """Return the number of trials to run at a time on this machine; None: submit them to Slurm.

    `local` is the option. Without it and without Slurm, 0: the number in the sweep file, or one.
    """
    return local if local is not None or shutil.which("sbatch") else 0


def submit(
    file: Path,
    local: int | None,
    *,
    cluster: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    after: Sequence[str] = (),
) -> None:
    """Plan a sweep, show it, create the job directories, and start the trials that are new.

    On Slurm, they wait until what `after` names has succeeded.
    """
    local = _trials_at_a_time(local)
    if after and local is not None:
        raise ConfigError("--after needs Slurm: trials on this machine start at once")
    ids = chain_steps.ids_to_wait_for(after)
    cluster_profile = None if cluster is None else profile(cluster)
    plan = _drop_invalid(sweeps.plan(file, cache(model_of), cluster_profile), local)
    if not as_json:
        print("\n".join(_plan_lines(plan)))
    if dry_run:
        if as_json:
            unused = {t.id: dropped_lines(t.resolved) for t in plan.trials}
            _print_json(
                {
                    "sweep": plan.file.sweep.name,
                    "trials": {trial.id: trial.values for trial in plan.trials},
                    "not_used": {id: lines for id, lines in unused.items() if lines},
                    "dropped": [{"values": v, "why": why} for v, why in plan.dropped],
                }
            )
        return
    if not yes and not confirmed(f"start {len(plan.trials)} trials in {plan.root}?"):
        print("nothing was started", file=sys.stderr)
        return
    new = not plan.root.exists()
    try:
        _start(plan.write(), lambda one: one.state == State.NEW, local, ids, as_json=as_json)
    except DttError:
        if new and local is None and not any(plan.root.glob("*/submission.json")):
            shutil.rmtree(plan.root)  # so that a corrected file need not match it
        raise


def retry(name: str, chosen: list[str], local: int | None, *, as_json: bool) -> None:
    """Restart trials that are neither done nor active; each resumes from its checkpoint.

    `chosen` names trials; none: all.
    """
    sweep = sweeps.find(name)
    ids = sweep.chosen(chosen)
    # A trial in state UNKNOWN may be queued, since Slurm did not answer. It is only restarted if
    # the user names it.
    settled = (State.DONE,) if chosen else (State.DONE, State.UNKNOWN)
    _start(
        sweep,
        lambda one: one.trial in ids and not one.active and one.state not in settled,
        _trials_at_a_time(local),
        as_json=as_json,
    )


def _start(
    sweep: Sweep,
    wanted: Callable[[TrialProgress], bool],
    local: int | None,
    ids_before: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    """Start the trials that are `wanted`, and print the progress of the sweep.

    Waits for local trials, then exits with the first nonzero exit code among them, or with 0.
    """
    with exclusive(sweep.root, "trials of this sweep"):
        before = sweeps.progress(sweep)
        ids = [one.trial for one in before if wanted(one)]
        left = Counter(one.state for one in before if one.trial not in ids)
        for state, number in left.items():
            log.info("%s: %d %s, not started", sweep.root, number, state)
        jobs = [sweep.job(trial) for trial in ids]
        concurrency = sweep.manifest.concurrency
        if jobs and local is None:
            _submit(sweep, jobs, concurrency, ids_before)
        elif jobs:
            for job in jobs:
                job.stop.unlink(missing_ok=True)  # left by `dtt sweep cancel`
            local_trials.run(jobs, local or concurrency or 1, local_trials.visible_gpus())
    after = sweeps.progress(sweep)
    _print_progress(sweep, after, as_json=as_json)
    if local is not None:
        trials = [sweep.job(one.trial) for one in after]
        if (page := report.write_at_end(trials, sweep.root, sweep)) is not None:
            log.info("report: %s", page)
        sys.exit(next((one.code for one in after if one.trial in ids and one.code), ExitCode.DONE))


def _submit(sweep: Sweep, jobs: Sequence[JobDir], cap: int | None, after: Sequence[str]) -> None:
    """Submit all jobs as one Slurm array, at most `cap` at a time.

    They start when the Slurm jobs `after` have succeeded. The tasks of an array share their
    resources, so jobs whose `launch` sections differ are submitted separately; raises ConfigError
    for these if there is a `cap`.
    """
    configs = [load_job(job.root) for job in jobs]
    leads = [job_script.lead(job, config.launch) for job, config in zip(jobs, configs, strict=True)]
    script = partial(job_script.Script, directory=Path.cwd(), argv=("train",), kind="train")
    first = configs[0]
    if all(config.launch == first.launch for config in configs):
        array = job_script.Array(tuple(job.root for job in jobs), cap)
        whole = script(
            job_name=sweep.manifest.name, job=sweep.root, launch=first.launch,
            device=first.train.device, lead=max(leads), array=array,
        )  # fmt: skip
        number = submissions.submit(whole, after=after)
        log.info("%s: Slurm job %s, an array of %d", sweep.root, number, len(jobs))
        return
    if cap is not None:
        raise ConfigError(
            f"{sweep.manifest.name} cannot limit its concurrency",
            why="the trials differ in their `launch` section, so they are separate Slurm jobs",
            next="omit `concurrency` in the sweep file",
        )
    for job, config, lead in zip(jobs, configs, leads, strict=True):
        one = script(
            job_name=config.name, job=job.root, launch=config.launch, device=config.train.device,
            lead=lead,
        )  # fmt: skip
        log.info("%s: Slurm job %s", job.root, submissions.submit(one, after=after))


def status(name: str, *, as_json: bool) -> None:
    """Print the state of every trial, according to its job files."""
    sweep = sweeps.find(name)
    _print_progress(sweep, sweeps.progress(sweep), as_json=as_json)


def cancel(name: str, chosen: list[str], *, as_json: bool) -> None:
    """Ask running trials to save and stop; remove queued ones from the Slurm queue."""
    sweep = sweeps.find(name)
    ids = sweep.chosen(chosen)
    may_start = (State.NEW, State.UNKNOWN)
    active = [
        one
        for one in sweeps.progress(sweep)
        if one.trial in ids and (one.active or one.state in may_start)
    ]
    for one in active:
        job = sweep.job(one.trial)
        # Written for queued trials, too: if one starts after all, it finds the request and stops.
        write_atomically(job.stop, f"{getpass.getuser()}: dtt sweep cancel\n")
        if one.queued and (id := one.slurm) is not None:
            # Without --state=PENDING, which would cancel every pending task of the array.
            for error in checks.caught(lambda: squeue.cancel(id)):
                log.warning("%s", error)
    log.info("%s: requested %d trials to stop", sweep.root, len(active))
    _print_progress(sweep, sweeps.progress(sweep), as_json=as_json)


def results(name: str, *, as_plots: bool, as_json: bool) -> None:
    """Print the mean metric of each combination over its seeds, best first; or plot it."""
    if as_plots and as_json:
        raise ConfigError("--plot and --json are mutually exclusive")
    sweep = sweeps.find(name)
    rows = sweeps.table(sweep)
    if as_plots:
        _plot(sweep, rows)
        return
    keys, metric = sweeps.varied(sweep), sweep.manifest.metric
    if as_json:
        _print_json({"sweep": sweep.manifest.name, "metric": metric, "goal": sweep.manifest.goal,
                     "rows": [asdict(row) for row in rows]})  # fmt: skip
        return
    head = [*keys, metric, "error", "n", "trials"]
    lines = [
        [*sweeps.cells(row.values, keys), _number(row.mean), _number(row.error),
         str(len(row.done)), " ".join(row.trials)]
        for row in rows
    ]  # fmt: skip
    print("\n".join(columns([head, *lines])))


def _plot(sweep: Sweep, rows: Sequence[ResultRow]) -> None:
    """Plot the metric against each varied key and the curves of all trials, as PNG files."""
    from dtt.track import plot as draw

    metric, folder = sweep.manifest.metric, sweep.root / "plots"
    for one in sweeps.varied(sweep):
        curves = sweeps.against(sweep, rows, one)
        figure = draw.figure(
            curves, one, metric,
            log_x=draw.spread(c.x for c in curves),
            log_y=draw.spread(c.y for c in curves),
        )  # fmt: skip
        print(draw.save(figure, folder / f"{one}.png"))
    for one in dict.fromkeys((metric, "train.loss")):
        curves = sweeps.histories(sweep, one)
        figure = draw.figure(
            curves, "step", one, log_x=False, log_y=draw.spread(c.y for c in curves)
        )
        print(draw.save(figure, folder / f"curves-{one}.png"))


def _drop_invalid(plan: SweepPlan, local: int | None) -> SweepPlan:
    """Drop trials whose configuration has errors; raise the errors that all trials share.

    Also raises the errors of the first trial if no trial is left.
    """
    errors = {}
    for trial in plan.trials:
        config, job = trial.resolved.config, JobDir(trial.resolved.config.job_dir)
        found = list(checks.problems("train", config, job))
        if local is None:
            found += checks.launch_problems("train", config, job)
            found += checks.batch_problems(config, job)
        errors[trial.id] = {str(error): error for error in found}
    first, *others = errors.values()
    raise_all([error for text, error in first.items() if all(text in other for other in others)])
    dropped = [
        (trial.values, next(iter(errors[trial.id])).splitlines()[0])
        for trial in plan.trials
        if errors[trial.id]
    ]
    trials = tuple(trial for trial in plan.trials if not errors[trial.id])
    if not trials:
        raise_all(list(first.values()))
    return SweepPlan(plan.file, trials, (*plan.dropped, *dropped))


def _plan_lines(plan: SweepPlan) -> list[str]:
    keys = plan.file.sweep.keys
    head = ["trial", *keys]
    rows = [[trial.id, *sweeps.cells(trial.values, keys)] for trial in plan.trials]
    lines = columns([head, *rows])
    unused: dict[str, list[str]] = {}
    for trial in plan.trials:
        for line in dropped_lines(trial.resolved):
            unused.setdefault(line, []).append(trial.id)
    lines += [f"{line}: {', '.join(ids)}" for line, ids in unused.items()]
    if plan.dropped:
        lines += ["", f"{len(plan.dropped)} combinations are dropped:"]
        for values, why in plan.dropped[:MAX_DROPPED_SHOWN]:
            lines.append(f"  {sweeps.label(values, values)}: {why}")
        if len(plan.dropped) > MAX_DROPPED_SHOWN:
            lines.append(f"  and {len(plan.dropped) - MAX_DROPPED_SHOWN} more; --json lists all")
    return [*lines, "", f"{len(plan.trials)} trials in {plan.root}"]


def _print_progress(sweep: Sweep, progress: Iterable[TrialProgress], *, as_json: bool) -> None:
    manifest = sweep.manifest
    if as_json:
        listed = [asdict(one) for one in progress]
        _print_json({"sweep": manifest.name, "metric": manifest.metric, "trials": listed})
        return
    rows = [
        [
            one.trial,
            *sweeps.cells(one.values, manifest.keys),
            one.state,
            "" if one.step is None else f"{one.step}/{one.steps}",
            _number(one.metric),
            one.error or "",
        ]
        for one in progress
    ]
    head = ["trial", *manifest.keys, "state", "step", manifest.metric, "error"]
    print("\n".join(columns([head, *rows])))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))
