"""The forward pass of the reference model of DPO over all preference pairs, once per job.

    reference/train-00000.f32        see data/samples/reference.py
              manifest.json          written last

All ranks compute; rank 0 writes. A process that was killed before the manifest starts over: the
pass takes less time than a third of an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifest import FileRecord, fingerprint
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import DttError, InputError
from dtt.base.files import check_space, has_sha256, replacing, sha256_file, write_atomically
from dtt.base.log import log, progress
from dtt.checkpoint.store import Checkpoint
from dtt.config.adapter import LoraConfig
from dtt.config.init import HF
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.loader import BatchReader
from dtt.data.samples.protocol import SampleSource
from dtt.data.samples.reference import DTYPE, ReferenceManifest, reference_files
from dtt.evaluate.validation import evaluating
from dtt.hf.model_source import find_model
from dtt.mesh.dist import World
from dtt.mesh.mesh import DATA, Mesh
from dtt.train.assemble import LaidOutModel
from dtt.train.inputs import StartedRun, named_reference
from dtt.train.step import TOKEN_LOSSES, Passes

Float32 = npt.NDArray[np.float32]


def is_complete(folder: Path, key: str | None) -> bool:
    """Return True if `folder` holds all files with their recorded hashes.

    `key` is that of the manifest; None accepts any.
    """
    try:
        manifest = ReferenceManifest.read(folder)
    except DttError:
        return False
    return key in (None, manifest.key) and all(
        has_sha256(folder / file.path, file.sha256) for file in manifest.files
    )


@dataclass(frozen=True)
class ReferencePass:
    """The pass of the reference model over the samples of a run; every rank has one."""

    passes: Passes
    """The passes of the module with the weights of the reference model."""
    reader: BatchReader
    mesh: Mesh
    world: World

    def write(self, dataset: Dataset, folder: Path, key: str, seq_len: int) -> None:
        """Write the log-probabilities of all targets of `dataset` into `folder`; collective.

        `key` identifies the model, the data and the precision.
        """
        files, first = dict(reference_files(dataset)), self.world.first
        total = sum(map(len, files.values()))
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ReferenceManifest.filename).unlink(missing_ok=True)
            needed = total * seq_len * DTYPE.itemsize
            check_space(folder, needed, "the log-probabilities of the reference model")
        records = []
        with progress("reference model", total, "", shown=first) as advance:
            for name, source in files.items():
                digest = hashlib.sha256()
                with replacing(folder / name) if first else nullcontext() as file:
                    for rows in self._rows(source):
                        advance(len(rows))
                        content = rows.tobytes()
                        digest.update(content)
                        if file is not None:
                            file.write(content)
                size = len(source) * seq_len * DTYPE.itemsize
                records.append(FileRecord(path=name, bytes=size, sha256=digest.hexdigest()))
        if first:
            manifest = ReferenceManifest(key=key, files=tuple(records))
            write_atomically(folder / manifest.filename, manifest.dump())
        self.world.barrier()

    def _rows(self, source: SampleSource) -> Iterator[Float32]:
        """Yield the values of all samples, in order, on every rank: [n, S]."""
        reader = self.reader
        with evaluating(self.passes.module):
            for start in range(0, len(source), reader.size * reader.micro_batch):
                stop = min(start + reader.size * reader.micro_batch, len(source))
                samples = np.arange(start, stop, dtype=np.uint64)
                (micro_batch,) = reader.read_on_all(source, samples)
                losses = self.passes.evaluate(micro_batch, TOKEN_LOSSES).loss
                values = np.asarray((0.0 - losses).float().cpu().numpy(), dtype=DTYPE)
                rows = np.empty((stop - start, values.shape[1]), dtype=DTYPE)
                # Only from ranks with other samples: those that share samples have equal values.
                for rank, part in enumerate(self.mesh.gather(values, DATA)):
                    mine = rows[rank :: reader.size]
                    mine[:] = part[: len(mine)]  # a rank without samples computed a dummy one
                yield rows


def check_reference(inputs: StartedRun) -> None:
    """Raise InputError on every rank if a job with a checkpoint lacks the log-probabilities.

    They are not computed again: `init.from` or `objective.reference` may refer to other weights by
    now, which would change the loss.
    """
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
    cfg = inputs.cfg
    if checkpoint is None:
        files = sorted(find_model(source.removeprefix(HF)).glob("*.safetensors"))
    else:
        files = [checkpoint.path / CheckpointManifest.filename]
    # Part of the reference only if that is the initial model.
    if cfg.init.adapter is not None and named_reference(cfg) is None:
        from dtt.hf.peft import TENSORS

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
