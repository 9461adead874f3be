"""`dtt submit`: a command becomes a job directory and a Slurm job."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import dtt
from dtt.commands.train import find_job
from dtt.config import explain
from dtt.config.load import Resolved, find, load_job, resolve, shipped_configs
from dtt.config.source import Layer, Leaf
from dtt.errors import ConfigError, EnvironmentUnfit
from dtt.launch import checks, slurm
from dtt.launch.slurm import Script
from dtt.runtime.files import exclusive, write_atomically
from dtt.runtime.jobdir import JobDir

COMMANDS = ("download", "tokenize", "train", "export", "pipeline")

HEARTBEAT_LASTS = 60.0
"""Seconds after which a heartbeat says that nobody is there any more."""


@dataclass(frozen=True)
class Request:
    """What is to be submitted: nothing of it is on the disk yet."""

    command: str
    resolved: Resolved
    job: JobDir
    """Where script, logs and configuration go."""
    script: Script

    @property
    def text(self) -> str:
        """The job script."""
        return slurm.render(self.script)


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
    """Check, show the plan, ask at a terminal, submit; prints what it did."""
    request = prepare(command, config, arguments, cluster, allow_change, code_copy=code_copy)
    text = request.text
    if print_script:
        print(text, end="")
        return
    cfg = request.resolved.config
    trained = request.job if command == "train" else _job_to_train(cfg, arguments)
    found = list(checks.problems(command, cfg, trained))
    if not dry_run:
        found += [*checks.sbatch_problems(), *_already_there(request.job)]
    checks.raise_all(found)
    print("\n".join(plan(request)), file=sys.stderr if as_json else sys.stdout, flush=True)
    job_id = None
    if not dry_run:
        if not yes and not _agreed():
            print("not submitted", file=sys.stderr)
            return
        job_id = submit(request, text, code_copy=code_copy)
    _report(request, job_id, as_json=as_json)


def prepare(
    command: str,
    config: str | None,
    arguments: Sequence[str],
    cluster: str | None,
    allow_change: Sequence[str],
    *,
    code_copy: bool,
) -> Request:
    """The configuration, where the job goes, and the parameters of its script."""
    if command not in COMMANDS:
        raise ConfigError(
            f"cannot submit {command!r}", next=f"dtt submit {' or '.join(COMMANDS)} -c CONFIG"
        )
    if cluster is None:
        base: str | Layer | None = config
    else:
        names = [str(_profile(cluster)), *([config] if config else [])]
        base = {("extends",): Leaf(names, "--cluster")}
    folders = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if command == "train":
        resolved, job = find_job(config if folders else base, arguments, allow_change)
        if folders and cluster is not None:
            resolved = resolve(base, overrides, job_config=job.config)
        argv: tuple[str, ...] = ("train",)
    else:
        resolved, job, argv = _stage(command, base, folders, overrides)
    launch = resolved.config.launch
    name = str(job.root.relative_to("jobs")) if job.root.is_relative_to("jobs") else job.root.name
    return Request(
        command,
        resolved,
        job,
        Script(
            job_name=name,
            job=job.root,
            directory=Path.cwd(),
            argv=argv,
            kind="train" if command == "train" else "tokenize" if command == "tokenize" else "other",
            launch=launch,
            lead=slurm.lead(job, launch),
            code=code_copy,
        ),
    )


def _profile(name: str) -> Path:
    """A cluster profile: a file, or one of configs/clusters/ by name."""
    return find(name if Path(name).is_file() else f"clusters/{name}")


def _stage(
    command: str, base: str | Layer | None, folders: Sequence[str], overrides: Sequence[str]
) -> tuple[Resolved, JobDir, tuple[str, ...]]:
    """Configuration, directory and arguments of a command that is not `train`."""
    if len(folders) > (command == "export"):
        raise ConfigError(
            f"cannot understand the argument {folders[0]!r}",
            next=f"dtt submit {command} -c CONFIG KEY=VALUE",
        )
    if command != "export":
        resolved = resolve(base, overrides)
        root = resolved.config.job_dir
        job = JobDir(root.with_name(f"{root.name}-{command}"))
        return resolved, job, (command, "-c", str(job.config))
    root = Path(folders[0]) if folders else resolve(base, overrides).config.job_dir
    load_job(root)
    resolved = resolve(base, overrides, job_config=JobDir(root).config)
    return resolved, JobDir(root.with_name(f"{root.name}-export")), ("export", str(root), *overrides)


def _job_to_train(resolved: Resolved, request: Request) -> JobDir: ...
