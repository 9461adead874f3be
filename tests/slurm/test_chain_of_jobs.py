"""A chain on a real Slurm: preempted, at a limit and failing, it makes the files of one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import local_tasks
from support.running import Dtt

pytestmark = pytest.mark.slow

HOLD = '[ "$SLURM_JOB_NAME" != t-tokenize ] || [ -e ended ] || { touch began; exec sleep 300; }'
DATA = (
    "data.tokens=null", "download.dataset=counting.jsonl", "tokenizer.vocab_size=300",
    "tokenize.validation_fraction=0.1", "tokenize.unit_bytes=8192",
    "pipeline.tokenize_processes=1", "launch.nodes=1", "eval.tasks=[pages.yaml]",
)  # fmt: skip


def states(dtt: Dtt) -> list[str]:
    said = dtt("job", "status", "jobs/t-pipeline", "--json").stdout
    return [step["state"] for step in json.loads(said)["steps"]]


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
        shutil.copy(source, folder)
    keys = [*settings(), *DATA]
    blocked = dtt.folder / "exports"
    blocked.write_text("")  # the export fails
    setup = f"launch.setup={json.dumps([HOLD])}"
    report = json.loads(dtt("submit", "pipeline", *keys, setup, "-y", "--json").stdout)
    ids = [step["job_id"] for step in report["steps"]]
    tokenize, train, evaluation, export = ids[1:]
    later = ("name=later", "download.dataset=counting.jsonl", "--after", "jobs/t-pipeline")
    after = json.loads(dtt("submit", "download", *later, "-y", "--json").stdout)

    cluster.wait_for_file(dtt.folder / "began")
    assert states(dtt) == ["done", "running", "queued", "queued", "queued"]
    (dtt.folder / "ended").touch()
    cluster.run("scontrol", "requeue", tokenize)
    cluster.wait_for_state(tokenize, "PENDING", "CONFIGURING")
    assert states(dtt)[2:] == ["queued", "queued", "queued"]
    cluster.wait_for_state(tokenize, "COMPLETED")

    training = follow("jobs/t", train)
    training.wait_for_step(80)
    cluster.wait_for_state(evaluation, "RUNNING")
    assert states(dtt) == ["done", "done", "running", "running", "queued"]
    cluster.ask_to_save(train)
    assert training.exit_record(1)["code"] == 75
    cluster.wait_for_state(train, "PENDING", "CONFIGURING")
    assert states(dtt) == ["done", "done", "queued", "running", "queued"]
    cluster.wait_for_state(train, "COMPLETED")

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
    for pattern in ("data/tokens/**/*.bin", "exports/t/*.safetensors", "exports/t/*.json"):
        made = {path.relative_to(plain): path for path in plain.glob(pattern)}
        assert made
        for name, path in made.items():
            if name.name != "dtt_export.json":
                assert (dtt.folder / name).read_bytes() == path.read_bytes(), name
