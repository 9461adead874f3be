"""What becomes of files with one fault each: what is kept, what is printed, how it ends.

`DTT_WRITE_DOCS=1 pytest tests/data/test_malformed.py` writes the table of docs/bad-input.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.malformed import FAULTS, GOOD, GOOD_FILES, LONG, Fault, parquet
from support.running import ROOT, Dtt

from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import DamagedError, DttError
from dtt.config.data import DownloadConfig, GivenTokenizerConfig, TokenizeConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus
from dtt.data.inspect.inspector import inspect_path
from dtt.data.inspect.report import InspectOptions
from dtt.data.samples.encoded_documents import CorpusDocuments
from dtt.data.token_file import TokenFile
from dtt.data.tokenize.distributed import Tokenized, tokenize
from dtt.mesh.comm import Serial

WISHES = InspectOptions(samples=0, everything=True, hashes=False, tokenizer=None, dtype="uint16")
PAGE = ROOT / "docs/bad-input.md"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, so that none has to be learnt from each fault."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_bytes(GOOD_FILES["jsonl"]() * 10)
    Dtt(folder)("download", "-d", "a.jsonl")
    Dtt(folder)(
        "tokenize", "-d", "a.jsonl", "tokenizer.vocab_size=260", "tokenize.validation_fraction=0",
        "tokenize.out=tokens",
    )  # fmt: skip
    return folder / "tokens/tokenizer.json"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """A row of the page for each fault."""
    return {}


def write_source(fault: Fault, folder: Path) -> None:
    """The files of a dataset: `a`, which is whole, and `b`."""
    folder.mkdir()
    kind = "jsonl" if fault.suffix.startswith("json") else fault.suffix.split(".")[0]
    (folder / f"a.{kind}").write_bytes(GOOD_FILES[kind]())
    (folder / f"b.{fault.suffix}").write_bytes(fault.content())


def ids_outside(out: Path, manifest: TokensManifest) -> int:
    files = [TokenFile(out / shard.stem) for shard in manifest.shards]
    return sum(int(np.count_nonzero(file.tokens >= manifest.vocab_size)) for file in files)


Run = Callable[..., Tokenized]


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Run:
    """Tokenizes the folder `corpus` in this process."""

    def run(on_bad_document: str) -> Tokenized:
        result = tokenize(
            TokenizeConfig(validation_fraction=0.0, on_bad_document=on_bad_document),
            GivenTokenizerConfig(path=str(tokenizer)),
            tmp_path / "corpus", tmp_path / on_bad_document, Serial(),
        )  # fmt: skip
        assert result is not None
        return result

    return run


READABLE = [fault for fault in FAULTS if fault.skipped and not fault.refused]
STOPPED = {fault.suffix: fault for fault in READABLE}.values()
"""A fault of each reader: what ends a command is the same function for all that it skips."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.suffix} {fault.what}")
def test_a_fault_is_reported_and_counted_and_the_rest_is_kept(
    fault: Fault, run: Run, tmp_path: Path, rows: dict[str, str]
) -> None:
    write_source(fault, tmp_path / "source")
    options = DownloadConfig(dataset=str(tmp_path / "source"), txt_documents="line")
    name = f"{fault.suffix}: {fault.what}"
    if fault.refused:
        with pytest.raises(DttError) as refusal:
            download(options, tmp_path / "corpus")
        assert fault.refused in str(refusal.value)
        rows[name] = f"| {name} | | | `dtt download`: {fault.refused} |\n"
        return
    download(options, tmp_path / "corpus")
    result = run("skip")
    manifest = result.manifest
    kept = manifest.counts("train").documents - len(GOOD)
    assert kept == (kept if fault.kept is None else fault.kept)
    assert manifest.skipped_documents == (
        max(manifest.skipped_documents, 1) if fault.skipped is None else fault.skipped
    )
    assert ids_outside(tmp_path / "skip", manifest) == 0
    said = "".join(result.problems[:1]).replace(f"{tmp_path}/source/", "")
    assert fault.says in said
    assert said.isprintable()
    assert fault.says or not manifest.skipped_documents
    if manifest.skipped_documents and fault in STOPPED:
        with pytest.raises(DamagedError) as stop:
            run("stop")
        where, _, why = said.partition(": ")
        assert f"where: {tmp_path}/source/{where}\n  why:   {why}\n" in str(stop.value)
        assert not TokensManifest.exists(tmp_path / "stop")
    kept_told, skipped_told = ("some" if n is None else n for n in (fault.kept, fault.skipped))
    said = fault.says.lstrip(": ") if fault.kept is None else said
    rows[name] = f"| {name} | {kept_told} | {skipped_told} | {said.replace('|', ' ')} |\n"


def test_the_page_shows_what_they_print(rows: dict[str, str]) -> None:
    if len(rows) < len(FAULTS):
        pytest.skip("only some of the faults were run")
    head, line, _ = PAGE.read_text(encoding="utf-8").partition("| --- | --- | --- | --- |\n")
    page = head + line + "".join(rows.values())
    if os.environ.get("DTT_WRITE_DOCS"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, "write it again with DTT_WRITE_DOCS=1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.kept is not None or fault.refused
              if not any(word in fault.what for word in ("70 MB", "100,000", "of many"))],
    ids=lambda fault: f"{fault.suffix} {fault.what}",
)  # fmt: skip
def test_the_verdict_does_not_depend_on_the_place_of_the_file(
    fault: Fault, run: Run, tmp_path: Path
) -> None:
    """`A`, with the fault, stands before the whole file `a`; text on the fly is judged alike."""
    write_source(fault, tmp_path / "source")
    (tmp_path / f"source/b.{fault.suffix}").rename(tmp_path / f"source/A.{fault.suffix}")
    options = DownloadConfig(dataset=str(tmp_path / "source"), txt_documents="line")
    if fault.refused:
        remedies = (
            r"download\.(text_column|datasets)=|files with a column of text|iconv -f |with commas"
            "|with other names"
        )
        with pytest.raises(DttError, match=remedies):
            download(options, tmp_path / "corpus")
        return
    download(options, tmp_path / "corpus")
    manifest = run("skip").manifest
    assert manifest.counts("train").documents - len(GOOD) == fault.kept
    assert manifest.skipped_documents == fault.skipped
    documents = CorpusDocuments(Corpus(tmp_path / "corpus"))
    bad = BadDocuments()
    texts = [d.text for unit in documents.units for d in documents.of(unit, bad) if d.text]
    assert (len(texts) - len(GOOD), bad.count) == (fault.kept, fault.skipped)
    if tmp_path.joinpath(f"source/A.{fault.suffix}").suffix != ".txt":
        seen = inspect_path(tmp_path / "source", WISHES)
        assert seen.documents == manifest.counts("train").documents + manifest.empty_documents
        reported = f"documents that cannot be read: {fault.skipped}"
        assert any(odd.startswith(reported) for odd in seen.oddities) == bool(fault.skipped)


# ---- the command, with real processes ------------------------------------------------------------

JSON_SKIP = ("tokenize", "--json", "download.out=corpus", "tokenizer.vocab_size=260")


def as_a_user(dtt: Dtt, fault: Fault) -> None:
    write_source(fault, dtt.folder / "source")
    dtt("download", "-d", "source", "download.out=corpus", "download.txt_documents=line")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_memory_is_bounded_for_unbounded_documents(dtt: Dtt, suffix: str) -> None:
    fault = next(f for f in FAULTS if f.suffix == suffix and "70 MB" in f.what)
    as_a_user(dtt, fault)
    # Not getrusage: its peak begins with that of the process that started this one.
    code = (
        "import sys; from pathlib import Path\n"
        "from dtt.data.tokenize import run as tokenize; from dtt.config.load import resolve\n"
        f"cfg = resolve(None, [*{JSON_SKIP[2:]!r}, 'tokenize.validation_fraction=0']).config\n"
        "tokenize.run(cfg, as_json=True)\n"
        "print(Path('/proc/self/status').read_text(), file=sys.stderr)\n"
    )
    done = dtt.wait(dtt.start_python("-c", code))
    assert json.loads(done.stdout)["skipped_documents"] == 1
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", done.stderr)
    assert int(peak) * 1024 < 15 * LONG


def test_missing_changed_or_unreadable_files_end_the_command(dtt: Dtt) -> None:
    as_a_user(dtt, Fault("nothing", "jsonl", GOOD_FILES["jsonl"]))
    victim = dtt.folder / "source/b.jsonl"
    content = victim.read_bytes()
    victim.write_bytes(content * 2)
    changed = dtt(*JSON_SKIP, expect=65)
    assert "has changed" in changed.stderr
    victim.unlink()
    assert "is missing" in dtt(*JSON_SKIP, expect=66).stderr
    victim.mkdir()
    assert "is missing" in dtt(*JSON_SKIP, expect=66).stderr
    shutil.rmtree(victim)
    victim.write_bytes(content)
    victim.chmod(0)
    if os.access(victim, os.R_OK):
        return  # root may read everything
    assert "permission denied" in dtt(*JSON_SKIP, expect=74).stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_shrinks_during_reading_yields_no_wrong_token(
    run: Run, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shrinks after the command has looked at its size and cut it into units."""
    fault = Fault("", kind, GOOD_FILES["jsonl"] if kind == "jsonl" else lambda: parquet(*GOOD))
    write_source(fault, tmp_path / "source")
    download(DownloadConfig(dataset=str(tmp_path / "source")), tmp_path / "corpus")
    from dtt.data.tokenize import work_plan

    find = work_plan.find_pending

    def shrinks(*arguments: object, **options: object) -> object:
        victim = tmp_path / f"source/b.{kind}"
        os.truncate(victim, victim.stat().st_size - 9)
        return find(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(work_plan, "find_pending", shrinks)
    result = run("skip")
    assert result.manifest.skipped_documents == (2 if kind == "jsonl" else 1)
    assert result.manifest.counts("train").documents == len(GOOD) + (2 if kind == "jsonl" else 0)
    assert any("has become shorter" in why for why in result.problems) == (kind == "jsonl")
    assert ids_outside(tmp_path / "skip", result.manifest) == 0


@pytest.mark.slow
@pytest.mark.parametrize("files", [{"a.txt": " \n\t\n"}, {"a.jsonl": '{"text": " \\n "}\n' * 9}])
def test_a_corpus_of_white_space_is_refused_by_tokenize_and_by_training_from_text(
    dtt: Dtt, tokenizer: Path, files: dict[str, str]
) -> None:
    ((name, content),) = files.items()
    (dtt.folder / name).write_text(content * 20)
    dtt("download", "-d", name, "download.out=corpus")
    given = ("tokenizer.type=file", f"tokenizer.path={tokenizer}")
    for options in (("tokenizer.vocab_size=260",), given):
        refused = dtt(
            "tokenize", "download.out=corpus", "tokenize.validation_fraction=0", *options,
            "tokenize.out=tokens", expect=66,
        )  # fmt: skip
        assert "only white space" in refused.stderr
        assert not TokensManifest.exists(dtt.folder / "tokens")
        assert "training a tokenizer" not in refused.stderr
    refused = dtt(
        "train", "data.type=text", "download.out=corpus", *given, "model.dim=16",
        "model.n_layers=1", "model.n_heads=2", "train.seq_len=16", "train.micro_batch=1",
        "train.global_batch_tokens=16", "train.steps=1", expect=66,
    )  # fmt: skip
    assert "only white space" in refused.stderr
    seen = json.loads(dtt("data", "inspect", "corpus", "--json").stdout)
    assert any("only white space" in odd for odd in seen["oddities"])
