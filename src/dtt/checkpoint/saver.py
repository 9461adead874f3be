"""Saving while training goes on: copied off the device, then written by a thread.

All ranks write at once, each its pieces. The thread has a process group of its own, so what it says
to other ranks never mixes with training. One checkpoint is on its way at most.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtt.artifacts import FileRecord
from dtt.checkpoint import retain, store, tensors
from dtt.checkpoint.tensors import Piece
from dtt.config.train import CheckpointConfig
from dtt.errors import DiskFull, DttError, StorageError
from dtt.reading import SECONDS_BETWEEN_LOOKS_FOR_SPACE, retrying, waiting_for_space
from dtt.runtime.dist import World
from dtt.runtime.files import check_space, forget_cached
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log
from dtt.runtime.process import in_words

T = TypeVar("T")

SECONDS_TO_SETTLE = 120.0
NICENESS = 10
"""Of the writing thread: where cores are scarce, training comes first."""


@dataclass
class Save:
    """One checkpoint on its way: what is to be written, then what it took."""

    step: int
    pieces: dict[str, list[Piece]]
    """This rank's, by kind."""
    position: Mapping[str, Any]
    bytes: int
    """Of all ranks."""
    flush: Callable[[], None]
    """Makes durable what a run that goes on from here must find."""
    began: float = field(default_factory=time.perf_counter)
    """When training went on, by `time.perf_counter`."""
    ended: float = 0.0
    """When it was on the disk and verified."""
    blocked_seconds: float = 0.0
    """How long training stood still for it."""
    write_seconds: float = 0.0
    """From the first byte to the commit."""
    verify_seconds: float = 0.0
    """Reading all of it back."""

    def record(self) -> dict[str, Any]:
        """What it took, for the metrics."""
        numbers = ("step", "bytes", "blocked_seconds", "write_seconds", "verify_seconds")
        return {name: round(getattr(self, name), 4) for name in numbers}


class Saver:
    """Writes the checkpoints of one attempt."""

    def __init__(
        self,
        job: JobDir,
        attempt: int,
        world: World,
        config: CheckpointConfig,
        facts: Mapping[str, Any],
        stop_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`facts` go into every manifest: what the run is, not where it is.

        While it waits for space, it asks whether a stop is wanted, on any rank: then it gives up.
        """
        self._stop_wanted = stop_wanted
        self._diverged = job.diverged_after()
        self._job, self._attempt, self._world, self._config = job, attempt, world, config
        self._facts = {"attempt": attempt, "world_size": world.size, **facts}
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._done: list[Save] = []
        self._error: Exception | None = None

    def begin(
        self,
        step: int,
        shared: Mapping[str, Mapping[str, Tensor]],
        own: Mapping[str, Tensor],
        position: Mapping[str, Any],
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a copy and begin to write it; on return the tensors may change.

        `shared` tensors, by kind and name, are the same on every rank, or DTensors of which each
        has its part; `own` are this rank's, under names no other rank uses, and become part of the
        kind STATE. `flush` is called by the first rank, from the thread. Waits for the save before;
        raises what went wrong with that one.
        """
        started = time.perf_counter()
        self.wait()
        ranks = self._world
        pieces = {k: tensors.cut(named, ranks.rank, ranks.size) for k, named in shared.items()}
        whole = [Piece(n, t, (0,) * t.dim(), tuple(t.shape)) for n, t in own.items()]
        pieces.setdefault(store.STATE, []).extend(whole)
        size = sum(t.numel() * t.itemsize for named in shared.values() for t in named.values())
        save = Save(step, self._copied(pieces), position, size, flush)
        if self._config.asynchronous:
            self._thread = threading.Thread(
                target=self._run, args=(save,), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._run(save)
        save.blocked_seconds = time.perf_counter() - started

    @property
    def failed(self) -> bool:
        """Whether the last save went wrong; `wait` then raises it, on every rank the same."""
        return self._error is not None

    def wait(self) -> None:
        """Return when the last save is on the disk and verified; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """After a failure elsewhere: let a save on its way come to its end, if it still can."""
        if self._thread is not None:
            self._thread.join(timeout=SECONDS_TO_SETTLE)

    def finished(self) -> list[Save]:
        """The saves that have come to their good end since the last call."""
        done, self._done = self._done, []
        return done

    def _copied(self, pieces: Mapping[str, list[Piece]]) -> dict[str, list[Piece]]:
        """The pieces in host memory, apart from what training goes on to change."""
        on_gpu = self._world.device.type == "cuda"
        if not on_gpu and not self._config.asynchronous:
            return dict(pieces)
        copied = {k: [self._copy(k, piece, on_gpu) for piece in some] for k, some in pieces.items()}
        if on_gpu:
            torch.cuda.synchronize(self._world.device)
        return copied

    def _copy(self, kind: str, piece: Piece, pinned: bool) -> Piece:
        copy = self._copies.get((kind, piece.name))
        if copy is None or copy.shape != piece.tensor.shape:
            copy = torch.empty_like(
                piece.tensor, device="cpu", pin_memory=pinned, requires_grad=False
            )
            self._copies[kind, piece.name] = copy
        copy.copy_(piece.tensor.detach(), non_blocking=True)
        return Piece(piece.name, copy, piece.offset, piece.shape)

    def _run(self, save: Save) -> None:
        """Body of the thread: nothing may escape it, `wait` raises it elsewhere."""
        try:
            if self._config.asynchronous and sys.platform == "linux":  # there, of this thread alone
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            with waiting_for_space(None):  # here all ranks wait together, for all files anew
                full = self._write(save)
            if full is not None and self._world.first:
                log.warning("%s\n  the checkpoint of step %d waits for space", full, save.step)
            while full is not None:
                time.sleep(SECONDS_BETWEEN_LOOKS_FOR_SPACE)
                if any(self._world.exchange(self._stop_wanted())):
                    raise full
                with waiting_for_space(None):
                    full = self._write(save)
            save.ended = time.perf_counter()
            self._done.append(save)
        except Exception as error:  # noqa: BLE001  raised again by `wait`
            self._error = error

    def _write(self, save: Save) -> DiskFull | None:
        """Write, commit, verify, prune; or return that the disk is full and to be waited for."""
        folder, staging = self._job.checkpoints, self._staging(save)
        first, started = self._world.first, time.perf_counter()
        try:
            self._together(lambda: retrying(partial(self._prepare, save)) if first else None)
            written = self._together(lambda: self._write_files(save))
            files = [file for some in written for file in some]
            facts = {"step": save.step, **self._facts}
            self._together(lambda: store.commit(staging, files, **facts) if first else None)
        except DiskFull as error:
            if first:
                shutil.rmtree(staging, ignore_errors=True)
            if self._config.on_full == "stop":
                raise
            return error
        save.write_seconds = time.perf_counter() - started
        path = store.folder_of(folder, save.step)
        mine = written[self._world.rank]
        self._together(lambda: _verify_files(path, mine))
        save.verify_seconds = time.perf_counter() - started - save.write_seconds
        if first:
            self._prune()
            log.info("saved %s", path)
        return None

    def _staging(self, save: Save) -> Path:
        return self._job.checkpoints / store.staging_name(save.step, self._attempt)

    def _prepare(self, save: Save) -> None:
        save.flush()
        needed = save.bytes + 2**20
        check_space(self._job.checkpoints, needed, f"the checkpoint of step {save.step}")
        self._staging(save).mkdir(parents=True, exist_ok=True)

    def _write_files(self, save: Save) -> list[FileRecord]:
        """This rank's files, and the position if it is the first."""
        staging = self._staging(save)
        rank = self._world.rank
        files = [
            retrying(partial(tensors.write, staging / store.rank_file(kind, rank), pieces))
            for kind, pieces in save.pieces.items()
            if pieces
        ]
        if self._world.first:
            text = (json.dumps(save.position, indent=1) + "\n").encode()
            files.append(retrying(partial(tensors.write_bytes, staging / store.POSITION, [text])))
        return files

    def _together(self, action: Callable[[], T]) -> list[T]:
        """`action()` on every rank; all results, or the first failure, on all of them."""
        outcome: T | DttError
        try:
            outcome = action()
        except OSError as error:
            told = in_words(error)  # whatever it is, it is the disk's: a missing folder, too
            outcome = told if isinstance(told, StorageError) else StorageError(str(told))
        except DttError as error:
            outcome = error
        outcomes = self._world.exchange(outcome)
        failures = [failure for failure in outcomes if isinstance(failure, DttError)]
        if failures:
            raise failures[0]
        return [result for result in outcomes if not isinstance(result, DttError)]

    def _prune(self) -> None:
        try:
            retain.prune(self._job.checkpoints, self._config, self._diverged)
            retain.remove_rejected(self._job.checkpoints)
        except OSError as error:  # there is one too many: no reason to stop
            log.warning("an old checkpoint could not be deleted: %s", error)


def _verify_files(path: Path, files: list[FileRecord]) -> None:
    """Read back what this rank wrote; StorageError when the disk gives something else."""
    for record in files:
        retrying(partial(forget_cached, path / record.path))
        try:
            store.verify_file(path, record)
        except DttError as error:
            raise StorageError(
                "a checkpoint reads back otherwise than it was written",
                where=path,
                why=str(error),
                next="look at that disk; the checkpoint before is still there, the same command "
                "goes on from it",
            ) from None
