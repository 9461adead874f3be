"""The script for a short session on a GPU runs: on a CPU, with tiny shapes, in minutes.

pytest runs it only when it is named: `./env.sh pytest -n 0 -s tests/e2e/nightly_gpu_session.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.running import ROOT

SCRIPT = ROOT / "benchmarks/gpu_session.py"
BLOCKS = (
    "versions", "nccl", "generation", "1b-lora", "8b-lora-fp8", "8b-third-fp8", "mixture-1.7b",
    "memory", "start", "attention", "small", "flex", "1b-muon", "loss",
)  # fmt: skip
"""One of those that differ in an option of a training run."""


def session(out: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and summary."""
    command = [sys.executable, SCRIPT, "--tiny", "--out", out, *arguments]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    summary = out / "summary.json"
    assert summary.exists(), run.stdout + run.stderr
    return run.returncode, json.loads(summary.read_text())


@pytest.mark.timeout(1800)
def test_every_block_of_the_session_runs(tmp_path: Path) -> None:
    """Of the blocks that differ in one option of a training run, only one."""
    code, summary = session(tmp_path, *BLOCKS, "--total", 60, "--minutes", 10)
    logs = {block: (tmp_path / f"{block}.log").read_text() for block in summary}
    assert {found["status"] for found in summary.values()} == {"ok"}, logs
    assert code == 0
    assert tuple(summary) == BLOCKS
    parts = {part["part"]: part for found in summary.values() for part in found["parts"]}
    assert parts["resume eager"]["resumed"]
    for part in ("1b, muon", "1b-lora, adamw", "1b-lora, peer"):
        assert parts[part]["tokens_per_second"] > 0
    assert any("memory" in line for line in parts["out of memory"]["messages"])
    assert [save["step"] for save in parts["first save"]["saves"]] == [3, 6, 9]


def test_after_a_failure_the_session_continues(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a file where the tokens should be")
    code, summary = session(tmp_path, "small", "attention")
    assert code == 1
    assert summary["small"]["status"] == "failed"
    assert all("error" in part for part in summary["small"]["parts"])
    assert len(summary["small"]["parts"]) > 1
    assert "Traceback" in (tmp_path / "small.log").read_text()
    assert summary["attention"]["status"] == "ok"


def test_a_block_is_ended_at_its_time_limit_and_its_results_are_kept(
    tmp_path: Path,
) -> None:
    code, summary = session(tmp_path, "versions", "--minutes", "0.001")
    assert code == 1
    assert summary["versions"]["status"] == "ended after 0.001 minutes"
