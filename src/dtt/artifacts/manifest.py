"""The base class of manifests: strict, hashed, and written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dtt.base.errors import DamagedError, InputError
from dtt.base.reading import parse, read_small
from dtt.base.safe_names import checked_name

LARGEST = 2**28
"""Maximum size of a manifest in bytes, enough for a million files; a larger one is not written."""
SEAL_BYTES = 100
"""Room for the seal at the end of some manifests."""


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON-serialisable value in canonical form: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Record(BaseModel):
    """A part of a manifest."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Manifest(Record):
    """Base class of manifests, the files that mark a folder as a complete artifact."""

    filename: ClassVar[str] = "manifest.json"
    holds: ClassVar[str]
    made_by: ClassVar[str]

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Return True if `folder` is a complete artifact."""
        return (folder / cls.filename).is_file()

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Return True if `folder` has a manifest of this kind, damaged or not.

        A file of that name that is valid JSON without the `format` of dtt belongs to another
        program.
        """
        try:
            content = read_small(folder / cls.filename, LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except ValueError:
            return True
        if f'"{cls.model_fields["format"].default}"'.encode() in content:
            return True
        try:
            parse(content)
        except ValueError:
            return True
        return False

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of `folder`.

        Raises InputError if it does not exist, and DamagedError if its content is invalid or names
        a file outside its folder.
        """
        path = folder / cls.filename
        try:
            content = read_small(path, LARGEST)
            cls.check(content)
            manifest = cls.model_validate_json(content)
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"no {cls.holds} in {folder}",
                why=f"{path.name} is missing: the command that writes this folder has not finished"
                if folder.is_dir()
                else "there is no such folder",
                next=f"create it with `{cls.made_by}`, or specify another folder",
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise DamagedError(
                f"cannot read the manifest {path}",
                why=f"{key}: {first['msg']}",
                next=f"create it again with `{cls.made_by}`",
            ) from None
        except ValueError as error:
            raise DamagedError(
                f"cannot read the manifest {path}",
                why=str(error),
                next=f"create it again with `{cls.made_by}`",
            ) from None
        for name in manifest.names():
            checked_name(name, path)
        return manifest

    @classmethod
    def check(cls, content: bytes) -> None:
        """Raise ValueError unless the bytes of the file are known to be as they were written."""

    def names(self) -> Iterable[str]:
        """Return the names of the files and folders that must lie in the manifest's folder."""
        return ()

    def dump(self) -> str:
        """Return the text of the manifest file."""
        return manifest_text(self.model_dump(mode="json"))


def manifest_text(content: Any) -> str:
    """Return the text of a manifest file with this JSON content.

    Raises InputError if `Manifest.read` would refuse it for its size.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    size = len(text.encode())
    if size > LARGEST - SEAL_BYTES:
        raise InputError(
            "too many files for one manifest",
            why=f"it would have {size / 1e6:,.0f} MB, and dtt reads {LARGEST / 1e6:,.0f} MB: about "
            "a million files",
            next="join small files, such as to JSON lines with a document each; or divide them "
            "with download.include into several datasets",
        )
    return text


class FileRecord(Record):
    """The name, size and hash of one file."""

    path: str
    bytes: int
    sha256: str
