"""Token files are the same bytes whatever happened on the way, and hold what the documents hold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import tokenizing
from support.corpora import json_lines
from support.running import TIMEOUT, Dtt
from support.token_files import sums
from support.tokenizing import documents
from tokenizers import Tokenizer

from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import DamagedError, InputError
from dtt.config.data import GivenTokenizerConfig
from dtt.data.corpus.document_sampling import held_out
from dtt.data.corpus.streams import Span
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.token_file import TokenFileWriter
from dtt.data.tokenize.encode_corpus import Tokenized, ahead
from dtt.data.tokenize.work_plan import Plan, TokensKey

WORDS = ["alpha", "beta", "gamma", "delta", "<|endoftext|>", "ünïcode", "字", "\n"]


def text(number: int) -> str:
    return " ".join(WORDS[(number * 31 + i * i) % len(WORDS)] for i in range(number % 50 + 1))


TEXTS = [f"{i} {text(i)}" for i in range(2000)]


def run(corpus: Corpus, *arguments: Any, **options: Any) -> Tokenized:
    return tokenizing.run(corpus.folder, *arguments, **options)


@pytest.fixture
def corpus(corpora: Any) -> Corpus:
    made: Corpus = corpora.make({"a.jsonl": json_lines(TEXTS)})
    return made


def test_every_document_is_there_once_and_ends_with_the_end_of_document(
    corpus: Corpus, tmp_path: Path
) -> None:
    manifest = run(corpus, tmp_path / "out").manifest
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    splits = documents(tmp_path / "out")
    texts = {
        split: [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in found]
        for split, found in splits.items()
    }
    assert sorted(texts["train"] + texts["validation"]) == sorted(TEXTS)
    for split, found in splits.items():
        assert all(ids[-1] == 0 and 0 not in ids[:-1] for ids in found)
        counts = manifest.counts(split)
        assert counts.documents == len(found)
        assert counts.tokens == sum(map(len, found))
        assert counts.bytes == sum(len(t.encode()) for t in texts[split])
    assert len(manifest.shards) > 6


def test_validation_is_disjoint_and_stable_when_documents_are_added(
    corpora: Any, tmp_path: Path
) -> None:
    held_out = []
    for count in (1000, 2000):
        corpora.folder = tmp_path / str(count)
        corpus = corpora.make({"a.jsonl": json_lines(TEXTS[:count] * 2)})
        out = tmp_path / f"out{count}"
        run(corpus, out)
        decode = Tokenizer.from_file(str(out / "tokenizer.json")).decode
        train, validation = (
            {decode(ids, skip_special_tokens=False) for ids in found}
            for found in documents(out).values()
        )
        assert not train & validation
        assert 0.05 * count < len(validation) < 0.15 * count
        held_out.append(validation)
    assert held_out[0] <= held_out[1]


def test_the_split_is_decided_by_the_documented_hash() -> None:
    """XXH3 of nothing is 0x2d06800538d394c2: 0.17588 of all that 64 bits can hold."""
    assert held_out(b"", 0.1759)
    assert not held_out(b"", 0.1758)


def test_the_engine_changes_no_byte_and_is_reported(corpus: Corpus, tmp_path: Path) -> None:
    made = {engine: run(corpus, tmp_path / engine, engine=engine) for engine in ("hf", "gigatoken")}
    assert {engine: result.engine for engine, result in made.items()} == {e: e for e in made}
    assert bytes_of(tmp_path / "hf") == bytes_of(tmp_path / "gigatoken")
    assert run(corpus, tmp_path / "hf", engine="gigatoken").units == 0


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What all files hold that matter once the manifest is there."""
    return {path.name: path.read_bytes() for path in folder.glob("*.*") if path.is_file()}


def test_an_unfinished_run_is_continued(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out"
    total = run(corpus, out).units
    whole = sums(out)
    (out / "manifest.json").unlink()
    (out / ".units/00001.json").unlink()
    (out / ".units/00003.json").write_text("{")
    (out / ".units/00003.train.bin").write_bytes(b"half")
    assert run(corpus, out).units == 2 < total
    assert sums(out) == whole


def test_manifest_and_shards_are_enough_to_be_done(corpus: Corpus, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/.units")
    assert run(corpus, tmp_path / "out").units == 0


def test_overwrite_removes_all_previous_files(corpus: Corpus, tmp_path: Path) -> None:
    run(corpus, tmp_path / "fresh", unit_bytes=50_000)
    run(corpus, tmp_path / "out")
    run(corpus, tmp_path / "out", unit_bytes=50_000, overwrite=True)
    assert sums(tmp_path / "out") == sums(tmp_path / "fresh")


def test_a_split_without_documents_is_reported_with_what_to_type(
    corpora: Any, tmp_path: Path
) -> None:
    corpus = corpora.make({"a.jsonl": json_lines(TEXTS[:5])})
    with pytest.raises(InputError, match=r"no document fell into the validation split"):
        run(corpus, tmp_path / "out", validation_fraction=1e-9)
    with pytest.raises(InputError, match=r"or 0 to hold out none"):
        run(corpus, tmp_path / "out", validation_fraction=1e-9)
    manifest = run(corpus, tmp_path / "out", validation_fraction=0.0).manifest
    assert manifest.counts("train").documents == 5
    assert not any(shard.split == "validation" for shard in manifest.shards)


def test_bad_documents_are_counted_or_stop(corpora: Any, tmp_path: Path) -> None:
    lines = (
        json_lines(TEXTS[:100])
        + b'broken\n{"text": ""}\n{"text": 3}\n'
        + json_lines(TEXTS[100:200])
    )
    corpus = corpora.make({"a.jsonl": lines})
    with pytest.raises(DamagedError, match=r"a\.jsonl:101") as stopped:
        run(corpus, tmp_path / "out", on_bad_document="stop")
    assert stopped.tb is not None  # what it holds is not freed yet
    opened = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in opened if path.startswith(str(tmp_path / "out"))]
    result = run(corpus, tmp_path / "out")
    assert result.manifest.skipped_documents == 2
    assert result.manifest.empty_documents == 1
    assert "a.jsonl:101" in result.problems[0]
    assert "a.jsonl:103" in result.problems[1]
    assert result.manifest.counts("train").documents > 150
    assert run(corpus, tmp_path / "out").problems == result.problems
    with pytest.raises(DamagedError, match=r"a\.jsonl:101"):
        run(corpus, tmp_path / "out", on_bad_document="stop")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": ""}\n', "1 are empty"),
        (b'{"text": " "}\n', "1 contain only white space"),
        (b'{"text": ""}\n{"text": "\\n"}\n', "1 are empty; 1 contain only"),
        (b'{"text": 1}\n{"text": 2}\n', "2 could not be used.*the text is int"),
        (b'{"body": "x"}\n', "1 could not be used.*no key 'text'"),
        (b'{"text": "x\n', "1 could not be used.*not JSON"),
        (b'{"text": "\xff"}\n', "1 could not be used.*not UTF-8"),
    ],
)
def test_a_corpus_without_documents_is_reported_before_a_tokenizer_is_trained(
    corpora: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, reason: str
) -> None:
    first = b'{"text": "x"}\n'
    corpus = corpora.make({"a.jsonl": first + content}, text_column="text")
    run(corpus, tmp_path / "before", validation_fraction=0.0)
    path, record = corpus.path(0), corpus.manifest.files[0]
    path.write_bytes(content.ljust(record.bytes, b"\n"))
    error = rf"the corpus contains[^$]*{reason}[^$]*text_column=NAME"
    caplog.clear()
    given = GivenTokenizerConfig(path=str(tmp_path / "before"))
    for tokenizer in (tokenizing.BPE, given):
        with caplog.at_level("INFO", "dtt"), pytest.raises(InputError, match=error):
            run(corpus, tmp_path / "out", tokenizer)
        assert not TokensManifest.exists(tmp_path / "out")
    assert "training a tokenizer" not in caplog.text


def test_units_are_distributed_evenly(corpus: Corpus) -> None:
    units = [Unit(i, (Span(0, i, i + 1, size),)) for i, size in enumerate([9, 1, 5, 3, 8, 2, 7])]
    key = TokensKey(key_parts={}, tokenizer_sha256="")
    plan = Plan(Path(), corpus, units, key, dict.fromkeys(range(7), ""), complete=False)
    shares = [plan.share(rank, 3) for rank in range(3)]
    assert sorted(u.index for share in shares for u in share) == list(range(7))
    loads = [sum(unit.text_bytes for unit in share) for share in shares]
    assert max(loads) - min(loads) <= max(unit.text_bytes for unit in units)


# ---- threads beside the encoder ------------------------------------------------------------------


def test_items_come_in_order_and_only_one_is_made_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    with ThreadPoolExecutor(1) as reader:
        for i, item in enumerate(ahead(items(), reader)):
            assert item == i
            assert len(made) <= i + 2
    assert made == list(range(20))


@pytest.mark.parametrize(("action", "unit"), [("append", 1), ("close", 1), ("close", -1)])
def test_an_error_of_the_disk_ends_the_run_and_nothing_is_written_after_it(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, unit: int
) -> None:
    """Shards are written in another thread, the last one when no batch comes after it."""
    units, calls = len(corpus.units(20_000)), 0
    finished = unit % units
    works = getattr(TokenFileWriter, action)

    def fail(writer: TokenFileWriter, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2 * finished:  # two shards a unit
            raise OSError("disk full")
        return works(writer, *given)

    monkeypatch.setattr(TokenFileWriter, action, fail)
    with pytest.raises(OSError, match="disk full"):
        run(corpus, tmp_path / "out", unit_bytes=20_000)
    assert calls == 2 * finished + 1
    assert len([*(tmp_path / "out/.units").glob("0*.json")]) == finished


# ---- real ranks ----------------------------------------------------------------------------------

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def command(corpus: Corpus, out: Path) -> list[str]:
    return [
        *("-m", "dtt.main", "tokenize", f"download.out={corpus.folder}", f"tokenize.out={out}"),
        *("tokenizer.vocab_size=300", "tokenize.validation_fraction=0.1"),
        "tokenize.unit_bytes=20000",
    ]


def test_any_number_of_ranks_writes_the_same_bytes(
    corpus: Corpus, tmp_path: Path, mpirun: Any
) -> None:
    run(corpus, tmp_path / "alone")
    expected = sums(tmp_path / "alone")
    for ranks in (1, 2, 3):
        done = mpirun(ranks, *command(corpus, tmp_path / f"out{ranks}"))
        assert done.returncode == 0, done.stderr
        assert sums(tmp_path / f"out{ranks}") == expected
        assert done.stdout.count("speed ") == 1


@pytest.mark.slow(except_for=["0-1"])
@pytest.mark.parametrize(("killed", "then"), [(0, 1), (1, 3)])
def test_a_killed_rank_ends_the_job_and_a_rerun_gives_the_same_bytes(
    corpora: Any, tmp_path: Path, killed: int, then: int, mpirun: Any
) -> None:
    corpus = corpora.make({"a.jsonl": json_lines([f"{i} {text(i)}" for i in range(5000)])})
    run(corpus, tmp_path / "alone")
    out = tmp_path / "out"
    (out / ".units").mkdir(parents=True)
    blocked = out / ".units/00010.train.bin"
    os.mkfifo(blocked)  # without a reader: the rank that comes to this unit cannot finish it
    job = subprocess.Popen(
        [str(MPIRUN), "-n", "2", sys.executable, *command(corpus, out)],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    rank = None
    while rank is None or not any(out.glob(".units/0*.json")):
        assert job.poll() is None, job.communicate()
        rank = rank or find_rank(job, killed)
    os.kill(rank, signal.SIGKILL)
    job.communicate(timeout=TIMEOUT)
    blocked.unlink()
    assert job.returncode != 0
    assert not TokensManifest.exists(out)
    finished = len(list(out.glob(".units/0*.json")))
    again = mpirun(then, *command(corpus, out))
    assert again.returncode == 0, again.stderr
    assert finished >= 1
    assert sums(out) == sums(tmp_path / "alone")


def find_rank(job: subprocess.Popen[str], rank: int) -> int | None:
    """Process id of a rank; None while it is not there yet."""
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if "dtt.main" in process.cmdline() and process.environ().get("PMI_RANK") == str(rank):
                return process.pid
        except psutil.Error:
            continue
    return None


@pytest.mark.slow
def test_an_error_in_one_rank_ends_all_with_its_exit_code(
    corpora: Any, tmp_path: Path, mpirun: Any
) -> None:
    corpus = corpora.make({"a.jsonl": json_lines(TEXTS) + b"broken\n" + json_lines(TEXTS)})
    done = mpirun(3, *command(corpus, tmp_path / "out"), "tokenize.on_bad_document=stop")
    assert done.returncode == 65, done.stderr
    assert "a.jsonl:2001" in done.stderr
    assert "Traceback" not in done.stderr


# ---- the command ---------------------------------------------------------------------------------


def test_a_corpus_becomes_token_files_with_a_report(dtt: Dtt) -> None:
    lines = [json.dumps({"text": f"document {i} of some"}) for i in range(200)]
    (dtt.folder / "a.jsonl").write_text("\n".join(lines))
    dtt("download", "-d", "a.jsonl")
    command = ("tokenize", "-d", "a.jsonl", "tokenizer.vocab_size=260")
    command += ("tokenize.validation_fraction=0.1",)
    first = dtt(*command)
    assert "data/tokens/a-bpe260" in first.stdout
    assert "train" in first.stdout
    assert "validation" in first.stdout
    assert "MB/s" in first.stdout
    second = dtt(*command, "--json")
    facts = json.loads(second.stdout)
    assert facts["already_done"]
    assert "already done" in second.stderr
    assert sum(split["documents"] for split in facts["splits"].values()) == 200
    refused = dtt(*command, "tokenize.validation_fraction=0.2", expect=2)
    assert "--overwrite" in refused.stderr
    other = (*command, "tokenize.validation_fraction=0.2", "--overwrite")
    again = dtt(*other, "--json")
    assert not json.loads(again.stdout)["already_done"]


def test_a_missing_corpus_is_reported_with_the_command_that_creates_it(dtt: Dtt) -> None:
    run = dtt("tokenize", "-d", "a.jsonl", expect=66)
    assert "dtt download" in run.stderr
    assert run.stdout == ""
