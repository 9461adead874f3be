"""The forward pass of the reference model of DPO over all preference pairs, once per job.

    reference/train-00000.f32        see data/samples/reference.py
              train-00000.f32.json   number of rows that are on disk, and their hash
              manifest.json          written last

All ranks compute; rank 0 writes. A process that was killed continues after the rows whose hash is
on record, with any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifest import FileRecord, fingerprint
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import DttError, InputError
from dtt.base.files import check_space, has_sha256, named, sha256_file, write_atomically
from dtt.base.log import log, progress
from dtt.base.reading import Kind, read_record
from dtt.checkpoint.store import Checkpoint
from dtt.config.adapter import LoraConfig
from dtt.config.init import HF
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.loader import BatchReader
from dtt.data.samples.protocol import SampleNumbers, SampleSource
from dtt.data.samples.reference import DTYPE, ReferenceManifest, reference_files
from dtt.evaluate.validation import evaluating
from dtt.hf.model_source import find_model
from dtt.mesh.dist import World
from dtt.mesh.mesh import DATA, Mesh
from dtt.train.objects import StartedRun, named_reference
from dtt.train.step import TOKEN_LOSSES, Passes
from dtt.train.trained_model import LaidOutModel

SECONDS_BETWEEN_RECORDS = 30.0
"""Time between two records of the rows that are on disk; a process that is killed loses less."""
RECORD: dict[str, Kind] = {"key": str, "rows": int, "sha256": str}
PART_BYTES = 2**24

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

        `key` identifies the model, the data and the precision; rows with a different key are
        overwritten.
        """
        files, first = dict(reference_files(dataset)), self.world.first
        total = sum(map(len, files.values()))
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            needed = total * seq_len * DTYPE.itemsize
            check_space(folder, needed, "the log-probabilities of the reference model")
        records = []
        with progress("reference model", total, "", shown=first) as advance:
            for name, source in files.items():
                file = _RowsFile(folder / name, key, seq_len) if first else None
                done = self.world.from_first(0 if file is None else file.rows)
                advance(done)
                for rows in self._rows(source, done):
                    advance(len(rows))
                    if file is not None:
                        file.append(rows)
                if file is not None:
                    records.append(file.close())
        if first:
            manifest = ReferenceManifest(key=key, files=tuple(records))
            write_atomically(folder / manifest.filename, manifest.dump())
        self.world.barrier()

    def _rows(self, source: SampleSource, first: int) -> Iterator[Float32]:
        """Yield the values of all samples from `first` on, in order, on every rank: [n, S]."""
        reader = self.reader
        with evaluating(self.passes.module):
            for start in range(first, len(source), reader.size * reader.micro_batch):
                stop = min(start + reader.size * reader.micro_batch, len(source))
                values = self._logprobs(source, np.arange(start, stop, dtype=np.uint64))
                rows = np.empty((stop - start, values.shape[1]), dtype=DTYPE)
                # Only from ranks with other samples: those that share samples have equal values.
                for rank, part in enumerate(self.mesh.gather(values, DATA)):
                    mine = rows[rank :: reader.size]
                    mine[:] = part[: len(mine)]  # a rank without samples computed a dummy one
                yield rows

    def _logprobs(self, source: SampleSource, samples: SampleNumbers) -> Float32:
        """Return the values of this rank's part of `samples`, at most one micro-batch: [n, S]."""
        (micro_batch,) = self.reader.read_on_all(source, samples)
        losses = self.passes.evaluate(micro_batch, TOKEN_LOSSES).loss
        return np.asarray((0.0 - losses).float().cpu().numpy(), dtype=DTYPE)


class _RowsFile:
    """A file to which rows are appended, with a record of those that are on disk."""

    def __init__(self, path: Path, key: str, seq_len: int) -> None:
        """Open the file after the rows on record, if they are of the same key and undamaged."""
        self._path, self._key, self._row_bytes = path, key, seq_len * DTYPE.itemsize
        self._record = path.with_name(f"{path.name}.json")
        self.rows, self._hash = self._recorded()
        """Number of rows in the file."""
        self._file = path.open("r+b" if self.rows else "wb")
        self._file.truncate(self.rows * self._row_bytes)
        self._file.seek(0, os.SEEK_END)
        self._recorded_at = time.monotonic()

    def _recorded(self) -> tuple[int, hashlib._Hash]:
        nothing = 0, hashlib.sha256()
        record = read_record(self._record, RECORD)
        if record is None or record["key"] != self._key or not self._path.is_file():
            return nothing
        digest, missing = hashlib.sha256(), record["rows"] * self._row_bytes
        with self._path.open("rb") as file:
            while missing > 0 and (part := file.read(min(missing, PART_BYTES))):
                digest.update(part)
                missing -= len(part)
        return (record["rows"], digest) if digest.hexdigest() == record["sha256"] else nothing

    def append(self, rows: Float32) -> None:
        """Write rows, and record them if the last record is old."""
        content = rows.tobytes()
        with named(self._path):
            self._file.write(content)
        self._hash.update(content)
        self.rows += len(rows)
        if time.monotonic() - self._recorded_at >= SECONDS_BETWEEN_RECORDS:
            self._write_record()

    def _write_record(self) -> None:
        with named(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        record = {"key": self._key, "rows": self.rows, "sha256": self._hash.hexdigest()}
        write_atomically(self._record, json.dumps(record) + "\n")
        self._recorded_at = time.monotonic()

    def close(self) -> FileRecord:
        """Record all rows, close the file, and return its entry in the manifest."""
        self._write_record()
        self._file.close()
        size = self.rows * self._row_bytes
        return FileRecord(path=self._path.name, bytes=size, sha256=self._hash.hexdigest())


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
