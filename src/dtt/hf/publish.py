"""The folder of an export: what is there already, and its replacement in one step.

Only files that dtt wrote, and that are as it wrote them, are replaced. Others stay.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dtt.artifacts.manifests import ExportManifest
from dtt.base.errors import ConfigError, DamagedError
from dtt.base.files import check_space, exclusive, fsync_file, fsync_folder, remove, sha256_file

CARD = "README.md"
LOADED = (
    "config.json", "generation_config.json", "adapter_config.json", "adapter_model.*",
    "model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json",
    "chat_template.*", "additional_chat_templates*", "added_tokens.json", "tokenizer.model",
)  # fmt: skip
"""Files that `transformers` and PEFT load, or prefer, if they lie beside those of an export.

transformers prefers model.safetensors to shards, and loads an adapter that lies beside a model."""


@dataclass(frozen=True)
class ExportSource:
    """The checkpoint that an export is made from, and how."""

    job: str
    step: int
    checkpoint_sha256: str
    """sha256 of the checkpoint's manifest."""
    ema: bool = False
    """True if the export contains the moving average of the weights."""
    base: str | None = None
    """Model that the exported adapter is for; None: the export is a complete model."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keys of `export`, besides the dtype, that the files depend on."""


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Keep other exports away from `out`; InUse if there is one."""
    out = out.resolve()
    with exclusive(out.parent, f"dtt export into {out}", name=f".{out.name}.lock"):
        yield


def already_done(out: Path, origin: ExportSource, dtype: str) -> ExportManifest | None:
    """Return the manifest of the same export if it exists at `out`.

    Returns None if `out` is empty, does not exist, or contains another export of the same job,
    which may be replaced. Raises ConfigError if `out` contains anything else, DamagedError if a
    file of the export, apart from the model card, is missing or has a different size.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not ExportManifest.exists(out):
        raise ConfigError(
            f"{out} is not an export", next="specify another folder with --out, or move it away"
        )
    found = ExportManifest.read(out)
    same = (found.checkpoint_sha256, found.ema, found.base, found.dtype, found.options)
    if same != (origin.checkpoint_sha256, origin.ema, origin.base, dtype, origin.options):
        if found.job == origin.job:
            return None
        raise ConfigError(
            f"{out} holds the export of another job: {found.job}, step {found.step}, {found.dtype}",
            next="specify another folder with --out, or remove it",
        )
    for file in found.files:
        path = out / file.path
        if not path.is_file() or (path.stat().st_size != file.bytes and path.name != CARD):
            raise DamagedError(
                "the export is incomplete",
                where=path,
                why="it has another size" if path.is_file() else "it is missing",
                next=f"move {out} away, then export again",
            )
    return found


@contextmanager
def published(out: Path, size: int) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `out` at the end of the block unless it raises.

    `size` is about the number of bytes that are written into it. Files in `out` that dtt did not
    write are in the new folder, too. Raises ConfigError if `transformers` would load them, or if
    files of the earlier export were changed.
    """
    out = out.resolve()  # the target of a symbolic link, and a name instead of `.`
    # What a killed export left: an `out` that was set aside, and temporary folders.
    for path in list(out.parent.iterdir()) if out.parent.is_dir() else []:
        if path.name.startswith(f".{out.name}.") and path.suffix in (".tmp", ".old"):
            if path.suffix == ".old" and not out.exists():
                path.rename(out)
            else:
                remove(path)
    theirs = _files_of_others(out)
    check_space(out.parent, size + 2**24, "the export")
    # A name of its own: a lock may not hold between the nodes of a shared file system.
    staging = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in staging.iterdir():
            fsync_file(path)
        for path in theirs:
            _link(path, staging / path.name)
        fsync_folder(staging)
        old = staging.with_suffix(".old")
        if out.exists():
            out.rename(old)
        staging.rename(out)
        fsync_folder(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _files_of_others(out: Path) -> list[Path]:
    """Return the files and folders in `out` that are not of the export that it holds."""
    if not ExportManifest.exists(out):
        return []
    manifest = ExportManifest.read(out)
    for file in manifest.files:
        path = out / file.path
        if path.is_file() and sha256_file(path) != file.sha256:
            raise ConfigError(
                "a file of the earlier export was changed, and would be lost",
                where=path,
                next="move it away, or specify another folder with --out",
            )
    own = {manifest.filename, *(file.path for file in manifest.files)}
    theirs = sorted(path for path in out.iterdir() if path.name not in own)
    for path in theirs:
        if any(fnmatch(path.name, pattern) for pattern in LOADED):
            raise ConfigError(
                "the folder of the export has a file that dtt did not write",
                where=path,
                why="transformers would load it together with the export",
                next="move it away, or specify another folder with --out",
            )
    return theirs


def _link(source: Path, target: Path) -> None:
    """Put a file or folder of others at `target`, too, without a copy where links are possible."""

    def link(path: str, to: str) -> None:
        try:
            os.link(path, to, follow_symlinks=False)
        except OSError:  # file systems without hard links
            shutil.copy2(path, to, follow_symlinks=False)

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))
