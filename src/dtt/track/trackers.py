"""Creation of the trackers that a configuration names, and the one for TensorBoard."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import EnvironmentUnfit
from dtt.config.run import RunConfig
from dtt.config.train import TensorBoardConfig, WandbConfig
from dtt.mesh.environment import install
from dtt.track.base import Record, Tracker, scalars
from dtt.track.console import ConsoleTracker
from dtt.track.jsonl import JsonlTracker
from dtt.track.wandb import NEEDED, WandbTracker, wandb_client


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


def check_installed(cfg: RunConfig) -> None:
    """Raise EnvironmentUnfit if a tracker that the configuration names is not installed."""
    for tracker in cfg.track:
        match tracker:
            case WandbConfig():
                wandb_client(NEEDED)
            case TensorBoardConfig():
                TensorBoardTracker.writer()
            case _:
                assert_never(tracker)


def make_trackers(
    cfg: RunConfig, job: JobDir, resume_step: int | None, *, again: Collection[str] = ()
) -> list[Tracker]:
    """Return the trackers of a job: metrics.jsonl, the console, then those in the configuration.

    `again` are the kinds of records of `resume_step` that will be written again.
    """
    record = JsonlTracker(job.metrics, resume_step, again=again)
    trackers: list[Tracker] = [record, ConsoleTracker()]
    for tracker in cfg.track:
        match tracker:
            case WandbConfig():
                settings = cfg.model_dump(mode="json")
                trackers.append(WandbTracker(tracker, cfg.name, job.run_id(), job.root, settings))
            case TensorBoardConfig():
                trackers.append(TensorBoardTracker(job.tensorboard, resume_step))
            case _:
                assert_never(tracker)
    return trackers
