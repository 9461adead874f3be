"""`dtt submit`: create a job directory for a command and submit it as a Slurm job."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import dtt
from dtt.artifacts import TokensManifest
from dtt.commands.begin import model_of
from dtt.commands.home import enter
from dtt.commands.train import find_job
from dtt.config import explain
from dtt.config.load import Resolved, find, load_job, resolve, shipped_configs
from dtt.config.run import RunConfig
from dtt.config.source import Layer, Leaf, is_config
from dtt.data import fit
from dtt.data.stages import resolve as resolve_stages
from dtt.errors import ConfigError, DttError
from dtt.launch import checks, ledger, slurm, submissions
from dtt.runtime.files import exclusive, write_atomically
from dtt.runtime.jobdir import JobDir

SIGNAL_EARLY = 60
"""Seconds by which Slurm may send the signal of `--signal` early, according to its manual."""
COMMANDS = ("download", "tokenize", "train", "export", "pipeline")


@dataclass(frozen=True)
class Request:
    """A submission that was prepared in memory; nothing is written to disk yet."""

    command: str
    resolved: Resolved
    job: JobDir
    """Job directory of the command: script, logs and configuration are written there."""
    trained: JobDir
    """Job directory of the training: `train` creates it and `export` reads it."""
    script: slurm.Script

    @property
    def config(self) -> RunConfig:
        """The validated configuration."""
        return self.resolved.config


def run(
    command: str,
    config: str | None,
    arguments: Sequence[str],
    *,
    cluster: str | None,
    allow_change: Sequence[str],
    dry_run: bool,
    print_script: bool,
    yes: bool,
    as_json: bool,
    code_copy: bool,
) -> None:
    """Check a command, show the plan, ask for confirmation at a terminal, and submit.

    Prints the id of the Slurm job. With `print_script`, only prints the job script. With `dry_run`,
    submits nothing.
    """
    if print_script and as_json:
        raise ConfigError("--print-script and --json exclude each other")
    request = prepare(command, config, arguments, cluster, allow_change, code_copy=code_copy)
    text = slurm.render(request.script)
    if print_script:
        print(text, end="")
        return
    checks.raise_all(list(problems(request, dry_run=dry_run)))
    print("\n".join(plan(request)), file=sys.stderr if as_json else sys.stdout, flush=True)
    job_id = None
    if not dry_run and (yes or agreed("submit?")):
        job_id = submit(request, copy_code=code_copy)
    elif not dry_run:
        print("not submitted", file=sys.stderr)
    if as_json:
        facts = {"job_id": job_id, "job_dir": str(request.job.root)}
        print(json.dumps(facts | {"script": str(request.job.script)}))
    elif job_id is not None:
        print(f"submitted  {job_id}")


def prepare(
    command: str,
    config: str | None,
    arguments: Sequence[str],
    cluster: str | None,
    allow_change: Sequence[str],
    *,
    code_copy: bool,
) -> Request:
    """Resolve the configuration, the job directory and the parameters of the job script.

    Raises ConfigError for arguments that the command does not take.
    """
    base: str | Layer | None = config
    if cluster is not None:  # the config overrides a profile, a profile the job's own
        names = [str(profile(cluster).absolute()), *([config] if config else [])]
        base = {("extends",): Leaf(names, "--cluster")}
    folders = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    match command:
        case "train":
            if folders:  # relative paths of a job, also in its script, start from its home
                root, overrides = enter(Path(folders[0]), overrides)
                folders[0] = str(root)
                arguments = [*folders, *overrides]
            resolved, trained = find_job(config if folders else base, arguments, allow_change)
            if folders and cluster is not None:  # changes only the `launch` section
                resolved = resolve(base, overrides, job_config=trained.config)
            job, argv = trained, ["train"]
        case "export":
            resolved, trained = _job_to_export(base, folders, overrides)
            job = _beside(trained, command)
            argv = ["export", str(trained.root), *_export_keys(load_job(trained.root), resolved)]
        case "download" | "tokenize" | "pipeline":
            if folders:
                named = folders[0] if is_config(folders[0]) else "CONFIG"
                raise ConfigError(
                    f"cannot understand the argument {folders[0]!r}",
                    next=f"dtt submit {command} -c {named} KEY=VALUE",
                )
            resolved = resolve(base, overrides, model_of=model_of)
            trained = JobDir(resolved.config.job_dir)
            job = _beside(trained, command)
            argv = [command, "-c", str(job.config)]
        case _:
            raise ConfigError(
                f"cannot submit {command!r}",
                next=f"one of {', '.join(COMMANDS)}, as dtt submit train",
            )
    launch = resolved.config.launch
    script = slurm.Script(
        job_name=_job_name(job),
        job=job.root,
        directory=Path.cwd(),
        argv=tuple(argv),
        kind="train" if command == "train" else "tokenize" if command == "tokenize" else "other",
        launch=launch,
        lead=slurm.lead(job, launch),
        code=code_copy or (job.root / "code").is_dir(),
    )
    return Request(command, resolved, job, trained, script)


def profile(cluster: str) -> Path:
    """Return the file of a cluster profile; raise ConfigError if it sets more than `launch`."""
    path = find(cluster if Path(cluster).is_file() else f"clusters/{cluster}")
    layer = resolve(path, env={}).layer
    others = [k for k, leaf in layer.items() if k[0] != "launch" and leaf.origin != "default"]
    if others:
        raise ConfigError(
            f"{path} is no cluster profile: it sets {', '.join(map('.'.join, others))}",
            where=layer[others[0]].origin,
            why="a profile holds a `launch` section and nothing else",
            next="put the rest into a config, and name that with -c",
        )
    return path


def _beside(trained: JobDir, command: str) -> JobDir:
    """Return the job directory of another command, beside that of the training."""
    return JobDir(trained.root.with_name(f"{trained.root.name}-{command}"))


def _job_name(job: JobDir) -> str:
    """Return the Slurm job name: the path below `jobs/`, or else the name of the folder."""
    below = job.root.is_relative_to("jobs")
    return str(job.root.relative_to("jobs") if below else job.root.name)


def _job_to_export(
    base: str | Layer | None, folders: Sequence[str], overrides: Sequence[str]
) -> tuple[Resolved, JobDir]:
    """Return the job to export, given by its folder or by the config it was trained with."""
    if len(folders) > 1 or not (folders or base or overrides):
        raise ConfigError("export takes one job directory", next="dtt submit export jobs/run")
    trained = JobDir(Path(folders[0]) if folders else resolve(base, overrides).config.job_dir)
    load_job(trained.root)  # InputError if it is not a job
    return resolve(base, overrides, job_config=trained.config), trained


def _export_keys(own: RunConfig, resolved: Resolved) -> Iterator[str]:
    """Yield `key=value` for each `export` key that differs from the job's own configuration."""
    for key, knob in explain.knobs(resolved.config):
        if key[0] == "export" and knob.value != explain.value_at(own, key):
            yield f"{'.'.join(key)}={explain.scalar(explain.plain(knob.value))}"


def problems(request: Request, *, dry_run: bool) -> Iterator[DttError]:
    """Yield every error that would make this submission fail."""
    command, job, cfg = request.command, request.job, request.config
    if job.config.is_file() and (name := load_job(job.root).name) != cfg.name:
        yield ConfigError(
            f"{job.root} is the directory of another job, of {name}",
            where=job.config,
            next="name=ANOTHER",
        )
    trained = request.trained
    found = list(checks.problems(command, cfg, trained))
    yield from found
    if command == "train" and not found and trained.newest_checkpoint_name() is None:
        yield from checks.caught(lambda: fit.check_vocabulary(request.resolved, trained))
    yield from checks.launch_problems(command, cfg)
    if command in ("train", "pipeline"):  # the others have no checkpoint to save
        yield from checks.time_problems(trained, cfg.launch)
    if not dry_run:
        yield from checks.sbatch_problems()
        [status] = ledger.examine([job])
        yield from checks.caught(status.check_idle)


def plan(request: Request) -> Iterator[str]:
    """Yield the lines of the plan that is shown before submission."""
    cfg, launch, script = request.config, request.config.launch, request.script
    processes = launch.processes if script.kind != "other" else 1
    yield f"{request.command:<10} {request.job.root}{_progress(request)}"
    gpus = f", {launch.gpus_per_node} GPUs on each" if launch.gpus else ""
    starter = launch.start if script.kind == "train" else launch.mpi
    yield f"processes  {script.nodes} nodes x {processes}, by {starter}{gpus}"
    if request.command == "train":
        yield f"training   {_amount(cfg)}"
    limit = "the partition's limit" if launch.time is None else str(launch.time)
    yield f"time       {limit}; asked to save {script.lead} s before; then {launch.continuation}"
    if launch.time_limit is not None and launch.time_limit - script.lead <= SIGNAL_EARLY:
        yield f"warning    Slurm may send its signal {SIGNAL_EARLY} s early: then no time is left"
    where = [f"{k} {v}" for k in ("partition", "account", "qos") if (v := getattr(launch, k))]
    yield f"where      {', '.join(where) or 'the default partition and account'}"
    if script.code:
        yield f"code       the copy in {request.job.root / 'code'}"
    yield f"script     {request.job.script}"


def _progress(request: Request) -> str:
    newest = request.job.newest_checkpoint_name()
    return f", goes on from {newest}" if newest is not None else ""


def _amount(cfg: RunConfig) -> str:
    stages, steps = resolve_stages(cfg.train), cfg.train.steps
    total = stages.tokens_before(steps)
    most = "at most " if cfg.train.timed else ""
    amount = f"{most}{steps} steps of {stages.describe(steps)}: {total / 1e6:.1f}M tokens"
    paths = [source.path for source in cfg.token_sources]
    if len(paths) != 1 or not TokensManifest.exists(paths[0]):  # `dtt data mix` shows more
        return f"{amount} of {', '.join(map(str, paths or [cfg.corpus_dir]))}"
    have = TokensManifest.read(paths[0]).counts("train").tokens
    return f"{amount}, {total / have:.2f} epochs of {paths[0]}"


def agreed(question: str) -> bool:
    """Ask a yes/no question at a terminal; return True without one, and by default."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()  # empty at the end of input, which is no answer
    return bool(answer) and answer.strip().lower() in ("", "y", "yes")


def submit(request: Request, *, copy_code: bool) -> str:
    """Create the job directory and submit its script to Slurm; return the Slurm job id.

    If Slurm rejects the script, a new job directory is removed, and the configuration of an
    existing one is restored.
    """
    job = request.job
    before = job.config.read_bytes() if job.config.exists() else None
    new = not job.root.exists()
    with exclusive(job.root, "dtt train or dtt submit"):
        write_atomically(job.config, explain.show(request.config, request.resolved.layer))
        job.write_environment()
        job.stop.parent.mkdir(exist_ok=True)
        if copy_code:
            _copy_code(job.root / "code")
        try:
            return submissions.submit(request.script)
        except slurm.Unanswered:  # the job may be queued and needs its files
            raise
        except DttError:
            if new:
                shutil.rmtree(job.root)
            elif before is None:
                job.config.unlink()
            else:
                write_atomically(job.config, before)
            raise


def _copy_code(folder: Path) -> None:
    """Copy dtt's own code into `folder`, so that a job with this PYTHONPATH runs the copy."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(dtt.__file__).parent, folder / "dtt", ignore=ignored)
    shutil.copytree(shipped_configs(), folder / "dtt/configs", dirs_exist_ok=True, ignore=ignored)
