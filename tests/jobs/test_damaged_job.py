"""Every file of a job directory, damaged in every way: commands report what they can, or end with
one message. None of them crashes or hangs, and no restart is lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.running import Dtt, in_this_process

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError, ExitCode
from dtt.base.files import remove
from dtt.checkpoint import inspect as ckpt
from dtt.checkpoint import store
from dtt.jobs import listing as job_listing
from dtt.launch import job as launch_job
from dtt.mesh.process import in_words
from dtt.report import run as report
from dtt.track import jsonl
from dtt.train import run as train

JOB = Path("jobs/t")
SECONDS = 120


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]]) -> Path:
    """A folder with a real job of two attempts, which was submitted as well."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {"train__steps": 4, "train__eval_every": 0, "train__sample_tokens": 0}
    Dtt(folder)("train", *tiny(**settings))
    Dtt(folder)("train", JOB, "train.steps=8", "--allow-change", "train.steps")
    job = JobDir(folder / JOB)
    record = {"time": 1, "job_id": "7", "argv": ["train", "jobs/t"], "directory": str(folder)}
    job.submission.write_text(json.dumps(record) + "\n")
    answer = {"request": "stop", "by": "me", "step": 3, "time": 2e9}
    job.acknowledged.write_text(json.dumps(answer) + "\n")
    job.parent.write_text(json.dumps({"job": "../other", "step": 4}) + "\n")
    job.logs.mkdir()
    (job.logs / "latest.log").write_text("a line\n")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy, in which commands run in this process, each for two minutes at most."""

    def late(*_: object) -> None:
        raise AssertionError("it hangs")

    shutil.copytree(trained / "jobs", tmp_path / "jobs")
    monkeypatch.setenv("PATH", "")  # here Slurm has nothing to say, and takes long to say so
    before = signal.signal(signal.SIGALRM, late)
    with in_this_process(tmp_path):
        yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path: Path, rng: random.Random) -> None:
    remove(path)
    os.mkfifo(path)


def directory(path: Path, rng: random.Random) -> None:
    remove(path)
    path.mkdir()


def content(make: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, random.Random], None]:
    def write(path: Path, rng: random.Random) -> None:
        path.write_bytes(make(path.read_bytes(), rng))

    return write


def changed(value: object, rng: random.Random) -> object:
    """A JSON value of which one part is of another type."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: changed(value[key], rng)}
    return rng.choice(
        [None, True, -1, 2**70, 1e308, "x", "\ud800", "\x1b[2J", [], [1], {}, {"a": 1}]
    )


def other_types(text: bytes, rng: random.Random) -> bytes:
    try:
        lines = [json.loads(line) for line in text.splitlines()]
    except ValueError:
        try:
            return json.dumps(changed(json.loads(text), rng)).encode()
        except ValueError:
            return b"{}"
    return b"".join(json.dumps(changed(line, rng)).encode() + b"\n" for line in lines)


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "empty": content(lambda text, rng: b""),
    "random bytes": content(lambda text, rng: rng.randbytes(300)),
    "cut short": content(lambda text, rng: text[: rng.randrange(max(1, len(text)))]),
    "a line 123": content(lambda text, rng: b"123\n" + text + b"123\n"),
    "a line null": content(lambda text, rng: text + b"null\n"),
    "only null": content(lambda text, rng: b"null\n"),
    "nested deeply": content(lambda text, rng: text + b"[" * 200_000 + b"]" * 200_000 + b"\n"),
    "not UTF-8": content(lambda text, rng: text + b"\xff\xfe\n"),
    "other types": content(other_types),
    "other types again": content(other_types),
    "a directory": directory,
    "a FIFO": fifo,
}
REPLACED = [
    "config.yaml", "data.json", "tokenizer.json", "env.json", "heartbeat.json", "lead",
    "metrics.jsonl", "overrides.txt", "run_id", "parent.json", "submission.json",
    "attempts/1/clock.json", "attempts/1/attempt.json", "attempts/2/attempt.json",
    "attempts/2/clock.json", "control/acknowledged.json",
    "logs/latest.log", "checkpoints/step-000008/position.json",
    "checkpoints/step-000008/MANIFEST.json",
]  # fmt: skip


def outcome(command: Callable[[], object]) -> DttError | None:
    """The message that a command ends with; anything else that it raises is a traceback."""
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
            command()
    except DttError as error:
        return error
    except OSError as error:
        return in_words(error)
    finally:
        signal.alarm(0)
    return None


def commands_of(job: Path) -> dict[str, Callable[[], object]]:
    return {
        "status": lambda: job_listing.status(job, as_json=False),
        "status --json": lambda: job_listing.status(job, as_json=True),
        "ls": lambda: job_listing.ls(job.parent, as_json=False),
        "ls --json": lambda: job_listing.ls(job.parent, as_json=True),
        "ckpt ls": lambda: ckpt.ls(str(job), as_json=False),
    }


@pytest.mark.slow(except_for=["config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("name", REPLACED)
def test_every_command_survives_a_damaged_file(folder: Path, name: str) -> None:
    path = JOB / name
    whole = path.read_bytes()
    for kind, damage in DAMAGE.items():
        damage(path, random.Random(f"{name} {kind}"))
        for what, command in commands_of(JOB).items():
            error = outcome(command)
            if error is not None:
                assert name == "config.yaml", f"{what}, {kind}: {error}"
        remove(path)
        path.write_bytes(whole)


def resume() -> DttError | None:
    return outcome(lambda: train.run(None, [str(JOB), "train.steps=9"], ["train.steps"], None))


@pytest.mark.slow(except_for=["random bytes"])
@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind != "a directory"])
def test_a_job_resumes_with_all_of_its_files_damaged(folder: Path, kind: str) -> None:
    """All but its configuration, which decides what it is, and the checkpoint before the newest."""
    for name in REPLACED[1:]:
        DAMAGE[kind](JOB / name, random.Random(f"{name} {kind}"))
    assert resume() is None
    assert store.steps(JOB / "checkpoints")[-1] == 9
    assert JobDir(JOB).exit_record(3) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run_id", "metrics.jsonl", "env.json", "tokenizer.json"])
def test_a_folder_in_place_of_an_output_file_is_one_error(folder: Path, name: str) -> None:
    directory(JOB / name, random.Random(0))
    error = resume()
    assert error is not None
    assert error.exit_code == ExitCode.IO
    assert name in str(error)
    (JOB / name).rmdir()
    assert resume() is None


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind not in ("empty", "cut short")])
def test_a_damaged_configuration_is_one_error(folder: Path, kind: str) -> None:
    DAMAGE[kind](JOB / "config.yaml", random.Random(kind))
    error = resume()
    assert error is not None
    assert error.exit_code in (ExitCode.USAGE, ExitCode.INPUT_MISSING)


STRAY: dict[str, Callable[[], object]] = {
    "a folder step-²": (JOB / "checkpoints/step-²").mkdir,
    "a folder step-9": (JOB / "checkpoints/step-9").mkdir,
    "a file step-000007": lambda: (JOB / "checkpoints/step-000007").write_text("x"),
    "a stray file .tmp-step-x": lambda: (JOB / "checkpoints/.tmp-step-x").write_text("x"),
    "a stray folder .tmp-step-x": (JOB / "checkpoints/.tmp-step-x").mkdir,
    "a folder attempts/²": (JOB / "attempts/²").mkdir,
    "a file attempts/3": lambda: (JOB / "attempts/3").write_text("x"),
    "a file superseded-step-000001-1": lambda: (
        JOB / "checkpoints/superseded-step-000001-1"
    ).write_text("x"),
    "a FIFO control/save": lambda: os.mkfifo(JOB / "control/save"),
}


@pytest.mark.slow
@pytest.mark.parametrize("put", STRAY.values(), ids=STRAY)
def test_a_stray_file_or_folder_stops_nothing(folder: Path, put: Callable[[], object]) -> None:
    put()
    for what, command in commands_of(JOB).items():
        assert outcome(command) is None, what
    train.run(None, [str(JOB), "train.steps=9"], ["train.steps"], None)
    assert store.steps(JOB / "checkpoints")[-1] == 9


HOSTILE = {
    "a number without end": (JOB / f"attempts/{'9' * 21}").mkdir,
    "a great number": (JOB / "attempts/999999999").mkdir,
    "digits of another script": (JOB / "attempts/\u0663").mkdir,
    "a checkpoint of a great number": (JOB / f"checkpoints/step-{'9' * 30}").mkdir,
    "an ending without a reason": lambda: _forge("attempts/2/attempt.json", code=1, reason=""),
    "an odd ending": lambda: _forge(
        "attempts/2/attempt.json", code=10**15, rank=-1, node="\x1b[2J"
    ),
    "a heartbeat of the future": lambda: _forge("heartbeat.json", time=1e300, pid=-5, step=-1),
    "an odd submission": lambda: _forge("submission.json", job_id="--all; 7", time=-1e300),
    "a submission without a folder": lambda: _forge(
        "submission.json", job_id=None, argv=["\x1b"], directory="/dev/null/x"
    ),
    "odd facts of the supervisor": lambda: _forge(
        "attempts/2/attempt.json", decision=["over:"], decided="x", stalled={}
    ),
    "a log without line breaks": lambda: (JOB / "logs/latest.log").write_text("x" * 2_000_000),
    "a log that is a device": lambda: _link("logs/latest.log", "/dev/zero"),
    "a loop of links": lambda: _link("logs/latest.log", "latest.log"),
    "a job that is its own parent": lambda: _forge("parent.json", job="."),
}


def _forge(name: str, **values: object) -> None:
    path = JOB / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _link(name: str, target: str) -> None:
    (JOB / name).unlink()
    (JOB / name).symlink_to(target)


@pytest.mark.parametrize("forge", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_job_folder_hangs_no_command(folder: Path, forge: Callable[[], object]) -> None:
    forge()
    commands: dict[str, Callable[[], object]] = commands_of(JOB) | {
        "logs": lambda: launch_job.logs(JOB, follow=False, node=None, lines=20),
        "stop": lambda: launch_job.stop(JOB, yes=True, wait=0.0),
        "report": lambda: report.write([JOB], Path("page.html")),
        "resume": lambda: launch_job.resume(JOB),
        "rm": lambda: launch_job.rm(JOB, yes=True),
    }
    for what, command in commands.items():
        error = outcome(command)  # any message of dtt will do, but for these
        assert error is None or what not in ("status", "status --json", "ls", "ls --json"), error


def test_a_folder_in_place_of_the_stop_request_is_one(folder: Path) -> None:
    (JOB / "control/stop").mkdir()
    error = outcome(lambda: train.run(None, [str(JOB), "train.steps=9"], ["train.steps"], None))
    assert error is not None
    assert error.exit_code == ExitCode.PREEMPTED
    assert not (JOB / "control/stop").exists()
    train.run(None, [str(JOB), "train.steps=9"], ["train.steps"], None)


def test_lost_records_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = JobDir(JOB).metrics
    metrics.write_text("")
    train.run(None, [str(JOB), "train.steps=9"], ["train.steps"], None)
    assert "lacks the records of 8 steps" in caplog.text
    assert [r["step"] for r in jsonl.read(metrics, "train")] == [9]


def test_temporary_files_of_dead_processes_are_removed_at_the_next_start(folder: Path) -> None:
    """Those that another command may be writing just now are not."""
    names = [
        ".lead.0a1b2c3d.tmp", ".run_id.0a1b2c3d.tmp", ".metrics.jsonl.0a1b2c3d.tmp",
        "attempts/1/.attempt.json.0a1b2c3d.tmp", "attempts/1/.ending.tmp",
        "attempts/2/.clock.json.tmp", "attempts/2/ranks/.00000.json.0a1b2c3d.tmp",
        "control/.stop.0a1b2c3d.tmp", "checkpoints/.tmp-step-000003-rejected/x",
        "checkpoints/.tmp-step-000003-1/x",
    ]  # fmt: skip
    for name in names:
        (JOB / name).parent.mkdir(exist_ok=True)
        (JOB / name).write_text("x")
    young = JOB / "control/.save.0a1b2c3d.tmp"
    young.write_text("x")
    os.utime(JOB / "control/.stop.0a1b2c3d.tmp", (1, 1))
    train.run(None, [str(JOB), "train.steps=9"], ["train.steps"], None)
    left = [path for path in JOB.rglob(".*") if path.name.endswith((".tmp", "-rejected", "-1"))]
    assert left == [young]
