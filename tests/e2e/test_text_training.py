"""Training straight from text, in real processes: killed, gone on with, shared out, exported."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support import forked_runs
from support.running import Dtt, wait_until, write_documents

from dtt.track import jsonl

STEPS = 90
BLANK = b" " * 10**6 + b"\n"


def write_corpus(folder: Path) -> None:
    """Four files, each large enough to be a unit of its own, for most of it is blank lines."""
    folder.mkdir()
    write_documents(folder / "all")
    lines = (folder / "all").read_bytes().splitlines(keepends=True)
    (folder / "all").unlink()
    for i in range(4):
        content = b"".join([*lines[i::4], *[BLANK] * 5])
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(content, compresslevel=0))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Dtt:
    """A folder with a corpus, a tokenizer and a run that nothing disturbed."""
    dtt = Dtt(tmp_path_factory.mktemp("text"))
    write_corpus(dtt.folder / "texts")
    dtt("download", "-d", "texts", "download.out=corpus")
    dtt("tokenize", "download.out=corpus", "tokenize.out=tokens", "tokenizer.vocab_size=300",
        "tokenize.validation_fraction=0.1")  # fmt: skip
    dtt("train", *settings("whole"))
    return dtt


def settings(name: str) -> list[str]:
    """A run over more than an epoch, with a checkpoint in every unit."""
    return [
        f"name={name}", "data.type=text", "download.out=corpus",
        "tokenizer.type=file", "tokenizer.path=tokens", "tokenize.validation_fraction=0.1",
        "model.dim=16", "model.n_layers=1", "model.n_heads=2", f"train.steps={STEPS}",
        "train.seq_len=64", "train.global_batch_tokens=1024", "train.micro_batch=8",
        "train.eval_every=20", "train.eval_tokens=2048", "train.sample_tokens=4",
        "checkpoint.every=5", "checkpoint.keep_last=3", "schedule.warmup=2",
    ]  # fmt: skip


def metrics(job: Path, kind: str) -> list[dict[str, Any]]:
    return [r for r in jsonl.read(job / "metrics.jsonl") if r["kind"] == kind]


def trained_on(job: Path) -> dict[int, tuple[str, int]]:
    """The ledger and the tokens up to each step, as the last record of it says."""
    return {r["step"]: (r["ledger"], r["tokens"]) for r in metrics(job, "train")}


def weights(job: Path) -> dict[str, Any]:
    return load_file(job / f"checkpoints/step-{STEPS:06}/model-00000.safetensors")


def read_state(checkpoint: Path) -> dict[str, int]:
    state: dict[str, int] = json.loads((checkpoint / "position.json").read_text())["sources"][
        "text"
    ]
    return state


def kill_in_the_middle(dtt: Dtt, name: str) -> Path:
    job = dtt.folder / "jobs" / name
    process = dtt.start("train", *settings(name))
    wait_until(lambda: max((r["step"] for r in metrics(job, "save")), default=0) >= STEPS // 3)
    process.kill()
    assert Dtt.wait(process).returncode == -signal.SIGKILL
    return job


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit_from_a_few_integers(prepared: Dtt) -> None:
    job, whole = kill_in_the_middle(prepared, "killed"), prepared.folder / "jobs/whole"
    newest = max((job / "checkpoints").glob("step-*"))
    state = read_state(newest)
    assert len(state) == 5
    assert all(type(value) is int for value in state.values())
    prepared("train", "jobs/killed")
    assert trained_on(job) == trained_on(whole)
    assert read_state(whole / f"checkpoints/step-{STEPS:06}")["epoch"] > 1
    expected = weights(whole)
    assert all((value == expected[name]).all() for name, value in weights(job).items())


@pytest.mark.slow
def test_on_another_number_of_ranks_it_resumes_with_the_same_samples(prepared: Dtt) -> None:
    job = kill_in_the_middle(prepared, "shared")
    forked_runs.run(prepared, "train", "jobs/shared", ranks=2)
    assert trained_on(job) == trained_on(prepared.folder / "jobs/whole")


def test_a_tokenizer_must_be_given(dtt: Dtt) -> None:
    refused = dtt("train", "data.type=text", expect=2)
    assert "data.type=text needs a given tokenizer" in refused.stderr
