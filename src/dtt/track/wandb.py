"""Weights & Biases: one run over all attempts of a job; its failure never stops training."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtt.config.train import WandbConfig
from dtt.errors import EnvironmentUnfit
from dtt.runtime.environment import install
from dtt.runtime.log import log
from dtt.secrets import named_secret
from dtt.track.base import Record, scalars


class WandbTracker:
    """Sends numbers as `kind/name` metrics over their step."""

    @staticmethod
    def client() -> Any:
        """Return the module of the client; EnvironmentUnfit if it is not installed."""
        try:
            import wandb
        except ImportError:
            raise EnvironmentUnfit(
                "track asks for wandb, which is not installed", next=install("wandb")
            ) from None
        return wandb

    def __init__(
        self, config: WandbConfig, name: str, run_id: str, folder: Path, settings: dict[str, Any]
    ) -> None:
        """`run_id` makes restarts one run; `settings` is the job's config; files go to `folder`."""
        wandb = self.client()
        self._alive = True
        self._run: Any = None

        def begin() -> None:
            # The client keeps all of Slurm's variables with a run; SLURM_JWT is one.
            for variable in [v for v in os.environ if v.startswith("SLURM_") and named_secret(v)]:
                del os.environ[variable]
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=name,
                id=run_id,
                resume="allow",
                dir=folder,
                config=settings,
                mode=_mode(config),
                settings=wandb.Settings(init_timeout=20, finish_timeout=10),
            )
            for kind in ("train", "eval", "guard", "data", "start", "perf", "save"):
                self._run.define_metric(f"{kind}/*", step_metric="step")

        self._guarded(begin)

    def log(self, record: Record) -> None:
        """Send one record; samples are left to metrics.jsonl."""
        if record["kind"] != "sample":
            values = {**dict(scalars(record)), "step": record["step"]}
            self._guarded(lambda: self._run.log(values))

    def flush(self) -> None:
        """Nothing is held back."""

    def rewind(self, step: int) -> None:
        """Nothing sent can be taken back; what comes again is drawn over it."""

    def close(self) -> None:
        """Finish the run."""
        self._guarded(lambda: self._run.finish())  # noqa: PLW0108  _run may be None

    def _guarded(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  whatever the client raises, training goes on without it
            self._alive = False
            log.warning("wandb failed and is off for this attempt: %s", error)


def _mode(config: WandbConfig) -> Any:
    """Online with a key and a server that answers; what is kept offline can be sent later."""
    import wandb

    mode = os.environ.get("WANDB_MODE", "auto") if config.mode == "auto" else config.mode
    if mode == "auto":
        mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    server = wandb.setup().settings.base_url
    if mode == "online" and not _answers(server):
        log.warning("%s does not answer: wandb stays offline; send it later: wandb sync", server)
        mode = "offline"
    return mode


def _answers(server: str) -> bool:
    """Whether there is anything at that address; the client would try for a minute and more."""
    try:
        urllib.request.urlopen(server, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
