"""Answers of squeue and sacct that are not what they document."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtt.jobs.slurm import squeue


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("17||n1|1|1|1|x", None),  # no state
        ("Welcome!\n17|RUNNING|n1|1|1|1|None", "RUNNING"),  # the greeting of a wrapper
        ("17|RUNNING|n1", None),
        ("slurm is down for maintenance", None),
        ("\xff\xfe|\x00", None),
        ("17|RUNNING|n1|\xb2|\xb2|\xb2|x", "RUNNING"),  # ² is a digit, but no number
        ("17|CANCELLED by 0|n1|Unknown|Unknown|N/A|a|b", "CANCELLED"),
    ],
)
def test_odd_output_of_squeue_is_no_answer_or_ignored(
    printed: str, state: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").write_bytes(printed.encode("latin-1"))
    for name in ("squeue", "sacct"):
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\ncat {tmp_path}/out\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = squeue.ask(["17"])
    assert {id: job.state for id, job in answer.jobs.items()} == ({"17": state} if state else {})
    assert (answer.error is None) == (state is not None)
    assert squeue.of_script(Path("a.sh"), 0.0) == []
