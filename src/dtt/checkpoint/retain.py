"""Which checkpoints stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from dtt.checkpoint import store


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the `keep_last` newest; call only after the newest was verified.

    A folder is renamed before its files go, so that a half-deleted one is never taken for whole.
    """
    for step in store.steps(folder)[:-keep_last]:
        path = folder / f"{store.PREFIX}{step:06d}"
        doomed = folder / f"{store.STAGING_PREFIX}{step:06d}-pruned"
        path.rename(doomed)
        shutil.rmtree(doomed)


def sweep_staging(folder: Path) -> None:
    """Delete what interrupted saves and prunings left; call when nobody else writes here."""
    for path in folder.glob(f"{store.STAGING_PREFIX}*"):
        shutil.rmtree(path)
