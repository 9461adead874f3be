"""Tracker for TensorBoard event files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from dtt.base.errors import EnvironmentUnfit
from dtt.mesh.environment import install
from dtt.track.base import Record, scalars


class TensorBoardTracker:
    """Tracker that writes numbers as scalars `kind/name`, and samples as text."""

    @staticmethod
    def writer() -> Any:
        """Return torch's SummaryWriter class; EnvironmentUnfit if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise EnvironmentUnfit(
                "track requests tensorboard, which is not installed",
                next=install("tensorboard"),
            ) from None
        return SummaryWriter

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """Open a writer to `folder`; hide events of earlier attempts after `resume_step`."""
        self._open = partial(self.writer(), str(folder))
        self._writer = self._open(purge_step=None if resume_step is None else resume_step + 1)

    def log(self, record: Record) -> None:
        """Write one record."""
        kind, step = record["kind"], record["step"]
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, step)
        if kind == "sample":
            self._writer.add_text("sample", record["text"], step)

    def flush(self) -> None:
        """Write buffered events to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
