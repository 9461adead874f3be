"""`dtt train --branch JOB@STEP`: a branch from the stable phase (WSD) of a parent run."""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtt.checkpoint import store
from dtt.checkpoint.store import Checkpoint
from dtt.commands.home import enter
from dtt.config.load import Resolved, changes_on_resume, load_job, resolve
from dtt.config.run import RunConfig
from dtt.config.schedule import WsdConfig
from dtt.data import stages
from dtt.errors import ConfigError
from dtt.optim import schedule
from dtt.optim.schedule import DECAY, Decay, Schedule
from dtt.reading import fits, read_json, tolerant
from dtt.runtime.files import sha256_file, write_atomically
from dtt.runtime.jobdir import JobDir

OWN_KEYS = {"name", "train.steps", "train.budget", "train.finish_by"}
"""Keys that a branch may set differently from its parent, besides `schedule.*` and the keys that
may change whenever a job resumes."""
LONGEST = 2**40
"""Maximum number of steps that `_horizon` tries."""


@dataclass(frozen=True)
class Branch:
    """A branch point: a step of a parent run."""

    parent: JobDir
    step: int

    def begin(self, child: JobDir) -> None:
        """Set up the job `child` from the parent run, unless it has a checkpoint already.

        Writes the parent record, and copies the metrics and the verified checkpoint. The checkpoint
        comes last, so a call that was interrupted before is repeated in full.
        """
        if store.steps(child.checkpoints):
            return
        found = store.at_step(self.parent.checkpoints, self.step)
        manifest = found.path / found.manifest.filename
        record = self.record(child) | {"checkpoint_sha256": sha256_file(manifest)}
        write_atomically(child.parent, json.dumps(record, indent=1) + "\n")
        if self.parent.metrics.exists():
            # Records from after the branch point are dropped when `child` resumes.
            shutil.copyfile(self.parent.metrics, child.metrics)
        child.run_id()
        store.adopt(found, child.checkpoints)

    def record(self, child: JobDir) -> dict[str, Any]:
        """Return the parent record of the job `child`: the step, and the parent's path relative to
        the folder of `child`."""
        return {"job": os.path.relpath(self.parent.root, child.root), "step": self.step}

    def check(self, decay: Decay | None, steps: int) -> None:
        """Raise ConfigError unless a branch of `steps` steps continues the parent's stable phase.

        It does not if it ends at or before the branch point, or if its `decay` starts before it.
        """
        if steps <= self.step:
            raise ConfigError(
                f"the child ends with step {steps}, and begins after step {self.step}",
                next="a larger train.steps",
            )
        if decay is not None and decay.begin < self.step:
            raise ConfigError(
                f"the learning rate of the child falls after step {decay.begin}, "
                f"before the branch at {self.step}",
                why=f"it ends with step {steps}",
                next="schedule.type=wsd with a shorter schedule.decay, or a larger train.steps",
            )


def own_decay(job: JobDir, resume: Checkpoint) -> dict[str, Any] | None:
    """Return the decay in the checkpoint `resume`, if a time limit started it in this job.

    Returns None for a run without a time limit, whose schedule alone determines the decay, and for
    the checkpoint taken over from the parent run, whose decay does not apply to this job.
    """
    parent, position = job.parent_record(), resume.position()
    if position.get("speed") is None or (parent is not None and parent["step"] == resume.step):
        return None
    decay: dict[str, Any] | None = position.get("decay")
    return decay


def find(
    reference: str,
    config: str | None,
    arguments: Sequence[str],
    allow_change: Sequence[str],
    from_step: int | None = None,
) -> tuple[Resolved, JobDir, Branch]:
    """Return the configuration of the job that `--branch` creates, the job, and its branch point.

    Raises ConfigError if the parent's learning rate has left its peak before the branch point, or
    if the new configuration would have trained differently up to there.
    """
    wrong = [key for key in arguments if "=" not in key]
    wrong += [f"-c {config}"] if config else []
    wrong += [] if from_step is None else [f"--from-step {from_step}"]
    if wrong:
        raise ConfigError(
            f"--branch goes on with the configuration of {reference}: {wrong[0]} has no place",
            next=f"dtt train --branch {reference} schedule.decay=20% name=CHILD",
        )
    folder, step = store.parse(reference)
    root, arguments = enter(folder.parent, arguments)
    folder, reference = JobDir(root).checkpoints, f"{root}" if step is None else f"{root}@{step}"
    if step is None:
        store.locate(reference)  # InputError if there is none
        raise ConfigError(
            f"--branch {reference} names no step",
            why=f"there are: {', '.join(map(str, store.steps(folder)))}",
            next=f"--branch {folder.parent}@{store.steps(folder)[-1]}",
        )
    branch = Branch(JobDir(folder.parent), step)
    parent = load_job(branch.parent.root)
    resolved = _resolve(branch, parent, arguments)
    job = JobDir((Path.cwd() if root.is_absolute() else Path()) / resolved.config.job_dir)
    if store.steps(job.checkpoints):
        told = job.parent_record()
        if told is None or not branch.record(job).items() <= told.items():
            raise ConfigError(
                f"{job.root} exists, and is no branch of {branch.parent.root}@{branch.step}",
                next="name=ANOTHER",
            )
        resolved = resolve(None, arguments, job_config=job.config)
        changed = changes_on_resume(load_job(job.root), resolved.config)
        _refuse(resolved, changed, job, allow_change, "name=ANOTHER begins another branch; ")
        return resolved, job, branch
    store.locate(reference)  # a branch with own checkpoints, returned above, needs none
    changed = [
        key
        for key in changes_on_resume(parent, resolved.config)
        if key not in OWN_KEYS and not key.startswith("schedule.")
    ]
    _refuse(resolved, changed, branch.parent, allow_change, "")
    _check_trunk(branch, parent, resolved)
    return resolved, job, branch


def _refuse(
    resolved: Resolved,
    changed: Sequence[str],
    job: JobDir,
    allow_change: Sequence[str],
    next: str,
) -> None:
    refused = [key for key in changed if key not in allow_change]
    if refused:
        raise ConfigError(
            f"{job.root} was started with other values of: {', '.join(refused)}",
            where=", ".join(resolved.origin(key) for key in refused),
            why="a branch goes on with all of its parent but schedule.* and its length",
            next=next + " ".join(f"--allow-change {key}" for key in refused) + " insists",
        )


def _resolve(branch: Branch, parent: RunConfig, arguments: Sequence[str]) -> Resolved:
    """Return the configuration of the branch: the parent's, overridden by the arguments.

    The name and the number of steps are derived from these unless they are given.
    """
    arguments = [f"schedule.warmup={_trunk(branch, parent).warmup}", *arguments]
    before = resolve(None, arguments, job_config=branch.parent.config)
    cfg, keys = before.config, ("name", "train.steps", "train.budget", "train.finish_by")
    said = {key for key in keys if before.origin(key).startswith(("argument", "environment"))}
    options: dict[str, Any] = {}
    if "train.budget" not in said and "train.finish_by" not in said:
        options |= {"train.budget": None, "train.finish_by": None}
        if "train.steps" not in said and isinstance(cfg.schedule, WsdConfig):
            options["train.steps"] = _horizon(cfg, cfg.schedule, branch.step)
    if "name" not in said:
        steps = options.get("train.steps", cfg.train.steps)
        # A trial of a sweep is named SWEEP/TRIAL. Its branch is no trial, so the slash must go: it
        # would put the branch into the folder of the sweep.
        options["name"] = f"{parent.name.replace('/', '-')}-branch-{branch.step}-{steps}"
    options = {key: value for key, value in options.items() if key not in said}
    return resolve(None, arguments, options, job_config=branch.parent.config)


def _horizon(cfg: RunConfig, wsd: WsdConfig, step: int) -> int:
    """Return the number of steps of the shortest run whose decay does not start before `step`."""
    tokens_before = stages.resolve(cfg.train).tokens_before

    def begin(steps: int) -> int:
        return schedule.before_last(wsd.decay, steps, tokens_before)

    most = step + 1
    while begin(most) < step:
        most *= 2
        if most > LONGEST:
            raise ConfigError(
                f"schedule.decay={wsd.decay} leaves no step before the decay",
                next="a shorter one, or train.steps=N",
            )
    return bisect_left(range(most), step, lo=step + 1, key=begin)


def _schedule(cfg: RunConfig) -> Schedule:
    """Return the learning-rate schedule that the configuration alone determines.

    It has no decay if the run has a time limit: then the decay depends on the measured speed.
    """
    steps = cfg.train.steps
    resolved = schedule.resolve(cfg.schedule, steps, stages.resolve(cfg.train).tokens_before)
    return replace(resolved, decay=None) if cfg.train.timed else resolved


def _trunk(branch: Branch, parent: RunConfig) -> Schedule:
    """Return the parent's schedule as recorded in the checkpoint at the branch point.

    The size of its data or a time limit may have changed the configured one, which is used if the
    checkpoint records none.
    """
    path = store.folder_of(branch.parent.checkpoints, branch.step) / store.POSITION
    told = tolerant(path, read_json) or {}  # empty if the checkpoint is damaged or was pruned
    planned = _schedule(parent)
    decay = Decay(**told["decay"]) if fits(told.get("decay"), DECAY) else planned.decay
    warmup = told["warmup"] if fits(told, {"warmup": int}) else planned.warmup
    return replace(planned, warmup=warmup, decay=decay)


def _check_trunk(branch: Branch, parent: RunConfig, resolved: Resolved) -> None:
    """Raise ConfigError unless parent and branch train identically up to the branch point."""
    step = branch.step
    trunk = _trunk(branch, parent)
    if trunk.decay is not None and trunk.decay.begin < step:
        raise ConfigError(
            f"the learning rate of {branch.parent.root} falls after step {trunk.decay.begin}, "
            f"before the branch at {step}",
            next=f"a checkpoint up to there: dtt ckpt ls {branch.parent.root}",
        )
    branch.check(_schedule(resolved.config).decay, resolved.config.train.steps)
    if _schedule(resolved.config).warmup != trunk.warmup:
        raise ConfigError(
            "schedule.warmup lies before the branch and cannot change",
            where=resolved.origin("schedule.warmup"),
            next="leave it out",
        )
    then, now = (
        [stage for stage in stages.resolve(cfg.train).stages if stage.step < step]
        for cfg in (parent, resolved.config)
    )
    if then != now:
        raise ConfigError(
            f"with train.steps={resolved.config.train.steps} other batches come before the branch",
            why="train.batch_schedule or train.context_schedule is a share of the run",
            next="train a trunk whose schedules are in steps or tokens",
        )
