"""Frozen models that an objective holds, such as a teacher: sharded as the model of the run is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest, Reference
from dtt.base.errors import DamagedError, InputError
from dtt.base.log import log
from dtt.checkpoint import retention, store
from dtt.checkpoint.store import Checkpoint
from dtt.hf.model_source import find_folder
from dtt.hf.read import read_hf_folder
from dtt.hf.read_checkpoint import architecture, checkpoint_weights, hf_reference
from dtt.mesh.mesh import Mesh
from dtt.mesh.sharding import FullTensor
from dtt.model.architecture import AnyArchitecture
from dtt.model.contract import Model
from dtt.model.decoder import make_model
from dtt.parallel.apply import allocate_shards, shard_frozen
from dtt.train.assemble import allocate
from dtt.train.inputs import StartedRun
from dtt.train.warm_start import take_base


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
