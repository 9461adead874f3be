"""The stages of a configuration as jobs: what each starts from, and which are done.

A stage is identified by its configuration, its data and the checkpoint it started from; its job
directory records them in config.yaml and stage.json. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest, DataManifest, TokensManifest
from dtt.artifacts.token_folders import token_sources
from dtt.base.errors import ConfigError, DttError, ExitCode, InputError
from dtt.base.files import sha256_file, write_atomically
from dtt.base.log import log
from dtt.base.reading import fits
from dtt.checkpoint import store
from dtt.config import explain
from dtt.config.key_types import STAGES
from dtt.config.layers import from_arguments
from dtt.config.merging import Resolved, origin_of
from dtt.config.run import RunConfig
from dtt.data.samples import compatibility

PREDECESSOR = {"job": str, "step": int, "checkpoint_sha256": str}
"""Fields of the record of the checkpoint that a stage started from."""


@dataclass(frozen=True)
class FinalCheckpoint:
    """The last checkpoint of a job that has trained to its end."""

    job: JobDir
    step: int
    sha256: str
    """Hash of its manifest, which contains the hashes of all its files."""

    @classmethod
    def of(cls, job: JobDir) -> FinalCheckpoint | None:
        """Return the last checkpoint of a job that is done; None for any other job.

        Compares only the sizes of its files: code that loads it verifies the content.
        """
        ending, steps = job.exit_record(job.attempt()), store.steps(job.checkpoints)
        if ending is None or ending["code"] != ExitCode.DONE or not steps:
            return None
        path = store.folder_of(job.checkpoints, steps[-1])
        try:
            manifest = CheckpointManifest.read(path)
            sizes = [(path / file.path).stat().st_size == file.bytes for file in manifest.files]
        except (DttError, OSError):
            return None
        if ending.get("checkpoint") != path.name or not all(sizes):
            return None
        return cls(job, steps[-1], sha256_file(path / manifest.filename))

    @property
    def reference(self) -> str:
        """The value of `init.from` that names it."""
        return f"{self.job.root}@{self.step}"


@dataclass(frozen=True)
class Stage:
    """A stage of training and its job."""

    job: JobDir
    names: tuple[str, ...]
    """The names of all stages of its configuration, in order."""
    resolved: Resolved

    @classmethod
    def of_job(cls, job: JobDir, resolved: Resolved) -> Stage | None:
        """Return the stage that a job directory belongs to; None if the job is not a stage."""
        record = job.stage_record()
        names = tuple(str(name) for name in record["stages"]) if record else ()
        return cls(job, names, resolved) if job.root.name in names else None

    @property
    def name(self) -> str:
        """The name of the stage."""
        return self.job.root.name

    @property
    def config(self) -> RunConfig:
        """The resolved configuration of the stage."""
        return self.resolved.config

    @property
    def predecessor(self) -> JobDir | None:
        """The job of the previous stage; None for the first stage."""
        index = self.names.index(self.name)
        return JobDir(self.job.root.with_name(self.names[index - 1])) if index else None

    @property
    def started(self) -> bool:
        """True if the job has a checkpoint."""
        return bool(store.steps(self.job.checkpoints))

    @property
    def _origin(self) -> dict[str, Any] | None:
        """The record of the checkpoint that the stage started from; None if there is none."""
        record = (self.job.stage_record() or {}).get("predecessor")
        return record if fits(record, PREDECESSOR) else None

    def create(self) -> None:
        """Write the record of a stage that has not started, so that its job can start alone."""
        if not self.started:
            self.record(None, None)

    def record(self, data_key: str | None, predecessor: FinalCheckpoint | None) -> None:
        """Write stage.json: the data, and the checkpoint that the stage starts from."""
        origin = predecessor and {
            "job": f"../{predecessor.job.root.name}",
            "step": predecessor.step,
            "checkpoint_sha256": predecessor.sha256,
        }
        content = {"stages": self.names, "data_key": data_key, "predecessor": origin}
        self.job.root.mkdir(parents=True, exist_ok=True)
        write_atomically(self.job.stage, json.dumps(content, indent=1) + "\n")

    def start_from(self) -> FinalCheckpoint | None:
        """Return the checkpoint that the stage starts from; None for the first, and on resume.

        Raises InputError if the previous stage is not done. On resume, raises ConfigError if it now
        has another final checkpoint.
        """
        if self.predecessor is None:
            return None
        final = FinalCheckpoint.of(self.predecessor)
        if self.started:
            if final is not None:
                self._check_origin(final)
            return None
        if final is None:
            raise InputError(
                f"stage {self.name} cannot start: the previous stage is not done",
                where=self.predecessor.root,
                next=f"train it first, with --stage {self.predecessor.root.name} or dtt pipeline",
            )
        return final

    def check_unchanged(self, final: FinalCheckpoint | None) -> None:
        """Raise ConfigError if a job that has started no longer matches this stage.

        `final` is the final checkpoint of the previous stage, None if it has none. The
        configuration was compared before, when it was resolved.
        """
        if self.job.stage_record() is None and (self.started or self.job.exists):
            raise ConfigError(
                f"{self.job.root} is already a job, but not stage {self.name}",
                next="set name=ANOTHER, or give the stage another name",
            )
        if not self.started:
            return
        if self.predecessor is not None and final is None:
            record, steps = self._origin, store.steps(self.predecessor.checkpoints)
            path = store.folder_of(self.predecessor.checkpoints, max(steps, default=0))
            manifest = path / CheckpointManifest.filename
            recorded = record["checkpoint_sha256"] if record else None
            known = manifest.is_file() and sha256_file(manifest) == recorded
            # If the newest checkpoint is the recorded one, an attempt at the previous stage was
            # killed after its last step. It will finish again, or train longer; the next start of
            # this stage compares the checkpoints.
            if not known:
                raise ConfigError(
                    f"{self.job.root} was trained from {self.predecessor.root}, which is not done "
                    "now",
                    why="its final checkpoint is gone, or it is being trained again",
                    next=remedy(self.job, self.names)
                    + f"; dtt train {self.job.root} resumes it alone",
                )
        if final is not None:
            self._check_origin(final)
        self._check_data()

    def _check_origin(self, final: FinalCheckpoint) -> None:
        known = self._origin
        if known is None or known["checkpoint_sha256"] != final.sha256:
            step = "" if known is None else f" of step {known['step']}"
            raise ConfigError(
                f"{self.job.root} was trained from a checkpoint other than {final.reference}",
                where=self.job.stage,
                why=f"{final.job.root} has since been trained again or for longer; the "
                f"checkpoint{step} that "
                "the stage started from is not its final checkpoint",
                next=remedy(self.job, self.names),
            )

    def _check_data(self) -> None:
        """Raise ConfigError if the token files are not those that the job was trained on."""
        sources = token_sources(self.config)
        known = len(sources) and len(self.config.token_sources) == len(self.config.sources)
        if not known or not all(TokensManifest.exists(source.path) for source in sources):
            return  # trained from text, a class, or files of other tools: training compares them
        keys = [(source.label, TokensManifest.read(source.path).key) for source in sources]
        if compatibility.data_key(keys) != DataManifest.read(self.job.root).key:
            raise ConfigError(
                f"{self.job.root} was trained on token files that have changed since",
                where=", ".join(str(source.path) for source in sources),
                next=remedy(self.job, self.names),
            )


def remedy(job: JobDir, names: Sequence[str]) -> str:
    """Return the advice for a stage whose job can no longer be used; `names` are all stages."""
    later = [job.root.with_name(name) for name in names[names.index(job.root.name) :]]
    folders = " ".join(str(root) for root in later if root.exists())
    return f"mv {folders} ELSEWHERE, and the same command trains these stages again"


def done(stages: Sequence[Stage]) -> list[FinalCheckpoint | None]:
    """Return the final checkpoint of each stage that is done, None for the others.

    A stage is not done while the one before it is not. Raises ConfigError if the job of a stage was
    trained with another configuration, on other data, or from another checkpoint than it would be
    now.
    """
    whole = JobDir(stages[0].job.root.parent)
    if whole.exists or whole.attempt():
        raise ConfigError(
            f"{whole.root} is already a job: it cannot contain the stages of a configuration",
            next="set name=ANOTHER",
        )
    found: list[FinalCheckpoint | None] = []
    for stage in stages:
        stage.check_unchanged(found[-1] if found else None)
        waits = bool(found) and found[-1] is None
        found.append(None if waits else FinalCheckpoint.of(stage.job))
    return found


def report_shadowed(stages: Sequence[Stage], arguments: Sequence[str]) -> None:
    """Warn about `key=value` arguments without effect on a stage whose entry sets the key.

    Raises ConfigError if an argument has no effect on any stage of the configuration.
    """
    given = from_arguments((a for a in arguments if "=" in a), explain.key_types())
    for key in (key for key in given if key[:1] != STAGES):
        dotted = ".".join(key)
        origins = {stage.name: origin_of(stage.resolved.layer, key) for stage in stages}
        kept = {name: origin for name, origin in origins.items() if origin != "argument"}
        if len(kept) == len(stages[0].names):
            name, origin = next(iter(kept.items()))
            raise ConfigError(
                f"{dotted} has no effect: it changes the common part, but every stage sets it",
                where=origin,
                next=f"name a stage: stages.{name}.{dotted}=VALUE",
            )
        for name, origin in kept.items():
            log.warning(
                "%s changes the common part: stage %s keeps its own value (%s); stages.%s.%s=VALUE "
                "changes it",
                *(dotted, name, origin, name, dotted),
            )
