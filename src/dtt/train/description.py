"""The files of a job directory that describe its run and what it needs to be used."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.base.files import append, write_atomically
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.base.secrets import redacted
from dtt.checkpoint import store
from dtt.config import explain
from dtt.config.load import load_job
from dtt.config.optim import horizon_keys
from dtt.config.own import kept_files
from dtt.config.run import RunConfig
from dtt.config.schedule import Decay
from dtt.data.samples import compatibility

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.samples.dataset import Dataset
    from dtt.train.inputs import PreparedRun
    from dtt.train.run_plan import RunPlan

RATE_JUMP = 1.1
"""Factor by which the learning rate must rise on resume to cause a warning. A warm-up raises it by
less than this between two steps."""


def write_description(start: PreparedRun, resume: Checkpoint | None) -> None:
    """Write the files of the job directory that describe the run; rank 0 calls it."""
    job, resolved = start.job, start.resolved
    if start.stage is not None and resume is None:  # before config.yaml makes the folder a job
        start.stage.record(start.dataset.manifest.key, start.predecessor)
    text = explain.show(resolved)
    write_atomically(job.config, text)
    write_atomically(job.trained_config(job.attempt()), text)
    copy_data_files(job, start.dataset)
    for path, content in kept_files(resolved.config, job.root).items():
        write_atomically(path, content)
    if resume is None and start.source_of_weights is not None:
        from dtt.hf import released  # half a second of CPU time

        released.keep(start.source_of_weights, job, start.dataset.tokenizer)


def warn_of_early_end(dataset: Dataset, steps: int) -> None:
    """Log that the data ends before the last of `steps`, if it does."""
    if dataset.steps < steps:
        reached = dataset.steps
        log.warning(
            "the run ends at step %d instead of %d, when the data is exhausted", reached, steps
        )


def warn_of_rate_jump(job: JobDir, resume: Checkpoint, plan: RunPlan) -> None:
    """Warn if the learning rate rises again after the decay during which `resume` was taken.

    A finished run that is given more steps gets a new, later decay, so its rate jumps from the
    annealed value up to the new schedule. A branch from before the decay avoids this.
    """
    decayed = resume.position().get("decay")
    if decayed is None:
        return
    decay = Decay.from_json(decayed)
    earlier = plan.schedule.with_decay(decay)
    before, after = earlier.multiplier(resume.step - 1), plan.schedule.multiplier(resume.step)
    if resume.step <= decay.begin or resume.step >= plan.steps or after <= RATE_JUMP * before:
        return
    steps = [step for step in store.steps(job.checkpoints) if step <= decay.begin]
    advice = "no checkpoint from before the decay exists: expect the loss to rise first"
    if steps:
        advice = (
            f"dtt train --branch {job.root}@{steps[-1]} train.steps={plan.steps} name=ANOTHER, or "
            f"dtt train {job.root} --from-step {steps[-1]} train.steps={plan.steps} "
            "--allow-change train.steps"
        )
    log.warning(
        "the learning rate jumps from %.3g%% to %.3g%% of its peak after step %d\n"
        "  why:   the decay from step %d to %d has run, and the run now has %d steps\n"
        "  next:  %s",
        *(100 * before, 100 * after, resume.step),
        *(decay.begin + 1, decay.end, plan.steps, advice),
    )


def warn_of_decay_change(job: JobDir, cfg: RunConfig) -> None:
    """Warn if another number of steps changes a weight decay by horizon on resume.

    Call it before `write_description`: it compares `cfg` with the configuration in the job.
    """
    key = next(horizon_keys(cfg.optim), None)
    if key is None or not job.config.exists():  # a new branch, whose length was checked
        return
    before = load_job(job.root).train.steps
    if before != cfg.train.steps:
        log.warning(
            "the weight decay is divided by %.4g from here on\n"
            "  why:   %s gives it by horizon, and the run has %d steps instead of %d\n"
            "  next:  set a number to keep a decay whatever the length of the run",
            *(cfg.train.steps / before, key, cfg.train.steps, before),
        )


def copy_data_files(job: JobDir, dataset: Dataset) -> None:
    """Copy the tokenizer, the chat template and the data manifest into the job directory.

    With them, the model can be used without the token files.
    """
    compatibility.check_tokenizer(dataset.tokenizer, dataset.manifest.tokenizer_sha256)
    write_atomically(job.tokenizer, read_whole(dataset.tokenizer))
    if dataset.chat_template is not None:
        write_atomically(job.chat_template, dataset.chat_template)
    write_atomically(job.root / dataset.manifest.filename, dataset.manifest.dump())


def write_provenance(job: JobDir) -> None:
    """Record the environment and the command line of this attempt in the job directory."""
    job.write_environment()
    append(job.root / "overrides.txt", redacted(shlex.join(sys.argv[1:])) + "\n")
