"""Models that `dtt eval` evaluates: checkpoints of a job, and Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import sha256_file
from dtt.checkpoint import store
from dtt.config.init import HF
from dtt.config.load import load_job
from dtt.hf.model_source import find_folder

if TYPE_CHECKING:
    from dtt.hf.read import LoadedModel

EVALS = Path("evals")
"""Folder of the results of models that are not those of a job."""
NEWEST, ALL = None, "all"


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate. None of its files has been read."""

    name: str
    """The argument that names it, such as `jobs/run@500`."""
    step: int | None
    """Step of the checkpoint; None for a Hugging Face folder."""
    ema: bool
    """True for the averaged weights of the checkpoint."""
    path: Path
    """Folder of its files."""
    results: Path
    """Folder of its result files."""
    tokenizer: Path
    """A tokenizer.json."""
    identity: Callable[[], str]
    """Returns a hash that identifies the weights and the architecture; quick for checkpoints. It is
    computed once, so that results can be reported of a checkpoint that was deleted meanwhile."""
    verify: Callable[[], None]
    """Raises DamagedError if the weights are not what was written."""
    load: Callable[[], LoadedModel]
    """Reads the weights, without verifying them."""


def find_steps(source: str, step: str | None, *, ema: bool = False) -> list[int] | None:
    """Return the steps of the checkpoints that `source` names, as `load_model` describes it.

    `step` is a step of a job, or `all`: all checkpoints, the oldest first. By default, these are
    the checkpoints of a job from the newest on, of which the first that is intact is meant. Return
    None for a Hugging Face folder.
    """
    if find_folder(source) is not None:
        if ema or step is not None:
            raise ConfigError(
                f"{'--ema' if ema else '--step'} requires a job, and {source} is not one",
                why="a Hugging Face folder has a single set of weights",
                next=f"dtt eval {source}",
            )
        return None
    number = None
    if step not in (NEWEST, ALL):
        if not (step.isascii() and step.isdigit()):
            raise ConfigError(f"--step {step} is not a step", next="--step 500, or --step all")
        number = int(step)
    folder, at = store.parse(source, number)
    if at is not None and step == ALL:
        raise ConfigError(f"{source} and --step all contradict each other")
    if at is not None:
        store.existing(folder, at)
        return [at]
    steps = store.steps(folder)
    if not steps:
        raise InputError(
            f"no checkpoint in {folder}",
            why="training has not saved one yet",
            next="continue training, or touch control/save in the job directory to save one now",
        )
    if step is NEWEST:
        steps.reverse()
    return steps


def checkpoint_model(
    job: JobDir,
    step: int,
    *,
    ema: bool = False,
    path: Path | None = None,
) -> EvaluatedModel:
    """Return the model of a checkpoint of `job`; `path` is that of a copy of its folder."""
    path = path or store.folder_of(job.checkpoints, step)

    def identity() -> str:
        try:
            return sha256_file(path / CheckpointManifest.filename)
        except FileNotFoundError:
            why = f"{CheckpointManifest.filename} is missing"
            raise DamagedError(f"checkpoint {path} is damaged", why=why) from None

    def verify() -> None:
        store.verify(path)

    def load() -> LoadedModel:
        from dtt.hf.read_checkpoint import read_checkpoint

        checkpoint = store.Checkpoint(path, CheckpointManifest.read(path))
        return read_checkpoint(load_job(job.root), job, checkpoint, ema=ema)

    return EvaluatedModel(
        name=f"{job.root}@{step}",
        step=step,
        ema=ema,
        path=path,
        results=store.folder_of(job.evals, step),
        tokenizer=job.tokenizer,
        identity=cache(identity),
        verify=verify,
        load=load,
    )


def folder_model(source: str, folder: Path) -> EvaluatedModel:
    """Return the model of a Hugging Face folder, which `source` names."""

    def identity() -> str:
        described = (folder / name for name in ("config.json", "generation_config.json"))
        files = (*filter(Path.is_file, described), *sorted(folder.glob("*.safetensors")))
        # Not by time and size, which other weights may share: it reads every byte, as loading does.
        return fingerprint([sha256_file(path) for path in files])

    def load() -> LoadedModel:
        from dtt.hf.read import read_hf_folder

        return read_hf_folder(folder)

    return EvaluatedModel(
        name=source,
        step=None,
        ema=False,
        path=folder,
        results=folder_results(source),
        tokenizer=folder / "tokenizer.json",
        identity=cache(identity),
        verify=lambda: None,
        load=load,
    )


def folder_results(source: str) -> Path:
    """Return the folder of the results of a Hugging Face folder or of a model on the Hub."""
    name = source.removeprefix(HF)
    folder = Path(name).expanduser()
    return EVALS / (folder.resolve().name if folder.exists() else name.replace("/", "--"))
