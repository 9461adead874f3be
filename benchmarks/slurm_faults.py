"""Check job chains on a real Slurm that loses nodes, suspends, preempts and times out jobs.

    ./env.sh python benchmarks/slurm_faults.py [N] [--faults node,slurmd,…]
                                               [--modes requeue,singleton]

Runs inside dtt's environment, which has torchrun on PATH. Needs a dedicated Slurm with accounting:
$SLURM_CONF of start-slurm.sh --accounting --preempt 20.
Each kind of fault hits one job N (10) times, for each value of launch.continuation:

    node      a node is set down: alternately that of the job script and the other one
    slurmd    the slurmd of a node is killed; Slurm notices after SlurmdTimeout, here set to 15 s
    suspend   the job is suspended for 8 s, the first time for 70 s, beyond the heartbeat timeout
    preempt   another job takes the nodes, alternately with a grace time of 20 s and without
    limit     the job reaches a time limit of three minutes; dtt is asked to save 90 s before it

Meanwhile `dtt job status --json` is polled; its state must match squeue just before or just after.
At the end the job must be done without manual intervention, no job may be left in Slurm, sacct must
show the faults, and weights, optimizer state and metrics must equal those of an undisturbed run bit
for bit. The exit code is 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import differences, dtt, make_tokens, require_programs, results
from slurm_chain import seconds_per_step, settings, train_without_slurm

from dtt.artifacts.jobdir import JobDir

SECONDS_BETWEEN_FAULTS = {"node": 8, "slurmd": 50, "suspend": 8, "preempt": 8, "limit": 60}
"""Seconds of training: Slurm takes half a minute to notice a dead slurmd."""
MIN_STEPS_BETWEEN_FAULTS = 60
SUSPENDED_FOR = (70, 8)
"""Seconds of the first suspension and of the later ones."""
FREQUENT = ("checkpoint.every=25", "train.log_every=5")
"""Settings for frequent checkpoints and records."""
PATIENCE = 300
"""Seconds after which a wait fails."""
SLURMD_TIMEOUT = 15
"""Seconds after which Slurm considers a dead slurmd as down."""
LIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "PENDING")
SACCT_STATES = {
    "requeue": {"node": "NODE_FAIL|REQUEUED", "slurmd": "NODE_FAIL|REQUEUED",
                "preempt": "PREEMPTED|REQUEUED", "limit": "REQUEUED"},
    "singleton": {"node": "NODE_FAIL", "slurmd": "NODE_FAIL", "preempt": "PREEMPTED|FAILED",
                  "limit": "FAILED"},
}  # fmt: skip
"""States in sacct of a run ended by a fault; FAILED stands for dtt's exit code 75."""


def run(*argv: str) -> str:
    """Run a Slurm command, which must succeed, and return its output."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()


@dataclass
class Chain:
    """A training job and the states reported for it."""

    name: str
    fault: str
    states: Counter[str] = field(default_factory=Counter)
    wrong_states: list[str] = field(default_factory=list)
    """States that dtt reported and squeue contradicts."""

    @property
    def job(self) -> JobDir:
        """Job directory."""
        return JobDir(Path("jobs") / self.name)

    def ids(self) -> list[str]:
        """Return the Slurm job ids, the newest last."""
        lines = (self.job.root / "submissions.jsonl").read_text().splitlines()
        return [json.loads(line)["job_id"] for line in lines]

    def slurm_states(self) -> dict[str, str]:
        """Return the state of each job of the chain, as squeue shows it now."""
        out = run("squeue", "-h", "-t", "all", "-o", "%i %T", "-j", ",".join(self.ids()))
        return dict(line.split() for line in out.splitlines())

    def running(self) -> str | None:
        """Return the id of the running job, if any."""
        return next((id for id, state in self.slurm_states().items() if state == "RUNNING"), None)

    def step(self) -> int:
        """Return the last recorded step."""
        return self.job.last_step() or 0

    def check_status(self) -> str:
        """Run `dtt job status --json` and compare its state with squeue before and after."""
        before = self.slurm_states()
        status: dict[str, Any] = json.loads(dtt("job", "status", self.job.root, "--json"))
        after = self.slurm_states()
        state, allowed = str(status["state"]), self.allowed(before) | self.allowed(after)
        self.states[state] += 1
        if state not in allowed:
            self.wrong_states.append(
                f"{state} ({status['detail']}), squeue: {before}, then {after}"
            )
        return state

    def allowed(self, slurm_states: dict[str, str]) -> set[str]:
        """Return the states that dtt may report when squeue shows `slurm_states`."""
        states = set(slurm_states.values())
        newest = self.job.attempt()
        record = self.job.exit_record(newest)
        if record is not None and record["code"] == 0:
            return {"done", "running", "stopping"} if states & set(LIVE) else {"done"}
        if "SUSPENDED" in states:
            return {"suspended"}
        if states & {"RUNNING", "COMPLETING", "CONFIGURING"}:
            return {"running", "stopping"} | (
                {"queued", "preempted"} if "PENDING" in states else set()
            )
        if "PENDING" in states:
            return {"preempted"} if self.fault == "preempt" and newest else {"queued"}
        return set()  # an unfinished chain must have a job in Slurm

    def wait(self, what: str, true: Callable[[], Any]) -> Any:
        """Poll the job status until `true()` holds, and return its value."""
        end = time.monotonic() + PATIENCE
        while not (value := true()):
            assert time.monotonic() < end, f"{self.name}: waited too long for {what}"
            self.check_status()
        return value

    def wait_for_step(self, step: int) -> str:
        """Wait until the job runs and has reached `step`; return its Slurm id."""
        self.wait(f"step {step}", lambda: self.step() >= step and self.running())
        return str(self.wait("a running job", self.running))

    def wait_for_release(self, id: str) -> None:
        """Wait until Slurm has taken the nodes from this run of the job."""
        self.wait(
            f"the end of {id}", lambda: self.slurm_states().get(id) not in ("RUNNING", "COMPLETING")
        )


# ---- faults: each function injects one -------------------------------------------------------


def resume_node(chain: Chain, name: str) -> None:
    """Set a node up, unless it already is: a slurmd that registers again is set up by Slurm."""
    subprocess.run(["scontrol", "update", f"nodename={name}", "state=idle"], check=False)
    chain.wait(f"{name} up", lambda: "down" not in run("sinfo", "-hN", "-n", name, "-o", "%t"))


def node(chain: Chain, id: str, number: int) -> None:
    """Set a node down, then up again."""
    name = f"n{1 + number % 2}"
    run("scontrol", "update", f"nodename={name}", "state=down", "reason=fault")
    chain.wait_for_release(id)
    resume_node(chain, name)


def slurmd(chain: Chain, id: str, number: int) -> None:
    """Kill the slurmd of a node; restart it when Slurm has noticed."""
    name = f"n{1 + number % 2}"
    pid = Path(os.environ["SLURM_CONF"]).parent / f"run/slurmd-{name}.pid"
    os.kill(int(pid.read_text()), 9)
    chain.wait_for_release(id)
    subprocess.run(["slurmd", "-f", os.environ["SLURM_CONF"], "-N", name], check=True)
    resume_node(chain, name)


def suspend(chain: Chain, id: str, number: int) -> None:
    """Suspend the job, then resume it."""
    run("scontrol", "suspend", id)
    end = time.monotonic() + SUSPENDED_FOR[number > 0]
    chain.wait("the end of the suspension", lambda: time.monotonic() > end)
    run("scontrol", "resume", id)


def preempt(chain: Chain, id: str, number: int) -> None:
    """Let a job of higher priority take both nodes for a moment."""
    run("scontrol", "update", "partitionname=batch", f"gracetime={0 if number % 2 else 20}")
    urgent = run("sbatch", "--parsable", "-p", "debug", "-N2", "--exclusive", "-o", "/dev/null",
                 "--wrap", "sleep 3")  # fmt: skip
    over = "JobState=COMPLETED"
    chain.wait("the urgent job", lambda: over in run("scontrol", "show", "job", urgent))


def limit(chain: Chain, id: str, number: int) -> None:
    """Wait until Slurm's time limit ends the run and the next attempt starts."""
    before = chain.step()
    attempt = chain.job.attempt()
    chain.wait("the time limit", lambda: chain.job.attempt() > attempt or ended(chain))
    assert chain.step() >= before


def ended(chain: Chain) -> bool:
    """Return True if no job of the chain is live."""
    return not set(chain.slurm_states().values()) & set(LIVE)


FAULTS = {f.__name__: f for f in (node, slurmd, suspend, preempt, limit)}


# ---- one chain, and all of them --------------------------------------------------------------


def check(fault: str, mode: str, n: int, steps: int, reference: JobDir) -> Iterator[str]:
    """Run a chain through its faults and yield the problems."""
    start, chain = time.monotonic(), Chain(f"{fault}-{mode}", fault)
    launch = ["launch.nodes=2", f"launch.continuation={mode}", "launch.time=30"]
    if fault == "limit":
        launch[-1:] = ["launch.time=3", "launch.lead_seconds=90"]
    dtt("submit", "train", *settings(chain.name, steps), *FREQUENT, *launch, "-y")
    for number in range(n):
        step = 20 if fault == "limit" else (number + 1) * steps // (n + 1)
        FAULTS[fault](chain, chain.wait_for_step(step), number)
    chain.wait("the end", lambda: ended(chain))
    last = chain.check_status()
    rows = run("sacct", "-nXDP", "-o", "State", "-j", ",".join(chain.ids())).splitlines()
    expected = SACCT_STATES[mode].get(fault)
    faults = [row for row in rows if expected and re.match(expected, row)]
    print(
        f"{fault:<9}{mode:<11}{n:>3} faults  {chain.job.attempt():>3} attempts  {last:<6}"
        f"  {chain.states.total():>4} status checks {dict(chain.states)}"
        f"  sacct {dict(Counter(rows))}  {time.monotonic() - start:.0f} s",
        flush=True,
    )
    yield from chain.wrong_states
    if last != "done":
        yield f"the job ended as {last}"
    if expected and len(faults) < n:
        yield f"sacct shows {len(faults)} faults, not {n}: {rows}"
    if differing := differences(chain.job, steps, results(reference, steps)):
        yield f"different from the run without faults: {', '.join(differing)}"


def steps_of(fault: str, n: int, per_step: float) -> int:
    """Return the number of steps of a job with `n` faults, evenly spaced."""
    between = max(MIN_STEPS_BETWEEN_FAULTS, round(SECONDS_BETWEEN_FAULTS[fault] / per_step))
    return between * (n + 1)


def require_slurm() -> None:
    """Exit with one line unless this is dtt's environment, with a Slurm that keeps accounts."""
    require_programs("torchrun", "sbatch")
    if "SLURM_CONF" not in os.environ:
        sys.exit("SLURM_CONF is not set: start a dedicated Slurm, this script changes its settings")
    sacct = subprocess.run(["sacct", "-nX"], capture_output=True, text=True, check=False)
    if sacct.returncode:
        error = " ".join(sacct.stderr.split())
        sys.exit(f"Slurm accounting is off, start the cluster with --accounting: {error}")


def shorten_slurmd_timeout() -> None:
    """Shorten SlurmdTimeout, so that Slurm notices a dead slurmd soon."""
    conf = Path(os.environ["SLURM_CONF"])
    text = re.sub(r"SlurmdTimeout=\d+", f"SlurmdTimeout={SLURMD_TIMEOUT}", conf.read_text())
    conf.write_text(text)
    run("scontrol", "reconfigure")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("n", nargs="?", type=int, default=10)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--modes", default="requeue,singleton")
    options = parser.parse_args()
    require_slurm()
    os.environ["OMP_NUM_THREADS"] = "1"
    shorten_slurmd_timeout()
    start, problems = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_tokens(Path(folder))
        faults = options.faults.split(",")
        per_step = seconds_per_step(Path(folder))
        print(f"{per_step:.3f} s a step", flush=True)
        steps_by_fault = {fault: steps_of(fault, options.n, per_step) for fault in faults}
        for steps in set(steps_by_fault.values()):
            train_without_slurm(Path(folder), [*settings(f"free-{steps}", steps), *FREQUENT])
        for mode in options.modes.split(","):
            for fault in faults:
                steps = steps_by_fault[fault]
                reference = JobDir(Path(f"jobs/free-{steps}"))
                for problem in check(fault, mode, options.n, steps, reference):
                    problems += 1
                    print(f"    WRONG: {problem}", flush=True)
        run("scontrol", "update", "partitionname=batch", "gracetime=20")
    print(f"{problems} problems in {time.monotonic() - start:.0f} s")
    sys.exit(problems > 0)


if __name__ == "__main__":
    main()
