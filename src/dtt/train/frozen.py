"""Frozen weights of others: those below an adapter, and the models that an objective holds.

Checkpoints contain neither, but a `Reference` to them. Also adapters of others to train on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest, Reference
from dtt.base import host_memory
from dtt.base.errors import DamagedError, InputError
from dtt.base.log import log
from dtt.checkpoint import retention, store
from dtt.checkpoint.store import Checkpoint
from dtt.config.adapter import LoraConfig
from dtt.config.init import HF
from dtt.hf.model_source import find_folder, find_model
from dtt.hf.peft import read_peft
from dtt.hf.read import read_hf_folder
from dtt.hf.read_checkpoint import architecture, base_weights, checkpoint_weights, hf_reference
from dtt.hf.verify import check_adapter
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.mesh.sharding import FullTensor, fill
from dtt.model import count
from dtt.model.adapted_layers import adapted_layers
from dtt.model.architecture import AnyArchitecture
from dtt.model.contract import Model
from dtt.model.decoder import make_model
from dtt.model.lora import merged
from dtt.parallel.apply import allocate, allocate_shards, shard_frozen
from dtt.train.objects import StartedRun
from dtt.train.warm_start import take_base


def restore_base(resume: Checkpoint, model: Model, world: World, *, average: bool) -> Reference:
    """Load the frozen weights below the adapter in `resume`; return the reference to them.

    `average` is `init.average`. Raises InputError if they are missing, and DamagedError if they
    have changed.
    """
    reference = resume.manifest.base
    assert reference is not None, "the configuration of a job keeps its adapter"
    # Rank 0 hashes the weights for all: they may have hundreds of gigabytes.
    if world.first:
        base_weights(resume, average=average)
        if not _is_hf(Path(reference.folder)):
            retention.note_dependent(Path(reference.folder), resume.path.parents[1])
    world.barrier()
    # Not from `init.from`: it may name the newest checkpoint of a job, which is another one by now.
    weights = base_weights(resume, average=average, check=False)
    log.info("%s", take_base(model, weights, reference.folder))
    return reference


def base_reference(
    source: str | None, checkpoint: Checkpoint | None, world: World, job: Path
) -> Reference:
    """Return the reference of `job` to the weights of `source`, the same on all ranks.

    They came from `checkpoint`, whose retention then keeps it, or, if it is None, from a Hugging
    Face folder.
    """
    assert source is not None, "the configuration was checked"
    if checkpoint is not None:
        if world.first:
            retention.note_dependent(checkpoint.path, job)
        return checkpoint.reference()
    folder = find_model(source.removeprefix(HF)) if world.first else None
    found = world.from_first(None if folder is None else hf_reference(folder))
    assert found is not None
    return found


def load_adapter(folder: Path, model: Model, cfg: LoraConfig, source: str, world: World) -> None:
    """Load the adapter in a folder of PEFT; ConfigError unless it has the settings of `cfg`.

    `source` has the frozen weights. Rank 0 compares the logits with those of PEFT, as those of
    released weights are compared with transformers: if the host has memory for one more fp32 model.
    """
    state = read_peft(folder, model.arch, cfg)
    parameters = dict(model.named_parameters())
    for name, tensor in state.items():
        if model.holds(name):
            fill(parameters[name], tensor)
    log.info("adapter from %s: %d layers", folder, len(state) // 2)
    if not world.first or not source.startswith(HF):
        return
    if 4 * count.parameters(model.arch) > host_memory.free():
        log.warning("skipped comparing the logits of %s with PEFT: not enough memory", folder)
        return
    base = find_model(source.removeprefix(HF))
    trained = read_hf_folder(base)
    weights = merged(trained.state, state, adapted_layers(cfg, model.arch))
    whole = {name: tensor[()] for name, tensor in weights.items()}
    difference = check_adapter(folder, base, replace(trained, state=whole))
    log.info("the logits of %s differ from those of PEFT by %.1e", folder, difference)


def load_frozen(source: str, inputs: StartedRun, mesh: Mesh) -> Model:
    """Return the model that `source` names, in the compute dtype; all ranks call this together.

    A run that resumes takes the weights with which it began, whose reference `inputs.models`
    keeps for the next checkpoint: `source` may name the newest checkpoint of a job, which is
    another one by now. Raises InputError if they are missing, DamagedError if they have changed.
    """
    world, resume = inputs.world, inputs.resume
    known = None if resume is None else resume.manifest.models.get(source)
    # Rank 0 hashes the weights for all: they may have hundreds of gigabytes.
    reference = world.on_first(lambda: _reference(source, known, inputs.job.root))
    inputs.models[source] = reference
    arch, weights = _weights(Path(reference.folder))
    model = make_model(arch, dtype=inputs.plan.precision.compute_dtype)
    model.requires_grad_(requires_grad=False)
    if mesh.sharded:
        shard_frozen(model, mesh)
        allocate_shards(model, world.device)
    else:
        allocate(model, world.device)
    log.info("%s", take_base(model, weights, source))
    return model.eval()


def _reference(source: str, known: Reference | None, job: Path) -> Reference:
    """Return the reference to the weights of `source`, or `known` if they are unchanged."""
    if known is not None and not Path(known.folder).is_dir():
        raise InputError(
            f"the weights of {source} with which the run began are missing",
            where=known.folder,
            why="no checkpoint contains a frozen model",
            next="restore that folder, or put a link to it there",
        )
    folder = find_folder(source) if known is None else Path(known.folder)
    if folder is not None and _is_hf(folder):
        found = hf_reference(folder)
    else:
        checkpoint = store.find(source) if folder is None else store.verify(folder)
        found = checkpoint.reference()
        # Otherwise the retention of its job may delete it while this one trains.
        retention.note_dependent(checkpoint.path, job)
    if known is not None and found.sha256 != known.sha256:
        raise DamagedError(
            f"the weights in {known.folder} are not those of {source} when the run began",
            next="restore the old ones from a backup, or start a new job",
        )
    return found


def _weights(folder: Path) -> tuple[AnyArchitecture, Mapping[str, FullTensor]]:
    """Return the model in a checkpoint, whose tensors are read when indexed, or in an HF folder."""
    if _is_hf(folder):
        trained = read_hf_folder(folder)
        return trained.arch, trained.state
    checkpoint = Checkpoint(folder, CheckpointManifest.read(folder))
    return architecture(JobDir(folder.parents[1])), checkpoint_weights(checkpoint, check=False)


def _is_hf(folder: Path) -> bool:
    return (folder / "config.json").is_file()
