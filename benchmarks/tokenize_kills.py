"""Check that `dtt tokenize`, killed and run again, writes bit for bit the same files.

    python benchmarks/tokenize_kills.py [KILLS] [SEED]

Jobs have one to three ranks, under mpirun or with the file-based rendezvous of a plain `srun`. A
random rank gets SIGKILL at a random moment. The others must then end by themselves with a message,
and the same command, with a different number of ranks, must write the same files as an undisturbed
run. (With the file-based rendezvous, ranks wait minutes for one that has not started, so no rank is
killed before its first heartbeat.)
All runs must execute the same code: do not edit the source meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

import psutil
from jobs import DTT, dtt

LIMIT = 10.0
"""Seconds within which all ranks must have ended."""
TEXT_BYTES = 6_000_000
STEPS = count()


def write_corpus(folder: Path) -> None:
    """Download a corpus from the first files of Python's library, one document per file."""
    remaining = TEXT_BYTES
    with (folder / "library.jsonl").open("w") as file:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
            remaining -= len(text)
            if remaining < 0:
                break
    dtt("download", "-d", "library.jsonl", folder=folder)


class Job:
    """The ranks of one `dtt tokenize`; their output goes to a file."""

    def __init__(self, folder: Path, out: str, launcher: str, ranks: int) -> None:
        self.ranks, self.launcher, self._out = ranks, launcher, folder / out
        self._log = folder / "output.log"
        command = [
            *DTT, "tokenize", "-d", "library.jsonl",
            f"tokenize.out={out}", "tokenizer.vocab_size=1000", "tokenize.unit_bytes=60000",
            "tokenize.validation_fraction=0.1", "tokenize.engine=hf",
        ]  # fmt: skip
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if launcher == "mpirun":
            mpirun = Path(sys.executable).with_name("mpirun")
            commands = [([str(mpirun), "-n", str(ranks), *command], env)]
        else:
            step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": str(next(STEPS))}
            step["SLURM_STEP_NUM_TASKS"] = str(ranks)
            commands = [(command, env | step | {"SLURM_PROCID": str(r)}) for r in range(ranks)]
        with self._log.open("w") as log:
            self.processes = [
                subprocess.Popen(argv, cwd=folder, env=environment, stdout=log, stderr=log)
                for argv, environment in commands
            ]

    def running(self) -> bool:
        """Return True if any process is left."""
        return any(process.poll() is None for process in self.processes)

    def wait(self, seconds: float) -> float | None:
        """Return the seconds until all had ended; None if they did not within `seconds`."""
        start = time.monotonic()
        while self.running():
            if time.monotonic() - start > seconds:
                return None
            time.sleep(0.01)
        return time.monotonic() - start

    def wait_for_units(self, number: int) -> None:
        """Wait until `number` units are finished, or the job has ended."""
        while self.running() and len(list(self._out.glob(".units/0*.json"))) < number:
            time.sleep(0.002)

    def kill(self, rank: int) -> bool:
        """Send SIGKILL to one rank; return False if it has not started or has ended."""
        if self.launcher != "mpirun":
            alive = any(self._out.glob(f".units/rendezvous/*/{rank:05d}.beat"))
            if alive and self.processes[rank].poll() is None:
                self.processes[rank].kill()
                return True
            return False
        try:
            children = psutil.Process(self.processes[0].pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return False
        for process in children:
            try:
                if process.environ().get("PMI_RANK") == str(rank):
                    process.kill()
                    return True
            except psutil.Error:
                continue
        return False

    def end(self) -> None:
        """Kill all processes that are left."""
        for process in self.processes:
            process.kill()
            process.wait()

    def output(self) -> str:
        """Return the output of all ranks."""
        return self._log.read_text()

    def succeeded(self) -> bool:
        """Return True if every process ended with code 0."""
        return all(process.wait() == 0 for process in self.processes)


def checksums(out: Path) -> dict[str, str]:
    """Return the sha256 of each output file, without the work files."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.iterdir()
        if path.is_file() and path.name != ".lock"
    }


def phase_of(out: Path) -> str:
    """Return the phase of a run, derived from the files in `out`."""
    work = out / ".units"
    if (out / "manifest.json").exists():
        return "manifest written"
    if any(work.glob("0*.json")):
        return "encoding"
    return "first units" if (out / "tokenizer.json").exists() else "start-up and tokenizer"


def main() -> None:
    """Kill, run again and compare; print the counts."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    phases: Counter[str] = Counter()
    problems: list[str] = []
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder)
        start = time.monotonic()
        reference = Job(folder, "undisturbed", "mpirun", 1)
        assert reference.wait(600) is not None, reference.output()
        duration = time.monotonic() - start
        assert reference.succeeded(), reference.output()
        expected = checksums(folder / "undisturbed")
        units = len(list((folder / "undisturbed").glob(".units/0*.json")))
        done = 0
        while done < kills:
            launcher = rng.choice(["mpirun", "mpirun", "files"])
            ranks = rng.choice([1, 2, 3] if launcher == "mpirun" else [2, 3])
            out = folder / f"out{done}"
            job = Job(folder, out.name, launcher, ranks)
            if rng.random() < 0.4:
                job.wait(rng.random() * duration)
            else:
                job.wait_for_units(rng.randint(0, units))
                job.wait(rng.random() * 0.1)
            phase = phase_of(out)
            if not job.kill(rng.randrange(ranks)):
                job.wait(600)  # the kill came too late or too early
                job.end()
                shutil.rmtree(out, ignore_errors=True)
                continue
            done += 1
            took = job.wait(60)
            job.end()
            name = f"{done}: {launcher}, {ranks} ranks, {phase}"
            if took is None or took > LIMIT:
                problems.append(f"{name}: took {took} s to end")
            if not job.output().strip():
                problems.append(f"{name}: without a message")
            phases[phase] += 1
            slowest[launcher] = max(slowest.get(launcher, 0.0), took or 60.0)
            rerun_ranks = rng.choice([n for n in (1, 2, 3) if n != ranks])
            rerun = Job(folder, out.name, "mpirun" if rerun_ranks == 1 else launcher, rerun_ranks)
            if rerun.wait(600) is None or not rerun.succeeded():
                problems.append(f"{name}: the rerun failed: {rerun.output()[-500:]}")
            elif checksums(out) != expected:
                problems.append(f"{name}: different files after a rerun with {rerun_ranks} ranks")
            rerun.end()
            shutil.rmtree(out)
            print(f"{name}: ended after {took or 60:.1f} s, rerun with {rerun_ranks}", flush=True)
    print(f"\n{kills} kills:", ", ".join(f"{n} in {what}" for what, n in phases.most_common()))
    for launcher, seconds in slowest.items():
        print(f"{launcher}: all ranks had ended {seconds:.1f} s after the kill at the latest")
    print(f"different from an undisturbed run, or not ended in {LIMIT:.0f} s: {len(problems)}")
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
