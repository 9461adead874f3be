"""Adapters in training: the frozen weights below them, and adapters of others to train on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dtt.artifacts.manifests import Reference
from dtt.base import host_memory
from dtt.base.log import log
from dtt.checkpoint import retention
from dtt.checkpoint.store import Checkpoint
from dtt.config.adapter import LoraConfig
from dtt.config.init import HF
from dtt.hf.model_source import find_model
from dtt.hf.peft import read_peft
from dtt.hf.read import read_hf_folder
from dtt.hf.read_checkpoint import base_weights, hf_reference
from dtt.hf.verify import check_adapter
from dtt.mesh.dist import World
from dtt.mesh.sharding import fill
from dtt.model import count
from dtt.model.adapted_layers import adapted_layers
from dtt.model.contract import Model
from dtt.model.lora import merged
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
        if not (Path(reference.folder) / "config.json").is_file():  # no Hugging Face model
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
