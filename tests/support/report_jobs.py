"""Folders of jobs as `dtt train` leaves them, with the metrics of long runs, made in no time."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import DataManifest, SourceFacts
from dtt.base.errors import ExitCode
from dtt.base.files import sha256_file
from dtt.checkpoint import store, tensors
from dtt.config.explain import show
from dtt.config.layers import Leaf
from dtt.config.load import resolve
from dtt.config.merging import Resolved
from dtt.jobs import sweeps as trials
from dtt.mesh.sharding import on_every_rank
from dtt.track.base import Record
from dtt.track.jsonl import JsonlTracker
from support.tiny_job import KEY, make_tokenizer

START = 1_700_000_000.0
"""Unix time at which the first attempt of every job starts."""
STARTUP = 6.0
"""Seconds from the start of an attempt to its first step."""


@dataclass(frozen=True)
class SyntheticRun:
    """The run that a job trains: a smooth loss with noise, and one spike."""

    steps: int = 400
    log_every: int = 10
    eval_every: int = 50
    save_every: int = 50
    batch_tokens: int = 2048
    seconds_per_step: float = 0.25
    lr: float = 4e-3
    spike: int | None = 157
    skipped: int | None = None
    """A step that the anomaly guard skipped."""
    sources: tuple[str, ...] = ("novels", "code")
    tasks: tuple[str, ...] = ("hellaswag", "arc_easy")
    seed: int = 0

    def time(self, step: int, first: int, began: float) -> float:
        """Return the time of a step of an attempt that started after step `first`."""
        return round(began + STARTUP + (step - first) * self.seconds_per_step, 3)

    def loss(self, step: int) -> float:
        """Return the loss without its noise, which is lowest with a learning rate of 4e-3."""
        penalty = 0.2 * math.log10(self.lr / 4e-3) ** 2
        return 2.0 + penalty + 6.3 * math.exp(-5 * (step / self.steps) ** 0.5)

    def train(self, step: int) -> Record:
        """Return the `train` record of a step, without its time."""
        noise = random.Random(self.seed << 32 | step)
        warmup = min(1.0, step / 20)
        record: Record = {
            "kind": "train", "step": step, "lr": self.lr * warmup,
            "tokens": self.batch_tokens * step, "ledger": _ledger(step),
            "loss": self.loss(step) + noise.gauss(0, 0.05),
            "grad_norm": 0.4 + 2.5 * math.exp(-step / 40) + noise.expovariate(20),
        }  # fmt: skip
        if step == self.spike:
            record |= {"loss": 11.5, "grad_norm": 88.0}
        return record | ({"skipped": True} if step == self.skipped else {})

    def records(
        self, first: int, last: int, began: float, saves: Collection[int] = ()
    ) -> Iterator[Record]:
        """Yield the records, in order, of an attempt that trains steps `first` + 1 … `last`."""
        if first == 0:
            yield from self._evaluated(0, began + STARTUP)
        for step in range(first + 1, last + 1):
            logged = min(last, -(-step // self.log_every) * self.log_every)
            written = self.time(logged, first, began)
            yield self.train(step) | {"time": written}
            if step == self.skipped:
                yield {
                    "kind": "guard", "step": step, "why": "spike", "action": "skip",
                    "bad_step": step, "ledger": _ledger(step), "time": written,
                }  # fmt: skip
            if step % self.log_every == 0 or step == last:
                yield from self._logged(step, first, written)
            if step % self.eval_every == 0 or step == self.steps:
                yield from self._evaluated(step, written)
            if step in saves:
                yield {
                    "kind": "save", "step": step, "bytes": 23_613_736, "blocked_seconds": 0.0092,
                    "write_seconds": 0.049, "verify_seconds": 0.0355, "time": written,
                }  # fmt: skip

    def _logged(self, step: int, first: int, time: float) -> Iterator[Record]:
        noise = random.Random(-step)
        duration = self.seconds_per_step * noise.uniform(0.95, 1.1)
        if step - first <= self.log_every:
            phases = {"imports": 1.3, "data": 0.5, "model": 0.1, "resume": 0.1, "first step": 3.9}
            yield {
                "kind": "start", "step": first, "seconds": phases,
                "matmul_flops": 1.3e12, "time": time,
            }  # fmt: skip
        yield {
            "kind": "perf", "step": step, "steps": self.steps,
            "tokens_per_second": round(self.batch_tokens / duration, 1),
            "seconds_per_step": round(duration, 6), "mfu": 0.41, "mfu_causal": 0.38,
            "matmul_share": 0.52, "memory_gb": 0.657, "memory_steady_gb": 0.61,
            "memory_reserved_gb": None,
            "seconds": {
                "other": 0.01, "data": 0.02,
                "forward_backward": round(self.log_every * duration * 0.8, 4),
                "optimizer": round(self.log_every * duration * 0.2, 4),
            },
            "communication_seconds": {"optimizer": 0.0, "gradients": 0.0},
            "slowest_rank": None, "slowest_node": None, "slowest_behind": None, "time": time,
        }  # fmt: skip
        epochs = {name: step / self.steps * (i + 0.5) for i, name in enumerate(self.sources)}
        yield {"kind": "data", "step": step, "epochs": epochs, "time": time}

    def _evaluated(self, step: int, time: float) -> Iterator[Record]:
        loss = self.loss(step) + 0.03
        yield {
            "kind": "eval", "step": step, "loss": loss, "bits_per_byte": loss / 2.6,
            "losses": {name: loss + 0.2 * i for i, name in enumerate(self.sources)}, "time": time,
        }  # fmt: skip
        for i, task in enumerate(self.tasks):
            acc = 0.25 + 0.5 * (i + 1) / len(self.tasks) * step / self.steps
            yield {
                "kind": "task", "step": step, "task": task, "n": 1000, "acc": acc,
                "acc_stderr": math.sqrt(acc * (1 - acc) / 1000), "time": time,
            }  # fmt: skip
        yield {
            "kind": "sample", "step": step, "time": time,
            "text": f"def step_{step}():\n    return 'after {step} steps'",
        }  # fmt: skip

    def parts(self, steps: int) -> dict[str, float]:
        """Return the time breakdown of an attempt with this number of steps, in seconds."""
        spent = steps * self.seconds_per_step
        return {
            "start": STARTUP, "data": round(0.01 * spent, 3), "other": round(0.01 * spent, 3),
            "forward_backward": round(0.76 * spent, 3), "optimizer": round(0.18 * spent, 3),
            "evaluate": round(0.02 * spent, 3), "save": round(0.02 * spent, 3),
        }  # fmt: skip


def _ledger(step: int) -> str:
    return blake2b(step.to_bytes(8, "little"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class WrittenJob:
    """A job directory that is being written."""

    job: JobDir
    run: SyntheticRun

    def attempt(
        self,
        first: int,
        last: int,
        *,
        began: float,
        code: ExitCode | None = ExitCode.DONE,
        reason: str = "done",
        asked_by: str = "",
        node: str | None = None,
        saves: Sequence[int] = (),
        extra: Sequence[Record] = (),
    ) -> float:
        """Write an attempt, which resumes after step `first` and ends after `last`.

        It was killed if `code` is None. `saves` are the steps of its checkpoints, `extra` more
        records. Returns the time of its end.
        """
        job, run = self.job, self.run
        number = job.begin_attempt()
        ended = run.time(last, first, began) + 1
        # Drop what this attempt writes again, as every attempt does.
        JsonlTracker(job.metrics, first if number > 1 else None).close()
        with job.metrics.open("a", encoding="utf-8") as file:
            records = [*run.records(first, last, began, saves), *extra]
            for record in sorted(records, key=lambda record: record["step"]):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        for step in saves:
            write_checkpoint(job, run, step, number)
        host = node or socket.gethostname()
        heartbeat = {
            "time": ended, "progress": ended, "attempt": number, "phase": "stop", "step": last,
            "steps": run.steps, "seconds_per_step": run.seconds_per_step, "world_size": 1,
            "node": host, "pid": 2**22 + 1,
        }  # fmt: skip
        rank = job.attempt_dir(number) / "ranks/00000.json"
        clock = {
            "began": began, "seconds": round(ended - began, 3), "first": first, "step": last,
            "steps": last - first, "parts": run.parts(last - first),
        }  # fmt: skip
        _write_json(job.heartbeat, heartbeat, ended)
        _write_json(rank, {"rank": 0, "node": host, "pid": 2**22 + 1}, began)
        _write_json(job.clock(number), clock, ended)
        if code is not None:
            job.end_attempt(code, reason, 0, attempt=number, node=node, asked_by=asked_by)
        return ended

    def keep_checkpoints(self, *steps: int) -> None:
        """Delete all other checkpoints."""
        for step in store.steps(self.job.checkpoints):
            if step not in steps:
                shutil.rmtree(store.folder_of(self.job.checkpoints, step))


def _write_json(path: Path, record: Mapping[str, Any], time: float) -> None:
    """Write a JSON object to a file that was last modified at `time`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    os.utime(path, (time, time))


def settings(run: SyntheticRun) -> dict[str, Any]:
    """Return the dotted keys and values of the configuration that trains this run."""
    return {
        "model.dim": 32, "model.n_layers": 2, "model.n_heads": 2, "train.seq_len": 64,
        "train.global_batch_tokens": run.batch_tokens, "train.steps": run.steps,
        "train.log_every": run.log_every, "train.eval_every": run.eval_every,
        "checkpoint.every": run.save_every, "optim.lr": run.lr, "seed": run.seed,
        "data.sources": [
            {"path": f"data/tokens/{name}", "name": name, "weight": i + 1.0}
            for i, name in enumerate(run.sources)
        ],
        "schedule.warmup": 20, "guard.spike": "skip",
    }  # fmt: skip


def resolved_settings(values: Mapping[str, Any]) -> Resolved:
    """Return the configuration with these values, as those of a file."""
    return resolve({tuple(k.split(".")): Leaf(v, "run.yaml:3") for k, v in values.items()}, env={})


def write_new_job(
    folder: Path, name: str, run: SyntheticRun, more: Mapping[str, Any] | None = None
) -> WrittenJob:
    """Write a job that has not started yet: its configuration and the description of its data."""
    root = folder / "jobs" / name
    root.mkdir(parents=True)
    resolved = resolved_settings({"name": name, **settings(run), **(more or {})})
    JobDir(root).config.write_text(show(resolved))
    write_surroundings(root, run, "-c", "run.yaml")
    return WrittenJob(JobDir(root), run)


def write_surroundings(root: Path, run: SyntheticRun, *said: str) -> None:
    """Write what a start leaves beside the configuration: data, tokenizer, environment."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(root / "tokenizer.json"))
    sources = [
        SourceFacts(
            name=name, path=f"data/tokens/{name}", key=fingerprint(name),
            corpus=CorpusSource(kind="hub", id=f"org/{name}", split="train", revision="0" * 40),
            tokens=1_000_000 * (i + 1), samples=15_625 * (i + 1), bytes_per_token=3.6,
        )
        for i, name in enumerate(run.sources)
    ]  # fmt: skip
    manifest = DataManifest(
        key=KEY,
        tokenizer_sha256=sha256_file(root / "tokenizer.json"),
        vocab_size=tokenizer.get_vocab_size(),
        end_of_document=256,
        sources=tuple(sources),
    )
    (root / manifest.filename).write_text(manifest.dump())
    environment = {
        "command": ["dtt", "train", *said], "python": "3.11.7", "platform": "Linux-6.1-x86_64",
        "packages": {"torch": "2.11.0"}, "git": {"commit": "0" * 40, "diff": ""},
        "environment": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    _write_json(root / "env.json", environment, START)
    (root / "overrides.txt").write_text(" ".join(["train", *said]) + "\n")
    (root / "lead").write_text("60\n")


def write_checkpoint(
    job: JobDir,
    run: SyntheticRun,
    step: int,
    attempt: int,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Write a verified checkpoint that contains one small tensor of each kind."""
    staging = job.checkpoints / store.staging_name(step, attempt)
    staging.mkdir(parents=True)
    position = {
        "step": step, "samples": 32 * step, "tokens": run.batch_tokens * step,
        "ledger": _ledger(step), "previous_ledger": _ledger(step - 1), "evaluated": step,
        "eval_loss": run.loss(step), "tasks_evaluated": step, "trained": step, "skipped": [],
        "avoided": {}, "run_id": "5947251e", "sources": {},
    }  # fmt: skip
    state = {"norm.weight": torch.ones(32)}
    files = [
        tensors.write(staging / store.rank_file(kind, 0), tensors.cut(on_every_rank(state, 1), 0))
        for kind in (store.MODEL, store.STATE)
    ]
    store.commit(
        staging,
        [*files, tensors.write_bytes(staging / store.POSITION, [json.dumps(position).encode()])],
        step=step,
        attempt=attempt,
        world_size=1,
        config_sha256="0" * 64,
        data_key=KEY,
        versions=dict(versions or {"dtt": "0.1.0", "torch": "2.11.0"}),
    )


def write_finished_job(
    folder: Path, name: str = "finished", run: SyntheticRun | None = None
) -> Path:
    """Write a job that ran to its end in one attempt; its last two checkpoints exist."""
    run = run or SyntheticRun()
    written = write_new_job(folder, name, run)
    saves = range(run.save_every, run.steps + 1, run.save_every)
    written.attempt(0, run.steps, began=START, saves=saves)
    written.keep_checkpoints(*saves[-2:])
    return written.job.root


def write_interrupted_job(folder: Path) -> Path:
    """Write a job of four attempts: killed, preempted, failed, and done; one step was skipped."""
    run = SyntheticRun(skipped=157)
    written = write_new_job(folder, "interrupted", run)
    ended = written.attempt(0, 130, began=START, code=None, node="node-1", saves=[50, 100])
    ended = written.attempt(
        100, 210, began=ended + 40, code=ExitCode.PREEMPTED, node="node-1", asked_by="SIGTERM",
        reason="stopped at step 210 on request; saved step-000210", saves=[150, 200, 210],
    )  # fmt: skip
    why = "no space left on device\n  where: /scratch/jobs\n  next:  free some space"
    ended = written.attempt(
        210, 275, began=ended + 900, code=ExitCode.IO, node="node-2", reason=why, saves=[250]
    )
    written.attempt(250, 400, began=ended + 60, node="node-2", saves=[300, 350, 400])
    written.keep_checkpoints(350, 400)
    return written.job.root


SWEEP = """
name: sweep
base: base.yaml
parameters:
  optim.lr: [0.001, 0.0025, 0.0063, 0.016]
  model.n_layers: [2, 4]
"""


def write_sweep(folder: Path) -> Path:
    """Write a sweep of 8 trials: 6 are done, the seventh diverged, and the last never started."""
    run = SyntheticRun(steps=200, spike=None, tasks=())
    (folder / "base.yaml").write_text(show(resolved_settings(settings(run))))
    (folder / "sweep.yaml").write_text(SWEEP)
    with chdir(folder):
        sweep = trials.plan(Path("sweep.yaml")).write()
    records = list(sweep.manifest.trials.items())
    for number, (id, trial) in enumerate(records[:-1]):
        own = replace(run, lr=trial.values["optim.lr"], seed=number)
        written = WrittenJob(JobDir(folder / sweep.job(id).root), own)
        write_surroundings(written.job.root, own, *(f"{k}={v}" for k, v in trial.values.items()))
        began = START + 100.0 * number
        if number < len(records) - 2:
            written.attempt(0, run.steps, began=began, saves=[200])
        else:
            why = "training diverged at step 88: loss is nan"
            written.attempt(0, 88, began=began, code=ExitCode.DIVERGED, reason=why, saves=[50])
    return folder / "jobs/sweep"
