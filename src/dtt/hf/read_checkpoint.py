"""Models of checkpoints with complete weights: averaged if asked for, adapters merged.

A checkpoint of an adapter lacks the frozen weights, and refers to where they came from: another
checkpoint, or a Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import CheckpointManifest, DataManifest, Reference
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import sha256_file
from dtt.checkpoint import store
from dtt.checkpoint.store import Checkpoint
from dtt.config.adapter import LoraConfig
from dtt.config.init import HF, HUB_ID
from dtt.config.load import load_job
from dtt.config.model import Family
from dtt.config.run import RunConfig
from dtt.data.samples import compatibility
from dtt.hf.peft import Adapter
from dtt.hf.read import LoadedModel, read_hf_folder, weight_files
from dtt.mesh.dist import World
from dtt.mesh.sharding import FullTensor
from dtt.model.adapted_layers import adapted_layers
from dtt.model.architecture import AnyArchitecture
from dtt.model.lora import merged
from dtt.model.scaling import scaled
from dtt.optim.ema import averages


def find_checkpoint(folder: Path, step: int | None) -> store.Checkpoint:
    """Return the verified checkpoint of `step`, or the newest; InputError if there is none."""
    found = store.newest(folder) if step is None else store.at_step(folder, step)
    if found is None:
        raise InputError(
            f"no checkpoint in {folder}",
            why="training has not saved one yet",
            next="continue training, or touch control/save in the job directory to save one now",
        )
    return found


def read_checkpoint(
    cfg: RunConfig,
    job: JobDir,
    checkpoint: store.Checkpoint,
    *,
    ema: bool = False,
    world: World | None = None,
) -> LoadedModel:
    """Return the model of a job with the resolved config `cfg`.

    Reads only the job directory, and the frozen weights below an adapter.

    With `ema`, the weights are their moving average. With the `world` of several ranks, weights
    stay in files until each rank reads its part. Raises InputError if the job keeps none, and
    DamagedError if the job directory contains the manifest of different data.
    """
    data = DataManifest.read(job.root)
    # Same ids, other tokenizer: nothing else would reveal that the texts are garbage.
    if checkpoint.manifest.data_key != data.key:
        raise DamagedError(
            f"{job.root / data.filename} does not describe the data that the job was trained on",
            why="another tokenizer assigns the same ids to different text",
            next=f"run dtt train {job.root}, which writes it again",
        )
    compatibility.check_tokenizer(job.tokenizer, data.tokenizer_sha256)
    check = world is None or world.first
    weights = checkpoint_weights(checkpoint, job, average=ema, check=check)
    return LoadedModel(
        architecture(job, cfg),
        weights if world else {name: weight[()] for name, weight in weights.items()},
        job.tokenizer,
        data.end_of_document,
        data.until_ids,
        data.begin_of_document,
    )


def architecture(job: JobDir, cfg: RunConfig | None = None) -> AnyArchitecture:
    """Return the architecture of the model of a job, whose resolved config is `cfg` if given."""
    cfg = cfg or load_job(job.root)
    if isinstance(cfg.model, Family):
        # Of the user's own: the model is what its code computes.
        cfg = load_job(job.root, run_code=True)
    return scaled(cfg, DataManifest.read(job.root).vocab_size).arch


def checkpoint_weights(
    checkpoint: Checkpoint,
    job: JobDir | None = None,
    *,
    average: bool = False,
    check: bool = True,
) -> dict[str, FullTensor]:
    """Return all weights of a checkpoint by name; they are read when indexed.

    `job` is the job that saved it, if it does not lie in the job directory (a link, as of a watch).

    With `average`, trained weights are their moving average. `check` hashes the frozen weights of
    an adapter: of several ranks, one does it for all. Raises InputError if the job keeps no
    average, or if the frozen weights of an adapter are not there, and DamagedError if they are
    others than at the time of the save.
    """
    job = job or JobDir(checkpoint.path.parents[1])
    cfg = load_job(job.root)
    own: dict[str, FullTensor] = {**checkpoint.stored(store.MODEL)}
    if average:
        own |= _averages(checkpoint)
    if checkpoint.manifest.base is None:
        return own
    assert isinstance(cfg.adapter, LoraConfig), "only an adapter has a base"
    base = base_weights(checkpoint, average=cfg.init.average, check=check)
    return merged(base, own, adapted_layers(cfg.adapter, architecture(job, cfg)))


def read_adapter(cfg: RunConfig, checkpoint: Checkpoint, *, average: bool = False) -> Adapter:
    """Return the adapter in a checkpoint of the job with the configuration `cfg`.

    With `average`, A and B are their moving averages. Raises ConfigError if the job trained no
    adapter, or one for the weights of another job, which only dtt can read.
    """
    base, source = checkpoint.manifest.base, cfg.init.source
    if base is None or source is None or not isinstance(cfg.adapter, LoraConfig):
        raise ConfigError(
            f"{checkpoint.path} has no adapter",
            why="its job trained all weights",
            next="omit --adapter to export the model",
        )
    if not source.startswith(HF):
        raise ConfigError(
            f"the adapter in {checkpoint.path} belongs to the weights of {source}",
            why="PEFT needs a Hugging Face model to apply an adapter to",
            next="omit --adapter to export the merged model",
        )
    hub_id = HUB_ID.fullmatch(source.removeprefix(HF))
    local = hub_id is None or Path(source.removeprefix(HF)).expanduser().is_dir()
    own: dict[str, FullTensor] = {**checkpoint.stored(store.MODEL)}
    if average:
        own |= _averages(checkpoint)
    arch = scaled(cfg, DataManifest.read(checkpoint.path.parents[1]).vocab_size).arch
    return Adapter(
        {name: tensor[()] for name, tensor in own.items()},
        adapted_layers(cfg.adapter, arch),
        base.folder if local or hub_id is None else hub_id["repo"],
        None if local or hub_id is None else hub_id["revision"],
        Path(base.folder),
        cfg.adapter.dropout,
    )


def base_weights(
    checkpoint: Checkpoint, *, average: bool, check: bool = True
) -> Mapping[str, FullTensor]:
    """Return the frozen weights below the adapter in `checkpoint`, by name; errors as above.

    `average` is `init.average` of its job: the adapter was trained on averaged weights.
    """
    reference = checkpoint.manifest.base
    assert reference is not None
    folder = Path(reference.folder)
    if not folder.is_dir():
        raise InputError(
            f"the frozen weights of {checkpoint.path} are missing",
            where=folder,
            why="the checkpoint of an adapter does not contain them",
            next="restore that folder, or put a link to it there",
        )
    if not (folder / "config.json").is_file():
        base = checkpoint.base() if check else Checkpoint(folder, CheckpointManifest.read(folder))
        assert base is not None
        return checkpoint_weights(base, average=average, check=check)
    if check and hf_reference(folder).sha256 != reference.sha256:
        raise DamagedError(
            f"the weights in {folder} are not those that {checkpoint.path} was trained on",
            next="restore the old ones from a backup",
        )
    return read_hf_folder(folder).state


def hf_reference(folder: Path) -> Reference:
    """Return a reference to the weights in a Hugging Face folder."""
    # Of their bytes: another model may have the same shapes, and its logits would be garbage.
    hashes = [sha256_file(file) for file in weight_files(folder)]
    return Reference(folder=str(folder.absolute()), sha256=fingerprint(hashes))


def _averages(checkpoint: Checkpoint) -> Mapping[str, FullTensor]:
    """Return the averages of the trained weights."""
    found = averages(checkpoint.stored(store.STATE))
    if not found:
        raise InputError(
            f"{checkpoint.path} has no moving average of the weights",
            why="the job was trained without train.ema_decay",
            next="use the weights themselves: omit --ema, or set init.average=false; "
            "train.ema_decay=0.999 in the next job keeps an average",
        )
    return found
