"""Concurrent trials of a sweep as local processes.

Each trial saves and stops when the parent process ends, for whatever reason.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base import local
from dtt.base.errors import ExitCode
from dtt.base.log import log
from dtt.config.load import load_job
from dtt.jobs.job_files import first_line, last_lines


def run(jobs: Sequence[JobDir], concurrency: int, gpus: Sequence[str]) -> None:
    """Train each job to its end, `concurrency` at a time.

    SIGINT and SIGTERM are forwarded to every running trial, which saves and stops; no further trial
    starts.
    """
    asyncio.run(_TrialPool(deque(jobs)).run(split_gpus(gpus, min(concurrency, len(jobs)))))


def split_gpus(gpus: Sequence[str], slots: int) -> list[list[str]]:
    """Distribute GPUs over `slots` concurrent trials; if there are fewer, trials share one."""
    if not gpus:
        return [[] for _ in range(slots)]
    each = len(gpus) // slots
    return [
        list(gpus[slot * each : (slot + 1) * each]) if each else [gpus[slot % len(gpus)]]
        for slot in range(slots)
    ]


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine as in CUDA_VISIBLE_DEVICES, without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is not None:  # unlike /proc, lists only GPUs of this container
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        return [str(number) for number in range(listed.stdout.count("GPU "))]
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = sum(node.read_text().strip() not in ("", "0") for node in nodes)
    return [str(number) for number in range(amd)]


@dataclass
class _TrialPool:
    """A pool of workers that train queued jobs."""

    waiting: deque[JobDir]
    running: set[asyncio.subprocess.Process] = field(default_factory=set)
    stopping: bool = False

    async def run(self, devices: list[list[str]]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        threads = str(max(1, local.cores() // max(1, len(devices))))
        await asyncio.gather(*(self._work(gpus, threads) for gpus in devices))

    def _stop(self, number: signal.Signals) -> None:
        if not self.stopping:
            log.info("%s: saving and stopping %d trials", number.name, len(self.running))
        self.stopping = True
        for process in self.running:
            if process.returncode is None:
                process.send_signal(number)

    async def _work(self, gpus: list[str], threads: str) -> None:
        """Train one job after the other on these GPUs."""
        env = {"OMP_NUM_THREADS": threads} | os.environ
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        while self.waiting and not self.stopping:
            job = self.waiting.popleft()
            if job.stop.exists():
                log.info("%s: cancelled before it started", job.root)
                continue
            await self._train(job, gpus, env)

    async def _train(self, job: JobDir, gpus: list[str], env: dict[str, str]) -> None:
        number = job.attempt() + 1
        path, latest = job.logs / f"train-local-{number}.log", job.logs / "latest.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        latest.unlink(missing_ok=True)
        latest.symlink_to(path.name)
        log.info("%s: attempt %d, log in %s", job.root, number, path)
        # A process per GPU, or as many as the configuration asks for.
        config, argv = load_job(job.root), ["train", str(job.root)]
        visible = len(gpus) if config.train.device != "cpu" else 1
        processes = config.pipeline.train_processes or visible or 1
        command = local.dtt_argv(*argv)
        if processes > 1:
            command = local.torchrun_argv(processes, argv)
        with path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=local.stop_with_parent,
            )
        self.running.add(process)
        if self.stopping:  # the signal arrived while the process was starting
            process.terminate()
        code = await process.wait()
        self.running.discard(process)
        log.info("%s: %s", job.root, _ending(job, number, code, path))


def _ending(job: JobDir, attempt: int, code: int, path: Path) -> str:
    """Return how an attempt ended, in one line.

    If the trial was killed before it could write attempt.json, this function writes it.
    """
    if job.exit_record(attempt) is None and code != ExitCode.DONE:
        if job.attempt() < attempt:
            job.begin_attempt()
        known = ExitCode(code) if code in set(ExitCode) else ExitCode.BUG
        last = "".join(last_lines(path, 1)) or f"exit code {code}"
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else last
        job.end_attempt(known, reason, rank=0, attempt=attempt)
    record = job.exit_record(attempt)
    return first_line(record["reason"]) if record else "done"
