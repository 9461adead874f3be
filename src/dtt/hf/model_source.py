"""Models to generate with: of a job, of an exported folder, or from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, InputError
from dtt.config.init import HF
from dtt.config.load import load_job
from dtt.train.initial import find_model

if TYPE_CHECKING:
    import torch

    from dtt.hf.read import Trained
    from dtt.model.decoder import Decoder

SOURCES = "a job (jobs/run, jobs/run@500), an export (exports/run), or hf:ORG/NAME"


def load_model(source: str, *, ema: bool) -> Trained:
    """Read the model that `source` names.

    `source` is a job directory, whose newest checkpoint is read; `JOB@STEP`; a Hugging Face folder,
    such as one written by `dtt export`; or `hf:FOLDER`, `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`,
    as in `init.from`. With `ema`, reads the averaged weights of a job's checkpoint. Raises
    InputError if there is no such model, and ConfigError for `ema` without a job.
    """
    folder = find_folder(source)
    if folder is None:
        return _read_job(source, ema)
    if ema:
        raise ConfigError(
            f"--ema requires a job, and {source} is not one",
            why="a Hugging Face folder has a single set of weights",
            next="export the averaged weights with dtt export JOB --ema, and omit --ema here",
        )
    from dtt.hf.read import read_hf_folder

    return read_hf_folder(folder)


def find_folder(source: str) -> Path | None:
    """Return the Hugging Face folder that `source` names; None if it names a job.

    Fetches a model on the Hub. Raises InputError if there is neither a folder nor a job.
    """
    if source.startswith(HF):
        return find_model(source.removeprefix(HF), where=source)
    folder = Path(source)
    if (folder / "config.json").is_file():
        return folder
    if job_of(source).config.is_file():
        return None
    missing = not folder.exists()
    raise InputError(
        f"no model in {source}",
        why="there is no such folder"
        if missing
        else "it has neither config.yaml (a job) nor config.json (a Hugging Face folder)",
        next=f"name {SOURCES}",
    )


def job_of(source: str) -> JobDir:
    """Return the job directory of `JOB` or `JOB@STEP`, which need not exist."""
    from dtt.checkpoint import store

    if JobDir(Path(source)).exists:  # the name of a job may contain @
        return JobDir(Path(source))
    return JobDir(store.parse(source)[0].parent)


def _read_job(source: str, ema: bool) -> Trained:
    from dtt.checkpoint import store
    from dtt.hf.read import find_checkpoint, read_checkpoint

    job = job_of(source)
    step = None if job.root == Path(source) else store.parse(source)[1]
    checkpoint = find_checkpoint(job.checkpoints, step)
    return read_checkpoint(load_job(job.root), job, checkpoint, ema=ema)


def on_device(trained: Trained, device: torch.device) -> Decoder:
    """Return the model with its weights on `device`."""
    import torch

    from dtt.model.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(trained.arch)
    state = {name: tensor.to(device) for name, tensor in trained.state.items()}
    model.load_state_dict(state, assign=True)
    return model
