"""Long waits and Ctrl-C: a command says what it waits for, and what it keeps if it is interrupted.

Slow libraries are replaced by modules that end the process, and a slow disk by an `fsync` that
blocks, so nothing here depends on time.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import filelock
import pytest
from support.fake_slurm import FakeSlurm
from support.forked import ForkedDtt, become_dtt
from support.running import Dtt, write_documents

from dtt.base.errors import ExitCode
from dtt.base.files import exclusive
from dtt.base.log import setup_logging
from dtt.base.ranks import Ranks
from dtt.jobs.slurm import squeue

RUN = """\
name: small
download: {dataset: book.jsonl}
tokenizer: {vocab_size: 300}
tokenize: {validation_fraction: 0.1}
model: {dim: 16, n_layers: 1, n_heads: 2}
train: {steps: 8, seq_len: 32, micro_batch: 4, global_batch_tokens: 256, sample_tokens: 0}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set."""
    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder / "book.jsonl")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def trained(corpus: Path) -> Path:
    """The same folder, with token files and a job."""
    (corpus / "run.yaml").write_text(RUN)
    for command in ("download", "tokenize", "train"):
        Dtt(corpus)(command, "-c", "run.yaml")
    return corpus


@pytest.mark.slow(except_for=["train -c run.yaml name=new"])
@pytest.mark.parametrize(
    "command",
    [
        "download -d book.jsonl",
        "tokenize -d book.jsonl",
        "train -c run.yaml name=new",
        "export jobs/small --out new",
        "report jobs/small --out new",
        "generate model -p one",
        "chat model",
        "eval model --tasks arc_easy",
        "plan -c quickstart",
        "doctor",
        "data inspect book.jsonl",
        "mup coord-check -c quickstart",
    ],
)
def test_a_command_says_that_it_loads_libraries_before_it_does(
    trained: Path, tmp_path: Path, command: str
) -> None:
    for name in ("numpy", "pyarrow", "torch", "transformers", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)\n")
    dtt = Dtt(trained)
    done = dtt(*command.split(), expect=7, PYTHONPATH=str(tmp_path))
    assert re.fullmatch(
        r"....-..-.. ..:..:.. loading (PyTorch|libraries)", done.stderr.splitlines()[-1]
    )
    assert done.stdout == ""


def test_the_wait_for_a_lock_names_its_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_logging(Ranks())
    held = filelock.FileLock(tmp_path / ".lock", thread_local=False).acquire()
    (tmp_path / ".lock").write_text("process 4242 on node7\n")
    acquire = filelock.FileLock.acquire

    def released(lock: filelock.FileLock, *args: object, timeout: float, **named: object) -> object:
        if timeout:
            held.lock.release()
        return acquire(lock, timeout=timeout)

    monkeypatch.setattr(filelock.FileLock, "acquire", released)
    with exclusive(tmp_path, "dtt train", patience=10):
        said = capsys.readouterr().err
    assert f"waiting for {tmp_path}, which process 4242 on node7 is using" in said


def test_the_wait_for_a_slow_slurm_is_logged_and_its_answer_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_logging(Ranks())
    FakeSlurm(tmp_path).says("squeue", "7|50|/job/slurm.sh", "8|50|/other/slurm.sh")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(squeue, "PROMPT", -1.0)  # it is late already
    assert squeue.of_script(Path("/job/slurm.sh"), since=40) == ["7"]
    assert "waiting for Slurm: squeue\n" in capsys.readouterr().err


def become_dtt_on_a_slow_disk(*arguments: Any) -> None:
    fsync = os.fsync

    def blocking(fd: int) -> None:
        os.fsync = fsync
        Path("hold").read_bytes()
        fsync(fd)

    os.fsync = blocking
    become_dtt(*arguments)


@pytest.mark.slow(except_for=["tokenize-the finished units are kept"])
@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("download", "the downloaded files are kept"),
        ("tokenize", "the finished units are kept"),
        ("export", "the checkpoint is unchanged"),
    ],
)
def test_ctrl_c_says_what_is_kept_and_the_same_command_continues(
    trained: Path, command: str, kept: str
) -> None:
    folder = trained
    arguments = {
        "download": ["download", "-d", "book.jsonl", "download.out=data/corpus/again"],
        "tokenize": ["tokenize", "-c", "run.yaml", "tokenize.out=again"],
        "export": ["export", "jobs/small", "--out", "exports/again"],
    }[command]
    os.mkfifo(folder / "hold")
    dtt = Dtt(folder)
    process = ForkedDtt(arguments, folder, {}, become_dtt_on_a_slow_disk)
    with (folder / "hold").open("w"):  # opens when the command writes
        process.send_signal(signal.SIGINT)
    done = dtt.wait(process)
    (folder / "hold").unlink()
    assert done.returncode == ExitCode.INTERRUPTED, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"interrupted: {kept}; run the same command")
    assert list(folder.rglob("*.tmp")) == []
    dtt(*arguments)
