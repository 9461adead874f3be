"""The configurations that are shipped with dtt."""

from __future__ import annotations

import os
from pathlib import Path


def shipped_configs() -> Path:
    """Return the folder of the configs shipped with dtt: in the wheel, or in the clone."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def shipped_file(name: str | Path, kind: str = "") -> Path | None:
    """Return the shipped file of a name in the folder `kind` of the configs; None if there is none.

    A path that leads out of the folder, such as an absolute one, is no name.
    """
    path = shipped_configs() / kind / name
    outside = Path(name).is_absolute() or ".." in Path(name).parts
    # Path.is_file raises OSError for text that is too long for a path.
    return None if outside or not os.path.isfile(path) else path  # noqa: PTH113
