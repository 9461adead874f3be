"""`dtt train`, `eval` and `generate` on a machine with several GPUs: a process on each."""

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

WEIGHTS_SHARE = 0.9
"""Share of a GPU's memory that weights may take; the rest is for CUDA, keys and values."""


def start_training(
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
    if not _alone_with_gpus():
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
    before = job.attempt()
    code = _run(processes, "launch.gpus_per_node=1, or CUDA_VISIBLE_DEVICES, takes fewer")
    sys.exit(reported_code(code, job, started=job.attempt() > before)[0])


def start_evaluation() -> None:
    """Run this command in one process per GPU and exit with its code, if that is more than one.

    Returns in a process of a launcher or of a Slurm job, and with one GPU.
    """
    if (processes := _gpus()) > 1:
        # torchrun exits with 1 for every failure; its cause is in the lines above.
        sys.exit(_run(processes, "CUDA_VISIBLE_DEVICES takes fewer"))


def start_generation(source: str) -> None:
    """Run this command in one process per GPU and exit with its code, if one GPU is too small.

    Returns in a process of a launcher or of a Slurm job, with one GPU, and if one GPU holds the
    weights that `source` names: a model that is divided generates more slowly.
    """
    if (processes := _gpus()) < 2:
        return
    import torch

    from dtt.hf.model_source import weight_bytes

    try:
        size = weight_bytes(source)
    except (DttError, OSError):
        return  # `dtt generate` reports it
    memory = torch.cuda.get_device_properties(0).total_memory
    if size > WEIGHTS_SHARE * memory:
        why = f"{size / 1e9:.0f} GB of weights, and a GPU has {memory / 1e9:.0f} GB"
        sys.exit(_run(processes, f"{why}; CUDA_VISIBLE_DEVICES takes fewer"))


def _run(processes: int, fewer: str) -> int:
    """Run the command that was typed under torchrun, and return the exit code of torchrun."""
    argv = local.torchrun_argv(processes, sys.argv[1:])
    shown = local.shell_command(argv)
    log.info("starting a process on each of %d GPUs (%s): %s", processes, fewer, shown)
    return local.run(argv)


def _gpus() -> int:
    """Return the number of GPUs of this machine; 0 under a launcher and in a Slurm job."""
    if not _alone_with_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def _alone_with_gpus() -> bool:
    """Return True outside of a launcher and of Slurm, on a machine that may have GPUs."""
    alone = Ranks.detect().launcher == "alone" and "SLURM_JOB_ID" not in os.environ
    return alone and _has_gpus()


def _has_gpus() -> bool:
    """Return True if this machine may have GPUs, without importing torch."""
    return Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
