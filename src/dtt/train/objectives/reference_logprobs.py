"""The reference model of a loss: its log-probabilities are computed when a new job starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import ConfigError, InputError
from dtt.base.files import sha256_file
from dtt.base.log import log
from dtt.config.adapter import LoraConfig
from dtt.config.init import HF
from dtt.config.run import RunConfig
from dtt.hf.model_source import find_model

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.samples.loader import BatchReader
    from dtt.train.assemble import LaidOutModel
    from dtt.train.inputs import StartedRun


def check_initial_weights(cfg: RunConfig) -> None:
    """Raise ConfigError if a new job with preference pairs would start from random weights."""
    if cfg.objective.per_pair and cfg.init.source is None:
        raise ConfigError(
            f"objective.type={cfg.objective.type} needs the weights of a fine-tuned model",
            where="init.from",
            why="it is null, so the model would start from random weights",
            next="init.from=JOB, or init.from=hf:FOLDER",
        )


def named_reference(cfg: RunConfig) -> str | None:
    """Return the source of the reference model; None: the initial weights, or the loss has none."""
    objective = cfg.objective
    return getattr(objective, "reference", None) if objective.needs_reference else None


def check_reference(inputs: StartedRun) -> None:
    """Raise InputError on every rank if a job with a checkpoint lacks the log-probabilities.

    They are not computed again: `init.from` or `objective.reference` may refer to other weights by
    now, which would change the loss.
    """
    from dtt.train.objectives.reference_pass import is_complete

    world, folder = inputs.world, inputs.job.reference
    if not world.from_first(is_complete(folder, None) if world.first else False):
        raise InputError(
            "the log-probabilities of the reference model are missing or damaged",
            where=folder,
            why="they were computed before the first step",
            next="restore the folder from a copy, or start a new job",
        )


def write_reference(
    inputs: StartedRun,
    laid_out: LaidOutModel,
    reader: BatchReader,
    source: str,
    checkpoint: Checkpoint | None,
) -> None:
    """Write the log-probabilities of the current weights, unless they are complete; collective.

    The weights came from `source`, in the form of `init.from`: from `checkpoint`, or, if it is
    None, from a Hugging Face folder.
    """
    from dtt.train.objectives.reference_pass import ReferencePass, is_complete
    from dtt.train.step import Passes

    cfg, world, folder = inputs.cfg, inputs.world, inputs.job.reference
    key = world.from_first(_key(inputs, source, checkpoint) if world.first else "")
    if world.from_first(is_complete(folder, key) if world.first else False):
        log.info("the log-probabilities of the reference model are in %s", folder)
        return
    log.info("computing the log-probabilities of the reference model, %s", source)
    passes = Passes(laid_out.module, inputs.plan.precision)
    reference = ReferencePass(passes, reader, laid_out.mesh, world)
    reference.write(inputs.dataset, folder, key, cfg.train.seq_len)


def _key(inputs: StartedRun, source: str, checkpoint: Checkpoint | None) -> str:
    """Return the hash of everything that determines the log-probabilities."""
    from dtt.hf.peft import TENSORS

    cfg = inputs.cfg
    if checkpoint is None:
        files = sorted(find_model(source.removeprefix(HF)).glob("*.safetensors"))
    else:
        files = [checkpoint.path / CheckpointManifest.filename]
    # Part of the reference only if that is the initial model.
    if cfg.init.adapter is not None and named_reference(cfg) is None:
        files.append(cfg.init.adapter / TENSORS)
    return fingerprint(
        {
            "weights": [sha256_file(path) for path in files],
            "average": cfg.init.average,
            "data": inputs.dataset.manifest.key,
            "seq_len": cfg.train.seq_len,
            "too_long": cfg.chat.too_long,
            "precision": inputs.plan.precision,
            **({"base": cfg.adapter.base} if isinstance(cfg.adapter, LoraConfig) else {}),
        }
    )
