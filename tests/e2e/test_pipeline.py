"""`dtt pipeline`: one command from raw text to a verified model; killed or repeated, it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.running import Done, Dtt, kill_when, wait_until

SMALL = (
    "train.steps=12", "model.dim=32", "model.n_layers=2", "model.n_heads=2", "train.seq_len=64",
    "train.global_batch_tokens=512", "train.micro_batch=8", "train.log_every=1",
    "train.eval_tokens=2048", "train.sample_tokens=8", "checkpoint.every=5",
    "tokenizer.vocab_size=512", "schedule.warmup=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def dtt(tmp_path_factory: pytest.TempPathFactory) -> Dtt:
    """The command, in a folder of all tests of this file."""
    return Dtt(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def books(dtt: Dtt) -> Path:
    """A folder of text files, as a user has them."""
    folder = dtt.folder / "my books"
    folder.mkdir()
    for number in range(60):
        lines = [f"Chapter {number}, line {i}: the sea was {i * number % 7}." for i in range(40)]
        (folder / f"book {number}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def run(dtt: Dtt, books: Path) -> Done:
    """What the pipeline said that made jobs/books and exports/books."""
    return dtt("pipeline", "-c", "quickstart", "-d", books, "name=books", *SMALL)


@pytest.mark.slow
def test_raw_text_becomes_a_model_that_transformers_loads(dtt: Dtt, books: Path, run: Done) -> None:
    for words in ("validation loss", "bits per byte", "tokens/s", "after training:",
                  "exports/books", "jobs/books", "dtt generate", "dtt train"):  # fmt: skip
        assert words in run.stdout
    for number, stage in enumerate(("download", "tokenize", "train", "export"), start=1):
        assert f"[{number}/4] {stage}: " in run.stderr
    assert "mpirun -n 2 dtt tokenize" in run.stderr

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(dtt.folder / "exports/books")
    model = AutoModelForCausalLM.from_pretrained(dtt.folder / "exports/books")
    prompt = tokenizer("Chapter", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=5, do_sample=False)[0])
    assert text.startswith("Chapter")
    ours = dtt("generate", "exports/books", "-p", "Chapter", "--temperature", 0,
               "--max-new-tokens", 5)  # fmt: skip
    assert ours.stdout.strip() == text.strip()

    again = dtt("pipeline", "-c", "quickstart", "-d", books, "name=books", *SMALL)
    for words in ("already done", "jobs/books is done", "export: already done"):
        assert words in again.stderr
    assert again.stdout.count("after training:") == 1

    quiet = dtt("pipeline", "-c", "quickstart", "-d", books, "name=books", *SMALL, "--json", "-q")
    reported = json.loads(quiet.stdout)  # what the stages print is not in it
    assert (reported["job"], reported["model"], reported["steps"]) == (
        "jobs/books",
        "exports/books",
        12,
    )
    assert f"{reported['last_eval']['loss']:.3f}" in run.stdout
    assert quiet.stderr == ""


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_killed_in_every_step_it_resumes_to_the_same_weights(dtt: Dtt, books: Path) -> None:
    command = ("pipeline", "-c", "quickstart", "-d", books, *SMALL)
    marks = {
        "tokenize": dtt.folder / "data/tokens/again/.units",
        "train": dtt.folder / "jobs/again/checkpoints/step-000005",
        "export": dtt.folder / "jobs/again/checkpoints/step-000012",
    }
    # All checkpoints stay: else the one that is waited for may be gone when the kill comes.
    command += ("name=again", "tokenize.out=data/tokens/again", "checkpoint.keep_last=9")
    for mark in marks.values():
        kill_when(mark.exists, dtt.start(*command))
        assert mark.exists()
    dtt(*command)
    for name in ("model", "state"):
        file = f"checkpoints/step-000012/{name}-00000.safetensors"
        one, other = (dtt.folder / "jobs" / job / file for job in ("books", "again"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_stage_that_failed(dtt: Dtt, books: Path) -> None:
    missing = dtt("pipeline", "-c", "quickstart", "-d", "no/such/folder", expect=66)
    assert "no/such/folder" in missing.stderr
    assert "stopped in download" in missing.stderr
    lost = (*SMALL, "optim.type=adamw", "optim.lr=1e30", "train.clip_norm=null")
    diverged = dtt("pipeline", "-c", "quickstart", "-d", books, *lost, "name=lost", expect=76)
    assert "stopped in train" in diverged.stderr
    two = (*lost, "name=two", "pipeline.train_processes=2")
    under_torchrun = Dtt.wait(dtt.start("pipeline", "-c", "quickstart", "-d", books, *two))
    assert under_torchrun.returncode == 76  # torchrun itself says 1
    assert "exit code 76\ntraining diverged" in under_torchrun.stderr


@pytest.mark.slow
def test_a_stopped_pipeline_saves_and_resumes(dtt: Dtt, books: Path) -> None:
    command = (
        "pipeline", "-c", "quickstart", "-d", books, *SMALL, "name=long", "checkpoint.keep_last=99",
    )  # fmt: skip
    process = dtt.start(*command, "train.steps=100000", "train.precision=fp32")
    wait_until((dtt.folder / "jobs/long/checkpoints/step-000005").exists, process)
    process.terminate()
    stopped = Dtt.wait(process)
    assert stopped.returncode == 75, stopped.stderr
    other = dtt(*command, "schedule.decay=0.1", "pipeline.train_processes=2", expect=2)
    assert "schedule.decay" in other.stderr
    record = json.loads((dtt.folder / "jobs/long/attempts/1/attempt.json").read_text())
    assert record["code"] == 75
    assert record["checkpoint"] == f"step-{record['step']:06d}"
