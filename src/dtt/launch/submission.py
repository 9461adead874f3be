"""A submission that is prepared in memory: its plan, and the files that it writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import DttError
from dtt.base.files import write_atomically
from dtt.config import explain
from dtt.config.merging import Resolved
from dtt.config.own import kept_files
from dtt.config.run import RunConfig
from dtt.data.samples.step_sizes import step_sizes_of
from dtt.jobs.slurm import job_script, submissions
from dtt.jobs.stages import Stage

SIGNAL_EARLY = 60
"""Seconds by which Slurm may send the signal of `--signal` early, according to its manual."""


@dataclass(frozen=True)
class Submission:
    """A submission that was prepared in memory; nothing is written to disk yet."""

    command: str
    resolved: Resolved
    job: JobDir
    """Job directory of the command: script, logs and configuration are written there."""
    trained: JobDir
    """Job directory of the training: `train` creates it and `export` reads it."""
    script: job_script.Script
    stages: tuple[Stage, ...] = ()
    """The stages of training that are not done, if the configuration defines stages."""

    @property
    def config(self) -> RunConfig:
        """The validated configuration."""
        return self.resolved.config


@contextmanager
def written(submission: Submission, new: Sequence[Path]) -> Iterator[None]:
    """Write the configurations of a submission; if Slurm rejects the job, undo all that is written.

    That includes the job script, the supervisor and the environment, which are written inside.
    `new` are the job directories that did not exist before.
    """
    texts, job = configurations(submission), submission.job
    supervisor = [job.supervisor / path.name for path in job_script.SUPERVISOR.glob("*.py")]
    paths = (*texts, job.script, job.root / "env.json", *supervisor)
    before = {path: path.read_bytes() if path.is_file() else None for path in paths}
    for stage in submission.stages:
        stage.create()
    for path, text in texts.items():
        write_atomically(path, text)
    try:
        yield
    except submissions.SlurmUnreachable:  # the job may be queued and needs its files
        raise
    except DttError:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, content)
        if job.script.is_file():
            job.script.chmod(0o755)
        for root in new:
            shutil.rmtree(root, ignore_errors=True)
        raise


def configurations(submission: Submission) -> dict[Path, str | bytes]:
    """Return each configuration file that the Slurm job reads, and its user's own code."""
    jobs = [(stage.job, stage.resolved) for stage in submission.stages]
    texts: dict[Path, str | bytes] = {}
    for job, resolved in jobs or [(submission.job, submission.resolved)]:
        texts |= kept_files(resolved.config, job.root)
        texts[job.config] = explain.show(resolved)
    return texts


def progress(argv: Sequence[str], configs: Sequence[RunConfig]) -> tuple[str, ...]:
    """Return patterns of the files that the next attempt at a command continues.

    Each of their bytes is progress, so the command may reach any number of time limits: markers of
    finished units, received files, answers.
    """
    command = argv[0]
    if command == "eval":
        return (f"{escape(argv[1])}/evals/*/*.jsonl",)
    patterns: dict[str, None] = {}
    for one in (one for cfg in configs for one in cfg.corpora):
        corpus, tokens = escape(str(one.corpus_dir)), escape(str(one.tokenize_dir))
        if command == "clean" and one.clean is not None:
            from dtt.artifacts.selection_manifest import SelectionManifest  # training needs none

            patterns[f"{corpus}/selection-*/{SelectionManifest.work}/*.json"] = None
        if command == "tokenize":
            patterns[f"{tokens}/{TokensManifest.work}/*.json"] = None
        if command == "download":
            # Complete files, and what the Hub and other stores have sent of the others.
            incomplete = (".parts/*", ".cache/huggingface/download/**/*.incomplete")
            patterns |= dict.fromkeys(f"{corpus}/{name}" for name in ("**/*", *incomplete))
    return tuple(patterns)


def plan(submission: Submission) -> Iterator[str]:
    """Yield the lines of the plan that is shown before submission."""
    launch, script = submission.script.launch, submission.script
    processes = launch.processes if script.kind != "other" else 1
    newest = submission.job.newest_checkpoint_name()
    resumes = f", resumes from {newest}" if newest is not None else ""
    yield f"{submission.command:<10} {submission.job.root}{resumes}"
    gpus = f", {launch.gpus} GPUs per node" if launch.gpus else ""
    mpi = "mpirun" if launch.mpi == "mpirun" else "srun"
    starter = launch.start if script.kind == "train" else mpi
    yield f"processes  {script.nodes} nodes x {processes}, started by {starter}{gpus}"
    yield from (
        f"{'stage' if submission.stages else 'training':<10} {a}" for a in amounts(submission)
    )
    limit = "the partition's limit" if launch.time is None else str(launch.time)
    yield f"time       {limit}; saves {script.lead} s before; then {launch.continuation}"
    if launch.time_limit is not None and launch.time_limit - script.lead <= SIGNAL_EARLY:
        yield f"warning    Slurm may send its signal {SIGNAL_EARLY} s early, which leaves no time"
    where = [f"{k} {v}" for k in ("partition", "account", "qos") if (v := getattr(launch, k))]
    yield f"where      {', '.join(where) or 'the default partition and account'}"
    yield f"script     {submission.job.script}"


def amounts(submission: Submission) -> Iterator[str]:
    """Yield how much is trained, for each stage that is not done."""
    yield from (f"{stage.name}: {_amount(stage.config)}" for stage in submission.stages)
    if submission.command == "train" and not submission.stages:
        yield _amount(submission.config)


def _amount(cfg: RunConfig) -> str:
    paths = [source.place for source in cfg.sources]
    if cfg.train.steps == 0:
        return f"{cfg.train.epochs:g} epochs of {', '.join(map(str, paths))}"
    batches, steps = step_sizes_of(cfg.train), cfg.train.steps
    total = batches.tokens_before(steps)
    most = "at most " if cfg.train.timed else ""
    amount = f"{most}{steps} steps of {batches.describe(steps)}: {total / 1e6:.1f}M tokens"
    if len(paths) != 1 or not TokensManifest.exists(paths[0]):  # `dtt data mix` shows more
        named = ", ".join(map(str, paths or cfg.data.input_paths(cfg)))
        return f"{amount} of {named or f'{cfg.data.type} data'}"
    available = TokensManifest.read(paths[0]).counts("train").tokens
    return f"{amount}, {total / available:.2f} epochs of {paths[0]}"
