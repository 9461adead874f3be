"""What dtt runs in is known without an import of it, and must be the same on all nodes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.running import ROOT

from dtt.base.errors import EnvironmentUnfit
from dtt.mesh import environment


def test_versions_and_the_disk_are_known_before_torch_is_imported() -> None:
    code = (
        "import sys, dtt.doctor.run\n"
        "from dtt.doctor import disk\n"
        "from dtt.mesh import environment\n"
        "from pathlib import Path\n"
        "disk.examine(Path())\n"
        "print(environment.facts()['torch'], 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == [torch.__version__, "False"], run.stderr


def test_a_torch_that_cannot_be_imported_is_reported_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EnvironmentUnfit, match=r"torch cannot be imported[\s\S]*env\.sh"):
        environment.torch_facts()


NAMED = sorted(
    {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"\binstall\([\"'](\w+)[\"']\)", path.read_text())
    }
)
"""The extras that messages of dtt propose to install."""


@pytest.mark.parametrize("extra", NAMED)
def test_a_hint_installs_what_an_extra_requires_and_names_no_distribution_of_dtt(
    extra: str,
) -> None:
    python, *rest = shlex.split(environment.install(extra))
    assert python == sys.executable
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert rest == ["-m", "pip", "install", *project["optional-dependencies"][extra]]


def test_the_command_of_a_hint_runs_as_printed() -> None:
    extras = {"language", "mpi", "mpich", "peft", "tensorboard", "wandb"}
    assert extras == set(NAMED)
    hint = environment.install("tensorboard")  # developers have it: nothing is fetched
    run = subprocess.run(f"{hint} --dry-run", shell=True, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "already satisfied: tensorboard" in run.stdout


def test_after_a_hint_setuptools_can_still_be_imported() -> None:
    """An import of torch.utils.cpp_extension needs it."""
    code = "from dtt.mesh import environment; environment.install('wandb'); import setuptools"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_where_there_is_no_pip_a_hint_names_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.distributions

    def without_pip(*, name: str) -> Iterable[metadata.Distribution]:
        return () if name == "pip" else found(name=name)

    monkeypatch.setattr(environment.metadata, "distributions", without_pip)
    hint = environment.install("wandb")
    assert hint == f"uv pip install --python {sys.executable} 'wandb>=0.19'"


def test_no_hint_installs_a_distribution_called_dtt() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["name"] == environment.DISTRIBUTION != "dtt"
    pages = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/errors.md"}
    files = [ROOT / "env.sh", *pages]  # errors.md holds what src prints
    for folder in ("src", "benchmarks", "configs", "tests", "sbatch"):
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".yaml", ".sh")]
    strangers = re.compile(r"(?:pip|uv) (?:\w+ )*?(?:install|add) (?:-\S+ )*['\"]?dtt(?![\w-])")
    assert [str(path) for path in files if strangers.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release",
            "580.95.05",
        ),
        (None, "none"),
    ],
)
def test_the_driver_version_is_parsed_from_its_own_report(
    text: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert environment.facts()["driver"] == version


def test_nodes_with_another_version_are_named() -> None:
    here = environment.facts()
    odd = here | {"torch": "1.0"}
    assert list(environment.differences([("n1", here), ("n2", here)])) == []
    (problem,) = environment.differences([("n1", here), ("n1", here), ("n2", odd), ("n3", here)])
    assert "torch is not the same on all nodes" in str(problem)
    assert f"why:   {here['torch']} on n1, n3; 1.0 on n2" in str(problem)
