"""A parent that hands on signals and exit codes, and takes its child with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.running import TIMEOUT

from dtt.base import local

CHILD = """
import os, signal, sys
caught = []
def note(number, frame):
    os.write(1, f"child got {signal.Signals(number).name}\\n".encode())  # print may be under way
    caught.append(number)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
print("child", os.getpid(), flush=True)
while not caught:
    signal.pause()
signal.setitimer(signal.ITIMER_REAL, 0.3)  # a second signal would come by now
signal.signal(signal.SIGALRM, lambda n, f: None)
signal.pause()
sys.exit(75)
"""
PARENT = f"""
import sys
from dtt.base import local
code = local.run([sys.executable, "-c", {CHILD!r}])
print("parent saw", code, flush=True)
"""


Family = tuple[subprocess.Popen[str], psutil.Process]


@pytest.fixture
def parent() -> Iterator[Family]:
    """A parent whose child is ready, and the child."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline().split()[1]))
    yield process, child
    for one in (process, child):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded_once_and_the_exit_code_returned(
    parent: Family, number: signal.Signals
) -> None:
    process, _ = parent
    process.send_signal(number)
    out, _ = process.communicate(timeout=TIMEOUT)
    assert out.splitlines() == [f"child got {number.name}", "parent saw 75"]


def test_a_child_receives_sigterm_when_its_parent_is_killed(parent: Family) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a child that its parent has died")
    process, child = parent
    process.kill()
    out, _ = process.communicate(timeout=TIMEOUT)  # ends with the child, which holds the pipe too
    assert out.splitlines() == ["child got SIGTERM"]
    assert psutil.wait_procs([child], timeout=TIMEOUT)[1] == []


def run_in_clean_process(program: str) -> list[str]:
    """Return what a clean process prints that runs a program in Python by `local.run`.

    It prints the exit code, and whether signal handlers are those of before. `local.run` forks, for
    which the process of the tests may have grown too large (ENOMEM).
    """
    caller = f"""
import signal, sys
from dtt.base import local
before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
print(local.run([sys.executable, "-c", {program!r}]))
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before)
"""
    return subprocess.check_output([sys.executable, "-c", caller], text=True).splitlines()


@pytest.mark.parametrize("code", [0, 1, 76])
def test_the_exit_code_is_the_childs(code: int) -> None:
    assert run_in_clean_process(f"raise SystemExit({code})") == [str(code), "True"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_child_that_a_signal_ended_gives_128_and_its_number(number: signal.Signals) -> None:
    found = run_in_clean_process(f"import os; os.kill(os.getpid(), {int(number)})")
    assert found == [str(128 + number), "True"]


def test_without_mpi4py_or_mpirun_there_is_no_mpi_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(mpirun.parent))
    monkeypatch.setattr("importlib.util.find_spec", {"mpi4py": object()}.get)
    assert local.mpi_argv(2, ["dtt"]) == [str(mpirun), "-n", "2", "dtt"]
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    assert local.mpi_argv(2, ["dtt"]) is None
    monkeypatch.setattr("importlib.util.find_spec", {"mpi4py": object()}.get)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert local.mpi_argv(2, ["dtt"]) is None


def test_the_mpirun_beside_this_python_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("machine", "venv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpirun").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "machine"))
    monkeypatch.setattr("importlib.util.find_spec", {"mpi4py": object()}.get)
    assert local.mpi_argv(3, ["x"]) == [str(tmp_path / "venv" / "mpirun"), "-n", "3", "x"]


@pytest.mark.slow
def test_the_commands_that_are_built_run() -> None:
    for argv in (local.dtt_argv("--help"), local.torchrun_argv(1, ["--help"])):
        run = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert "tokenize" in run.stdout
