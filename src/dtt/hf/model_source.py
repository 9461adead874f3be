"""Models to generate with: of a job, of an exported folder, or from the Hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest, DataManifest
from dtt.base.errors import ConfigError, InputError
from dtt.base.log import log, log_on_terminal
from dtt.config.init import HF, HUB_ID
from dtt.config.load import load_job
from dtt.config.own import own_code

if TYPE_CHECKING:
    import torch

    from dtt.config.objective import Objective
    from dtt.hf.chat_format import ChatFormat
    from dtt.hf.read import LoadedModel
    from dtt.mesh.dist import World
    from dtt.model.architecture import AnyArchitecture
    from dtt.model.contract import Model

T = TypeVar("T")


class NoChatTemplate(ConfigError):
    """A model whose conversation format is unknown."""


SOURCES = "a job (jobs/run, jobs/run@500), an export (exports/run), or hf:ORG/NAME"


def load_model(source: str, *, ema: bool, world: World | None = None) -> LoadedModel:
    """Read the model that `source` names.

    `source` is a job directory, whose newest checkpoint is read; `JOB@STEP`; a Hugging Face folder,
    such as one written by `dtt export`; or `hf:FOLDER`, `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`,
    as in `init.from`. With `ema`, reads the averaged weights of a job's checkpoint. Raises
    InputError if there is no such model, and ConfigError for `ema` without a job.

    With the `world` of several ranks, all call this: rank 0 chooses and verifies for them, and the
    weights of a job stay in files.
    """
    folder = on_first(world, lambda: find_folder(source))
    if folder is None:
        from dtt.checkpoint import store
        from dtt.hf.read_checkpoint import find_checkpoint, read_checkpoint

        checkpoints, step = store.parse(source)
        job = JobDir(checkpoints.parent)
        log_on_terminal("reading the model in %s", source)
        checkpoint = on_first(world, lambda: find_checkpoint(checkpoints, step))
        return read_checkpoint(load_job(job.root), job, checkpoint, ema=ema, world=world)
    if ema:
        raise ConfigError(
            f"--ema requires a job, and {source} is not one",
            why="a Hugging Face folder has a single set of weights",
            next="export the averaged weights with dtt export JOB --ema, and omit --ema here",
        )
    from dtt.hf.read import read_hf_folder

    log_on_terminal("reading the model in %s", folder)
    return read_hf_folder(folder)


def frozen_architectures(objective: Objective) -> list[AnyArchitecture]:
    """Return the architectures of the models that an objective holds; reads no weights."""
    with own_code(objective, "objective"):
        sources = [*objective.models()]
    return [read_architecture(source) for source in sources]


def read_architecture(source: str) -> AnyArchitecture:
    """Return the architecture of the model that `source` names, as in `load_model`."""
    from dtt.hf.read import read_hf_architecture
    from dtt.hf.read_checkpoint import architecture

    if source.startswith(HF):  # of the Hub: nothing but its config.json
        files = ["config.json"]
        return read_hf_architecture(find_model(source.removeprefix(HF), files, where=source))
    folder = find_folder(source)
    return architecture(job_of(source)) if folder is None else read_hf_architecture(folder)


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
    why = "it has neither config.yaml (a job) nor config.json (a Hugging Face folder)"
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
    close = [path for path in (Path("jobs") / source, Path("exports") / source) if path.is_dir()]
    raise InputError(
        f"no model in {source}",
        why=why,
        next=f"did you mean {' or '.join(map(str, close))}?" if close else f"name {SOURCES}",
    )


def job_of(source: str) -> JobDir:
    """Return the job directory of `JOB` or `JOB@STEP`, which need not exist."""
    from dtt.checkpoint import store

    return JobDir(store.parse(source)[0].parent)


def on_first(world: World | None, action: Callable[[], T]) -> T:
    """Return `world.on_first(action)`, or `action()` if `world` is None: there are no others."""
    return action() if world is None else world.on_first(action)


def weight_bytes(source: str) -> int:
    """Return the size of the weights that `load_model` would read; reads headers only.

    The newest checkpoint of a job is not verified: the others have the same size.
    """
    from dtt.checkpoint import store
    from dtt.hf.read import weight_files
    from dtt.hf.read_checkpoint import checkpoint_weights

    if (folder := find_folder(source)) is not None:
        return sum(file.stat().st_size for file in weight_files(folder))
    checkpoints, step = store.locate(source)
    path = store.folder_of(checkpoints, store.steps(checkpoints)[-1] if step is None else step)
    checkpoint = store.Checkpoint(path, CheckpointManifest.read(path))
    weights = checkpoint_weights(checkpoint, check=False).values()
    return sum(prod(weight.shape) * weight.dtype.itemsize for weight in weights)


def on_device(trained: LoadedModel, device: torch.device) -> Model:
    """Return the model with its weights on `device`."""
    from dtt.model.decoder import make_model

    model = make_model(trained.arch)
    state = {name: tensor.to(device) for name, tensor in trained.tensors.items()}
    # A table that a model of a user's own keeps in a buffer is in no checkpoint.
    kept = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    model.load_state_dict(kept | state, assign=True)
    model.to(device)
    return model


def find_model(name: str, files: Sequence[str] | None = None, *, where: str | None = None) -> Path:
    """Return the folder of a model, given as a local path or as a model on the Hub.

    A model on the Hub is `ORG/NAME` or `ORG/NAME@REVISION`; only `files` are fetched from it (None:
    all that training needs). Raises InputError if `name` is neither; it names `where` as the place
    that asks for the model, by default `init.from`.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    hub_id = HUB_ID.fullmatch(name)
    if (folder / "adapter_config.json").is_file():
        from dtt.hf.chat_format import read_config

        base = read_config(folder / "adapter_config.json").get("base_model_name_or_path")
        raise InputError(
            f"{folder} has an adapter, and no model",
            where=where or f"init.from={HF}{name}",
            why="it has adapter_config.json, and no config.json",
            next=f"train on it with init.from={HF}{base} init.adapter={folder} adapter.type=lora; "
            "or merge it with PEFT (merge_and_unload), and use the result",
        )
    if folder.exists() or hub_id is None:
        raise InputError(
            f"no model in {folder}",
            where=where or f"init.from={HF}{name}",
            why="it has no config.json" if folder.exists() else "the folder does not exist",
            next="use a folder written by `dtt export` or save_pretrained, or a model on the Hub",
        )
    from dtt.data.corpus.hub import MODEL_FILES, fetch_model

    if files is None:
        log.info("init.from: %s on the Hub", name)
    return fetch_model(hub_id["repo"], hub_id["revision"], files or MODEL_FILES)


def find_chat_format(source: str, template: str | None) -> ChatFormat:
    """Return the model's conversation format.

    Reads no weights. Raises NoChatTemplate if the model has none and `template` is None.
    """
    # Imports numpy, which commands that only name a model do without.
    from dtt.hf.chat_format import (
        chosen_chat_format,
        eos_token_ids,
        folder_chat_format,
        job_chat_format,
    )

    folder = find_folder(source)
    ends: tuple[int, ...]
    if folder is None:
        job = job_of(source)
        tokenizer, ends = job.tokenizer, (DataManifest.read(job.root).end_of_document,)
        own = job_chat_format(job, load_job(job.root).chat) if template is None else None
    else:
        tokenizer, ends = folder / "tokenizer.json", eos_token_ids(folder)
        own = folder_chat_format(folder) if template is None else None
    if template is not None:
        return chosen_chat_format(template, tokenizer, ends)
    if own is None:
        raise NoChatTemplate(
            f"{source} has no chat template, so its conversation format is unknown",
            why="the job was trained on plain text, not with data.type=chat"
            if folder is None
            else "the folder has neither chat_template.jinja nor chat_template in "
            "tokenizer_config.json",
            next=f"dtt generate {source} -p TEXT continues a text; dtt chat {source} --template "
            "chatml (or a Jinja file) uses a format that the model was not trained on",
        )
    return own
