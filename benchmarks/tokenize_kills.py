"""Whether `dtt tokenize` that is killed and run again ends as if nothing had happened, bit for bit.

    python benchmarks/tokenize_kills.py [KILLS] [SEED]

Ranks under mpirun, and ranks that meet through files alone as under a plain `srun`; one, two or
three of them. A random rank gets SIGKILL at a random moment of the run. Then the others must end
by themselves, with a message; and the same command, with another number of ranks, must leave the
same files as a run that nobody disturbed. (Ranks that meet through files wait minutes for one that
has not started, so none is killed before its first sign of life.)
Compares runs of one and the same code: leave the source alone meanwhile.
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

LIMIT = 10.0
"""Seconds within which all ranks must have ended."""
TEXT_BYTES = 6_000_000
STEPS = count()


def write_corpus(folder: Path) -> None:
    """The beginning of Python's own library, a document per file."""
    left = TEXT_BYTES
    with (folder / "library.jsonl").open("w") as file:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
            left -= len(text)
            if left < 0:
                break
    dtt = [sys.executable, "-m", "dtt.main", "download", "-d", "library.jsonl"]
    subprocess.run(dtt, cwd=folder, check=True, capture_output=True)


class Job:
    """The ranks of one `dtt tokenize`; what they say goes to a file."""

    def __init__(self, folder: Path, out: str, launcher: str, ranks: int) -> None:
        self.ranks, self.launcher, self._out = ranks, launcher, folder / out
        self._said = folder / "said.txt"
        command = [
            sys.executable, "-m", "dtt.main", "tokenize", "-d", "library.jsonl",
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
        with self._said.open("w") as said:
            self.processes = [
                subprocess.Popen(argv, cwd=folder, env=own, stdout=said, stderr=said)
                for argv, own in commands
            ]

    def running(self) -> bool:
        """Whether any process is left."""
        return any(process.poll() is None for process in self.processes)

    def wait(self, seconds: float) -> float | None:
        """Seconds until all had ended; None if they did not in time."""
        start = time.monotonic()
        while self.running():
            if time.monotonic() - start > seconds:
                return None
            time.sleep(0.01)
        return time.monotonic() - start

    def wait_for_units(self, number: int) -> None:
        """Until so many units are finished."""
        while self.running() and len(list(self._out.glob(".units/0*.json"))) < number:
            time.sleep(0.002)

    def kill(self, rank: int) -> bool:
        """SIGKILL one rank; False if it is not there (yet, or any more)."""
        if self.launcher != "mpirun":
            alive = any(self._out.glob(f".units/meeting/*/{rank:05d}.beat"))
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
        """Leave no process behind."""
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self) -> str:
        """All that the ranks printed."""
        return self._said.read_text()

    def succeeded(self) -> bool:
        """Whether every process ended well."""
        return all(process.wait() == 0 for process in self.processes)


def sums(out: Path) -> dict[str, str]:
    """sha256 of all files but those of the work itself."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.iterdir()
        if path.is_file() and path.name != ".lock"
    }


def phase(out: Path) -> str:
    """What a run in `out` is doing, by the files there."""
    work = out / ".units"
    if (out / "manifest.json").exists():
        return "manifest written"
    if any(work.glob("0*.json")):
        return "encoding"
    return "first units" if (out / "tokenizer.json").exists() else "start-up and tokenizer"


def main() -> None:
    """Kill, run again, compare; print what was seen."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    phases: Counter[str] = Counter()
    wrong: list[str] = []
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder)
        start = time.monotonic()
        reference = Job(folder, "undisturbed", "mpirun", 1)
        assert reference.wait(600) is not None, reference.said()
        length = time.monotonic() - start
        assert reference.succeeded(), reference.said()
        expected = sums(folder / "undisturbed")
        units = len(list((folder / "undisturbed").glob(".units/0*.json")))
        done = 0
        while done < kills:
            launcher = rng.choice(["mpirun", "mpirun", "files"])
            ranks = rng.choice([1, 2, 3] if launcher == "mpirun" else [2, 3])
            out = folder / f"out{done}"
            job = Job(folder, out.name, launcher, ranks)
            if rng.random() < 0.4:
                job.wait(rng.random() * length)
            else:
                job.wait_for_units(rng.randint(0, units))
                job.wait(rng.random() * 0.1)
            doing = phase(out)
            if not job.kill(rng.randrange(ranks)):
                job.wait(600)  # it was too late, or too early
                job.end()
                shutil.rmtree(out, ignore_errors=True)
                continue
            done += 1
            took = job.wait(60)
            job.end()
            name = f"{done}: {launcher}, {ranks} ranks, {doing}"
            if took is None or took > LIMIT:
                wrong.append(f"{name}: took {took} s to end")
            if not job.said().strip():
                wrong.append(f"{name}: without a message")
            phases[doing] += 1
            slowest[launcher] = max(slowest.get(launcher, 0.0), took or 60.0)
            other = rng.choice([n for n in (1, 2, 3) if n != ranks])
            again = Job(folder, out.name, "mpirun" if other == 1 else launcher, other)
            if again.wait(600) is None or not again.succeeded():
                wrong.append(f"{name}: the rerun failed: {again.said()[-500:]}")
            elif sums(out) != expected:
                wrong.append(f"{name}: other files after {other} ranks")
            again.end()
            shutil.rmtree(out)
            print(f"{name}: ended after {took or 60:.1f} s, rerun with {other}", flush=True)
    print(f"\n{kills} kills:", ", ".join(f"{n} in {what}" for what, n in phases.most_common()))
    for launcher, seconds in slowest.items():
        print(f"{launcher}: all ranks had ended {seconds:.1f} s after the kill at the latest")
    print(f"different from an undisturbed run, or not ended in {LIMIT:.0f} s: {len(wrong)}")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
