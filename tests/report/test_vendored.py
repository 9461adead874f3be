"""The library that draws the curves of a report is unchanged, and ships with its licence."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from support.running import ROOT

ASSETS = ROOT / "src/dtt/report/assets"
VENDORED = (ASSETS / "VENDORED.md").read_text()
LICENCE = "src/dtt/report/assets/uPlot.LICENSE"
HASHES = dict(re.findall(r"^\| `(\S+)` \| `\S+` \| `([0-9a-f]{64})` \|$", VENDORED, re.M))


@pytest.mark.parametrize("name", HASHES)
def test_a_vendored_file_is_the_one_on_record(name: str) -> None:
    assert sha256((ASSETS / name).read_bytes()).hexdigest() == HASHES[name]


def test_every_file_of_the_library_is_on_record_with_its_version() -> None:
    assert {path.name for path in ASSETS.glob("uPlot*")} == set(HASHES)
    [version] = re.findall(r"^\| version \| (\S+) \|$", VENDORED, re.M)
    assert f"(v{version})" in (ASSETS / "uPlot.iife.min.js").read_text().splitlines()[0]
    assert f"npm pack uplot@{version}" in VENDORED


def test_the_wheel_contains_all_assets_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        assets = {f"dtt/report/assets/{path.name}" for path in ASSETS.iterdir()}
        assert inside >= assets
        [licence] = [name for name in inside if name.endswith("licenses/" + LICENCE)]
        assert archive.read(licence) == (ROOT / LICENCE).read_bytes()


def test_the_metadata_names_the_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert LICENCE in project["license-files"]


def test_the_source_distribution_contains_all_assets(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    assert inside >= {f"src/dtt/report/assets/{path.name}" for path in ASSETS.iterdir()}
