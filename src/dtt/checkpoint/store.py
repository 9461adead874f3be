"""Checkpoints on disk: committed whole or not there, found by scanning, verified before use.

    .tmp-step-000500-<attempt>/   being written
    step-000500/                  committed: MANIFEST.json was written last, then the folder renamed

Tensors lie in safetensors files, everything else in JSON: nothing that is loaded can execute code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from dtt.artifacts import CheckpointManifest, FileRecord
from dtt.errors import DamagedError, DttError, InputError
from dtt.runtime.files import fsync_file, fsync_folder, sha256_file, write_atomically
from dtt.runtime.log import log

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
PREFIX, STAGING_PREFIX = "step-", ".tmp-step-"


def rank_file(rank: int) -> str:
    """Name of the file that holds what only `rank` knows: its random number generators."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint folder and its manifest."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors of one of its files, on the CPU."""
        return safetensors.torch.load_file(self.path / name)

    def model_tensors(self) -> dict[str, Tensor]:
        """The weights, by the model's parameter names."""
        return self.tensors(MODEL)

    def holds(self, name: str) -> bool:
        """Whether one of its files has this name; others in the folder are not part of it."""
        return any(file.path == name for file in self.manifest.files)

    def state(self) -> dict[str, Any]:
        """What is not a tensor: the position in the run, and the ledger."""
        state: dict[str, Any] = json.loads((self.path / STATE).read_bytes())
        return state


def staging_name(step: int, attempt: int) -> str:
    """Name of the folder that every rank writes its files of `step` into before the commit."""
    return f"{STAGING_PREFIX}{step:06d}-{attempt}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file; it is on the disk when this returns."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, path)
    fsync_file(path)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the JSON file; it is on the disk when this returns."""
    write_atomically(path, json.dumps(state, indent=1) + "\n")


def commit(staging: Path, **facts: Any) -> Checkpoint:
    """Turn a written folder into a checkpoint; `facts` are the manifest's fields but `files`.

    When this returns the checkpoint survives a power failure; before, there is none of this step.
    """
    files = tuple(
        FileRecord(path=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))
        for path in sorted(staging.iterdir())
    )
    manifest = CheckpointManifest(files=files, **facts)
    write_atomically(staging / manifest.filename, manifest.dump())
    folder = staging.parent
    final = folder / f"{PREFIX}{manifest.step:06d}"
    # Training reached this step from an older one, so those from here on were rejected. Set aside,
    # they neither take this one's place nor count as newer than it.
    for step in steps(folder):
        if step >= manifest.step:
            rejected = folder / f"{PREFIX}{step:06d}"
            rejected.rename(folder / f"{STAGING_PREFIX}{step:06d}-rejected")
    staging.rename(final)
    fsync_folder(folder)
    return Checkpoint(final, manifest)


def verify(path: Path) -> Checkpoint:
    """Check a folder against its manifest; DamagedError names the first file that differs.

    Files that the manifest does not name (notes, leftovers of NFS) are ignored, and never read.
    """
    manifest = CheckpointManifest.read(path)
    if path.name != f"{PREFIX}{manifest.step:06d}":
        raise DamagedError(
            f"checkpoint {path} is not what it is called", why=f"it holds step {manifest.step}"
        )
    for record in manifest.files:
        file = path / record.path
        if not file.is_file():
            raise DamagedError(f"checkpoint {path} is damaged", why=f"{record.path} is missing")
        size = file.stat().st_size
        if size != record.bytes:
            why = f"{record.path} has {size} bytes instead of {record.bytes}"
            raise DamagedError(f"checkpoint {path} is damaged", why=why)
        if sha256_file(file) != record.sha256:
            why = f"the content of {record.path} has changed: its sha256 differs"
            raise DamagedError(f"checkpoint {path} is damaged", why=why)
    return Checkpoint(path, manifest)


def steps(folder: Path) -> list[int]:
    """Steps that have a committed folder, oldest first, verified or not."""
    names = (path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*"))
    return sorted(int(name) for name in names if name.isdigit())


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies, each rejection named; None if there never was one.

    DamagedError when there are checkpoints but none verifies: starting over is for a person to say.
    """
    rejected = 0
    for checkpoint in _newest_first(folder):
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        rejected += 1
        log.warning("rejected a checkpoint: %s", checkpoint)
    if rejected:
        raise DamagedError(
            f"none of the {rejected} checkpoints in {folder} is whole",
            why="the lines above tell what is wrong with each",
            next=f"restore one from a backup, or start over: mv {folder} {folder}.damaged",
        )
    return None


def _newest_first(folder: Path) -> Iterator[Checkpoint | DttError]:
    for step in reversed(steps(folder)):
        try:
            yield verify(folder / f"{PREFIX}{step:06d}")
        except (DamagedError, InputError) as error:
            yield error


def at_step(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of one step; InputError lists the steps there are."""
    path = folder / f"{PREFIX}{step:06d}"
    if not path.is_dir():
        there = ", ".join(map(str, steps(folder))) or "none"
        raise InputError(
            f"no checkpoint of step {step} in {folder}",
            why=f"there are: {there}",
            next="name one of those; without --step it is the newest that is whole",
        )
    try:
        return verify(path)
    except DamagedError as error:
        raise DamagedError(
            str(error), next="leave --step out to take the newest that is whole"
        ) from None
