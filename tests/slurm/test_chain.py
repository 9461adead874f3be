"""A pipeline as a chain of Slurm jobs, which is disturbed at three places and loses nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DATA = (
    "data.tokens=null", "download.dataset=counting.jsonl", "tokenizer.vocab_size=300",
    "tokenize.validation_fraction=0.1", "tokenize.unit_bytes=8192", "tokenize.out=tokens",
)  # fmt: skip
# Only in the processes of the tokenizing step, and only the first time.
HANGS_ONCE = (
    '[ "${SLURM_JOB_NAME:-}" != t-tokenize ] || [ -z "${SLURM_STEP_ID:-}" ] || [ -e ended ] '
    "|| { touch began; exec sleep 300; }"
)


def test_a_chain_survives_a_preemption_a_time_limit_and_a_failed_export(
    cluster: Any,
    dtt: Any,
    tokens: Path,
    settings: Callable[..., list[str]],
    follow: Callable[..., Any],
    assert_as_undisturbed: Callable[[Any], None],
) -> None:
    shutil.copy(tokens.parent / "counting.jsonl", dtt.folder)
    keys = [*settings(), *DATA, f"launch.setup={json.dumps([HANGS_ONCE])}"]
    keys += ["launch.steps.tokenize.nodes=1", "export.out=exports/t"]
    (dtt.folder / "exports").touch()  # a file, where the export wants a folder
    report = json.loads(dtt("submit", "pipeline", *keys, "-y", "--json").stdout)
    jobs = {step["command"]: follow(step["job_dir"], step["job_id"]) for step in report["steps"]}
    assert list(jobs) == ["download", "tokenize", "train", "export"]

    def states() -> list[str]:
        shown = json.loads(dtt("job", "status", report["chain"], "--json").stdout)
        return [step["state"] for step in shown["steps"]]

    cluster.wait_for_file(dtt.folder / "began")
    assert states() == ["done", "running", "queued", "queued"]
    (dtt.folder / "ended").touch()
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "debug", "-N2", "--exclusive", "-o", "/dev/null",
        "--wrap", "sleep 1",
    )  # fmt: skip
    cluster.wait_for_state(urgent, "RUNNING", "COMPLETED")

    train = jobs["train"]
    train.wait_for_step(80)
    assert states() == ["done", "done", "running", "queued"]
    assert cluster.field(jobs["tokenize"].id, "Restarts") == "1"
    cluster.ask_to_save(train.id)
    assert "slurm: time limit" in train.exit_record(1)["reason"]
    cluster.wait_for_state(train.id, "COMPLETED")
    assert cluster.field(train.id, "Restarts") == "1"
    cluster.wait_for_state(jobs["export"].id, "FAILED")
    assert states() == ["done", "done", "done", "failed"]
    assert f"next: dtt job resume {report['chain']}" in dtt("job", "status", report["chain"]).stdout
    assert_as_undisturbed(train)

    (dtt.folder / "exports").unlink()
    resumed = dtt("job", "resume", report["chain"]).stdout
    assert "jobs/t-export" in resumed
    assert "jobs/t-tokenize" not in resumed
    cluster.wait_for_state(resumed.split()[1].rstrip(":"), "COMPLETED")
    assert states() == ["done"] * 4
    assert (dtt.folder / "exports/t/model.safetensors").is_file()


def test_steps_after_a_failed_one_are_cancelled_and_say_why(
    cluster: Any, dtt: Any, tokens: Path, settings: Callable[..., list[str]]
) -> None:
    shutil.copy(tokens.parent / "counting.jsonl", dtt.folder)
    keys = [*settings(name="u"), *DATA, "launch.setup=[exit 2]"]
    report = json.loads(dtt("submit", "pipeline", *keys, "-y", "--json").stdout)
    *_, last = report["steps"]
    cluster.wait_for_state(last["job_id"], "CANCELLED")
    shown = dtt("job", "status", last["job_dir"]).stdout
    assert "cancelled: jobs/u, which it waited for, has not ended well" in shown
    assert (
        "dtt job resume jobs/u-pipeline submits jobs/u-download"
        in dtt("job", "status", report["chain"]).stdout
    )
