"""Asynchronous checkpointing: tensors are copied to the host, then written by a thread.

All ranks write in parallel, each its own shards. The thread uses its own process group, so its
collectives never interleave with those of training. At most one save is in progress.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import Reference
from dtt.base.errors import DiskFull, DttError, PeerLost, StorageError
from dtt.base.files import check_space, forget_cached, remove
from dtt.base.log import log
from dtt.base.reading import retrying
from dtt.checkpoint import retention, store, tensors
from dtt.checkpoint.mirror import SECONDS_AT_END, SECONDS_AT_STOP, Mirror
from dtt.checkpoint.tensors import TensorShard
from dtt.config.train import CheckpointConfig
from dtt.mesh.dist import World
from dtt.mesh.process import in_words
from dtt.mesh.sharding import LaidOut

T = TypeVar("T")

SECONDS_TO_SETTLE = 120.0
DOING = "saved a checkpoint"
NICENESS = 10
"""Nice value of the writing thread, so that training has priority when cores are scarce."""


@dataclass
class Save:
    """A checkpoint being saved: its content, then the time it took."""

    step: int
    shards: dict[str, list[TensorShard]]
    """Shards that this rank writes, by kind."""
    position: Mapping[str, Any]
    bytes: int
    """Bytes of the tensors that all ranks save together."""
    flush: Callable[[], None]
    """Function that flushes to disk everything else that a resume from this checkpoint needs."""
    base: Reference | None = None
    blocked_seconds: float = 0.0
    """Seconds for which training was blocked."""
    write_seconds: float = 0.0
    """Seconds from the first byte to the commit."""
    verify_seconds: float = 0.0
    """Seconds for reading all files back."""

    def record(self) -> dict[str, Any]:
        """Return the size and the durations, for the metrics."""
        numbers = ("step", "bytes", "blocked_seconds", "write_seconds", "verify_seconds")
        return {name: round(getattr(self, name), 4) for name in numbers}


class Saver:
    """Asynchronous writer of the checkpoints of one attempt."""

    def __init__(
        self,
        job: JobDir,
        attempt: int,
        world: World,
        config: CheckpointConfig,
        facts: Mapping[str, Any],
        stop_wanted: Callable[[], bool] = lambda: False,
        mirror: Mirror | None = None,
    ) -> None:
        """Prepare to save to `job`; `facts` identify the run and go into every manifest.

        `mirror` gets each verified checkpoint, on rank 0.
        After `stop_wanted`, which asks no other rank, it waits less for the mirror.
        """
        self._stop_wanted, self.mirror = stop_wanted, mirror
        self._diverged = job.diverged_after()
        self.losses = retention.eval_losses(job) if config.keep_best and world.first else {}
        """Validation losses by step, which decide which checkpoints are kept."""
        self._job, self._attempt, self._world, self._config = job, attempt, world, config
        self._facts = {"attempt": attempt, "world_size": world.size, **facts}
        # Kept between saves: allocating pinned memory is slow. They cost host memory of the size of
        # this rank's part.
        self._host_copies: dict[tuple[str, str], Tensor] = {}
        self._allocating: threading.Thread | None = None
        self._save_is_due = threading.Event()
        self._thread: threading.Thread | None = None
        self._done: list[Save] = []
        self._error: Exception | None = None

    def allocate(self, params: Mapping[str, LaidOut], state: Mapping[str, LaidOut]) -> None:
        """Allocate the host memory of the saves in a thread, from the first call on.

        Pinning 6.5 GB takes 5 s, for which the first save would block training.
        """
        if self._allocating is not None or not self._copies:
            return
        shards = self._cut(params, state)

        def allocate() -> None:
            for kind, some in shards.items():
                for shard in some:
                    if self._save_is_due.is_set():
                        return  # the save allocates what is left itself, and raises its errors
                    try:
                        self._host_copy(kind, shard)
                    except RuntimeError as error:
                        log.info("no host memory ahead of the first save: %s", error)
                        return

        self._allocating = threading.Thread(target=allocate, name="pinning", daemon=True)
        self._allocating.start()

    def begin(
        self,
        step: int,
        params: Mapping[str, LaidOut],
        state: Mapping[str, LaidOut],
        position: Mapping[str, Any],
        flush: Callable[[], None] = lambda: None,
        base: Reference | None = None,
    ) -> None:
        """Copy the tensors and start to write them; on return the tensors may change.

        `params` and `state` are what this rank holds, by name. `base` is the checkpoint with the
        parameters that no rank saves here. Rank 0 calls `flush`, from the writing thread. Waits for
        the previous save first, and raises its error if it failed.
        """
        started = time.perf_counter()
        # At most one save in flight: the host copies below are reused, and two saves would need
        # twice the memory.
        self.wait()
        self._save_is_due.set()
        if self._allocating is not None:
            self._allocating.join()
        shards = self._cut(params, state)
        own = [shard.tensor for shard in chain(*shards.values())]
        size = sum(tensor.numel() * tensor.itemsize for tensor in own)
        save = Save(step, self._copied(shards), position, size, flush, base)
        if self._config.asynchronous:
            # A daemon, because a process that must end does not wait for a slow disk; an unfinished
            # folder is no checkpoint.
            self._thread = threading.Thread(
                target=self._run, args=(save,), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._run(save)
        save.blocked_seconds = time.perf_counter() - started

    @property
    def failed(self) -> bool:
        """True if the last save failed; `wait` then raises the same error on every rank."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until the last save is on the disk and verified; raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish_mirror(self, *, ended: bool) -> None:
        """Wait for the mirror's uploads, on all ranks together; less if the run has not `ended`."""
        if self.mirror is not None:
            seconds = SECONDS_AT_END if ended else SECONDS_AT_STOP
            self.mirror.finish(seconds, self._stop_wanted)
        if self._config.mirror is not None:
            # The other ranks wait here: some launchers end all ranks soon after the first that
            # ends.
            self._world.exchange(None)

    def close(self) -> None:
        """Wait up to SECONDS_TO_SETTLE for a save in progress; call after a failure elsewhere."""
        self._save_is_due.set()
        if self._thread is not None:
            self._thread.join(timeout=SECONDS_TO_SETTLE)
        if self.mirror is not None:
            self.mirror.finish(SECONDS_AT_STOP)

    def finished(self) -> list[Save]:
        """Return the saves that completed successfully since the last call."""
        done, self._done = self._done, []
        return done

    def _cut(
        self, params: Mapping[str, LaidOut], state: Mapping[str, LaidOut]
    ) -> dict[str, list[TensorShard]]:
        """Return the shards that this rank writes, by kind."""
        # For replicated tensors `cut` divides the work, so that no byte is written twice.
        named = {store.MODEL: params, store.STATE: state}
        return {kind: tensors.cut(held, self._world.rank) for kind, held in named.items()}

    @property
    def _copies(self) -> bool:
        """True if saves copy tensors to host memory."""
        return self._world.device.type == "cuda" or self._config.asynchronous

    def _copied(self, shards: dict[str, list[TensorShard]]) -> dict[str, list[TensorShard]]:
        """Copy the shards to host memory, so that training may change the originals.

        Returns the shards themselves if they are on the CPU and the save is synchronous.
        """
        if not self._copies:
            return shards
        copied: dict[str, list[TensorShard]] = {kind: [] for kind in shards}
        for kind, some in shards.items():
            for shard in some:
                copy = self._host_copy(kind, shard)
                copy.copy_(shard.tensor.detach(), non_blocking=True)
                copied[kind].append(replace(shard, tensor=copy))
        # The copies above are asynchronous on the stream; afterwards the step may overwrite the
        # tensors.
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return copied

    def _host_copy(self, kind: str, shard: TensorShard) -> Tensor:
        copy = self._host_copies.get((kind, shard.name))
        if copy is None or copy.shape != shard.tensor.shape:
            # pin_memory lets the GPU copy without the CPU, at the full speed of the link.
            pinned = self._world.device.type == "cuda"
            copy = torch.empty_like(
                shard.tensor, device="cpu", pin_memory=pinned, requires_grad=False
            )
            self._host_copies[kind, shard.name] = copy
        return copy

    def _run(self, save: Save) -> None:
        """Run a save in the thread. Errors are stored for `wait`, which raises them."""
        try:
            # Only on Linux does a priority apply to a single thread.
            if self._config.asynchronous and sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            # Rank 0 checks the free space for the whole checkpoint, of which a pipeline stage knows
            # only a part.
            save.bytes = sum(self._world.exchange(save.bytes))
            self._write(save)
            self._done.append(save)
        except Exception as error:  # noqa: BLE001  raised again by `wait`
            self._error = error

    def _write(self, save: Save) -> None:
        """Write, commit, verify and prune."""
        folder, staging = self._job.checkpoints, self._staging(save)
        # Each `on_all` is a collective of the background group. All ranks pass them in the same
        # order, whatever fails.
        world, started = self._world, time.perf_counter()
        first = world.first
        try:
            # Rank 0 creates the folder and checks the space before any rank writes.
            prepare = partial(self._prepare, save)
            on_all(world, lambda: retrying(prepare) if first else None, DOING)
            written = on_all(world, lambda: self._write_files(save), DOING)
            files = [file for some in written for file in some]
            facts = {"step": save.step, "base": save.base, **self._facts}
            # After all ranks have flushed their files: the manifest is what makes the folder a
            # checkpoint.
            on_all(world, lambda: store.commit(staging, files, **facts) if first else None, DOING)
        except DiskFull:
            if first:  # the files of all ranks, which would keep the disk full
                shutil.rmtree(staging, ignore_errors=True)
            raise
        save.write_seconds = time.perf_counter() - started
        path = store.folder_of(folder, save.step)
        # Each rank reads back what it wrote: the work is divided, and a node's broken disk is found
        # on that node.
        files = written[world.rank]
        on_all(world, lambda: _verify_files(path, files), DOING)
        save.verify_seconds = time.perf_counter() - started - save.write_seconds
        # Only after verification: until then the older checkpoint is the one to resume from.
        if first:
            if self.mirror is not None:
                self.mirror.add(save.step)
            self._prune()
            log.info("saved %s", path)

    def _staging(self, save: Save) -> Path:
        return self._job.checkpoints / store.staging_name(save.step, self._attempt)

    def _prepare(self, save: Save) -> None:
        save.flush()
        # A megabyte for headers, manifest and position.
        needed = save.bytes + 2**20
        check_space(self._job.checkpoints, needed, f"the checkpoint of step {save.step}")
        self._staging(save).mkdir(parents=True, exist_ok=True)

    def _write_files(self, save: Save) -> list[FileRecord]:
        """Write the files of this rank and, on rank 0, the position; return their records."""
        staging = self._staging(save)
        rank = self._world.rank
        files = [
            retrying(partial(tensors.write, staging / store.rank_file(kind, rank), shards))
            for kind, shards in save.shards.items()
            if shards
        ]
        if self._world.first:
            # Written by rank 0 alone: the position is the same on all ranks, as `check_ranks` has
            # found.
            text = (json.dumps(save.position, indent=1) + "\n").encode()
            files.append(retrying(partial(tensors.write_bytes, staging / store.POSITION, [text])))
        return files

    def _prune(self) -> None:
        try:
            also = set() if self.mirror is None else self.mirror.needed
            retention.prune(self._job.checkpoints, self._config, self._diverged, self.losses, also)
            # Those that the commit set aside: what replaces them has been verified now.
            rejected = f"{store.STAGING_PREFIX}*{store.REJECTED_SUFFIX}"
            for path in self._job.checkpoints.glob(rejected):
                remove(path)
        except OSError as error:  # a failure to delete an old checkpoint should not stop training
            log.warning("an old checkpoint could not be deleted: %s", error)


def on_all(world: World, action: Callable[[], T], doing: str) -> list[T]:
    """Run `action` on every rank, and return the results of all ranks.

    If it fails on any rank, every rank raises an error. OSErrors become StorageErrors. A rank
    whose action fails with a bug raises that; the others raise PeerLost, which says what it was
    `doing`. The exchange is in the group of checkpoints, which may wait for hours: a rank's disk
    may be slow.
    """
    result: T | None = None
    failure: DttError | None = None
    bug: Exception | None = None
    try:
        result = action()
    except OSError as error:
        words = in_words(error)  # every OSError here is a storage failure
        failure = words if isinstance(words, StorageError) else StorageError(str(words))
    except DttError as error:
        failure = error
    # A bug must reach the exchange below as well: the other ranks wait there, and would hang
    # until its timeout, which is hours. It is sent as text, because not every exception can be
    # pickled.
    except Exception as error:  # noqa: BLE001  raised again after the exchange
        failure = PeerLost(
            f"rank {world.rank} failed while it {doing}", why=f"{type(error).__name__}: {error}"
        )
        bug = error
    outcomes = world.exchange((result, failure))
    if bug is not None:
        raise bug
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [done for done, _ in outcomes]  # type: ignore[misc]  # no rank failed


def _verify_files(path: Path, files: list[FileRecord]) -> None:
    """Read back the files of this rank; raise StorageError if they differ from what was written."""
    for record in files:
        # Otherwise the page cache would answer, and a disk that lost the data would pass.
        retrying(partial(forget_cached, path / record.path))
        try:
            store.verify_file(path, record)
        except DttError as error:
            raise StorageError(
                "read-back verification of a checkpoint failed",
                where=path,
                why=str(error),
                next="inspect that disk; the same command resumes from the checkpoint before",
            ) from None
