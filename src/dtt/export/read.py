"""Reading of trained models from checkpoints of jobs and from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dtt.artifacts import DataManifest, checked_name
from dtt.checkpoint import store
from dtt.config.run import RunConfig
from dtt.data import fit
from dtt.errors import DamagedError, InputError
from dtt.export.weights import from_hf
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.scaling import scaled
from dtt.optim.ema import averages
from dtt.reading import read_json
from dtt.runtime.jobdir import JobDir

if TYPE_CHECKING:
    from dtt.model.families.base import Family

MOST = 2**28
"""Maximum bytes of a config.json or an index; enough for a million tensors."""
AGAIN = "export it again with `dtt export JOB`, or fetch the folder again"


@dataclass(frozen=True)
class Trained:
    """A trained model: architecture, weights and tokenizer."""

    arch: Architecture
    state: Mapping[str, Tensor]
    """State dict of a `Decoder`, on the CPU."""
    tokenizer: Path
    """A tokenizer.json."""
    end_of_document: int | None
    """Id of the token that ends a document; None if a Hugging Face folder names none."""


def find_checkpoint(folder: Path, step: int | None) -> store.Checkpoint:
    """Return the verified checkpoint of `step`, or the newest; InputError if there is none."""
    found = store.newest(folder) if step is None else store.at_step(folder, step)
    if found is None:
        raise InputError(
            f"no checkpoint in {folder}",
            why="training has not saved one yet",
            next="train on, or touch control/save in the job directory for one now",
        )
    return found


def read_checkpoint(
    cfg: RunConfig, job: JobDir, checkpoint: store.Checkpoint, *, ema: bool = False
) -> Trained:
    """Return the model of a job with the resolved config `cfg`; reads only the job directory.

    With `ema`, the weights are their moving average. Raises InputError if the job keeps none, and
    DamagedError if the job directory holds the data manifest of other data.
    """
    data = DataManifest.read(job.root)
    if checkpoint.manifest.data_key != data.key:
        raise DamagedError(
            f"{job.root / data.filename} is not of the data that the job was trained on",
            why="with another tokenizer the same ids would mean other text",
            next=f"dtt train {job.root}, which writes it again",
        )
    fit.check_tokenizer(job.tokenizer, data.tokenizer_sha256)
    return Trained(
        scaled(cfg, data.vocab_size).arch,
        _averages(checkpoint) if ema else checkpoint.tensors(store.MODEL),
        job.tokenizer,
        data.end_of_document,
    )


def _averages(checkpoint: store.Checkpoint) -> dict[str, Tensor]:
    found = averages(checkpoint.tensors(store.STATE))
    if not found:
        raise InputError(
            f"{checkpoint.path} holds no average of the weights",
            why="the job was trained without train.ema_decay",
            next="leave --ema out; train.ema_decay=0.999 keeps one in the next job",
        )
    return found


def read_hf_folder(folder: Path) -> Trained:
    """Read the model of a Hugging Face folder with safetensors files.

    The weights keep their dtype. Raises InputError if dtt does not support the model.
    """
    config = _read_config(folder / "config.json")
    family = _family(config, folder)
    files, tokenizer = _weight_files(folder), folder / "tokenizer.json"
    missing = next((path for path in (*files, tokenizer) if not path.is_file()), None)
    if missing is not None:
        why = f"{missing.name} is missing"
        raise InputError(f"{folder} is not a whole model", why=why, next=AGAIN)
    arch = _architecture(family, config, folder)
    tensors = {name: tensor for file in files for name, tensor in _load(file).items()}
    return Trained(arch, from_hf(tensors, arch), tokenizer, _end_of_document(folder, config))


def read_hf_architecture(folder: Path) -> Architecture:
    """Return the architecture of a Hugging Face folder; reads only config.json."""
    config = _read_config(folder / "config.json")
    return _architecture(_family(config, folder), config, folder)


def _family(config: Mapping[str, Any], folder: Path) -> Family:
    """Return the family that config.json names; InputError if dtt does not know it."""
    known = {family.hf_model_type: family for family in families.FAMILIES}
    if config.get("model_type") not in known:
        raise InputError(
            f"dtt does not know the kind of model in {folder}",
            why=f"config.json says model_type {config.get('model_type')!r}; "
            f"known: {', '.join(known)}",
            next="name a folder that `dtt export` made, or a model of one of those kinds",
        )
    return known[config["model_type"]]


def _architecture(family: Family, config: Mapping[str, Any], folder: Path) -> Architecture:
    """Return the architecture that config.json describes; InputError if dtt does not support it."""
    try:
        return family.from_hf_config(config, partial(transformers_defaults, family))
    except KeyError as error:
        why = f"config.json lacks {error}"
        raise InputError(f"{folder} is not a whole model", why=why, next=AGAIN) from None


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files as transformers does: model.safetensors, or the files of the index.

    Other files in the folder do not belong to the model. The index is untrusted input: raises
    DamagedError for a name that leads out of the folder.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return [single]
    names = _read_config(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise DamagedError(f"{index} has no weight_map", next=AGAIN)
    return [folder / checked_name(name, index) for name in sorted(set(names.values()))]


def _load(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; DamagedError if it is malformed."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DamagedError(f"{path} is damaged", why=str(error), next=AGAIN) from None


def transformers_defaults(family: Family) -> dict[str, Any]:
    """Return the default configuration of the family's transformers class.

    A key that dtt does not know is harmless if it has its default value.
    """
    from transformers import AutoConfig

    defaults: dict[str, Any] = AutoConfig.for_model(family.hf_model_type).to_dict()
    return defaults


def _end_of_document(folder: Path, config: Mapping[str, Any]) -> int | None:
    """Return the end-of-document id, the first if there are several.

    Returns None if neither config.json nor generation_config.json names one, as in a Qwen3 model
    that transformers created.
    """
    generation = folder / "generation_config.json"
    for said in (config, _read_config(generation) if generation.is_file() else {}):
        match said.get("eos_token_id"):
            case int(end) | [int(end), *_]:
                return end
    return None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, MOST)
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON", why=str(error), next=AGAIN) from None
