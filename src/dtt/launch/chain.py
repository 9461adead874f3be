"""`dtt submit pipeline`: a chain of Slurm jobs, one for each command, with resources of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError, ExitCode
from dtt.base.files import exclusive
from dtt.config.source import Layer
from dtt.jobs import chains, job_state
from dtt.jobs.clock import in_words
from dtt.jobs.slurm import job_script
from dtt.jobs.slurm.submissions import Dependency
from dtt.launch import checks, pipeline
from dtt.launch.pipeline import PipelineRun, PipelineStep
from dtt.launch.submission import Submission
from dtt.launch.submit import (
    beside,
    confirmed,
    plan,
    prepare_stages,
    script_of,
    submit,
    with_profile,
)


def run(
    config: str | None,
    arguments: Sequence[str],
    *,
    cluster: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    code_copy: bool,
    redo_from: str | None = None,
    after: str | None = None,
) -> None:
    """Check all steps, show them, ask for confirmation at a terminal, and submit one job for each.

    Slurm starts each when the one before it has ended well, and the first when `after` has. Steps
    whose results are there are left out. With `dry_run`, submits nothing, and asks Slurm when each
    step could start.
    """
    if redo_from is not None and dry_run:
        raise ConfigError("--redo-from renames jobs: use it without --dry-run")
    folders = [argument for argument in arguments if "=" not in argument]
    if folders:
        raise ConfigError(
            f"cannot understand the argument {folders[0]!r}",
            next=f"dtt submit pipeline -c {folders[0]} KEY=VALUE",
        )
    base = with_profile(config, cluster)
    whole, steps = prepare(base, arguments, redo_from, code_copy=code_copy)
    first = None if after is None else chains.dependency(after)
    known = [step.job.submission_record() for step in steps]
    checks.raise_all(list(problems(whole, steps, dry_run=dry_run)))
    lines = [line for step in steps for line in _described(step, asks=dry_run)]
    print("\n".join(lines), file=sys.stderr if as_json else sys.stdout, flush=True)
    ids: list[str] | None = None
    if not dry_run and (yes or confirmed("submit?")):
        whole.root.mkdir(parents=True, exist_ok=True)
        with exclusive(whole.root, "dtt submit"):
            chains.write(whole.root, [step.job for step in steps])
            ids = chains.send_in_order(
                [
                    (step.command, step.job, partial(_send, step, record, copy_code=code_copy))
                    for step, record in zip(steps, known, strict=True)
                ],
                first,
            )
    elif not dry_run:
        print("not submitted", file=sys.stderr)
    if as_json:
        named = zip(steps, ids or repeat(None), strict=False)
        facts = [{"command": s.command, "job_dir": str(s.job.root), "job_id": i} for s, i in named]
        print(json.dumps({"chain": str(whole.root), "steps": facts}))
    elif ids:
        print(f"submitted  {', '.join(ids)}: dtt job status {whole.root}")


def prepare(
    base: str | Layer | None, arguments: Sequence[str], redo_from: str | None, *, code_copy: bool
) -> tuple[JobDir, list[Submission]]:
    """Return the folder of the chain, and the submissions of the steps that are not done.

    The stages of a training are one step: their jobs share an allocation.
    """
    runs, waiting = pipeline.find_runs(base, arguments, (), redo_from)
    named = runs[-1].stage is not None
    trained = JobDir(runs[-1].job.root.parent) if named else runs[-1].job
    found: list[Submission] = []
    for step in pipeline.steps(waiting):
        if step.command != "train" and (found or not pipeline.is_made(step)):
            found.append(_of_data(step, code_copy=code_copy))
    ended = runs[-1].job.exit_record(runs[-1].job.attempt()) or {}
    if named and waiting:
        found.append(prepare_stages("train", base, arguments, None, code_copy=code_copy))
    elif not named and ended.get("code") != ExitCode.DONE:
        found.append(
            _submission("train", runs[-1], trained, trained, ["train"], code_copy=code_copy)
        )
    last = runs[-1].job.root
    if "eval" in runs[-1].cfg.launch.steps:
        argv = ["eval", str(last), "--watch"]
        job = beside(trained, "eval")
        found.append(_submission("eval", runs[-1], job, runs[-1].job, argv, code_copy=code_copy))
    job = beside(trained, "export")
    found.append(
        _submission(
            "export", runs[-1], job, runs[-1].job, ["export", str(last)], code_copy=code_copy
        )
    )
    return beside(trained, "pipeline"), found


def _of_data(step: PipelineStep, *, code_copy: bool) -> Submission:
    """Return the submission of a step that makes data."""
    job = beside(step.run.job, step.command)
    argv = [step.command, "-c", str(job.config)]
    return _submission(step.command, step.run, job, step.run.job, argv, code_copy=code_copy)


def _submission(
    command: str,
    run: PipelineRun,
    job: JobDir,
    trained: JobDir,
    argv: Sequence[str],
    *,
    code_copy: bool,
) -> Submission:
    script = script_of(command, job, argv, run.cfg, code_copy=code_copy)
    return Submission(command, run.resolved, job, trained, script)


def problems(whole: JobDir, steps: Sequence[Submission], *, dry_run: bool) -> Iterator[DttError]:
    """Yield every error that is known before the first step runs.

    What a step needs from one before it, such as the size of a vocabulary, is checked at its start.
    """
    if whole.config.is_file() or whole.attempt():
        yield ConfigError(
            f"{whole.root} is a pipeline in one Slurm job",
            next=f"--in-one-job resumes it; or dtt job rm {whole.root}",
        )
    makes_data = any(step.command in ("download", "clean", "tokenize") for step in steps)
    for step in steps:
        parts = [(one.config, one.job) for one in step.stages] or [(step.config, step.trained)]
        for cfg, job in parts if step.command in ("train", steps[0].command) else []:
            yield from checks.problems("pipeline", cfg, job)
            if step.command == "train":
                yield from checks.batch_problems("train", cfg, job)
        if step.command == "train" and not makes_data:
            cfg, job = parts[0]
            yield from checks.problems("train", cfg, job)
        yield from checks.launch_problems(step.command, step.config)
        if step.script.launch.continuation == "singleton":
            yield ConfigError(
                "launch.continuation=singleton cannot be used in a chain",
                why="a successor has another Slurm id, for which later steps would not wait",
                next="launch.continuation=requeue, or --in-one-job",
            )
    if not dry_run:
        yield from checks.sbatch_problems()
        jobs = [step.job for step in steps]
        for status in job_state.examine([job for job in jobs if job.root.is_dir()]):
            yield from checks.caught(status.check_idle)


def _send(
    step: Submission,
    known: dict[str, object] | None,
    after: Dependency | None,
    *,
    copy_code: bool,
) -> str:
    id = submit(step, known, copy_code=copy_code, after=after)
    assert id is not None, "it is sent"
    return id


def _described(step: Submission, *, asks: bool) -> Iterator[str]:
    """Yield lines about a step; with `asks`, also when Slurm could start it, and how long it takes.

    Slurm knows nothing of its predecessors, and answers for now.
    """
    yield from plan(step)
    if asks:
        if (estimate := _duration(step)) is not None:
            yield f"estimate   {estimate}"
        yield f"start      {_earliest(job_script.render(step.script))}"
    yield ""


def _duration(step: Submission) -> str | None:
    """Return the estimated time of a training; None for others, and for unknown GPUs."""
    if step.command != "train" or step.stages or not step.config.launch.gpus:
        return None
    from dtt.estimate import gpus  # imports torch
    from dtt.estimate.estimates import make_estimate

    device = gpus.for_run(step.config, None)
    if device is None:
        return None
    try:
        found = make_estimate(step.config, device, None)
    except DttError:  # such as a number of steps that only the data tells
        return None
    longest = found.slow_run.seconds / found.run.seconds * found.device_hours
    return (
        f"{in_words(found.run.seconds)} to {in_words(found.slow_run.seconds)}, "
        f"{found.device_hours:,.3g} to {longest:,.3g} device hours"
    )


def _earliest(script: str) -> str:
    """Return what Slurm says of the start of a script, were it submitted now."""
    try:
        asked = subprocess.run(
            ["sbatch", "--test-only"], input=script, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown: there is no sbatch here, or it did not answer"
    lines = asked.stderr.strip().splitlines()
    return lines[-1].removeprefix("sbatch: ").strip() if lines else "unknown: sbatch was silent"
