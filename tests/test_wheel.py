"""dtt as a wheel holds it, in a folder without a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.running import ROOT, TIMEOUT


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder laid out as pyproject.toml declares a wheel, whose build needs a network."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    # `src` = "" and `configs` = "dtt/configs"; whatever else a wheel should hold needs a rule here.
    assert set(wheel["sources"]) == {name.split("/")[0] for name in wheel["only-include"]}
    for name in wheel["only-include"]:
        first, _, rest = name.partition("/")
        target = tmp_path / "site" / wheel["sources"][first] / rest
        shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


@pytest.mark.slow(except_for=["one-node"])
@pytest.mark.parametrize("profile", ["one-node", "generic"])
def test_the_profiles_of_a_wheel_need_no_clone(profile: str, site: Path, tmp_path: Path) -> None:
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
