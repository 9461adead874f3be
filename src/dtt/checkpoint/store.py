"""Checkpoints on disk: committed atomically, found by scanning, verified before use.

    .tmp-step-000500-<attempt>/   being written
    step-000500/                  committed: MANIFEST.json was written last, then the folder renamed

Tensors are stored in safetensors files, everything else in JSON, so loading a checkpoint cannot
execute code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import CheckpointManifest, Reference
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import fsync_file, fsync_folder, sha256_file, write_atomically
from dtt.base.log import log
from dtt.base.reading import read_json, retrying
from dtt.base.safe_names import checked_file
from dtt.checkpoint import header

if TYPE_CHECKING:  # keeps torch out of `dtt ckpt ls`
    from torch import Tensor

    from dtt.checkpoint.tensors import Stored

MODEL, STATE = "model", "state"
"""Kinds of tensor files: model weights; optimizer state and random number generators."""
POSITION = "position.json"
HASHED_AT_ONCE = 8
"""Number of files hashed in parallel.

One core hashes 1 to 2 GB/s, which is slower than a file server delivers."""
PREFIX, STAGING_PREFIX, SUPERSEDED_PREFIX = "step-", ".tmp-step-", "superseded-step-"
REJECTED_SUFFIX = "-rejected"


Headers = dict[str, list[header.HeaderEntry]]
"""The entries of the headers of tensor files, by the names of the files."""


def rank_file(kind: str, rank: int) -> str:
    """Return the name of the file with the shards that `rank` writes."""
    return f"{kind}-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint folder and its manifest."""

    path: Path
    manifest: CheckpointManifest
    headers: Headers = field(default_factory=dict, compare=False, repr=False)
    """The headers of tensor files that need not be read again."""

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.manifest.step

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Read all tensors of a kind to the CPU, unsharded; by parameter name for MODEL."""
        return {name: stored[()] for name, stored in self.stored(kind).items()}

    def stored(self, kind: str) -> dict[str, Stored]:
        """Return the tensors of a kind as `Stored` objects, which read only what is indexed."""
        from dtt.checkpoint import tensors

        return tensors.read(self.files(kind), self.headers)

    def reference(self) -> Reference:
        """Return a reference to this checkpoint, for the manifest of one that builds on it."""
        digest = sha256_file(self.path / self.manifest.filename)
        return Reference(folder=str(self.path.absolute()), sha256=digest)

    def base(self) -> Checkpoint | None:
        """Return the checkpoint that this one builds on, verified; None if it is complete.

        Raises DamagedError if it is another one than at the time of the save.
        """
        if (reference := self.manifest.base) is None:
            return None
        base = verify(Path(reference.folder))
        if base.reference().sha256 != reference.sha256:
            raise DamagedError(
                f"checkpoint {self.path} builds on another checkpoint than {base.path} is now",
                next="restore the old one from a backup",
            )
        return base

    def files(self, kind: str) -> list[Path]:
        """Return the paths of the files that hold the tensors of a kind."""
        names = [f.path for f in self.manifest.files if f.path.startswith(f"{kind}-")]
        return [self.path / name for name in names]

    def position(self) -> dict[str, Any]:
        """Read the part that is not tensors: the position in the run. DamagedError if invalid."""
        try:
            return read_json(self.path / POSITION)
        except ValueError as error:
            raise header.damaged(self.path, f"{POSITION}: {error}") from None


def folder_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"{PREFIX}{step:06d}"


def staging_name(step: int, attempt: int) -> str:
    """Return the name of the folder into which all ranks write the files of `step`."""
    return f"{STAGING_PREFIX}{step:06d}-{attempt}"


def commit(staging: Path, files: Sequence[FileRecord], **facts: Any) -> Checkpoint:
    """Commit a folder of written files as a checkpoint; `facts` are the manifest's other fields.

    On return, the checkpoint survives a power failure. Before the final rename, no checkpoint of
    this step exists.
    """
    manifest = CheckpointManifest(files=tuple(sorted(files, key=lambda f: f.path)), **facts)
    # Written last, and flushed before the rename below.
    write_atomically(staging / manifest.filename, manifest.dump())
    folder = staging.parent
    # Training reached this step from an older checkpoint, so existing ones at or after this step
    # were rejected on resume. Rename them, so that they neither block the path of this checkpoint
    # nor count as newer.
    final = folder_of(folder, manifest.step)
    rejected = {folder_of(folder, s) for s in retrying(lambda: steps(folder)) if s >= manifest.step}
    if os.path.lexists(final):
        rejected.add(final)  # also a file, which a folder cannot replace
    for path in sorted(rejected):
        aside = folder / f"{STAGING_PREFIX}{path.name.removeprefix(PREFIX)}{REJECTED_SUFFIX}"
        retrying(partial(_rename, path, aside))
    # The commit: a rename is atomic on POSIX file systems, so readers see no checkpoint or a
    # complete one.
    retrying(partial(_rename, staging, final))
    # Without it, a power failure may undo the rename.
    retrying(lambda: fsync_folder(folder))
    return Checkpoint(final, manifest)


def _rename(old: Path, new: Path) -> None:
    if new.exists() and not old.exists():  # a file server did it, but its reply was lost
        return
    old.rename(new)


def supersede(folder: Path, step: int, attempt: int) -> list[Path]:
    """Rename the checkpoints after `step`, because training restarts from `step`.

    They are kept as `superseded-step-N-<attempt>` until `dtt ckpt prune`. Returns the new paths.
    """
    moved = []
    for newer in (s for s in steps(folder) if s > step):
        moved.append(folder / f"{SUPERSEDED_PREFIX}{newer:06d}-{attempt}")
        folder_of(folder, newer).rename(moved[-1])
    # One flush for all renames.
    fsync_folder(folder)
    return moved


def adopt(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Copy the checkpoint of another job into `folder` atomically, and verify it there.

    Files are hard-linked if the file system permits. In both cases, the other job may be deleted
    afterwards.
    """
    staging = folder / staging_name(checkpoint.step, 0)
    # What an earlier adoption left when it was killed.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    files = (checkpoint.manifest.filename, *(f.path for f in checkpoint.manifest.files))
    link_files(checkpoint.path, staging, files)
    final = folder_of(folder, checkpoint.step)
    staging.rename(final)
    fsync_folder(folder)
    # Verified in its new place: a hard link shares the bytes, but a copy may fail.
    return verify(final)


def link_files(source: Path, folder: Path, names: Iterable[str]) -> bool:
    """Hard-link files of one folder into another; return False if some had to be copied."""
    linked = True
    for name in names:
        try:
            os.link(source / name, folder / name)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source / name, folder / name)
            fsync_file(folder / name)
            linked = False
    fsync_folder(folder)
    return linked


def verify(path: Path) -> Checkpoint:
    """Verify a folder against its manifest; DamagedError names the first file that differs.

    Files that are not in the manifest (notes, leftovers of NFS) are ignored and never read.
    """
    manifest = read_manifest(path)
    checkpoint = Checkpoint(path, manifest)
    check_headers(path, verify_files(path, manifest.files))
    check_readable(checkpoint)
    return checkpoint


def read_manifest(path: Path) -> CheckpointManifest:
    """Return the manifest of a folder; DamagedError if it is not that of a checkpoint."""
    try:
        manifest = retrying(lambda: CheckpointManifest.read(path))
    except OSError as error:
        why = f"{CheckpointManifest.filename} cannot be read: {error}"
        raise header.damaged(path, why) from None
    # A folder that was renamed by hand would resume at another step than its weights.
    if path.name != f"{PREFIX}{manifest.step:06d}":
        why = f"{manifest.filename} records step {manifest.step}"
        raise DamagedError(f"the name of checkpoint {path} contradicts its content", why=why)
    names = [file.path for file in manifest.files]
    # A name with a slash could point out of the folder.
    if POSITION not in names or len(set(names)) < len(names) or any("/" in n for n in names):
        raise header.damaged(path, f"{manifest.filename} does not list the files of a checkpoint")
    return manifest


def verify_files(path: Path, files: Sequence[FileRecord]) -> Headers:
    """Verify files of a checkpoint; return the headers of those that hold tensors."""
    # Threads, as sha256 releases the GIL.
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        list(pool.map(partial(verify_file, path), files))
    # The hashes prove that the bytes are those written. The headers are still checked, because a
    # seal proves no author.
    names = [file.path for file in files if file.path.startswith((f"{MODEL}-", f"{STATE}-"))]
    try:
        return {name: retrying(partial(header.read, path / name)) for name in names}
    except OSError as error:
        raise _unreadable(path, error) from None


def check_headers(path: Path, headers: Headers, part: int = 0, parts: int = 1) -> None:
    """Raise DamagedError unless the files hold every tensor once; `part` of `parts` of the names.

    The headers are those of all files of the checkpoint.
    """
    for kind in (MODEL, STATE):
        found = {path / name: one for name, one in headers.items() if name.startswith(f"{kind}-")}
        if parts > 1:
            names = {entry.name for entries in found.values() for entry in entries}
            # Not `hash`, which differs between processes.
            own = {name for name in names if crc32(name.encode()) % parts == part}
            found = {
                file: [entry for entry in entries if entry.name in own]
                for file, entries in found.items()
            }
        header.check(found)


def check_readable(checkpoint: Checkpoint) -> None:
    """Raise DamagedError unless the position can be read."""
    try:
        retrying(checkpoint.position)
    except OSError as error:
        raise _unreadable(checkpoint.path, error) from None


def _unreadable(path: Path, error: OSError) -> DamagedError:
    return header.damaged(path, f"{error.filename or path} cannot be read: {error}")


def verify_file(path: Path, record: FileRecord) -> None:
    """Raise DamagedError unless a file of the checkpoint at `path` matches its manifest record."""
    try:
        retrying(lambda: _compare(path, record))
    except OSError as error:
        raise header.damaged(path, f"{record.path} cannot be read: {error}") from None


def _compare(path: Path, record: FileRecord) -> None:
    file = checked_file(record.path, path / CheckpointManifest.filename)
    if not file.is_file():
        raise header.damaged(path, f"{record.path} is missing")
    size = file.stat().st_size
    # The size first: a truncated file is found without reading it.
    if size != record.bytes:
        raise header.damaged(path, f"{record.path} has {size} bytes instead of {record.bytes}")
    if sha256_file(file) != record.sha256:
        raise header.damaged(path, f"the content of {record.path} has changed: its sha256 differs")


def steps(folder: Path) -> list[int]:
    """Return the steps that have a committed folder, verified or not, in ascending order."""
    # A file of this name, such as a link that a copy has turned into text, is no checkpoint.
    names = {path.name for path in folder.glob(f"{PREFIX}*") if path.is_dir()}
    numbers = (name.removeprefix(PREFIX) for name in names)
    found = sorted(int(number) for number in numbers if number.isdecimal())
    # `step-7` is not a checkpoint of dtt: numbers have six digits or more, so the name must be
    # reproduced exactly.
    return [step for step in found if folder_of(folder, step).name in names]


Verify = Callable[[Path], Checkpoint]
"""Function that returns the checkpoint in a folder, or raises DamagedError."""


def newest(
    folder: Path,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    verified: Verify = verify,
) -> Checkpoint | None:
    """Return the newest checkpoint that passes verification; None if there are no checkpoints.

    Logs each rejected checkpoint. `check` may reject one as well, by raising DamagedError. If there
    are checkpoints but none passes, raises DamagedError: only the user may decide to start over.
    """
    rejected = 0
    # Newest first: usually the first one passes, and hashing others would take minutes.
    for step in reversed(steps(folder)):
        path = folder_of(folder, step)
        try:
            checkpoint = verified(path)
            check(checkpoint)
            return checkpoint
        except (DamagedError, InputError) as error:
            if path.exists():  # otherwise the running job has pruned it meanwhile
                rejected += 1
                log.warning("rejected a checkpoint: %s", error)
    if rejected:
        raise DamagedError(
            f"none of the {rejected} checkpoints in {folder} is complete",
            why="the lines above report what is wrong with each",
            next=f"restore one from a backup, or start over: mv {folder} {folder}.damaged",
        )
    return None


def find(reference: str) -> Checkpoint:
    """Return the verified checkpoint for `JOB` (its newest) or `JOB@STEP`; InputError if none."""
    folder, step = locate(reference)
    found = newest(folder) if step is None else at_step(folder, step)
    assert found is not None, "it was just located"
    return found


def parse(reference: str, step: int | None = None) -> tuple[Path, int | None]:
    """Parse `JOB` or `JOB@STEP` into the checkpoint folder and the step (None: the newest).

    Neither has to exist. `step` is that of an option, which may repeat the step of the reference;
    ConfigError if it contradicts it. InputError if the text after @ is not a number.
    """
    job, at, number = reference.rpartition("@")
    if not at or JobDir(Path(reference)).exists:  # the name of a job may contain @
        return JobDir(Path(reference)).checkpoints, step
    if not (number.isascii() and number.isdigit()):
        raise InputError(f"{reference} does not name a step", next=f"a number, such as {job}@500")
    if step not in (None, int(number)):
        raise ConfigError(f"{reference} names another step than {step}", next="give one of them")
    return JobDir(Path(job)).checkpoints, int(number)


def locate(reference: str) -> tuple[Path, int | None]:
    """Return the checkpoint folder and the step (None: the newest) of an existing checkpoint.

    Raises InputError if there is none. The checkpoint is not verified.
    """
    folder, step = parse(reference)
    if not steps(folder):
        why = "that job has not saved one" if folder.parent.is_dir() else "there is no such job"
        raise InputError(
            f"no checkpoint in {folder}",
            why="it is not a job" if (folder.parent / "config.json").is_file() else why,
            next="specify a job, such as jobs/base or jobs/base@500, or released weights: "
            "hf:ORG/NAME or hf:FOLDER",
        )
    if step is not None:
        existing(folder, step)
    return folder, step


def at_step(folder: Path, step: int, verified: Verify = verify) -> Checkpoint:
    """Return the verified checkpoint of a step; InputError lists the existing steps."""
    try:
        return verified(existing(folder, step))
    except DamagedError as error:
        raise DamagedError(
            str(error), next="omit the step to use the newest complete checkpoint"
        ) from None


def existing(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step; InputError lists the existing steps."""
    path = folder_of(folder, step)
    if not path.is_dir():
        there = ", ".join(map(str, steps(folder))) or "none"
        raise InputError(
            f"no checkpoint of step {step} in {folder}",
            why=f"there are: {there}",
            next="specify one of these, or omit the step to use the newest complete checkpoint",
        )
    return path
