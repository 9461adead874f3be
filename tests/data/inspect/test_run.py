"""`dtt data` as a user types it: what is there, what a mixture comes to, what a step trained on."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.running import Dtt
from support.selections import write_selection
from support.token_files import END, read_documents, write_folder
from tokenizers import Tokenizer

from dtt.artifacts.manifests import TokensManifest

Settings = Callable[..., list[str]]


def facts(dtt: Dtt, *arguments: object, expect: int = 0) -> dict[str, Any]:
    """What `dtt data … --json` prints."""
    found: dict[str, Any] = json.loads(dtt("data", *arguments, "--json", expect=expect).stdout)
    return found


def test_inspect_reports_a_token_folder_as_text_and_json(dtt: Dtt, tokens: Path) -> None:
    manifest = TokensManifest.read(tokens)
    train, held_out = manifest.counts("train"), manifest.counts("validation")
    report = facts(dtt, "inspect", tokens)
    assert report["kind"] == "token files of dtt"
    assert report["documents"] == train.documents + held_out.documents == 400
    assert report["tokens"] == train.tokens + held_out.tokens
    assert report["text_bytes"] == train.bytes + held_out.bytes
    assert report["files"] == 2 * len(manifest.shards)
    assert report["facts"]["splits"]["train"] == train.model_dump()
    end = {"id": 0, "token": "<|endoftext|>", "documents": 400, "of": 400}
    assert report["facts"]["end_of_document"] == end
    documents = (one for s in manifest.shards for one in read_documents(tokens / s.stem))
    lengths = np.array([len(one) for one in documents])
    assert report["lengths"]["documents"] == 400
    assert report["lengths"]["max"] == lengths.max()
    assert report["lengths"]["median"] == np.sort(lengths)[199]
    assert len(report["samples"]) == 3
    assert "four" in report["samples"][0]["text"]
    assert (report["oddities"], report["damaged"], report["verified"]) == ([], [], False)
    stdout = dtt("data", "inspect", tokens, "--samples", 1).stdout
    assert f"{report['tokens']:,}" in stdout
    assert f"longest {lengths.max():,} (400 documents measured)" in stdout
    assert stdout.count(".bin, document ") == 1


def test_verify_names_each_differing_file(dtt: Dtt, tokens: Path) -> None:
    folder = shutil.copytree(tokens, dtt.folder / "tokens")
    assert facts(dtt, "inspect", folder, "--verify")["verified"]
    first, second, third = (s.stem for s in TokensManifest.read(folder).shards[:3])
    with (folder / f"{first}.bin").open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    assert facts(dtt, "inspect", folder)["damaged"] == []
    (folder / f"{second}.idx").unlink()
    with (folder / f"{third}.bin").open("r+b") as file:
        file.truncate(10)
    by_size = facts(dtt, "inspect", folder, expect=65)["damaged"]
    assert [Path(line.split(": ")[0]).name for line in by_size] == [f"{second}.idx", f"{third}.bin"]
    done = dtt("data", "inspect", folder, "--verify", expect=65)
    for name, why in ((f"{first}.bin", "its sha256"), (f"{second}.idx", "missing"),
                      (f"{third}.bin", "10 bytes, the manifest records")):  # fmt: skip
        assert f"{folder / name}: {why}" in done.stdout
    assert "damaged files: 3" in done.stderr
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in dtt("data", "inspect", folder, expect=65).stderr


def test_inspect_reports_and_verifies_a_corpus(dtt: Dtt) -> None:
    (dtt.folder / "texts").mkdir()
    for i in range(4):
        (dtt.folder / f"texts/{i}.txt").write_text(f"text {i} " * (i + 1))
    dtt("download", "-d", "texts")
    corpus = dtt.folder / "data/corpus/texts"
    report = facts(dtt, "inspect", corpus, "--verify")
    assert (report["kind"], report["documents"], report["files"]) == ("corpus of dtt", 4, 4)
    assert report["lengths"]["max"] == 28
    assert report["facts"]["source"]["kind"] == "local"
    said = dtt("data", "inspect", corpus, "--verify").stdout
    assert "every file of the corpus matches its manifest" in said
    (dtt.folder / "texts/2.txt").write_text("TEXT 2 " * 3)
    assert facts(dtt, "inspect", corpus)["damaged"] == []
    done = dtt("data", "inspect", corpus, "--verify", expect=65)
    assert "2.txt: its sha256" in done.stdout
    (dtt.folder / "texts/3.txt").unlink()
    assert "3.txt: missing" in dtt("data", "inspect", corpus, expect=65).stdout


def test_a_terabyte_of_ids_is_inspected_without_reading_it(dtt: Dtt) -> None:
    """Sparse files: a thousand documents of 10^9 ids each would take far longer than this may."""
    documents, length = 1000, 10**9
    offsets = np.arange(documents, dtype="<i8") * length * 2
    with (dtt.folder / "a.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        file.write(np.full(documents, length, "<i4").tobytes() + offsets.tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with (dtt.folder / "a.bin").open("wb") as file:
        file.truncate(2 * documents * length)
    report = facts(dtt, "inspect", "a")
    assert report["tokens"] == 10**12
    assert report["documents"] == documents
    assert 0 < report["read"]["amount"] < 10**8
    assert report["lengths"]["max"] == length
    stdout = dtt("data", "inspect", "a").stdout
    assert "of 1,000,000,000,000 tokens, evenly spread; --all reads everything" in stdout


def test_invalid_arguments_are_reported(dtt: Dtt, tokens: Path) -> None:
    assert "there is no nowhere" in dtt("data", "inspect", "nowhere", expect=66).stderr
    stem = tokens / "train-00000"
    assert "no checksums to verify" in dtt("data", "inspect", stem, "--verify", expect=2).stderr
    assert "'uint16', " in dtt("data", "inspect", stem, "--dtype", "int8", expect=2).stderr
    missing = dtt("data", "inspect", stem, "--tokenizer", "none.json", expect=66).stderr
    assert "none.json" in missing
    assert "no token files" in dtt("data", "mix", "data.tokens=none", expect=66).stderr
    assert "not a job directory" in dtt("data", "at-step", "jobs/none", 1, expect=66).stderr


@pytest.mark.slow
def test_no_command_needs_torch(dtt: Dtt, tokens: Path, tiny: Settings, job: Path) -> None:
    assert job == dtt.folder / "jobs/t"
    for command in (["inspect", str(tokens)], ["mix", *tiny()], ["at-step", "jobs/t", "3"]):
        code = (
            "import sys; sys.modules['torch'] = None\n"  # importing it is an ImportError now
            f"sys.argv = ['dtt', 'data', *{command}]\nfrom dtt.main import main; main()"
        )
        done = dtt.wait(dtt.start_python("-c", code))
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("on_exhausted", "steps", "small", "total"),
    [("repeat", 100, 200, 800), ("stop", 39, 79, 315), ("renormalise", 49, 79, 398)],
)
def test_mix_reports_shares_epochs_and_steps(
    dtt: Dtt, on_exhausted: str, steps: int, small: int, total: int
) -> None:
    for name, documents in (("large", 1024), ("small", 256)):
        write_folder(dtt.folder / name, {"train-0": [[*range(1, 10), END]] * documents})
    (dtt.folder / "run.yaml").write_text(
        "train: {seq_len: 32, global_batch_tokens: 256, steps: 100}\n"
        "data: {sources: [{path: large, weight: 3}, {path: small, weight: 1}]}\n"
    )
    shown = dtt("data", "mix", "-c", "run.yaml", f"data.on_exhausted={on_exhausted}").stdout
    _, line, last = shown.splitlines()
    small_epochs = f"{small / 79:.2f} epochs"  # of 79 samples
    assert line.split("% ", 1)[1].strip() == f"0.0M tokens, {small_epochs}"
    assert float(line.split()[1].rstrip("%")) == pytest.approx(100 * small / total, abs=0.1)
    asked = "" if steps == 100 else " of the 100 requested"
    assert last == f"  {steps} steps{asked} of 256 tokens"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Settings) -> Path:
    """A job of 12 steps, resumed after 8 with another micro-batch."""
    dtt = Dtt(tmp_path_factory.mktemp("trained"))
    dtt("train", *tiny(train__steps=8))
    change = ["--allow-change", "train.steps", "--allow-change", "train.micro_batch"]
    dtt("train", "jobs/t", "train.steps=12", "train.micro_batch=2", *change)
    return dtt.folder / "jobs/t"


@pytest.fixture
def job(dtt: Dtt, trained: Path) -> Path:
    """A copy of that, to do anything with."""
    return shutil.copytree(trained, dtt.folder / "jobs/t")


@pytest.mark.slow
def test_at_step_lists_the_documents(dtt: Dtt, job: Path, tokens: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    seen = {step: facts(dtt, "at-step", job, step) for step in (1, 8, 9)}
    for step, found in seen.items():
        assert found["ledger_agrees"]
        assert found["samples_of_step"] == len(found["samples"]) == 8
        assert [s["position"] for s in found["samples"]] == [*range(8 * (step - 1), 8 * step)]
        for sample in found["samples"]:
            assert (sample["source"], sample["epoch"]) == ("tokens", 1)
            assert sum(part["tokens"] for part in sample["documents"]) == 33
            for part in sample["documents"]:
                document = read_documents(Path(part["file"]).with_suffix(""))[part["document"]]
                ids = document[part["offset"] :][: part["tokens"]]
                assert part["text"] == tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert len({s["sample"] for found in seen.values() for s in found["samples"]}) == 3 * 8
    of_one_rank = facts(dtt, "at-step", job, 9, "--rank", 1, "--of", 4)["samples"]
    assert of_one_rank == seen[9]["samples"][1::4]
    stdout = dtt("data", "at-step", job, 12, "--samples", 2).stdout
    assert "8 samples, the same as in metrics.jsonl" in stdout
    assert stdout.count("\nsample ") == 2
    assert "and 6 more" in stdout


def test_a_step_with_another_sample_hash_is_refused(dtt: Dtt, job: Path, tokens: Path) -> None:
    metrics = job / "metrics.jsonl"
    whole = metrics.read_text()
    records = [json.loads(line) for line in whole.splitlines()]
    for record in records:
        if record["kind"] == "train" and record["step"] == 5:
            record["ledger"] = "00" * 16
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in (5, 6):
        done = dtt("data", "at-step", job, step, "--json", expect=65)
        assert "other samples than the current data" in done.stderr
        assert done.stdout == ""
    facts(dtt, "at-step", job, 7)
    metrics.write_text(whole)
    other = write_folder(dtt.folder / "other", {"train-0": [[*range(1, 40), END]] * 900})
    shutil.copy(tokens / "tokenizer.json", dtt.folder / "other")
    assert other.key != TokensManifest.read(tokens).key
    config = job / "config.yaml"
    config.write_text(config.read_text().replace(str(tokens), "other"))
    done = dtt("data", "at-step", job, 5, expect=65)
    assert "the files of tokens have changed since" in done.stderr


@pytest.mark.slow
def test_untrained_steps_are_marked(dtt: Dtt, job: Path) -> None:
    assert "its steps are 1 to 12" in dtt("data", "at-step", job, 13, expect=2).stderr
    assert "its steps are 1 to 12" in dtt("data", "at-step", job, 0, expect=2).stderr
    assert "require each other" in dtt("data", "at-step", job, 1, "--rank", 1, expect=2).stderr
    (job / "metrics.jsonl").unlink()
    assert facts(dtt, "at-step", job, 3)["ledger_agrees"] is None
    assert "not trained yet" in dtt("data", "at-step", job, 3).stdout


@pytest.mark.slow
def test_a_step_of_a_run_from_text_needs_no_checkpoint(
    dtt: Dtt, tiny: Settings, tokens: Path
) -> None:
    corpus = tokens.parent / "data/corpus/counting"
    settings = [s for s in tiny() if not s.startswith("data.")]
    settings += ["data.type=text", f"download.out={corpus}"]
    settings += ["tokenizer.type=file", f"tokenizer.path={tokens / 'tokenizer.json'}"]
    dtt("train", *settings)
    found = [facts(dtt, "at-step", "jobs/t", step) for step in (2, 11)]
    assert all(step["ledger_agrees"] for step in found)
    shutil.rmtree(dtt.folder / "jobs/t/checkpoints")
    assert [facts(dtt, "at-step", "jobs/t", step) for step in (2, 11)] == found
    texts = [p["text"] for p in found[1]["samples"][0]["documents"]]
    assert any(len(text) > 10 for text in texts)
    assert found[1]["samples"][0]["documents"][0]["file"] == str(tokens.parent / "counting.jsonl")


def test_inspect_says_how_many_documents_a_selection_removes_and_why(dtt: Dtt) -> None:
    lines = [json.dumps({"text": f"{i} {'even' if i % 2 == 0 else 'odd'}"}) for i in range(3000)]
    (dtt.folder / "numbers.jsonl").write_text("\n".join(lines))
    dtt("download", "-d", "numbers.jsonl", "download.out=corpus")
    corpus = dtt.folder / "corpus"
    assert "removed" not in dtt("data", "inspect", corpus).stdout
    place = write_selection(corpus, lambda text: text.endswith(b"0 even"), unit_bytes=20_000)
    told = dtt("data", "inspect", corpus).stdout
    assert f"removed by {place.name} 300 documents: rules 300" in told
