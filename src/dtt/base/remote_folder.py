"""Folders behind URLs into which dtt writes: in a bucket, or on another disk of this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtt.base.errors import DamagedError, DttError, EnvironmentUnfit
from dtt.base.files import fsync_file, sha256_file, write_atomically
from dtt.base.object_store import (
    ObjectStore,
    StoredObject,
    is_permanent,
    reason,
    store_errors,
)

PART_BYTES = 16 * 2**20
"""Size of a part of an upload. Each file in flight holds about three of them in memory."""
PARTS = 9_000
"""Maximum number of parts of an object; S3 allows 10,000."""


class RemoteFolder(ObjectStore):
    """A folder in a bucket, or below `file://` or an absolute path.

    Its methods do not wait for a busy store, beyond what the library itself does: callers retry.
    They raise DttError if the store refuses a request or does not answer.
    """

    def __init__(self, url: str) -> None:
        """Prepare access; nothing is requested yet."""
        super().__init__(f"file://{url}" if url.startswith("/") else url)
        self._local = self.url.startswith("file://")

    def path(self, name: str) -> str:
        """Return the name for fsspec of the file `name` of this folder."""
        return f"{self.root.rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes of every file by its name, also of those in subfolders."""
        with self._translated(self.root):
            found = self.fs.find(self.root, detail=True)
        start = len(self.root.rstrip("/")) + 1
        return {path[start:]: int(info["size"]) for path, info in found.items() if path[start:]}

    def stored(self, name: str) -> StoredObject:
        """Return a file in its present state; InputError if there is none."""
        path = self.path(name)
        info = self.patiently(self.shown(path), lambda: self.fs.info(path))
        return self._stored(path, name, info)

    def content(self, name: str) -> bytes | None:
        """Return the bytes of a small file; None if there is none."""
        with self._translated(self.path(name)), suppress(FileNotFoundError):
            content: bytes = self.fs.cat_file(self.path(name))
            return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file as a whole: a reader sees the old or the new content."""
        with self._translated(self.path(name)):
            if self._local:
                write_atomically(Path(self.path(name)), content)
            else:
                self.fs.pipe_file(self.path(name), content)

    def put(self, source: Path, name: str) -> str:
        """Upload a file, check the size that the store reports, and return the sha256 of its bytes.

        What is appended to the file meanwhile is left out. An interruption may leave a part of it
        under `name`.
        """
        path, size = self.path(name), source.stat().st_size
        digest, left = hashlib.sha256(), size
        with self._translated(path):
            if self._local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            part = max(PART_BYTES, -(-size // PARTS))
            with source.open("rb") as file, self.fs.open(path, "wb", block_size=part) as sink:
                while data := file.read(min(part, left)):
                    digest.update(data)
                    sink.write(data)
                    left -= len(data)
            if self._local:
                fsync_file(Path(path))
            stored = int(self.fs.info(path)["size"])
        if stored != size:
            raise DamagedError(
                "an upload has another size than its file",
                where=self.shown(path),
                why=f"{stored} of {size} bytes are there",
            )
        return digest.hexdigest()

    def verify(self, source: Path, name: str) -> None:
        """Read the file `name` back; raise DamagedError unless it has the bytes of `source`."""
        one, size = self.stored(name), source.stat().st_size
        why = f"it has {one.bytes} bytes there, and {size} here"
        if one.bytes == size:
            digest, start = hashlib.sha256(), 0
            while start < size:
                data = self.read(one, start)
                digest.update(data)
                start += len(data)
            if digest.hexdigest() == sha256_file(source):
                return
            why = "its content there is another: the sha256 differs"
        raise DamagedError("a file was not uploaded right", where=self.shown(one.path), why=why)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, those that exist."""
        for name in names:
            with self._translated(self.path(name)), suppress(FileNotFoundError):
                self.fs.rm_file(self.path(name))
                if self._local and "/" in name:
                    with suppress(OSError):  # other files are in it
                        Path(self.path(name)).parent.rmdir()

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        """Raise errors of the store as those of dtt."""
        try:
            yield
        except DttError:
            raise
        except tuple(store_errors()) as error:
            if is_permanent(error):
                raise self.refused(error, self.shown(path)) from None
            raise EnvironmentUnfit(f"cannot write {self.shown(path)}", why=reason(error)) from None
