"""`dtt sweep submit | status | cancel | retry | results`: run and evaluate sweeps."""

from __future__ import annotations

import csv
import getpass
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError, ExitCode
from dtt.base.files import exclusive, write_atomically
from dtt.base.log import log
from dtt.config.explain import dropped_lines
from dtt.jobs import sweep_results
from dtt.jobs import sweep_trials as planning
from dtt.jobs.job_state import State
from dtt.jobs.slurm import squeue
from dtt.jobs.sweep_results import ResultRow, TrialProgress
from dtt.jobs.sweep_trials import DroppedCombination, Sweep, SweepPlan, Trial
from dtt.launch import checks
from dtt.launch.checks import raise_all
from dtt.launch.submit import confirmed, profile, waited_for
from dtt.launch.sweep import local_trials, slurm_trials
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
    ids = waited_for(after)
    cluster_profile = None if cluster is None else profile(cluster)
    plan = _drop_invalid(planning.plan(file, cache(model_of), cluster_profile), local)
    if not as_json:
        print("\n".join(_plan_lines(plan)))
    if dry_run:
        if as_json:
            _print_json(_planned(plan))
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
    sweep = planning.find(name)
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
        before = sweep_results.progress(sweep)
        ids = [one.trial for one in before if wanted(one)]
        left = Counter(one.state for one in before if one.trial not in ids)
        for state, number in left.items():
            log.info("%s: %d %s, not started", sweep.root, number, state)
        jobs = [sweep.job(trial) for trial in ids]
        if jobs:
            _run_or_submit(sweep, jobs, local, ids_before)
    after = sweep_results.progress(sweep)
    _print_progress(sweep, after, as_json=as_json)
    if local is not None:
        trials = [sweep.job(one.trial) for one in after]
        if (page := report.write_at_end(trials, sweep.root, sweep)) is not None:
            log.info("report: %s", page)
        sys.exit(next((one.code for one in after if one.trial in ids and one.code), ExitCode.DONE))


def _run_or_submit(
    sweep: Sweep, jobs: Sequence[JobDir], local: int | None, ids_before: Sequence[str]
) -> None:
    concurrency = sweep.manifest.concurrency
    if local is None:
        slurm_trials.submit(sweep, jobs, concurrency, ids_before)
        return
    for job in jobs:
        job.stop.unlink(missing_ok=True)  # left by `dtt sweep cancel`
    local_trials.run(jobs, local or concurrency or 1, local_trials.visible_gpus())


def status(name: str, *, as_json: bool) -> None:
    """Print the state of every trial, according to its job files."""
    sweep = planning.find(name)
    _print_progress(sweep, sweep_results.progress(sweep), as_json=as_json)


def cancel(name: str, chosen: list[str], *, as_json: bool) -> None:
    """Ask running trials to save and stop; remove queued ones from the Slurm queue."""
    sweep = planning.find(name)
    ids = sweep.chosen(chosen)
    may_start = (State.NEW, State.UNSENT, State.UNKNOWN)
    active = [
        one
        for one in sweep_results.progress(sweep)
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
    _print_progress(sweep, sweep_results.progress(sweep), as_json=as_json)


def results(name: str, *, as_csv: bool, as_plots: bool, as_json: bool) -> None:
    """Print the mean metric of each combination over its seeds, best first; or plot it."""
    if as_csv + as_plots + as_json > 1:
        raise ConfigError("--csv, --plot and --json are mutually exclusive")
    sweep = planning.find(name)
    rows = sweep_results.table(sweep)
    if as_plots:
        _plot(sweep, rows)
        return
    keys, metric = sweep_results.varied(sweep), sweep.manifest.metric
    if as_json:
        _print_json({"sweep": sweep.manifest.name, "metric": metric, "goal": sweep.manifest.goal,
                     "rows": [asdict(row) for row in rows]})  # fmt: skip
        return
    head = [*keys, metric, "error", "n", "trials"]
    number = _exact if as_csv else _number
    lines = [
        [
            *sweep_results.cells(row.values, keys),
            number(row.mean),
            number(row.error),
            str(len(row.done)),
            " ".join(row.trials),
        ]
        for row in rows
    ]
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([head, *lines])
    else:
        print("\n".join(columns([head, *lines])))


def _plot(sweep: Sweep, rows: Sequence[ResultRow]) -> None:
    """Plot the metric against each varied key and the curves of all trials, as PNG files."""
    from dtt.track import plot as draw

    metric, folder = sweep.manifest.metric, sweep.root / "plots"
    for one in sweep_results.varied(sweep):
        curves = sweep_results.against(sweep, rows, one)
        figure = draw.figure(
            curves, one, metric,
            log_x=one in sweep.manifest.logarithmic or draw.spread(c.x for c in curves),
            log_y=draw.spread(c.y for c in curves),
        )  # fmt: skip
        print(draw.save(figure, folder / f"{one}.png"))
    for one in dict.fromkeys((metric, "train.loss")):
        curves = sweep_results.histories(sweep, one)
        figure = draw.figure(
            curves, "step", one, log_x=False, log_y=draw.spread(c.y for c in curves)
        )
        print(draw.save(figure, folder / f"curves-{one}.png"))


def _drop_invalid(plan: SweepPlan, local: int | None) -> SweepPlan:
    """Drop trials whose configuration has errors; raise the errors that all trials share.

    Also raises the errors of the first trial if no trial is left.
    """
    errors = {
        trial.id: {str(error): error for error in _problems(trial, local)} for trial in plan.trials
    }
    first, *others = errors.values()
    raise_all([error for text, error in first.items() if all(text in other for other in others)])
    dropped = [
        DroppedCombination(trial.values, next(iter(errors[trial.id])).splitlines()[0])
        for trial in plan.trials
        if errors[trial.id]
    ]
    trials = tuple(trial for trial in plan.trials if not errors[trial.id])
    if not trials:
        raise_all(list(first.values()))
    return SweepPlan(plan.file, trials, (*plan.dropped, *dropped))


def _problems(trial: Trial, local: int | None) -> Iterator[DttError]:
    config = trial.resolved.config
    yield from checks.problems("train", config, JobDir(config.job_dir))
    if local is None:
        yield from checks.launch_problems("train", config)
        yield from checks.batch_problems("train", config, JobDir(config.job_dir))
        yield from checks.time_problems(JobDir(config.job_dir), config.launch)


def _plan_lines(plan: SweepPlan) -> list[str]:
    keys = plan.file.sweep.keys
    head = ["trial", *keys]
    rows = [[trial.id, *sweep_results.cells(trial.values, keys)] for trial in plan.trials]
    lines = columns([head, *rows])
    unused: dict[str, list[str]] = {}
    for trial in plan.trials:
        for line in dropped_lines(trial.resolved):
            unused.setdefault(line, []).append(trial.id)
    lines += [f"{line}: {', '.join(ids)}" for line, ids in unused.items()]
    if plan.dropped:
        lines += ["", f"{len(plan.dropped)} combinations are dropped:"]
        for one in plan.dropped[:MAX_DROPPED_SHOWN]:
            lines.append(f"  {sweep_results.label(one.values, list(one.values))}: {one.why}")
        if len(plan.dropped) > MAX_DROPPED_SHOWN:
            lines.append(f"  and {len(plan.dropped) - MAX_DROPPED_SHOWN} more; --json lists all")
    return [*lines, "", f"{len(plan.trials)} trials in {plan.root}"]


def _planned(plan: SweepPlan) -> dict[str, Any]:
    return {
        "sweep": plan.file.sweep.name,
        "trials": {trial.id: trial.values for trial in plan.trials},
        "not_used": {t.id: lines for t in plan.trials if (lines := dropped_lines(t.resolved))},
        "dropped": [asdict(one) for one in plan.dropped],
    }


def _print_progress(sweep: Sweep, progress: Iterable[TrialProgress], *, as_json: bool) -> None:
    manifest = sweep.manifest
    if as_json:
        listed = [asdict(one) for one in progress]
        _print_json({"sweep": manifest.name, "metric": manifest.metric, "trials": listed})
        return
    rows = [
        [
            one.trial,
            *sweep_results.cells(one.values, manifest.keys),
            one.state,
            "" if one.step is None else f"{one.step}/{one.steps}",
            _number(one.metric),
            one.error or "",
        ]
        for one in progress
    ]
    head = ["trial", *manifest.keys, "state", "step", manifest.metric, "error"]
    print("\n".join(columns([head, *rows])))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))
