"""`dtt train --branch JOB@STEP`: a branch from the stable phase (WSD) of a parent run.

The configuration of a branch is that of its parent run with the
arguments applied. dtt copies the verified checkpoint (as hard links) and the metrics up to that
step into the folder of the branch, and writes `parent.json`. From then on the branch is a job
like any other. dtt refuses changes that would alter the stable phase (WSD): keys other than
`schedule.*`, the length and those that may change on resume, or a decay or a warm-up that
overlaps the steps before the branch. For the parent, dtt checks this against the checkpoint,
because its data or a time budget may have ended it early. For the branch, dtt checks again once
its data is open. The same command resumes a branch that has started, even if the parent's
checkpoint is gone.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.base.files import sha256_file, write_atomically
from dtt.base.reading import fits, read_json, tolerant
from dtt.checkpoint import store
from dtt.checkpoint.store import Checkpoint
from dtt.config.load import changes_on_resume, load_job, resolve
from dtt.config.merging import Resolved
from dtt.config.optim import horizon_keys
from dtt.config.run import RunConfig
from dtt.config.schedule import Decay, before_last
from dtt.data.epochs import with_epochs_resolved
from dtt.data.samples.step_sizes import step_sizes_of
from dtt.jobs.job_paths import enter
from dtt.optim.lr_curves import WsdConfig
from dtt.optim.resolved_schedule import DECAY, ResolvedSchedule, resolve_schedule

OWN_KEYS = {"name", "train.steps", "train.epochs", "train.budget"}
"""Keys that a branch may set differently from its parent, besides `schedule.*` and the keys that
may change whenever a job resumes."""
LONGEST = 2**40
"""Maximum number of steps that `_shortest_run` tries."""


@dataclass(frozen=True)
class Branch:
    """A branch point: a step of a parent run."""

    parent: JobDir
    step: int

    def create_job(self, job: JobDir) -> None:
        """Create the branch `job` from the parent run, unless it has a checkpoint already.

        Writes the parent record, and copies the metrics, what it keeps of released weights, the
        log-probabilities of a reference model and the verified checkpoint. The checkpoint comes
        last, so a call that was interrupted before is repeated in full.
        """
        if store.steps(job.checkpoints):
            return
        checkpoint = store.at_step(self.parent.checkpoints, self.step)
        manifest = checkpoint.path / checkpoint.manifest.filename
        record = self.record(job) | {"checkpoint_sha256": sha256_file(manifest)}
        write_atomically(job.parent, json.dumps(record, indent=1) + "\n")
        if self.parent.metrics.exists():
            # Records from after the branch point are dropped when the branch resumes.
            shutil.copyfile(self.parent.metrics, job.metrics)
        for name in ("released", "sentencepiece"):
            if (kept := getattr(self.parent, name)).is_file():
                shutil.copyfile(kept, getattr(job, name))
        if self.parent.reference.is_dir():
            shutil.copytree(self.parent.reference, job.reference, dirs_exist_ok=True)
        job.run_id()
        store.adopt(checkpoint, job.checkpoints)

    def record(self, job: JobDir) -> dict[str, Any]:
        """Return the parent record of the branch `job`.

        It holds the step, and the path of the parent relative to the folder of `job`.
        """
        # Relative, so that both folders can be moved together.
        return {"job": os.path.relpath(self.parent.root, job.root), "step": self.step}

    def check(self, decay: Decay | None, steps: int) -> None:
        """Raise ConfigError unless a branch of `steps` steps continues the parent's stable phase.

        It does not if it ends at or before the branch point, or if its `decay` starts before it.
        """
        if steps <= self.step:
            raise ConfigError(
                f"the branch ends at step {steps}, but starts after step {self.step}",
                next="set a larger train.steps",
            )
        if decay is not None and decay.begin < self.step:
            raise ConfigError(
                f"the learning rate of the branch decays after step {decay.begin}, "
                f"before the branch point {self.step}",
                why=f"the branch ends at step {steps}",
                next="use schedule.type=wsd with a shorter schedule.decay, or a larger train.steps",
            )


def timed_decay(job: JobDir, resume: Checkpoint) -> dict[str, Any] | None:
    """Return the decay in the checkpoint `resume`, if a time limit started it in this job.

    Returns None for a run without a time limit, because its schedule alone determines the decay.
    Also returns None for the checkpoint of the parent run, whose decay does not apply to this job.
    """
    parent, position = job.parent_record(), resume.position()
    # The parent's decay was timed by the parent's limit, and the branch has its own.
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
    if the new configuration would have trained differently up to that point.
    """
    refused = [argument for argument in arguments if "=" not in argument]
    refused += [f"-c {config}"] if config else []
    refused += [] if from_step is None else [f"--from-step {from_step}"]
    if refused:
        raise ConfigError(
            f"--branch and {refused[0]} are mutually exclusive",
            why=f"a branch continues with the configuration of {reference}",
            next=f"dtt train --branch {reference} schedule.decay=20% name=NAME",
        )
    folder, step = store.parse(reference)
    root, arguments = enter(folder.parent, arguments)
    folder, reference = JobDir(root).checkpoints, f"{root}" if step is None else f"{root}@{step}"
    if step is None:
        store.locate(reference)  # InputError if there is none
        raise ConfigError(
            f"--branch {reference} has no step",
            why=f"steps with a checkpoint: {', '.join(map(str, store.steps(folder)))}",
            next=f"--branch {folder.parent}@{store.steps(folder)[-1]}",
        )
    branch = Branch(JobDir(folder.parent), step)
    parent = load_job(branch.parent.root, run_code=True)
    resolved = _resolve(branch, parent, arguments)
    job = JobDir((Path.cwd() if root.is_absolute() else Path()) / resolved.config.job_dir)
    # The branch has started before, so this is a resume, by the rules of a resume.
    if store.steps(job.checkpoints):
        recorded = job.parent_record()
        if recorded is None or not branch.record(job).items() <= recorded.items():
            raise ConfigError(
                f"{job.root} exists and is not a branch of {branch.parent.root}@{branch.step}",
                next="set name=ANOTHER",
            )
        resolved = resolve(None, arguments, job_config=job.config)
        changed = changes_on_resume(load_job(job.root, run_code=True), resolved.config)
        _refuse(
            resolved, changed, job, allow_change, "set name=ANOTHER for another branch, or use "
        )
        return resolved, job, branch
    store.locate(reference)  # only a new branch needs the checkpoint of its parent
    changed = [
        key
        # The schedule and the length are what a branch is made for. Everything else must be equal
        # up to the branch point, or the branch would not continue the same run.
        for key in changes_on_resume(parent, resolved.config)
        if key not in OWN_KEYS and not key.startswith("schedule.")
    ]
    _refuse(resolved, changed, branch.parent, allow_change, "use ")
    _check_stable_phase(branch, parent, resolved)
    return resolved, job, branch


def _refuse(
    resolved: Resolved,
    changed: Sequence[str],
    job: JobDir,
    allow_change: Sequence[str],
    next: str,
) -> None:
    """Raise ConfigError for changed keys that `allow_change` does not name."""
    refused = [key for key in changed if key not in allow_change]
    if refused:
        raise ConfigError(
            f"{job.root} was started with different values of: {', '.join(refused)}",
            where=", ".join(resolved.origin(key) for key in refused),
            why="a branch may change only schedule.* and its length",
            next=next + " ".join(f"--allow-change {key}" for key in refused),
        )


def _resolve(branch: Branch, parent: RunConfig, arguments: Sequence[str]) -> Resolved:
    """Return the configuration of the branch: the parent's, overridden by the arguments.

    The name and the number of steps are derived from these unless they are given.
    """
    # The warm-up as it was done. A fraction of the run would give another one for another length.
    arguments = [f"schedule.warmup={_recorded_schedule(branch, parent)[0]}", *arguments]
    configured = resolve(None, arguments, job_config=branch.parent.config)
    # Resolved twice: the defaults of the name and the length depend on the arguments.
    cfg, lengths = configured.config, {"train.steps", "train.epochs"}
    keys = {"name", *lengths, "train.budget"}
    given = {key for key in keys if configured.origin(key).startswith(("argument", "environment"))}
    options: dict[str, Any] = {}
    if "train.budget" not in given:
        options["train.budget"] = None  # the time limit of the parent is for the parent
        if not given & lengths and isinstance(cfg.schedule, WsdConfig):
            options["train.steps"] = _shortest_run(cfg, cfg.schedule, branch.step)
    if "name" not in given:
        steps = options.get("train.steps", with_epochs_resolved(configured).config.train.steps)
        # A trial of a sweep is named SWEEP/TRIAL. Its branch is not a trial, so the slash is
        # replaced: it would put the branch into the folder of the sweep.
        options["name"] = f"{parent.name.replace('/', '-')}-branch-{branch.step}-{steps}"
    options = {key: value for key, value in options.items() if key not in given}
    resolved = resolve(None, arguments, options, job_config=branch.parent.config)
    return with_epochs_resolved(resolved)


def _shortest_run(cfg: RunConfig, wsd: WsdConfig, step: int) -> int:
    """Return the number of steps of the shortest run whose decay does not start before `step`."""
    tokens_before = step_sizes_of(cfg.train).tokens_before

    def decay_start(steps: int) -> int:
        return before_last(wsd.decay, steps, tokens_before)

    # Doubling, then bisection: the start of the decay grows with the length, for lengths in steps,
    # tokens and shares alike.
    most = step + 1
    while decay_start(most) < step:
        most *= 2
        if most > LONGEST:
            raise ConfigError(
                f"schedule.decay={wsd.decay} leaves no step before the decay",
                next="set a shorter schedule.decay, or train.steps=N",
            )
    return bisect_left(range(most), step, lo=step + 1, key=decay_start)


def _schedule(cfg: RunConfig) -> ResolvedSchedule:
    """Return the learning-rate schedule that the configuration alone determines.

    It has no decay if the run has a time limit: then the decay depends on the measured speed.
    """
    tokens_before = step_sizes_of(cfg.train).tokens_before
    resolved = resolve_schedule(cfg.schedule, cfg.train.steps, tokens_before)
    return resolved.with_decay(None) if cfg.train.timed else resolved


def _recorded_schedule(branch: Branch, parent: RunConfig) -> tuple[int, Decay | None]:
    """Return the parent's warm-up and decay as recorded in the checkpoint at the branch point.

    They may differ from the configured ones, because they also depend on the size of the data and
    on the time limit. Returns the configured ones if the checkpoint records none.
    """
    path = store.folder_of(branch.parent.checkpoints, branch.step) / store.POSITION
    position = tolerant(path, read_json) or {}  # empty if the checkpoint is damaged or was pruned
    planned = _schedule(parent)
    recorded = fits(position.get("decay"), DECAY)
    decay = Decay.from_json(position["decay"]) if recorded else planned.decay
    return position["warmup"] if fits(position, {"warmup": int}) else planned.warmup, decay


def _check_stable_phase(branch: Branch, parent: RunConfig, resolved: Resolved) -> None:
    """Raise ConfigError unless parent and branch train identically up to the branch point."""
    step, cfg = branch.step, resolved.config
    warmup, decay = _recorded_schedule(branch, parent)
    if decay is not None and decay.begin < step:
        raise ConfigError(
            f"the learning rate of {branch.parent.root} decays after step {decay.begin}, "
            f"before the branch point {step}",
            next=f"choose an earlier checkpoint: dtt ckpt ls {branch.parent.root}",
        )
    branch.check(_schedule(cfg).decay, cfg.train.steps)
    if _schedule(cfg).warmup != warmup:
        raise ConfigError(
            "schedule.warmup cannot change: the warm-up ends before the branch point",
            where=resolved.origin("schedule.warmup"),
            next="omit schedule.warmup",
        )
    changes: list[tuple[str, str]] = []
    # A horizon divides by the number of steps, so another length is another weight decay from the
    # first step on.
    by_horizon = next(horizon_keys(cfg.optim), None)
    if by_horizon is not None and cfg.train.steps != parent.train.steps:
        why = f"{by_horizon} gives it by horizon, and the parent has {parent.train.steps} steps"
        changes.append(("the weight decay", why))
    before = [
        [stage for stage in step_sizes_of(one.train).ranges if stage.step < step]
        for one in (parent, cfg)
        # Only ranges before the branch point: later ones are in the branch's own hands.
    ]
    if before[0] != before[1]:
        why = "train.batch_schedule or train.context_schedule is a fraction of the run"
        changes.append(("batches", why))
    for what, why in changes:
        raise ConfigError(
            f"train.steps={cfg.train.steps} changes {what} before the branch point",
            where=resolved.origin("train.steps"),
            why=why,
            next=f"set train.steps={parent.train.steps}, or train a parent run whose settings do "
            "not depend on the length",
        )
