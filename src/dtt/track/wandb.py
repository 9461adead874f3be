"""Tracker for Weights & Biases, with one W&B run for all attempts of a job.

Errors of the W&B client never stop training.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtt.base.errors import EnvironmentUnfit
from dtt.base.log import log
from dtt.base.reading import is_kind
from dtt.base.secrets import named_secret
from dtt.config.train import WandbConfig
from dtt.mesh.environment import install
from dtt.track.base import Record, scalars

NEEDED = "track requests wandb"
KINDS = ("train", "eval", "task", "guard", "data", "sample", "start", "perf", "save", "own")
"""Kinds of records that have metrics."""


def wandb_client(needed: str) -> Any:
    """Return the `wandb` module; EnvironmentUnfit if it is not installed.

    `needed` is the reason why it is needed, for the message.
    """
    try:
        import wandb
    except ImportError:
        raise EnvironmentUnfit(f"{needed}, which is not installed", next=install("wandb")) from None
    return wandb


def delete_slurm_secrets() -> None:
    """Delete the SLURM_* variables of this process that hold secrets, such as SLURM_JWT.

    The client uploads all SLURM_* variables with a run.
    """
    for variable in [v for v in os.environ if v.startswith("SLURM_") and named_secret(v)]:
        del os.environ[variable]


def define_metrics(run: Any, axis: str = "step") -> None:
    """Plot the metrics of all kinds over the field `axis`."""
    for kind in KINDS:
        run.define_metric(f"{kind}/*", step_metric=axis)


def history_row(record: Record, axis: str = "step") -> dict[str, Any]:
    """Return the row of a run's history that stands for a record.

    It has the numbers of the record as `kind/name`, the text of a sample, the step, and the field
    `axis`. W&B takes the time of the row from `_timestamp`, in seconds since 1970; without it,
    which is the case if the record has no time, that is the time of logging.
    """
    metrics = {name: value for name, value in record.items() if name not in (axis, "time")}
    row = {**dict(scalars(metrics)), "step": record["step"], axis: record[axis]}
    if record["kind"] == "sample" and isinstance(record.get("text"), str):
        # An untrained byte-level model generates NUL, which databases refuse in text.
        row["sample/text"] = record["text"].replace("\0", "\N{REPLACEMENT CHARACTER}")
    if is_kind(record.get("time"), float) and record["time"] > 0:
        row["_timestamp"] = float(record["time"])
    return row


class WandbTracker:
    """Tracker that sends numbers as metrics `kind/name`, plotted over the step."""

    def __init__(
        self,
        config: WandbConfig,
        name: str,
        run_id: str,
        folder: Path,
        settings: dict[str, Any],
        *,
        group: str | None = None,
        axis: str = "step",
    ) -> None:
        """Start or resume the run `run_id`, which all attempts of a job share.

        `settings` is the config of the job; local files are written to `folder`. Runs of one
        `group`, by default `name`, belong together. `axis` is the field of each record that metrics
        are plotted over.
        """
        wandb = wandb_client(NEEDED)
        self._alive, self._axis = True, axis
        self._run: Any = None

        def begin() -> None:
            delete_slurm_secrets()
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=name,
                group=group or name,
                id=run_id,
                resume="allow",
                dir=folder,
                config=settings,
                mode=_mode(),
                settings=wandb.Settings(init_timeout=20, finish_timeout=10),
            )
            define_metrics(self._run, axis)

        self._guarded(begin)

    def log(self, record: Record) -> None:
        """Send one record."""
        self._guarded(lambda: self._run.log(history_row(record, self._axis)))

    def flush(self) -> None:
        """Do nothing: the client sends records in the background."""

    def close(self) -> None:
        """Finish the run."""
        self._guarded(lambda: self._run.finish())  # noqa: PLW0108  _run may be None

    def _guarded(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  no error of the client may stop training
            self._alive = False
            log.warning("wandb failed and is off for this attempt: %s", error)


def _mode() -> Any:
    """Return the mode of W&B: WANDB_MODE if it is set, else online if there is an API key.

    If the server does not answer, the mode is offline. Such runs can be uploaded later with
    `wandb sync`.
    """
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if not mode:
        mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    server = wandb.setup().settings.base_url
    if mode == "online" and not answers(server):
        log.warning(
            "%s did not respond: wandb remains offline; upload it later: wandb sync", server
        )
        mode = "offline"
    return mode


def answers(server: str) -> bool:
    """Return True if the server answers within 5 s; the client itself retries for over a minute."""
    try:
        urllib.request.urlopen(server, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
