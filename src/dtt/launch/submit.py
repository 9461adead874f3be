"""`dtt submit`: create a job directory for a command and submit it as a Slurm job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError
from dtt.base.files import exclusive
from dtt.base.terminal import Verbatim
from dtt.checkpoint import store
from dtt.config import explain
from dtt.config.init import InitConfig
from dtt.config.layers import Layer, is_config
from dtt.config.load import load_job, on_profile, resolve, stage_names
from dtt.config.merging import Resolved
from dtt.config.run import RunConfig
from dtt.config.shipped import find
from dtt.data.samples import compatibility
from dtt.jobs import chain_steps, job_state
from dtt.jobs.job_paths import enter, evaluation
from dtt.jobs.slurm import job_script, submissions
from dtt.jobs.stages import Stage, done, report_shadowed
from dtt.launch import checks
from dtt.launch.submission import Submission, configurations, plan, progress, written
from dtt.train.find_job import find_job, find_stages, model_of

KINDS: dict[str, job_script.Kind] = {"train": "train", "clean": "tokenize", "tokenize": "tokenize"}
"""The kind of script of each command; of the others: `other`."""
COMMANDS = ("download", "clean", "tokenize", "train", "eval", "export", "pipeline")


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """The options of `dtt submit`, which has documented them."""

    cluster: str | None = None
    allow_change: Sequence[str] = ()
    after: Sequence[str] = ()
    dry_run: bool = False
    print_script: bool = False
    yes: bool = False
    as_json: bool = False


def run(command: str, config: str | None, arguments: Sequence[str], options: SubmitOptions) -> None:
    """Check a command, show the plan, ask for confirmation at a terminal, and submit.

    Prints the id of the Slurm job.
    """
    dry_run, as_json = options.dry_run, options.as_json
    if options.print_script and as_json:
        raise ConfigError("--print-script and --json are mutually exclusive")
    if options.after and options.print_script:
        raise ConfigError("--after is an option of sbatch: use it without --print-script")
    submission = prepare(command, config, arguments, options)
    text = job_script.render(submission.script)
    if options.print_script:
        print(Verbatim(text), end="")
        return
    ids = chain_steps.ids_to_wait_for(options.after)
    known = submission.job.submission_record()
    checks.raise_all(list(problems(submission, dry_run=dry_run)))
    print("\n".join(plan(submission)), file=sys.stderr if as_json else sys.stdout, flush=True)
    job_id = None
    if not dry_run and (options.yes or confirmed("submit?")):
        job_id = submit(submission, known, after=ids)
    elif not dry_run:
        print("not submitted", file=sys.stderr)
    if as_json:
        facts = {"job_id": job_id, "job_dir": str(submission.job.root)}
        print(json.dumps(facts | {"script": str(submission.job.script)}))
    elif job_id is not None:
        print(f"submitted  {job_id}")


def with_profile(config: str | None, cluster: str | None) -> str | Layer | None:
    """Return a configuration below a cluster profile, as far as each is given."""
    return config if cluster is None else on_profile(config, profile(cluster).absolute())


def refuse_folders(command: str, folders: Sequence[str]) -> None:
    """Raise ConfigError if there are arguments that are not `key=value`."""
    if folders:
        named = folders[0] if is_config(folders[0]) else "CONFIG"
        raise ConfigError(
            f"cannot understand the argument {folders[0]!r}",
            next=f"dtt submit {command} -c {named} KEY=VALUE",
        )


def prepare(
    command: str, config: str | None, arguments: Sequence[str], options: SubmitOptions
) -> Submission:
    """Resolve the configuration, the job directory and the parameters of the job script.

    Raises ConfigError for arguments that the command does not take.
    """
    # Precedence: profile, configuration, that of the job.
    base = with_profile(config, options.cluster)
    folders = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if not folders and stage_names(base, overrides):
        return _prepare_stages(command, base, overrides, options)
    match command:
        case "train":
            if folders:
                # Relative paths of a job, also in its script, start from its home.
                root, overrides = enter(Path(folders[0]), overrides)
                arguments = [str(root), *folders[1:], *overrides]
                resolved, trained = find_job(config, arguments, options.allow_change)
                if base != config:  # a profile changes only the `launch` section
                    resolved = resolve(base, overrides, job_config=trained.config)
            else:
                resolved, trained = find_job(base, overrides, options.allow_change)
            if resolved.config.train.epochs is not None:
                from dtt.data.epochs import with_epochs_resolved  # slow on a login node

                resolved = with_epochs_resolved(resolved)
            job, argv = trained, ["train"]
        case "eval" | "export":
            resolved, trained, step = _trained_job(command, base, folders, overrides)
            job = _beside(trained, command)
            argv = [command, f"{trained.root}" if step is None else f"{trained.root}@{step}"]
            argv += ["--watch"] * (command == "eval") + changed_keys(command, trained, resolved)
        case "download" | "clean" | "tokenize":
            refuse_folders(command, folders)
            resolved = resolve(base, overrides, model_of=model_of)
            trained = JobDir(resolved.config.job_dir)
            job = _beside(trained, command)
            argv = [command, "-c", str(job.config)]
        case _:
            raise ConfigError(
                f"cannot submit {command!r}",
                next=f"use one of {', '.join(COMMANDS)}, such as dtt submit train",
            )
    own = resolved.config.model_copy(update={"launch": resolved.config.launch.of_step(command)})
    script = make_script(command, job, argv, own)
    return Submission(command, resolved, job, trained, script)


def changed_keys(section: str, job: JobDir, resolved: Resolved) -> list[str]:
    """Return `key=value` arguments for the keys of a section that differ from those of a job."""
    changed = []
    for key, value in explain.changes(resolved.config, load_job(job.root)).items():
        if key[0] != section or key == ("eval", "every"):  # for training only
            continue
        plain = explain.plain(value)
        # Text is taken as typed, without YAML's quotes.
        text = plain if isinstance(plain, str) else explain.scalar(plain)
        changed.append(f"{'.'.join(key)}={text}")
    return changed


def make_script(
    command: str,
    job: JobDir,
    argv: Sequence[str],
    cfg: RunConfig,
    stages: Sequence[Stage] = (),
) -> job_script.Script:
    """Return the parameters of the job script of a command; `cfg` has its own resources."""
    below = job.root.is_relative_to("jobs")
    return job_script.Script(
        job_name=str(job.root.relative_to("jobs") if below else job.root.name),
        job=job.root,
        directory=Path.cwd(),
        argv=tuple(argv),
        kind=KINDS.get(command, "other"),
        launch=cfg.launch,
        device=cfg.train.device,
        lead=job_script.lead(job, cfg.launch),
        stages=tuple(stage.job.root for stage in stages),
        progress=progress(argv, [stage.config for stage in stages] or [cfg]),
    )


def _prepare_stages(
    command: str,
    base: str | Layer | None,
    overrides: Sequence[str],
    options: SubmitOptions,
) -> Submission:
    """Return the submission of one Slurm job that trains all stages, one after the other.

    Raises ConfigError if all are done, or if they need different resources.
    """
    if command != "train":
        raise ConfigError(
            f"cannot submit {command!r} for a configuration with stages",
            next="dtt submit pipeline prepares the data of all stages; "
            "dtt config show --stage NAME prints one stage as a file",
        )
    stages = find_stages(base, overrides)
    report_shadowed(stages, overrides)
    finals = done(stages)
    waiting = tuple(s for s, final in zip(stages, finals, strict=True) if final is None)
    whole = JobDir(stages[0].job.root.parent)
    if not waiting:
        raise ConfigError(f"all stages of {whole.root} are done", next="dtt export JOB")
    for stage in waiting[1:]:
        if stage.config.launch != waiting[0].config.launch:
            raise ConfigError(
                f"stages {waiting[0].name} and {stage.name} have different `launch` sections",
                why="one Slurm job trains all stages",
                next="write `launch` in the common part, or submit the stages one by one: "
                f"dtt config show --stage {waiting[0].name} > FILE; dtt submit train -c FILE",
            )
    first = waiting[0]
    script = make_script(command, whole, ["train"], first.config, stages)
    return Submission(command, first.resolved, whole, whole, script, waiting)


def profile(cluster: str) -> Path:
    """Return the file of a cluster profile; raise ConfigError if it sets more than `launch`."""
    path = find(cluster if Path(cluster).is_file() else f"clusters/{cluster}")
    layer = resolve(path, env={}).layer
    others = [k for k, leaf in layer.items() if k[0] != "launch" and leaf.origin != "default"]
    if others:
        raise ConfigError(
            f"{path} is not a cluster profile: it sets {', '.join(map('.'.join, others))}",
            where=layer[others[0]].origin,
            why="a profile may contain only a `launch` section",
            next="move the other keys to a config, and pass it with -c",
        )
    return path


def _beside(trained: JobDir, command: str) -> JobDir:
    """Return the job directory of another command, next to that of the training."""
    return JobDir(trained.root.with_name(f"{trained.root.name}-{command}"))


def _trained_job(
    command: str, base: str | Layer | None, folders: Sequence[str], overrides: Sequence[str]
) -> tuple[Resolved, JobDir, int | None]:
    """Return the job that a command reads, by its folder or configuration, and its @STEP."""
    if len(folders) > 1 or not (folders or base or overrides):
        next = f"dtt submit {command} jobs/run"
        raise ConfigError(f"{command} requires one job directory", next=next)
    reference = folders[0] if folders else str(resolve(base, overrides).config.job_dir)
    checkpoints, step = store.parse(reference)
    trained = JobDir(checkpoints.parent)
    load_job(trained.root)  # InputError if it is not a job
    if step is not None and command == "eval":
        raise ConfigError("submit eval evaluates all checkpoints of a job", next="omit the step")
    if step is not None:
        store.existing(checkpoints, step)
    return resolve(base, overrides, job_config=trained.config, run_code=False), trained, step


def problems(submission: Submission, *, dry_run: bool) -> Iterator[DttError]:
    """Yield every error that would make this submission fail."""
    command, job, cfg = submission.command, submission.job, submission.config
    trained, stages = submission.trained, submission.stages
    if not stages and job.config.is_file() and (name := load_job(job.root).name) != cfg.name:
        yield ConfigError(
            f"{job.root} is the directory of another job, {name}",
            where=job.config,
            next="set name=ANOTHER",
        )
    if command == "eval" and cfg.eval.tasks == load_job(trained.root).eval.tasks:
        # Files that the job names start from its home, those in arguments from this folder.
        cfg = cfg.model_copy(update={"eval": evaluation(trained.root)})
    for one, config in _configs(submission) if stages else [(trained, cfg)]:
        errors = list(checks.problems(command, config, one))
        yield from errors
        unstarted = not stages and not errors and one.newest_checkpoint_name() is None
        if command == "train" and unstarted:
            check = compatibility.check_vocabulary
            yield from checks.caught(partial(check, submission.resolved, one))
        if command == "train":  # other commands save no checkpoints
            yield from checks.batch_problems(config, one)
    yield from checks.launch_problems(command, cfg, stages[0].job if stages else trained)
    if not dry_run:
        yield from checks.sbatch_problems()
        for status in job_state.examine([job, *(stage.job for stage in stages)]):
            yield from checks.caught(status.check_idle)


def known_problems(submission: Submission) -> Iterator[DttError]:
    """Yield what would make a training fail, as far as it is known before its data exists.

    `dtt train` checks the rest before its first step, with the same messages.
    """
    configs = _configs(submission)
    for job, cfg in configs:
        yield from checks.problems_before_data(cfg, job)
        yield from checks.batch_problems(cfg, job)
    yield from checks.launch_problems("train", submission.config, configs[0][0])


def _configs(submission: Submission) -> list[tuple[JobDir, RunConfig]]:
    """Return the job and the configuration of each stage, or of the only training.

    The weights of all but the first are those of the stage before, which is not done: their own
    `init` is left out.
    """
    if not submission.stages:
        return [(submission.job, submission.config)]
    first, *others = [(stage.job, stage.config) for stage in submission.stages]
    return [first, *((j, c.model_copy(update={"init": InitConfig()})) for j, c in others)]


def confirmed(question: str) -> bool:
    """Ask a yes/no question at a terminal. Return True by default, and without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()  # empty at the end of input, which is not an answer
    return bool(answer) and answer.strip().lower() in ("", "y", "yes")


def submit(
    submission: Submission,
    known: dict[str, Any] | None,
    *,
    after: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> str:
    """Create the job directory and submit its script to Slurm; return the Slurm job id.

    It starts when the Slurm jobs `after` have succeeded, and those `beside` have started. Raises
    ConfigError unless `known` is still the record of the newest submission, as it was before the
    checks. If Slurm rejects the script, a new job directory is removed, and the files of an
    existing one are restored.
    """
    job = submission.job
    folders = {job.root, *(path.parent for path in configurations(submission))}
    new = [folder for folder in folders if not folder.exists()]
    with exclusive(job.root, "dtt train or dtt submit"):
        # Another terminal may have submitted it while this one waited for an answer.
        if job.submission_record() != known:
            raise ConfigError(
                f"{job.root} was submitted by another process in the meantime",
                where=job.submission,
                next=f"dtt job status {job.root}",
            )
        with written(submission, new):
            job.write_environment()
            job.make_control()
            return submissions.submit(submission.script, after=after, beside=beside)
