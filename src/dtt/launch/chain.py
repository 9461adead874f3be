"""`dtt submit pipeline`: one Slurm job per step, each waiting for the success of the one before.

The steps are those of `dtt pipeline`. With `eval.tasks`, one more evaluates every checkpoint beside
the training. Each has the job directory of `dtt submit STEP`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError
from dtt.base.files import exclusive
from dtt.config.launch import LaunchConfig
from dtt.config.load import stage_names
from dtt.config.run import RunConfig
from dtt.jobs import chain_steps, job_state
from dtt.jobs.chain_steps import EVAL, LinkedStep
from dtt.jobs.listing import columns
from dtt.jobs.slurm import squeue
from dtt.jobs.slurm.job_script import Script
from dtt.launch import checks, pipeline, submit
from dtt.launch.pipeline import PipelineRun
from dtt.launch.submission import Submission, amounts
from dtt.launch.submit import SubmitOptions

Link = tuple[str, Submission | None]
"""Title of a step of a chain, and what submits it; None if the step is done."""


def run(config: str | None, arguments: Sequence[str], options: SubmitOptions) -> None:
    """Check the steps of a pipeline, show them, ask for confirmation, and submit each as a job.

    Without Slurm, runs them here, as `dtt pipeline` does. Raises ConfigError for options that
    concern one job.
    """
    given = {"--print-script": options.print_script}
    given["--allow-change"] = bool(options.allow_change)
    if of_one_job := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"a pipeline is a Slurm job per step, and {of_one_job[0]} concerns one job",
            next="submit the steps one by one, such as dtt submit train",
        )
    dry_run, as_json = options.dry_run, options.as_json
    if shutil.which("sbatch") is None and not dry_run:
        if options.after:
            checks.raise_all(list(checks.sbatch_problems()))
        print("no Slurm on this machine: the steps run here, in turn", file=sys.stderr)
        pipeline.run(config, arguments, None, as_json=as_json)
        return
    folder, links = prepare(config, arguments, options)
    waiting = [one for _, one in links if one is not None]
    if not waiting:
        raise ConfigError(f"all steps of {folder} are done", next="set name=ANOTHER, or train more")
    ids = chain_steps.ids_to_wait_for(options.after)
    known = [one.job.submission_record() for one in waiting]
    checks.raise_all(list(problems(folder, waiting, dry_run=dry_run)))
    out = sys.stderr if as_json else sys.stdout
    print("\n".join(plan(folder, links)), file=out, flush=True)
    submitted: list[str] = []
    if not dry_run and (options.yes or submit.confirmed("submit?")):
        submitted = _submit(folder, links, known, ids)
    elif not dry_run:
        print("not submitted", file=sys.stderr)
    if as_json:
        job_ids: list[str | None] = [*submitted] or [None] * len(waiting)
        pairs = zip(waiting, job_ids, strict=True)
        steps = [{"job_id": id, "job_dir": str(one.job.root)} for one, id in pairs]
        print(json.dumps({"job_dir": str(folder), "steps": steps}))
    elif submitted:
        print(f"submitted  {' '.join(submitted)}; dtt job status {folder}")


def _submit(
    folder: Path,
    links: Sequence[Link],
    known: Sequence[dict[str, Any] | None],
    after: Sequence[str],
) -> list[str]:
    """Submit the steps that are not done; return their Slurm ids.

    `known` are the newest records of their submissions, as they were before the checks. If Slurm
    rejects one, cancels those before it, and leaves the chain as it was.
    """
    queued, records = dict[str, str](), iter(known)
    with exclusive(folder, "dtt submit"):
        recorded = chain_steps.read(folder)
        chain_steps.write(
            folder, [LinkedStep(title, one.job if one else None) for title, one in links]
        )
        try:
            for title, one in links:
                if one is None:
                    continue
                before, beside = chain_steps.dependencies(title, queued, after)
                id = submit.submit(one, next(records), after=before, beside=beside)
                queued[title] = id
        except DttError:
            for id in queued.values():
                squeue.cancel(id)
            if recorded:
                chain_steps.write(folder, recorded)
            else:
                shutil.rmtree(folder)
            raise
    return list(queued.values())


def prepare(
    config: str | None, arguments: Sequence[str], options: SubmitOptions
) -> tuple[Path, list[Link]]:
    """Return the folder of the chain and its steps, in order."""
    submit.refuse_folders("pipeline", [one for one in arguments if "=" not in one])
    base = submit.with_profile(config, options.cluster)
    staged = bool(stage_names(base, arguments))
    runs, waiting = pipeline.find_runs(base, arguments, ())
    trained = runs[-1].job
    whole = JobDir(trained.root.parent) if staged else trained
    links: list[Link] = []
    finished = True  # a step after one that is not done runs again, and looks at its files
    for step in pipeline.steps(runs, waiting):
        command, cfg = step.command, step.run.cfg
        if command == "export":
            evaluation = _evaluation(runs, whole, done=finished)
            links += [(EVAL, evaluation[0])] if evaluation else []
        finished = finished and step.has_output()
        made = None
        if command == "train":
            if "train" in dict(links):
                continue
            if not finished:  # one Slurm job trains all stages
                one = SubmitOptions(cluster=options.cluster)
                made = submit.prepare("train", config, arguments, one)
        elif not finished:
            name = "-".join([whole.root.name, *step.title.split()])
            job = JobDir(whole.root.with_name(name))
            argv = [command, "-c", str(job.config)]
            if command == "export":
                argv = [command, str(step.run.job.root)]
            launch = cfg.launch.of_step(command, tasks=cfg.pipeline.tokenize_processes)
            script = submit.make_script(command, job, argv, _with_launch(cfg, launch))
            made = Submission(command, step.run.resolved, job, step.run.job, script)
        links.append((step.title if command != "train" else command, made))
    return whole.root.with_name(f"{whole.root.name}-pipeline"), links


def _evaluation(
    runs: Sequence[PipelineRun], whole: JobDir, *, done: bool
) -> list[Submission | None]:
    """Return the evaluation beside a training, which may be done, if the configuration asks for it.

    It watches the job, or the jobs of all stages in turn.
    """
    evaluated = [run for run in runs if run.cfg.eval.tasks]
    if not evaluated:
        return []
    last = evaluated[-1]
    job = JobDir(whole.root.with_name(f"{whole.root.name}-{EVAL}"))
    if done and chain_steps.is_evaluated(job, last.job, last.cfg.eval.tasks):
        return [None]
    argv = ["eval", str(whole.root), "--watch"]
    if done and last.stage is None:
        argv += submit.changed_keys("eval", last.job, last.resolved)
    cfg = _with_launch(last.cfg, last.cfg.launch.of_step("eval"))
    script = submit.make_script("eval", job, argv, cfg)
    return [Submission("eval", last.resolved, job, last.job, script)]


def _with_launch(cfg: RunConfig, launch: LaunchConfig) -> RunConfig:
    return cfg.model_copy(update={"launch": launch})


def problems(folder: Path, waiting: Sequence[Submission], *, dry_run: bool) -> Iterator[DttError]:
    """Yield every error that would make a step fail, as far as its inputs are known now."""
    for number, submission in enumerate(waiting):
        command, cfg, script = submission.command, submission.config, submission.script
        if command == "train" and number:
            yield from submit.known_problems(submission)
        elif command == "train":
            yield from submit.problems(submission, dry_run=True)
        elif not number:
            yield from checks.problems(command, cfg, submission.trained)
        if command != "train":
            yield from checks.launch_problems(
                command, _with_launch(cfg, script.launch), submission.trained
            )
        if not dry_run:
            [status] = job_state.examine([submission.job])
            yield from checks.caught(status.check_idle)


def plan(folder: Path, links: Sequence[Link]) -> Iterator[str]:
    """Yield a line for each step with its resources, limit and largest cost."""
    rows = [["step", "nodes", "tasks", "GPUs", "time limit", "at most", "partition"]]
    trained: list[str] = []
    for title, submission in links:
        if submission is None:
            rows.append([title, "done"])
            continue
        script, launch = submission.script, submission.script.launch
        limit = "the partition's" if launch.time is None else str(launch.time)
        cost = "unknown" if launch.time_limit is None else _cost(script, launch.time_limit)
        each = launch.processes if script.kind == "train" else script.tasks_per_node
        where = launch.partition or "the default"
        rows.append([title, str(script.nodes), str(each), str(launch.gpus), limit, cost, where])
        trained += [f"train      {line}" for line in amounts(submission)]
    beside = ", eval runs beside train" if EVAL in dict(links) else ""
    yield f"chain      {folder}: each step waits for the success of the one before{beside}"
    yield from columns(rows)
    yield from trained


def _cost(script: Script, seconds: float) -> str:
    unit = "GPU-hours" if script.launch.gpus else "node-hours"
    return f"{script.nodes * (script.launch.gpus or 1) * seconds / 3600:.1f} {unit}"
