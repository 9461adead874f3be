"""`dtt submit pipeline`: one Slurm job per step, each waiting for the success of the one before.

The steps are those of `dtt pipeline`. With `eval.tasks`, one more evaluates every checkpoint beside
the training. Each has the job directory of `dtt submit STEP`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError
from dtt.base.files import exclusive
from dtt.config.launch import LaunchConfig
from dtt.config.load import stage_names
from dtt.config.run import RunConfig
from dtt.jobs import chain_steps, job_state
from dtt.jobs.chain_steps import LinkedStep
from dtt.jobs.clock import in_words
from dtt.jobs.slurm import job_script, squeue
from dtt.jobs.slurm.job_script import Script
from dtt.launch import checks, pipeline, step_times, submit
from dtt.launch.pipeline import PipelineRun, PipelineStep
from dtt.launch.submission import Submission, amounts


@dataclass(frozen=True)
class ChainLink:
    """A step of a chain with what submits it."""

    title: str
    submission: Submission | None
    """None if the step is done."""

    @property
    def job(self) -> JobDir | None:
        """The directory of the job that is to be submitted."""
        return None if self.submission is None else self.submission.job


def run(
    config: str | None,
    arguments: Sequence[str],
    *,
    cluster: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    code_copy: bool,
    redo_from: str | None,
    after: Sequence[str],
    of_one_job: Sequence[str],
) -> None:
    """Check the steps of a pipeline, show them, ask for confirmation, and submit each as a job.

    Without Slurm, runs them here, as `dtt pipeline` does. Raises ConfigError for options
    `of_one_job`.
    """
    if of_one_job:
        raise ConfigError(
            f"a pipeline is a Slurm job per step, and {of_one_job[0]} concerns one job",
            next="--in-one-job, or submit the steps one by one",
        )
    if shutil.which("sbatch") is None and not dry_run:
        if after:
            checks.raise_all(list(checks.sbatch_problems()))
        print("no Slurm on this machine: the steps run here, in turn", file=sys.stderr)
        pipeline.run(config, arguments, None, redo_from=redo_from, as_json=as_json)
        return
    folder, links = prepare(config, arguments, cluster, redo_from, code_copy=code_copy)
    waiting = [one.submission for one in links if one.submission is not None]
    if not waiting:
        raise ConfigError(f"all steps of {folder} are done", next="set name=ANOTHER, or train more")
    ids = [id for name in after for id in chain_steps.ids_to_wait_for(name)]
    known = [one.job.submission_record() for one in waiting]
    checks.raise_all(list(problems(folder, links, dry_run=dry_run)))
    out = sys.stderr if as_json else sys.stdout
    print("\n".join(plan(folder, links, dry_run=dry_run)), file=out, flush=True)
    submitted: list[str] = []
    if not dry_run and (yes or submit.confirmed("submit?")):
        submitted = _submit(folder, links, known, ids, code_copy=code_copy)
    elif not dry_run:
        print("not submitted", file=sys.stderr)
    if as_json:
        given: list[str | None] = [*submitted] or [None] * len(waiting)
        pairs = zip(waiting, given, strict=True)
        steps = [{"job_id": id, "job_dir": str(one.job.root)} for one, id in pairs]
        print(json.dumps({"job_dir": str(folder), "steps": steps}))
    elif submitted:
        print(f"submitted  {' '.join(submitted)}; dtt job status {folder}")


def _submit(
    folder: Path,
    links: Sequence[ChainLink],
    known: Sequence[dict[str, Any] | None],
    after: Sequence[str],
    *,
    code_copy: bool,
) -> list[str]:
    """Submit the steps that are not done; return their Slurm ids.

    `known` are the newest records of their submissions, as they were before the checks. If Slurm
    rejects one, cancels those before it, and leaves the chain as it was.
    """
    waiting = [one for one in links if one.submission is not None]
    steps = [LinkedStep(one.title, one.job) for one in links]
    queued = chain_steps.Submitted(after)
    ids: list[str] = []
    with exclusive(folder, "dtt submit"):
        recorded = chain_steps.read(folder)
        chain_steps.write(folder, steps)
        try:
            for one, record in zip(waiting, known, strict=True):
                assert one.submission is not None
                before, beside = queued.dependencies(one.title)
                id = submit.submit(
                    one.submission, record, copy_code=code_copy, after=before, beside=beside
                )
                assert id is not None, "it was sent"
                queued.add(one.title, id)
                ids.append(id)
        except DttError:
            for id in ids:
                squeue.cancel(id)
            if recorded:
                chain_steps.write(folder, recorded)
            else:
                shutil.rmtree(folder)
            raise
    return ids


def prepare(
    config: str | None,
    arguments: Sequence[str],
    cluster: str | None,
    redo_from: str | None,
    *,
    code_copy: bool,
) -> tuple[Path, list[ChainLink]]:
    """Return the folder of the chain and its steps, in order."""
    submit.refuse_folders("pipeline", [one for one in arguments if "=" not in one])
    base = submit.with_profile(config, cluster)
    staged = bool(stage_names(base, arguments))
    if redo_from is not None and not staged:
        raise ConfigError(f"--redo-from {redo_from}: the configuration defines no stages")
    runs, waiting = pipeline.find_runs(base, arguments, (), redo_from)
    trained = runs[-1].job
    whole = JobDir(trained.root.parent) if staged else trained
    links: list[ChainLink] = []
    finished = True  # a step after one that is not done runs again, and looks at its files
    for step in pipeline.steps(runs, waiting):
        if step.command == "export":
            links += _evaluation(runs, whole, done=finished, code_copy=code_copy)
        finished = finished and step.has_output()
        if step.command == "train":
            if not any(link.title == "train" for link in links):
                made = None
                if not finished:  # one Slurm job trains all stages
                    made = submit.prepare(
                        "train", config, arguments, cluster, (), code_copy=code_copy
                    )
                links.append(ChainLink("train", made))
            continue
        made = None if finished else _of_step(step, whole, code_copy)
        links.append(ChainLink(step.title, made))
    return whole.root.with_name(f"{whole.root.name}-pipeline"), links


def _of_step(step: PipelineStep, whole: JobDir, code_copy: bool) -> Submission:
    """Return the submission of a step other than the training."""
    run, command = step.run, step.command
    name = "-".join([whole.root.name, *step.title.split()])
    job = JobDir(whole.root.with_name(name))
    argv = [command, "-c", str(job.config)]
    if command == "export":
        argv = [command, str(run.job.root)]
    launch = run.cfg.launch.of_step(command, tasks=run.cfg.pipeline.tokenize_processes)
    cfg = _with_launch(run.cfg, launch)
    script = submit.make_script(command, job, argv, cfg, code_copy=code_copy)
    return Submission(command, run.resolved, job, run.job, script)


def _evaluation(
    runs: Sequence[PipelineRun], whole: JobDir, *, done: bool, code_copy: bool
) -> Iterator[ChainLink]:
    """Yield the evaluation beside a training, which may be done, if the configuration asks for it.

    It watches the job, or the jobs of all stages in turn.
    """
    evaluated = [run for run in runs if run.cfg.eval.tasks]
    if not evaluated:
        return
    last = evaluated[-1]
    job = JobDir(whole.root.with_name(f"{whole.root.name}-{chain_steps.EVAL}"))
    if done and chain_steps.is_evaluated(job, last.job, last.cfg.eval.tasks):
        yield ChainLink(chain_steps.EVAL, None)
        return
    argv = ["eval", str(whole.root), "--watch"]
    if done and last.stage is None:
        argv += submit.changed_keys("eval", last.job, last.resolved)
    cfg = _with_launch(last.cfg, last.cfg.launch.of_step("eval"))
    script = submit.make_script("eval", job, argv, cfg, code_copy=code_copy)
    yield ChainLink(chain_steps.EVAL, Submission("eval", last.resolved, job, last.job, script))


def _with_launch(cfg: RunConfig, launch: LaunchConfig) -> RunConfig:
    return cfg.model_copy(update={"launch": launch})


def problems(folder: Path, links: Sequence[ChainLink], *, dry_run: bool) -> Iterator[DttError]:
    """Yield every error that would make a step fail, as far as its inputs are known now."""
    if JobDir(folder).config.is_file():
        yield ConfigError(
            f"{folder} is the directory of a pipeline in one job",
            next=f"dtt job rm {folder}, or --in-one-job",
        )
    before: list[str] = []
    for submission in (link.submission for link in links if link.submission is not None):
        command, cfg, script = submission.command, submission.config, submission.script
        if script.launch.continuation == "singleton":
            yield ConfigError(
                "the steps of a chain cannot wait for a job with launch.continuation=singleton",
                why="it continues as another Slurm job",
                next="launch.continuation=requeue, or --in-one-job",
            )
        if command == "train" and before:
            yield from submit.known_problems(submission)
        elif command == "train":
            yield from submit.problems(submission, dry_run=True)
        elif not before:
            yield from checks.problems(command, cfg, submission.trained)
        if command != "train":
            yield from checks.launch_problems(command, _with_launch(cfg, script.launch))
        if not dry_run:
            [status] = job_state.examine([submission.job])
            yield from checks.caught(status.check_idle)
        before.append(command)


def plan(folder: Path, links: Sequence[ChainLink], *, dry_run: bool) -> Iterator[str]:
    """Yield a line for each step with its resources, limit and largest cost.

    For a dry run, also how long each is expected to take, and when it could start alone.
    """
    header = ["step", "nodes", "tasks", "GPUs", "time limit", "at most", "partition"]
    rows = [header + ["expected", "earliest start alone"] * dry_run]
    trained: list[str] = []
    for link in links:
        if link.submission is None:
            rows.append([link.title, "done"])
            continue
        script, launch = link.submission.script, link.submission.script.launch
        limit = "the partition's" if launch.time is None else str(launch.time)
        cost = "unknown" if launch.time_limit is None else _cost(script, launch.time_limit)
        each = launch.processes if script.kind == "train" else script.tasks_per_node
        cells = [link.title, str(script.nodes), str(each), str(launch.gpus), limit, cost]
        cells.append(launch.partition or "the default")
        if dry_run:
            cells += [_expected(link.submission), job_script.earliest_start(script)]
        rows.append(cells)
        trained += [f"train      {line}" for line in amounts(link.submission)]
    beside = any(link.title == chain_steps.EVAL for link in links)
    yield f"chain      {folder}: each step waits for the success of the one before" + (
        ", eval runs beside train" if beside else ""
    )
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
    if dry_run:
        yield "alone      Slurm was asked for each step as if it waited for no other"
    yield from trained


def _cost(script: Script, seconds: float) -> str:
    unit = "GPU-hours" if script.launch.gpus else "node-hours"
    return f"{script.nodes * (script.launch.gpus or 1) * seconds / 3600:.1f} {unit}"


def _expected(submission: Submission) -> str:
    """Return the expected duration and cost of a step, that of a training as of `dtt plan`."""
    if submission.command == chain_steps.EVAL:
        return "as train"
    if submission.command == "train":
        seconds = _training_seconds(submission)
    else:
        script = submission.script
        processes = script.nodes * script.tasks_per_node
        seconds = step_times.expected_seconds(submission.command, submission.config, processes)
    if seconds is None:
        return "unknown"
    return f"≈ {in_words(seconds)}, {_cost(submission.script, seconds)}"


def _training_seconds(submission: Submission) -> float | None:
    from dtt.estimate import plan as estimate  # it loads torch

    try:
        stages = [stage.config for stage in submission.stages] or [submission.config]
        return estimate.expected_seconds(stages)
    except DttError:  # the number of epochs says nothing before there are token files
        return None
