"""`dtt train` on a machine with several GPUs: the processes that a pipeline would start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from dtt.base import local
from dtt.base.errors import DttError
from dtt.base.log import log
from dtt.base.ranks import Ranks


def start(
    config: str | None,
    arguments: Sequence[str],
    allow_change: Sequence[str],
    from_step: int | None,
    branch_of: str | None,
    stage: str | None,
) -> None:
    """Run this command in one process per GPU and exit with its code, if that is more than one.

    Returns in a process of a launcher or of a Slurm job, with one GPU, and for a command that
    `dtt train` itself refuses.
    """
    if Ranks.detect().launcher != "alone" or "SLURM_JOB_ID" in os.environ or not _has_gpus():
        return
    from dtt.jobs import branch
    from dtt.launch.pipeline import reported_code, train_processes
    from dtt.train.find_job import find_job

    try:
        with chdir("."):  # both may enter the folder of the job
            if branch_of is None:
                resolved, job = find_job(config, arguments, allow_change, stage)
            else:
                resolved, job, _ = branch.find(
                    branch_of, config, arguments, allow_change, from_step
                )
            job = type(job)(job.root.absolute())
    except DttError:
        return
    processes = train_processes(resolved.config)
    if processes == 1:
        return
    argv = local.torchrun_argv(processes, sys.argv[1:])
    log.info(
        "starting a process on each of %d GPUs (launch.gpus_per_node=1, or CUDA_VISIBLE_DEVICES, "
        "takes fewer): %s", processes, local.shell_command(argv),
    )  # fmt: skip
    before = job.attempt()
    code = local.run(argv)
    sys.exit(reported_code(code, job, started=job.attempt() > before)[0])


def _has_gpus() -> bool:
    """Return True if this machine may have GPUs, without importing torch."""
    return Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
