"""A chain on a real Slurm: preempted, at a limit and failing, it makes the files of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import local_tasks
from support.running import Dtt

from dtt.data.tokenize.markers import WORK

pytestmark = pytest.mark.slow

DATA = (
    "data.tokens=null", "download.dataset=counting.jsonl", "tokenizer.vocab_size=300",
    "tokenize.validation_fraction=0.1", "tokenize.unit_bytes=8192",
    "pipeline.tokenize_processes=1", "launch.nodes=1", "eval.tasks=[pages.yaml]",
)  # fmt: skip


def states(dtt: Dtt) -> list[str]:
    said = dtt("job", "status", "jobs/t-pipeline", "--json").stdout
    return [step["state"] for step in json.loads(said)["steps"]]


def write_units(path: Path, source: Path) -> None:
    """Write documents for 600 units of tokenization."""
    documents = source.read_text().splitlines(keepends=True)
    path.write_text("".join(documents * 50))


def pause_tokenization(folder: Path) -> dict[Path, tuple[int, int]]:
    """Stop the process that tokenizes once it has finished some units.

    Return the files of these units, each with its inode and the time of its last change.
    """
    tokens = folder / "data/tokens"
    while len(units := [*tokens.glob(f"*/{WORK}/[0-9]*.json")]) < 3:
        time.sleep(0.005)
    for pid in pids_of("tokenize", folder):
        os.kill(pid, signal.SIGSTOP)
    stems = {(unit.parents[1], unit.stem) for unit in units}
    files = [path for out, stem in stems for path in out.glob(f"*-{stem}.*")]
    return {path: changed(path) for path in files}


def pids_of(step: str, folder: Path) -> list[int]:
    """Return the ids of the Python processes of a step in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            is_python = "python" in (process / "exe").readlink().name
            if is_python and step.encode() in arguments and (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


def changed(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def reach_time_limit(cluster: Any, training: Any) -> None:
    """Let Slurm find that the time limit is near, while no step is trained: a core may be fast."""
    pid = training.reported()["heartbeat"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        ran = cluster.run("squeue", "-h", "-j", training.id, "-o", "%M")
        minutes = int(ran.split(":")[-2]) + 2  # one or two from now: it is to save 120 s before
        cluster.run("scontrol", "update", f"jobid={training.id}", f"timelimit={minutes}")
        cluster.wait_for_file(training.dtt.folder / training.path / "control/stop")
    finally:
        os.kill(pid, signal.SIGCONT)


def assert_equal_files(folder: Path, plain: Path, name: str) -> None:
    """Compare the token files and the export of a chain with those of an undisturbed run."""
    exported = (f"exports/{name}/*.safetensors", f"exports/{name}/*.json")
    for pattern in ("data/tokens/**/*.bin", *exported):
        made = {path.relative_to(plain): path for path in plain.glob(pattern)}
        assert made
        for relative, path in made.items():
            if relative.name != "dtt_export.json":
                assert (folder / relative).read_bytes() == path.read_bytes(), relative


def test_a_chain_survives_a_preemption_a_time_limit_and_a_failing_step(
    cluster: Any,
    dtt: Dtt,
    tokens: Path,
    settings: Callable[..., list[str]],
    follow: Callable[..., Any],
) -> None:
    source = tokens.parent / "counting.jsonl"
    for folder in (dtt.folder, plain := dtt.folder / "plain"):
        local_tasks.write_tasks(folder, questions=4)
        write_units(folder / source.name, source)
    keys = [*settings(), *DATA]
    blocked = dtt.folder / "exports"
    blocked.write_text("")  # the export fails
    report = json.loads(dtt("submit", "pipeline", *keys, "-y", "--json").stdout)
    ids = [step["job_id"] for step in report["steps"]]
    tokenize, train, evaluation, export = ids[1:]
    later = ("name=later", "download.dataset=counting.jsonl", "--after", "jobs/t-pipeline")
    after = json.loads(dtt("submit", "download", *later, "-y", "--json").stdout)

    finished = pause_tokenization(dtt.folder)
    assert states(dtt) == ["done", "running", "queued", "queued", "queued"]
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "debug", "-N2", "--exclusive", "-o", "/dev/null",
        "--wrap", "sleep 5",
    )  # fmt: skip
    cluster.wait_for_state(urgent, "RUNNING", "COMPLETED")
    waiting = states(dtt)
    assert waiting.pop(1) in ("preempted", "queued")
    assert waiting == ["done", "queued", "queued", "queued"]
    cluster.wait_for_state(tokenize, "COMPLETED")
    assert cluster.field(tokenize, "Restarts") == "1"
    assert {path: changed(path) for path in finished} == finished  # not encoded again
    [out] = {path.parent for path in finished}
    assert 3 <= len(finished) < len([*out.glob("*-?????.*")])

    training = follow("jobs/t", train)
    training.wait_for_step(80)
    cluster.wait_for_state(evaluation, "RUNNING")
    assert states(dtt) == ["done", "done", "running", "running", "queued"]
    reach_time_limit(cluster, training)
    record = training.exit_record(1)
    assert record["code"] == 75
    assert "slurm: time limit" in record["reason"]
    cluster.wait_for_state(train, "PENDING", "CONFIGURING")
    cluster.run("scontrol", "update", f"jobid={train}", "timelimit=60")
    assert states(dtt) == ["done", "done", "queued", "running", "queued"]
    cluster.wait_for_state(train, "COMPLETED")
    assert cluster.field(train, "Restarts") == "1"

    cluster.wait_for_state(export, "FAILED")
    cluster.wait_for_state(evaluation, "COMPLETED")
    assert states(dtt)[2:] == ["done", "done", "out of attempts"]
    [result] = dtt.folder.glob("jobs/t/evals/step-000320/pages-*.jsonl")
    assert len(result.read_text().splitlines()) > 4
    cluster.wait_for_state(after["job_id"], "CANCELLED")
    why = dtt("job", "status", "jobs/later-download").stdout
    assert "the job that it waited for did not succeed" in why
    blocked.unlink()
    [line] = dtt("job", "resume", "jobs/t-pipeline").stdout.splitlines()
    assert line.startswith("submitted  export: ")
    cluster.wait_for_state(line.split()[-1], "COMPLETED")
    assert states(dtt) == ["done"] * 5

    Dtt(plain)("pipeline", *keys)
    assert_equal_files(dtt.folder, plain, "t")


def test_two_chains_and_a_sweep_at_once(
    cluster: Any, dtt: Dtt, tokens: Path, settings: Callable[..., list[str]]
) -> None:
    source = tokens.parent / "counting.jsonl"
    for folder in (dtt.folder, plain := dtt.folder / "plain"):
        local_tasks.write_tasks(folder, questions=4)
        shutil.copy(source, folder)
    chains = {name: [*settings(name=name), *DATA, f"seed={seed}"] for seed, name in enumerate("ab")}
    ids = []
    for keys in chains.values():  # of the same corpus and token files
        report = json.loads(dtt("submit", "pipeline", *keys, "-y", "--json").stdout)
        ids += [step["job_id"] for step in report["steps"]]
    overrides = [key for key in settings(launch__nodes=1) if not key.startswith("name=")]
    sweep = {"base": {}, "overrides": overrides, "parameters": {"seed": [1, 2]}}
    (dtt.folder / "two.json").write_text(json.dumps(sweep))
    dtt("sweep", "submit", "two.json", "--after", "jobs/a-pipeline")
    reported = json.loads(dtt("sweep", "status", "two", "--json").stdout)["trials"]
    assert [one["state"] for one in reported] == ["queued", "queued"]
    for id in ids:
        cluster.wait_for_state(id, "COMPLETED")
    for name in chains:
        said = dtt("job", "status", f"jobs/{name}-pipeline", "--json").stdout
        assert {step["state"] for step in json.loads(said)["steps"]} == {"done"}
    for trial in (dtt.folder / "jobs/two").glob("0*/"):
        [id] = [json.loads((trial / "submission.json").read_text())["job_id"]]
        cluster.wait_for_state(id, "COMPLETED")
    Dtt(plain)("pipeline", *chains["b"])
    assert_equal_files(dtt.folder, plain, "b")
