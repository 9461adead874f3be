"""A real Slurm of two pretended nodes: its own cluster, which these tests may shake."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.track import jsonl

LIMIT = 300.0
"""Seconds; nothing here takes so long unless it hangs."""


def wait_for(what: str, true: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Poll for something that other processes do; returns what it is."""
    end = time.monotonic() + limit
    while not (value := true()):
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(0.05)
    return value


@dataclass(frozen=True)
class Cluster:
    """What a user types, and what happens to daemons."""

    conf: Path

    def run(self, *argv: str) -> str:
        """Output of one of Slurm's commands, which must succeed."""
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S*)", self.run("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def ask_to_save(self, job: str) -> None:
        """What Slurm does when the time limit is near."""
        self.run("scancel", "--signal=USR2", "--batch", job)

    def wait_for_state(self, job: str, *states: str) -> str:
        """Until Slurm has the job in one of these states."""
        said = wait_for(f"job {job} {states}", lambda: self._state_among(job, states))
        return str(said)

    def _state_among(self, job: str, states: tuple[str, ...]) -> str | None:
        state = self.field(job, "JobState")
        return state if state in states else None

    def wait_for_file(self, path: Path) -> None:
        """Until a job has made this file."""
        wait_for(str(path), path.exists)

    def kill(self, daemon: str) -> None:
        """End slurmctld, slurmd-n1 or slurmd-n2 as a power failure would."""
        path = self._pid_file(daemon)
        pid = int(path.read_text())
        os.kill(pid, signal.SIGKILL)
        path.unlink()
        wait_for(f"the end of {daemon}", lambda: not Path(f"/proc/{pid}").exists())

    def start_what_was_killed(self) -> None:
        """Until all daemons are up."""
        for daemon in ("slurmctld", "slurmd-n1", "slurmd-n2"):
            if not self._pid_file(daemon).exists():
                program, _, node = daemon.partition("-")
                name = ["-N", node] if node else []
                subprocess.run([program, "-f", self.conf, *name], check=True)
        ping = ["scontrol", "ping"]
        wait_for("slurmctld", lambda: not subprocess.run(ping, capture_output=True).returncode)

    def _pid_file(self, daemon: str) -> Path:
        return self.conf.parent / f"run/{daemon}.pid"

    def idle(self) -> bool:
        """Whether both nodes are free."""
        nodes = self.run("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N")
        return len(set(nodes.split())) == 2


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster of $SLURM_CONF, if it is one that may be shaken."""
    conf = os.environ.get("SLURM_CONF")
    if conf is None or shutil.which("scontrol") is None:
        pytest.skip("no Slurm: SLURM_CONF does not name a cluster")
    said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    if not re.search(r"^ClusterName\s*= dtt$", said.stdout, re.M):
        pytest.skip("no Slurm of our own: a cluster with ClusterName=dtt must run")
    return Cluster(Path(conf))


@pytest.fixture(autouse=True)
def free_nodes(request: pytest.FixtureRequest) -> Any:
    """Each test begins with two free nodes, and leaves no job."""
    cluster: Cluster = request.getfixturevalue("cluster")
    cluster.start_what_was_killed()
    wait_for("free nodes", cluster.idle)
    yield
    cluster.start_what_was_killed()
    for job in cluster.run("squeue", "-h", "-o", "%A").split():
        subprocess.run(["scancel", job])


@dataclass(frozen=True)
class Submitted:
    """A training job in Slurm."""

    dtt: Dtt
    path: Path
    id: str

    def reported(self) -> dict[str, Any]:
        """What `dtt job status` says."""
        status: dict[str, Any] = json.loads(self.dtt("job", "status", self.path, "--json").stdout)
        return status

    def state_in_report(self) -> str:
        """The state that the page shows, which dtt or the job script wrote at the end."""
        page = (self.dtt.folder / self.path / "report.html").read_text()
        data = page.partition('id="data">')[2].partition("</script>")[0]
        return str(json.loads(data)["runs"][0]["verdict"]["state"])

    def step(self) -> int:
        """The last step on record."""
        records = jsonl.read(self.dtt.folder / self.path / "metrics.jsonl")
        return max((r["step"] for r in records if r["kind"] == "train"), default=0)

    def wait_for_step(self, step: int) -> None:
        """Until this step is on record."""
        wait_for(f"step {step}", lambda: self.step() >= step)

    def exit_record(self, attempt: int) -> dict[str, Any]:
        """How an attempt ended; waits for it."""
        job = JobDir(self.dtt.folder / self.path)
        record: dict[str, Any] = wait_for(
            f"the end of attempt {attempt}", lambda: job.exit_record(attempt)
        )
        return record

    def slurm_log(self) -> str:
        """What the job script said."""
        return (self.dtt.folder / self.path / "logs/latest-slurm.log").read_text()


STEPS = 320
Settings = Callable[..., list[str]]


@pytest.fixture
def settings(tiny: Settings) -> Settings:
    """Like `tiny`: some seconds of training, on both nodes."""

    def longer(**changes: object) -> list[str]:
        values: dict[str, object] = {
            "train__steps": STEPS, "train__eval_every": 100, "train__log_every": 20,
            "checkpoint__every": 40, "launch__nodes": 2, "model__dropout": 0.1,
        }  # fmt: skip
        return tiny(**values | changes)

    return longer


@pytest.fixture
def submit(dtt: Dtt, cluster: Cluster, settings: Settings) -> Callable[..., Submitted]:
    """Hands a training job to Slurm; keywords change keys."""

    def submitted(**changes: object) -> Submitted:
        report = json.loads(dtt("submit", "train", *settings(**changes), "-y", "--json").stdout)
        return Submitted(dtt, Path(report["job_dir"]), report["job_id"])

    return submitted


@pytest.fixture
def follow(dtt: Dtt) -> Callable[[str | Path, str], Submitted]:
    """A job directory and the Slurm job that works in it, however it was submitted."""
    return lambda path, id: Submitted(dtt, Path(path), id)


@pytest.fixture(scope="session")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on two processes without Slurm, which nothing disturbed."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def assert_as_undisturbed(undisturbed: Path, settings: Settings) -> Callable[[Submitted], None]:
    """Checks that weights, optimizer state and metrics are those of an undisturbed run."""
    reference = undisturbed / "jobs/t"
    if not reference.exists():
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        process = Dtt(undisturbed).start_python(
            *launcher, "-m", "dtt.main", "train", *settings(), OMP_NUM_THREADS="1"
        )
        assert Dtt.wait(process).returncode == 0

    def check(job: Submitted) -> None:
        assert final(job.dtt.folder / job.path) == final(reference)
        assert measured(job.dtt.folder / job.path) == measured(reference)

    return check


def final(job: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint, as bytes."""
    paths = (job / f"checkpoints/step-{STEPS:06d}").glob("*.safetensors")
    tensors = {path.name: path.read_bytes() for path in paths}
    assert tensors
    return tensors


def measured(job: Path) -> list[dict[str, Any]]:
    """What does not differ between two runs of a configuration."""
    wanted = ("train", "eval", "sample")
    return [record for record in jsonl.read(job / "metrics.jsonl") if record["kind"] in wanted]
