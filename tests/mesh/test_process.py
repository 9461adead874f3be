"""The edge of a command: what each kind of ending prints, and the exit code it leaves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import TIMEOUT, Done, Dtt

from dtt.base.errors import ExitCode

DTT = f"{shlex.quote(sys.executable)} -m dtt.main"


def shell(folder: Path, script: str) -> Done:
    """Run a bash script that fails when any part of a pipeline does."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip


def body(folder: Path, *lines: str) -> Done:
    """Run `lines` as the body of a command."""
    code = ["import os", "from dtt.mesh.process import command", "with command():"]
    dtt = Dtt(folder)
    return dtt.wait(dtt.start_python("-c", "\n".join([*code, *(f"    {line}" for line in lines)])))


def test_a_user_error_shows_its_traceback_only_on_request(dtt: Dtt) -> None:
    dtt("train", expect=ExitCode.USAGE)
    debug = dtt.wait(dtt.start("train", DTT_DEBUG="1"))
    assert debug.returncode == ExitCode.USAGE
    assert "Traceback" in debug.stderr
    assert "\ndtt: train requires either" in debug.stderr
    assert debug.stdout == ""


def test_a_bug_shows_its_traceback_and_asks_for_a_report(tmp_path: Path) -> None:
    done = body(tmp_path, "{}['missing']")
    assert done.returncode == ExitCode.BUG
    assert "Traceback" in done.stderr
    assert "KeyError: 'missing'" in done.stderr
    assert done.stderr.endswith("dtt: this is a bug; please report the lines above\n")


@pytest.mark.parametrize(
    "memory", ["bytearray(2**62)", "import pyarrow as pa; pa.allocate_buffer(2**60)"]
)
def test_too_little_memory_is_no_bug(tmp_path: Path, memory: str) -> None:
    done = body(tmp_path, memory)
    assert done.returncode == ExitCode.UNFIT
    assert "dtt: this process has too little memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_quietly(dtt: Dtt, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hold")
    code = "from dtt.mesh.process import command\nwith command(): open('hold').read()"
    process = dtt.start_python("-c", code)
    with (tmp_path / "hold").open("w"):  # opens when the body does
        process.send_signal(signal.SIGINT)
        done = dtt.wait(process)
    assert done.returncode == ExitCode.INTERRUPTED
    assert done.stderr == "interrupted\n"


LONG = f"show train.sample_prompt={'x' * 100_000}"
"""More than a pipe holds."""


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    done = shell(tmp_path, f"{DTT} config {LONG} | head -1")
    assert (done.returncode, done.stderr) == (ExitCode.DONE, "")
    assert done.stdout.startswith("name: run ")


@pytest.mark.parametrize("results", [LONG, "explain seed"], ids=["long", "short"])
def test_a_pipe_that_is_never_read_is_not_an_error(tmp_path: Path, results: str) -> None:
    done = shell(tmp_path, f"{DTT} config {results} | true")
    assert (done.returncode, done.stderr) == (ExitCode.DONE, "")


@pytest.mark.parametrize("results", [LONG, "explain seed"], ids=["long", "short"])
def test_a_full_disk_under_stdout_is_reported(tmp_path: Path, results: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    done = shell(tmp_path, f"{DTT} config {results} > /dev/full")
    assert done.returncode == ExitCode.IO
    assert done.stderr.startswith("dtt: no space left on device\n")
    assert "Traceback" not in done.stderr


def test_a_file_size_limit_is_reported_and_no_partial_file_counts(dtt: Dtt, tmp_path: Path) -> None:
    documents = (json.dumps({"text": f"{i} " + "word " * 50}) for i in range(2000))
    (tmp_path / "book.jsonl").write_text("\n".join(documents))
    dtt("download", "-d", "book.jsonl")
    command = f"{DTT} tokenize -d book.jsonl tokenizer.vocab_size=300"
    # Blocks of 1024 bytes; what measures coverage would not have room for its own file, either.
    done = shell(tmp_path, f"unset COVERAGE_PROCESS_CONFIG; ulimit -f 16; exec {command}")
    assert done.returncode == ExitCode.IO, done.stderr
    assert "dtt: file too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("data/tokens/*/manifest.json"))
    assert shell(tmp_path, command).returncode == ExitCode.DONE


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("open('nowhere')", ExitCode.INPUT_MISSING, "no such file or directory\n  where: nowhere"),
        ("os.mkdir('file/sub')", ExitCode.IO, "there is a file where a folder is expected"),
        ("os.makedirs('file', exist_ok=True)", ExitCode.IO, "where: file\n  next:  specify"),
        ("raise PermissionError(13, 'Permission denied', 'x')", ExitCode.IO, "ls -ld"),
        ("raise OSError('odd')", ExitCode.IO, "dtt: odd\n"),
    ],
)  # fmt: skip
def test_os_errors_are_explained(tmp_path: Path, fault: str, code: ExitCode, says: str) -> None:
    (tmp_path / "file").write_text("")
    done = body(tmp_path, fault)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "redirects",
    [">/dev/full", "2>/dev/full", ">/dev/full 2>&1", ">&-", "2>&-", ">&- 2>&-", "2>&1 | head -1"],
)
def test_work_goes_on_without_a_place_for_its_output(tmp_path: Path, redirects: str) -> None:
    """With stderr closed, the next file that is opened would take its place, and its messages."""
    (tmp_path / "work.py").write_text(
        "import os, sys, warnings\nfrom dtt.base.log import log\n"
        "from dtt.mesh.process import command\n"
        "with command('it is kept'):\n"
        "    with open('result', 'w') as file:\n"
        "        for i in range(20_000):\n"
        "            print('a line')\n"
        "            log.info('a log line')\n"
        "            os.write(2, b'a library' if i == 0 and 'full' not in sys.argv[1] else b'')\n"
        "        file.write('done')\n"
    )
    done = shell(tmp_path, f"{shlex.quote(sys.executable)} work.py '{redirects}' {redirects}")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert (tmp_path / "result").read_text() == "done"
    assert "bug" not in done.stderr


def test_the_code_of_an_error_does_not_depend_on_stderr(tmp_path: Path) -> None:
    for redirects in ("2>&-", "2>/dev/full", ">&- 2>&-"):
        assert shell(tmp_path, f"{DTT} train {redirects}").returncode == ExitCode.USAGE
