"""The real env.sh, on a project of the same shape without dependencies: no network is needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "dtt"
version = "1"
dependencies = []

[project.optional-dependencies]
dev = []
mpi = []
mpich = []
"""

# Builds wheels with nothing but the standard library. Counts its calls, and waits in the middle of
# one while there is a FIFO named `gate`.
BACKEND = """
import os, zipfile
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    with open("calls", "a") as calls:
        calls.write("x")
    if Path("gate").exists():
        open("gate", "w").close()
        open("gate").close()
    if Path("broken").exists():
        raise SystemExit("this build is broken")
    info = "dtt-1.dist-info"
    files = {
        "dtt.pth": os.getcwd(),
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: dtt\\nVersion: 1\\n"
        "Provides-Extra: dev\\nProvides-Extra: mpi\\nProvides-Extra: mpich\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\n"
        "Tag: py3-none-any\\n",
    }
    name = "dtt-1-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        record = "".join(f"{path},,\\n" for path in files)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\\n")
    return name
"""

# Stand in for a Python whose venv module installs pip, and for uv: pip takes seconds to be
# installed, and to install a project without dependencies.
QUICK = {
    "python": """#!/bin/sh
[ "$1 $2" != "-m venv" ] || set -- -m venv --without-pip "$3"
exec '{python}' "$@"
""",
    "uv": """#!/bin/bash
while [[ $1 != --python ]]; do shift; done
"$2" - <<.
import sysconfig, tempfile, zipfile
import backend
with tempfile.TemporaryDirectory() as folder:
    name = backend.build_editable(folder)
    zipfile.ZipFile(folder + "/" + name).extractall(sysconfig.get_path("purelib"))
.
""",
}


class Project:
    """A clone in miniature."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        shutil.copy(ROOT / "env.sh", root)
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "backend.py").write_text(BACKEND)
        outside = [p for p in os.environ["PATH"].split(":") if p != f"{sys.prefix}/bin"]
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "DTT_"))}
        self.env |= {"PATH": ":".join(outside), "DTT_PYTHON": sys.executable}
        self.env |= {"PIP_NO_INDEX": "1"}  # so no uv is fetched either

    def bash(self, script: str, **more: object) -> subprocess.CompletedProcess[str]:
        """Run a bash script beside env.sh."""
        run = {"cwd": self.root, "env": self.env, "text": True, "capture_output": True} | more
        return subprocess.run(["bash", "-c", script], check=False, **run)  # type: ignore[call-overload]

    def start(self, script: str) -> subprocess.Popen[str]:
        """The same in the background, in a process group of its own."""
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.root, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    @property
    def installs(self) -> int:
        """How often dtt was built for installation."""
        calls = self.root / "calls"
        return len(calls.read_text()) if calls.exists() else 0

    @property
    def stamp(self) -> str:
        """How .venv was made and what it holds."""
        return (self.root / ".venv/.dtt").read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose environment has been made once, in a folder with a space."""
    project = Project(tmp_path_factory.mktemp("env") / "my clone")
    first = project.bash("./env.sh true")
    assert first.returncode == 0, first.stderr
    assert "making .venv with Python 3." in first.stderr
    assert "installing dtt[mpi" in first.stderr
    return project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project without an environment, which is made without pip."""
    fresh = Project(tmp_path / "a copy")
    quick = tmp_path / "quick"
    quick.mkdir()
    for name, text in QUICK.items():
        (quick / name).write_text(text.replace("{python}", sys.executable))
        (quick / name).chmod(0o755)
    fresh.env |= {"PATH": f"{quick}:{fresh.env['PATH']}", "DTT_PYTHON": str(quick / "python")}
    return fresh


@pytest.mark.slow
def test_the_command_runs_inside_the_environment(made: Project) -> None:
    run = made.bash("./env.sh python -c 'import sys, importlib.metadata as m; "
                    "print(sys.prefix); print(m.version(\"dtt\"))'")  # fmt: skip
    assert run.stdout.splitlines() == [f"{made.root}/.venv", "1"]


@pytest.mark.slow
def test_nothing_is_done_or_printed_if_nothing_changed(made: Project) -> None:
    before = made.installs
    run = made.bash("time ./env.sh true")
    assert made.installs == before
    assert "env.sh" not in run.stderr
    assert run.returncode == 0


@pytest.mark.slow
def test_arguments_exit_code_and_folder_are_passed_through(made: Project, tmp_path: Path) -> None:
    run = made.bash(
        f"'{made.root}/env.sh' bash -c 'pwd; echo \"$1\"; exit 7' _ 'a  b'", cwd=tmp_path
    )
    assert run.returncode == 7
    assert run.stdout.splitlines() == [str(tmp_path), "a  b"]


@pytest.mark.slow
def test_sourcing_activates_and_leaks_nothing(made: Project) -> None:
    run = made.bash(
        "unset VIRTUAL_ENV; declare -F | sort >before; shopt -o >options; "
        "source ./env.sh; echo code=$? in=$VIRTUAL_ENV which=$(command -v python); "
        "shopt -o | diff options - && declare -F | grep -v deactivate | sort | diff before - && "
        "false; echo still here; set | grep -E '^(root|venv|stamp|extras|backend)='"
    )
    assert run.stdout.splitlines() == [
        f"code=0 in={made.root}/.venv which={made.root}/.venv/bin/python",
        "still here",
    ]


def test_a_source_that_fails_returns_to_the_shell(project: Project) -> None:
    project.env["DTT_PYTHON"] = "/nowhere/python"
    run = project.bash("source ./env.sh || echo code=$?; echo still here")
    assert run.stdout.splitlines() == ["code=1", "still here"]
    assert "no Python 3.11 or newer" in run.stderr
    assert "DTT_PYTHON=" in run.stderr


@pytest.mark.slow
def test_a_python_that_is_too_old_is_passed_over(project: Project, tmp_path: Path) -> None:
    old = tmp_path / "bin/python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 1\n")  # as `sys.exit(sys.version_info < (3, 11))` ends there
    old.chmod(0o755)
    (old.parent / "python3.11").symlink_to(project.env.pop("DTT_PYTHON"))
    project.env["PATH"] = f"{old.parent}:{project.env['PATH']}"
    run = project.bash("./env.sh true")
    assert run.returncode == 0, run.stderr
    assert not project.stamp.startswith("python3|")


def test_without_a_python_it_says_what_to_install(project: Project) -> None:
    run = project.bash("DTT_PYTHON=/bin/false ./env.sh true")
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "env.sh: no Python 3.11 or newer with its venv module: tried /bin/false",
        (
            "env.sh: install one (Debian, Ubuntu: apt install python3-venv) or name it: "
            "DTT_PYTHON=/path ./env.sh"
        ),
    ]
    assert not (project.root / ".venv").exists()


@pytest.mark.slow
def test_developers_tools_come_with_a_developers_command_and_stay(made: Project) -> None:
    assert "dev" not in made.stamp
    made.bash("./env.sh pytest --version")
    assert made.stamp.splitlines()[1].startswith(("mpi,dev|", "mpich,dev|"))
    before = made.installs
    made.bash("./env.sh true")
    assert made.installs == before


@pytest.mark.slow
def test_a_changed_pyproject_is_installed_again(made: Project) -> None:
    before = made.installs
    with (made.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    run = made.bash("./env.sh true")
    assert run.returncode == 0, run.stderr
    assert "making" not in run.stderr
    assert made.installs == before + 1


@pytest.mark.slow
def test_a_failed_update_keeps_the_working_environment(made: Project) -> None:
    stamp = made.stamp
    pyproject = made.root / "pyproject.toml"
    text = pyproject.read_text()
    (made.root / "broken").touch()
    pyproject.write_text(text + "# broken\n")
    run = made.bash("./env.sh echo never")
    assert run.returncode == 1
    assert run.stdout == ""
    assert "could not install" in run.stderr
    (made.root / "broken").unlink()
    pyproject.write_text(text)
    assert made.stamp == stamp
    assert made.bash("./env.sh echo fine").stdout == "fine\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed here")
def test_two_at_once_install_once(project: Project) -> None:
    two = [project.start("./env.sh echo ran") for _ in range(2)]
    ends = [process.communicate() for process in two]
    assert [out for out, _ in ends] == ["ran\n", "ran\n"], ends
    assert project.installs == 1


@pytest.mark.slow
def test_a_killed_installation_is_started_again(project: Project) -> None:
    gate = project.root / "gate"
    os.mkfifo(gate)
    process = project.start("./env.sh echo never")
    gate.open().close()  # returns when the installation is in its middle
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    gate.unlink()
    run = project.bash("./env.sh echo ran")
    assert run.stdout == "ran\n", run.stderr
    assert "making .venv" in run.stderr


@pytest.mark.slow
def test_a_moved_clone_is_made_again(project: Project) -> None:
    assert project.bash("./env.sh true").returncode == 0
    moved = project.root.with_name("moved here")
    project.root.rename(moved)
    run = project.bash("./env.sh python -c 'import sys; print(sys.prefix)'", cwd=moved)
    assert run.stdout == f"{moved}/.venv\n", run.stderr
    assert "making .venv" in run.stderr


@pytest.mark.slow
def test_a_link_to_a_disk_with_more_space_stays(project: Project) -> None:
    (project.root / ".venv").symlink_to("../scratch/env")
    assert project.bash("./env.sh true").returncode == 0
    assert (project.root / ".venv").is_symlink()
    assert (project.root.parent / "scratch/env/bin/python").exists()
    assert project.installs == 1
    assert project.bash("./env.sh true").stderr == ""


@pytest.mark.slow
def test_a_link_to_the_environment_of_another_clone_is_refused(project: Project) -> None:
    other = project.root.parent / "other"
    other.mkdir()
    (other / ".dtt").write_text("python|cpu|/another/clone\nmpich|sources\n")
    (project.root / ".venv").symlink_to(other)
    run = project.bash("./env.sh true")
    assert run.returncode == 1
    assert "which is another environment: it is left alone" in run.stderr
    assert [path.name for path in other.iterdir()] == [".dtt"]
    assert (project.root / ".venv").is_symlink()
