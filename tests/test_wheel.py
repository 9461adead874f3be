"""dtt as a wheel holds it, in a folder without a clone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.running import ROOT, TIMEOUT


def test_a_wheel_carries_the_shipped_configs_and_the_type_marker(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"dtt/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*") if p.is_file()}
    assert shipped
    assert inside >= shipped | {"dtt/py.typed", "dtt/main.py"}
    assert "dtt/jobs/slurm/supervisor/__main__.py" in inside


@pytest.mark.slow(except_for=["one-node"])
@pytest.mark.parametrize("profile", ["one-node", "generic"])
def test_the_profiles_and_configs_of_a_wheel_need_no_clone(
    profile: str, wheel: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    work = tmp_path / "work"
    work.mkdir()
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    dtt = [sys.executable, "-m", "dtt", "submit", "pipeline", "-c", "quickstart", "name=x"]
    done = subprocess.run(
        [*dtt, "--cluster", profile, "--dry-run"],
        cwd=work, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "jobs/x-pipeline: each step waits" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import dtt; print(dtt.__file__)"],
        cwd=work, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    assert where.stdout.strip() == str(site / "dtt/__init__.py")
