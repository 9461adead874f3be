"""The files of a job directory that describe its run and what it needs to be used."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from dtt.base.files import append, write_atomically
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.base.secrets import redacted
from dtt.checkpoint import store
from dtt.config import explain
from dtt.config.own import kept_files
from dtt.config.schedule import Decay
from dtt.data.samples import compatibility

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.train.objects import StartedRun

RATE_JUMP = 1.1
"""Factor by which the learning rate must rise on resume to cause a warning. A warm-up raises it by
less than this between two steps."""


def write_description(start: StartedRun) -> None:
    """Write the files that describe the run, and warn of what a resume changes; on rank 0.

    The tokenizer, the chat template and the data manifest are copied, so that the
    model can be used without the token files.
    """
    job, resolved, dataset = start.job, start.resolved, start.dataset
    if start.resume is not None:
        _warn_of_rate_jump(start, start.resume)
    elif start.stage is not None:  # before config.yaml makes the folder a job
        start.stage.record(dataset.manifest.key, start.predecessor)
    text = explain.show(resolved)
    write_atomically(job.config, text)
    write_atomically(job.trained_config(job.attempt()), text)
    compatibility.check_tokenizer(dataset.tokenizer, dataset.manifest.tokenizer_sha256)
    write_atomically(job.tokenizer, read_whole(dataset.tokenizer))
    if dataset.chat_template is not None:
        write_atomically(job.chat_template, dataset.chat_template)
    write_atomically(job.root / dataset.manifest.filename, dataset.manifest.dump())
    for path, content in kept_files(resolved.config, job.root).items():
        write_atomically(path, content)
    if start.resume is None and start.source_of_weights is not None:
        from dtt.hf import released  # half a second of CPU time

        released.keep(start.source_of_weights, job, dataset.tokenizer)


def announce(inputs: StartedRun) -> None:
    """Log what is about to be trained, and record the command and its environment, on rank 0."""
    dataset, steps = inputs.dataset, inputs.cfg.train.steps
    if inputs.resume is None and (mirror := inputs.open_mirror()) is not None:
        # A wrong bucket of a new run is an error now. A run that resumes does not depend on it.
        mirror.claim()
    source = f"init.from={inputs.cfg.init.source}"
    adopted = [
        f"{'.'.join(key[1:])} {leaf.value}"
        for key, leaf in inputs.resolved.layer.items()
        if key[0] == "model" and leaf.origin == source
    ]
    if inputs.resume is None and adopted:
        keys = ", ".join(adopted)
        log.info("%s: the model section is taken from these weights: %s", source, keys)
    log.info("%s", inputs.plan.describe(inputs.world))
    if dataset.steps < steps:
        log.warning(
            "the run ends at step %d instead of %d, when the data is exhausted",
            *(dataset.steps, steps),
        )
    inputs.job.write_environment()
    append(inputs.job.root / "overrides.txt", redacted(shlex.join(sys.argv[1:])) + "\n")


def _warn_of_rate_jump(start: StartedRun, resume: Checkpoint) -> None:
    """Warn if the learning rate rises again after the decay during which `resume` was taken.

    A finished run that is given more steps gets a new, later decay, so its rate jumps from the
    annealed value up to the new schedule. A branch from before the decay avoids this.
    """
    job, plan, decayed = start.job, start.plan, resume.position().get("decay")
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
