"""Checks that `dtt train` makes before it touches the job directory.

They find errors in the device, the trackers, the data and the mesh. So a start that is refused
neither creates a job nor turns a finished job into a failed one. One of `dtt train JOB` is recorded
as an attempt, unless the job is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.artifacts.token_folders import token_paths
from dtt.base.errors import DttError, ExitCode
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.config.load import with_steps
from dtt.config.merging import Resolved
from dtt.config.run import RunConfig
from dtt.config.source import Layer
from dtt.data.samples import compatibility
from dtt.evaluate.evaluation import open_evaluation
from dtt.jobs.attempt import holding, recorded_attempt
from dtt.jobs.branch import Branch
from dtt.jobs.phase_timer import PhaseTimer
from dtt.jobs.stages import Stage
from dtt.jobs.stop import Requests
from dtt.train.initial import check_source, check_vocabulary_of_stage
from dtt.train.inputs import PreparedRun
from dtt.train.objectives.reference_logprobs import check_initial_weights, named_reference

if TYPE_CHECKING:
    from dtt.data.samples.dataset import Dataset


@contextmanager
def recorded_refusal(
    config: str | Layer | None,
    branch_of: str | None,
    arguments: Sequence[str],
    ranks: Ranks,
    requests: Requests,
) -> Iterator[None]:
    """Record a refused start as an attempt of the job, if the command is only `dtt train JOB`.

    Job scripts run that command and read `attempt.json`, because torchrun exits with 1 for every
    failure. A job that is done stays done, and a job that does not exist is not created.
    """
    here = Path.cwd()  # saved because `enter` changes the current folder
    try:
        yield
    except DttError:
        if config is not None or branch_of is not None or len(arguments) != 1:
            raise
        job = JobDir(here / arguments[0])
        ended = job.exit_record(job.attempt()) if job.exists else {"code": ExitCode.DONE}
        if ended is not None and ended["code"] == ExitCode.DONE:
            raise
        with holding(job, ranks), recorded_attempt(job, ranks, requests):
            raise


def prepare(
    resolved: Resolved,
    job: JobDir,
    ranks: Ranks,
    from_step: int | None,
    branch: Branch | None,
    startup: PhaseTimer,
    stage: Stage | None = None,
) -> PreparedRun:
    """Check a start, and return what it found; raise the same DttError on all ranks.

    Each rank checks on its own, because there is no process group yet.
    """
    cfg = resolved.config
    predecessor = None
    if ranks.first:
        compatibility.check_files(token_paths(cfg))
        predecessor = stage.start_from() if stage is not None else None
    # Only here, after the checks that need no torch: importing it takes two seconds.
    from dtt.mesh import dist
    from dtt.track.trackers import check_installed
    from dtt.train.run_plan import make_plan

    if ranks.first:
        check_installed(cfg)
    startup.end_phase("imports")
    device = dist.choose_device(ranks, cfg.train.device, gpus_asked=cfg.launch.gpus)
    dataset = _open_data(resolved, job, ranks)
    resolved = with_steps(resolved, dataset.requested_steps)
    cfg = resolved.config
    if ranks.first:
        if cfg.eval.tasks:
            open_evaluation(cfg.eval)  # downloads what is missing
        compatibility.check_tokenizer(dataset.tokenizer, dataset.manifest.tokenizer_sha256)
    newest = store.steps(job.checkpoints)[-1:] or [0 if branch is None else branch.step]
    done = newest[0] if from_step is None else from_step
    plan = make_plan(cfg, dataset, dist.World(ranks, device, None), done)  # without collectives
    if branch is not None:
        # Again, now that the length of the data is known.
        branch.check(plan.schedule.first_decay, plan.steps)
    if ranks.first:
        if predecessor is None and branch is None and job.newest_checkpoint_name() is None:
            check_initial_weights(cfg)
        _check_starting_weights(cfg, job, dataset, from_step, branched=branch is not None)
        if predecessor is not None:
            check_vocabulary_of_stage(dataset.tokenizer, predecessor.job.tokenizer)
    startup.end_phase("data")
    return PreparedRun(
        resolved=resolved,
        job=job,
        dataset=dataset,
        plan=plan,
        from_step=from_step,
        branch=branch,
        stage=stage,
        predecessor=predecessor,
    )


def _open_data(resolved: Resolved, job: JobDir, ranks: Ranks) -> Dataset:
    """Open the data; rank 0 warns if it differs from what the configuration asks for."""
    from dtt.data.samples.dataset import open_dataset

    dataset = open_dataset(resolved.config)
    doubts = dataset.rounded_weights() + dataset.left_out()
    if job.newest_checkpoint_name() is None:
        doubts += compatibility.check_vocabulary(resolved, job, dataset.manifest.vocab_size)
    for doubt in doubts if ranks.first else ():
        log.warning("%s", doubt)
    return dataset


def _check_starting_weights(
    cfg: RunConfig, job: JobDir, dataset: Dataset, from_step: int | None, *, branched: bool
) -> None:
    """Raise DttError if the checkpoint to resume from does not match the data.

    For a new job, raises DttError if the weights that the configuration names cannot be found; a
    branch starts from the weights of its parent instead. Reads only the manifest of the checkpoint,
    which is verified later, when the job is locked.
    """
    steps = store.steps(job.checkpoints)
    if not steps and from_step is None:
        if not branched:
            if cfg.init.source is not None:
                check_source(cfg.init.source)
            if (reference := named_reference(cfg)) is not None:
                check_source(reference)
        return
    step = steps[-1] if from_step is None else from_step
    path = store.existing(job.checkpoints, step)
    try:
        manifest = CheckpointManifest.read(path)
    except (DttError, OSError):
        # Damaged. Not an error here: it is verified again under the lock, and older ones are tried.
        return
    compatibility.check_data(manifest, dataset.manifest.named_keys, job)
