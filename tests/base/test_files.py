"""Files are whole after a kill, and a folder has one owner."""

from __future__ import annotations

import hashlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dtt.base.errors import InUse, StorageError
from dtt.base.files import (
    check_space,
    exclusive,
    in_size,
    named,
    patience_of_step,
    sha256_file,
    write_atomically,
)

WRITER = """
import sys
from pathlib import Path
from dtt.base.files import write_atomically
path = Path(sys.argv[1])
texts = [letter * 3_000_000 for letter in "ab"]
print("ready", flush=True)
for i in range(10**9):
    write_atomically(path, texts[i % 2])
"""


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "a" * 3_000_000)
    whole = {hashlib.sha256(letter * 3_000_000).hexdigest() for letter in (b"a", b"b")}
    interrupted = 0
    moments = random.Random(0)
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(moments.uniform(0, 0.02))  # the random moment
            child.send_signal(signal.SIGKILL)
        assert sha256_file(path) in whole
        for aside in tmp_path.glob(".file.*.tmp"):
            interrupted += 1
            aside.unlink()
    assert interrupted > 0, "no kill came in the middle of a write, so nothing was shown"


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "file", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_text_is_utf8_and_missing_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a/b/file"
    write_atomically(path, "naïve ×\n")
    assert path.read_bytes() == "naïve ×\n".encode()
    assert sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_too_little_space_is_reported_before_work_starts(tmp_path: Path) -> None:
    check_space(tmp_path / "not/yet/there", 1, "a byte")
    with pytest.raises(StorageError) as caught:
        check_space(tmp_path / "not/yet/there", 10**18, "the corpus")
    message = str(caught.value)
    assert message.startswith("not enough disk space for the corpus\n")
    assert "1,000,000,000.00 GB needed" in message
    assert caught.value.exit_code == 74


def test_a_folder_held_by_another_process_is_refused_until_that_dies(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dtt.base.files import exclusive\n"
        "with exclusive(Path(sys.argv[1]), 'dtt train'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"SLURM_JOB_ID": "812"},
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InUse) as caught, exclusive(tmp_path, "dtt train"):
            pass
        assert str(caught.value).splitlines()[:2] == [
            f"{tmp_path} is in use",
            f"  where: process {other.pid} on {socket.gethostname()}, Slurm job 812",
        ]
        other.kill()
    with exclusive(tmp_path, "dtt train"):
        pass


def test_a_step_in_a_batch_job_waits_for_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert patience_of_step() == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no terminal
    caplog.set_level("INFO")
    done: list[bool] = []

    def second_chain() -> None:
        with exclusive(tmp_path, "dtt tokenize", patience_of_step()):
            done.append(True)

    waiter = threading.Thread(target=second_chain)
    with exclusive(tmp_path, "dtt tokenize"):
        waiter.start()
        while f"waiting for {tmp_path}, which process {os.getpid()}" not in caplog.text:
            assert waiter.is_alive()
            time.sleep(0.01)
        assert not done
    waiter.join()
    assert done


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0.0 MB"), (900, "0.001 MB"), (12_345_678, "12.3 MB"), (999_000_000, "999.0 MB"),
     (1_400_000_000, "1.40 GB"), (2e13, "20,000.00 GB")],
)  # fmt: skip
def test_sizes_below_a_gigabyte_are_in_megabytes(size: float, words: str) -> None:
    assert in_size(size) == words


@pytest.mark.parametrize("other", [None, "b"])
def test_an_error_of_the_system_names_the_file_and_nothing_else(other: str | None) -> None:
    with pytest.raises(OSError, match="space") as caught, named(Path("mine")):
        raise OSError(28, "no space", *(("a", None, other) if other else ()))
    assert str(caught.value) == "[Errno 28] no space: 'mine'"
