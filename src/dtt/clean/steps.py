"""Finished steps of a run: files of raw numbers, each with its hash in a marker written last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dtt.artifacts.manifest import Record
from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import DamagedError
from dtt.base.files import has_sha256, named, replacing
from dtt.base.reading import read_small

Content = bytes | npt.NDArray[Any]


class StepMarker(Record):
    """The marker of a finished step."""

    key: str
    """The key of the steps that it belongs to; with another one it is redone."""
    files: dict[str, str]
    """The sha256 of each of its files, by the ending of the name."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Counts that the steps after it need."""


class Steps:
    """The folder of the finished steps of one selection.

    The ranks share it. Each step is done by one rank, which writes files of its own, by rename.
    """

    def __init__(self, selection: Path, key: str) -> None:
        """Use the work folder of the selection in folder `selection`.

        `key` is a fingerprint of everything that determines the files of all steps.
        """
        self._folder, self._key = selection / SelectionManifest.work, key

    def path(self, name: str, ending: str) -> Path:
        """Return the path of a file of a step."""
        return self._folder / f"{name}.{ending}"

    def done(self, name: str) -> bool:
        """Return True if the step is finished and each of its files has its hash."""
        marker = _marker(self._folder / f"{name}.json")
        return (
            marker is not None
            and marker.key == self._key
            and all(
                has_sha256(self.path(name, end), sha256) for end, sha256 in marker.files.items()
            )
        )

    def write(
        self,
        name: str,
        files: Mapping[str, Iterable[Content]],
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Write the files of a step in order, each from its pieces, and then its marker.

        The pieces of a file may change the files after it, and `facts`.
        """
        sums = {ending: self._write(self.path(name, ending), files[ending]) for ending in files}
        marker = StepMarker(key=self._key, files=sums, facts=facts or {})
        content = f"{marker.model_dump_json(indent=1)}\n".encode()
        self._write(self._folder / f"{name}.json", [content])

    def _write(self, path: Path, pieces: Iterable[Content]) -> str:
        """Write a file by rename, piece by piece; return its sha256.

        Without fsync, which took a third of the time: what a machine loses when it crashes does not
        have its hash, and is made again.
        """
        digest = hashlib.sha256()
        with replacing(path, synced=False) as file:
            for piece in pieces:
                content = piece if isinstance(piece, bytes) else piece.tobytes()
                digest.update(content)
                file.write(content)
        return digest.hexdigest()

    def facts(self, name: str) -> dict[str, Any]:
        """Return the counts of a finished step."""
        marker = _marker(self._folder / f"{name}.json")
        if marker is None:
            raise DamagedError(
                "a finished step is missing",
                where=self._folder / f"{name}.json",
                why="another process deletes from this folder",
                next="run the same command again",
            )
        return marker.facts

    def array(self, name: str, ending: str, dtype: Any) -> npt.NDArray[Any]:
        """Return the numbers in a file of a finished step, mapped into memory."""
        path = self.path(name, ending)
        with named(path):
            if path.stat().st_size == 0:  # which cannot be mapped
                return np.empty(0, dtype)
            # A plain view, because slices of np.memmap take ten times as long.
            return np.asarray(np.memmap(path, dtype, "r"))


def have_unread(selection: Path) -> bool:
    """Return True if a finished step has left out documents that cannot be read."""
    markers = map(_marker, (selection / SelectionManifest.work).glob("*.json"))
    return any(marker.facts.get("unread") for marker in markers if marker is not None)


def tidy(selection: Path, units: Iterable[str] | None = None) -> None:
    """Remove leftovers of killed processes from the folder of a selection.

    With `units`, the steps of pass 1 of a finished selection, also remove all other steps: their
    files are about as large as the corpus. Those of `units` are kept, as they take the longest: a
    damaged selection is made again without the corpus being read.
    """
    kept = None if units is None else set(units)
    for path in (*(selection / SelectionManifest.work).glob("*"), *selection.glob(".*.tmp")):
        gone = path.name.startswith(".") and path.name.endswith(".tmp")
        if kept is not None and not path.name.startswith("."):
            gone = path.stem not in kept
        if gone and path.is_file():
            path.unlink(missing_ok=True)


def _marker(path: Path) -> StepMarker | None:
    try:
        return StepMarker.model_validate_json(read_small(path))
    except (OSError, ValueError):  # also another user's, which may be unreadable
        return None
