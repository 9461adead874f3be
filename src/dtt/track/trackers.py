"""Creation of the trackers that a configuration names."""

from __future__ import annotations

from collections.abc import Collection
from typing import assert_never

from dtt.artifacts.jobdir import JobDir
from dtt.config.run import RunConfig
from dtt.config.train import TensorBoardConfig, WandbConfig
from dtt.track.base import Tracker
from dtt.track.console import ConsoleTracker
from dtt.track.jsonl import JsonlTracker
from dtt.track.tensorboard import TensorBoardTracker
from dtt.track.wandb import NEEDED, WandbTracker, wandb_client


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
