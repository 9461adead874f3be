"""A job's relative paths mean the same wherever dtt is run, and its bytes do not tell where."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from support.running import Dtt

from dtt.artifacts.manifests import CheckpointManifest

STEPS = ("train.steps=6", "--allow-change", "train.steps")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose job `x` has trained four steps on token files named by a relative path."""
    project = tmp_path_factory.mktemp("made") / "project"
    project.mkdir()
    words = [f"word{i % 7} of line {i}" for i in range(600)]
    (project / "source.txt").write_text("\n".join(words))
    dtt = Dtt(project)
    dtt("download", "-d", "source.txt", "download.out=data/corpus", "download.txt_documents=line")
    dtt(
        "tokenize", "download.out=data/corpus", "tokenize.out=data/ids",
        "tokenizer.vocab_size=260",
    )  # fmt: skip
    dtt(
        "train", "name=x", "data.tokens=data/ids", "model.dim=16", "model.n_layers=1",
        "model.n_heads=2", "train.seq_len=16", "train.micro_batch=2",
        "train.global_batch_tokens=32", "train.steps=4", "checkpoint.every=2",
        "checkpoint.keep_last=9", "schedule.warmup=0", "schedule.decay=1",
    )  # fmt: skip
    return project


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy of it, in another place than where it was made."""
    return Path(shutil.copytree(made, tmp_path / "project", symlinks=True))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Dtt:
    """Runs dtt in a folder that has nothing to do with the project."""
    (tmp_path / "elsewhere").mkdir()
    return Dtt(tmp_path / "elsewhere")


def checkpoint_hashes(job: Path, step: int) -> dict[str, object]:
    """What a checkpoint is: the hash of every file, and of the configuration."""
    manifest = CheckpointManifest.read(job / f"checkpoints/step-{step:06d}")
    return {file.path: file.sha256 for file in manifest.files} | {
        "config": manifest.config_sha256,
        "data": manifest.data_key,
    }


@pytest.mark.slow
def test_a_resume_from_another_folder_writes_the_same_bytes(
    made: Path, project: Path, elsewhere: Dtt, tmp_path: Path
) -> None:
    at_home = Path(shutil.copytree(made, tmp_path / "at home"))
    Dtt(at_home)("train", "jobs/x", *STEPS)
    reported = elsewhere("train", project / "jobs/x", *STEPS)
    assert f"relative paths of {project}/jobs/x start from {project}" in reported.stderr
    expected = checkpoint_hashes(at_home / "jobs/x", 6)
    assert checkpoint_hashes(project / "jobs/x", 6) == expected
    assert not list(elsewhere.folder.iterdir()), "nothing is written where dtt was run"
    there = elsewhere("train", "../project/jobs/../jobs/x", *STEPS)
    assert f"{project}/jobs/x is done" in there.stderr
    inside = Dtt(project / "jobs/x")("train", ".", *STEPS)
    assert "is done" in inside.stderr


@pytest.mark.slow
def test_data_branches_and_exports_of_a_job_in_another_folder(
    project: Path, elsewhere: Dtt
) -> None:
    job = project / "jobs/x"
    seen = elsewhere("data", "at-step", job, 2, "--json")
    assert seen.stdout == Dtt(project)("data", "at-step", "jobs/x", 2, "--json").stdout
    elsewhere("train", "--branch", f"{job}@2", "schedule.decay=1", "name=child")
    child = project / "jobs/child"
    assert (child / "checkpoints").is_dir(), "a child lies beside its parent"
    assert json.loads((child / "parent.json").read_text())["job"] == "../x"
    assert "is done" in elsewhere("train", child).stderr
    assert not list(elsewhere.folder.iterdir())
    elsewhere("export", job)
    assert (elsewhere.folder / "exports/x/config.json").is_file(), "an export goes where one is"
    elsewhere("export", job, "--out", "given")
    assert (elsewhere.folder / "given/config.json").is_file()


def test_paths_in_arguments_are_relative_to_the_current_folder(
    project: Path, elsewhere: Dtt
) -> None:
    (project / "data/ids").rename(elsewhere.folder / "ids")
    job = project / "jobs/x"
    missing = elsewhere("train", job, *STEPS, expect=66)
    assert "no token files in data/ids" in missing.stderr
    elsewhere("train", job, "data.tokens=ids", "--allow-change", "data.tokens", *STEPS)
    assert f"{elsewhere.folder}/ids" in (job / "config.yaml").read_text()


@pytest.mark.slow
def test_a_moved_job_is_resumed_in_the_folder_of_its_data(project: Path, elsewhere: Dtt) -> None:
    """As ever: also through a link, and under another name."""
    archive = elsewhere.folder / "jobs"
    archive.mkdir()
    (project / "jobs/x").rename(archive / "x")
    Dtt(project)("train", archive / "x", "train.steps=5", "--allow-change", "train.steps")
    (archive / "x").rename(archive / "y")
    Dtt(project)("train", archive / "y", *STEPS)
    (project / "jobs").rmdir()
    (archive / "y").rename(archive / "x")
    (project / "jobs").symlink_to(archive)
    assert "is done" in Dtt(project)("train", archive / "x", *STEPS).stderr
    assert "is done" in elsewhere("train", project / "jobs/x", *STEPS).stderr


def test_the_job_script_runs_in_the_home_of_the_job(project: Path, elsewhere: Dtt) -> None:
    script = elsewhere("submit", "train", project / "jobs/x", *STEPS, "--print-script").stdout
    assert f"cd -- {project} || exit" in script
    assert f"{project}/jobs/x" in script


def test_the_command_of_job_resume_works_in_the_current_folder(
    project: Path, elsewhere: Dtt
) -> None:
    job = project / "jobs/x"
    record = {"argv": ["train", "jobs/x"], "directory": str(project), "job_id": "1", "time": 1}
    (job / "submission.json").write_text(json.dumps(record) + "\n")
    path = job / "attempts/1/attempt.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": 75}))
    assert f"cd {project} && dtt train jobs/x" in elsewhere("job", "resume", job).stdout
    assert Dtt(project)("job", "resume", "jobs/x").stdout == "dtt train jobs/x\n"


@pytest.mark.slow
def test_every_file_follows_the_umask(project: Path, elsewhere: Dtt) -> None:
    """Each command in a process of its own, which inherits the umask."""
    (elsewhere.folder / "a.txt").write_text("a line\n" * 300)
    (elsewhere.folder / "a.txt").chmod(0o640)
    commands: list[tuple[object, ...]] = [
        ("export", project / "jobs/x", "export.max_shard_size=20KB"),
        ("download", "-d", "a.txt", "download.out=c", "download.txt_documents=line"),
        (
            "tokenize", "download.out=c", "tokenizer.vocab_size=260", "tokenize.out=t",
            "tokenize.validation_fraction=0",
        ),
        (
            "train", "data.tokens=t", "model.dim=16", "model.n_layers=1", "model.n_heads=2",
            "train.seq_len=16", "train.micro_batch=2", "train.global_batch_tokens=32",
            "train.steps=3", "track=[{type: tensorboard}]", "profile.steps=[1,2]",
        ),
    ]  # fmt: skip
    before = os.umask(0o027)
    try:
        for command in commands:
            elsewhere(*command)
    finally:
        os.umask(before)
    modes = {
        str(path): oct(stat.S_IMODE(path.stat().st_mode))
        for path in elsewhere.folder.rglob("*")
        if path.is_file()
    }
    assert len([name for name in modes if name.endswith(".safetensors")]) > 2
    assert {name: mode for name, mode in modes.items() if mode != "0o640"} == {}
