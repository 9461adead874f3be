"""What a selection removes is in no token file, as if it had been deleted from the corpus."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import tokenizing
from support.conversation_files import conversation, write_tokenizer
from support.corpora import comma_separated, json_lines, parquet
from support.running import Dtt
from support.selections import CLEAN, is_third, write_selection
from support.token_files import sums
from support.tokenizing import BPE, UNIT_BYTES, documents

from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.config.clean import CleanConfig
from dtt.config.data import ChatConfig, DownloadConfig, GivenTokenizerConfig, TokenizerConfig
from dtt.data.conversations.row_encoder import Conversations
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus
from dtt.data.tokenize.encode_corpus import Tokenized

WORDS = ["alpha", "beta", "gamma", "delta", "<|endoftext|>", "\xfcn\xefcode", "omega"]
TEXTS = [
    "" if i % 50 == 7 else f"{i} " + " ".join(WORDS[(i * 31 + j * j) % 7] for j in range(i % 40))
    for i in range(1500)
]


KEPT = [text for text in TEXTS if not is_third(text.encode())]


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "a.jsonl": json_lines,
    "a.jsonl.gz": lambda texts: gzip.compress(json_lines(texts)),
    "a.parquet": parquet,
    "a.csv": comma_separated,
    "a.txt": lambda texts: "".join(f"{text}\n" for text in texts).encode(),
}


def run(
    corpus: Corpus,
    out: Path,
    clean: CleanConfig | None = None,
    tokenizer: TokenizerConfig = BPE,
    **options: Any,
) -> Tokenized:
    return tokenizing.run(corpus.folder, out, tokenizer, clean=clean, **options)


def masks(folder: Path) -> dict[str, bytes]:
    """The loss masks of each split, in order."""
    found = {"train": b"", "validation": b""}
    for shard in TokensManifest.read(folder).shards:
        found[shard.split] += (folder / f"{shard.stem}.mask").read_bytes()
    return found


def shard_times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}


def make(corpora: Any, folder: Path, files: dict[str, bytes], **options: Any) -> Corpus:
    folder.mkdir()
    corpora.folder = folder
    corpus: Corpus = corpora.make(files, **options)
    return corpus


@pytest.fixture
def corpus(corpora: Any, tmp_path: Path) -> Corpus:
    return make(corpora, tmp_path / "whole", {"a.jsonl": json_lines(TEXTS)})


@pytest.fixture
def given(corpus: Corpus, tmp_path: Path) -> GivenTokenizerConfig:
    """A tokenizer that depends on no selection."""
    run(corpus, tmp_path / "given")
    path = shutil.copy(tmp_path / "given/tokenizer.json", tmp_path / "tokenizer.json")
    return GivenTokenizerConfig(path=str(path), end_of_document="<|endoftext|>")


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_the_trained_tokenizer_are_those_of_the_corpus_without_removed_documents(
    corpora: Any, tmp_path: Path, name: str
) -> None:
    options = {"txt_documents": "line"} if name == "a.txt" else {}
    whole = make(corpora, tmp_path / "whole", {name: FORMATS[name](TEXTS)}, **options)
    deleted = make(corpora, tmp_path / "deleted", {name: FORMATS[name](KEPT)}, **options)
    write_selection(whole.folder, is_third, unit_bytes=UNIT_BYTES)
    through = run(whole, tmp_path / "through", CLEAN).manifest
    expected = run(deleted, tmp_path / "expected").manifest
    everything = run(whole, tmp_path / "everything").manifest
    assert through.tokenizer_sha256 == expected.tokenizer_sha256 != everything.tokenizer_sha256
    assert documents(tmp_path / "through") == documents(tmp_path / "expected")
    assert all(documents(tmp_path / "through").values())
    assert through.empty_documents == expected.empty_documents
    assert through.selection is not None
    assert through.selection.removed == {"rules": len(TEXTS) - len(KEPT)}
    assert everything.selection is None


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_removed_conversations_are_left_out(tmp_path: Path, name: str) -> None:
    rows = [conversation(i) for i in range(300)]

    def is_removed(content: bytes) -> bool:
        return is_third(json.dumps(json.loads(content), sort_keys=True).encode())

    kept = [row for row in rows if not is_removed(json.dumps(row).encode())]
    assert 150 < len(kept) < 250
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    for folder, some in ((tmp_path / "whole", rows), (tmp_path / "deleted", kept)):
        folder.mkdir()
        if name == "rows.jsonl":
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))
        else:
            pq.write_table(pa.Table.from_pylist(some), folder / name, row_group_size=50)
        download(DownloadConfig(dataset=str(folder / name)), folder / "corpus", rows=True)
        clean = CLEAN if folder.name == "whole" else None
        if clean is not None:
            write_selection(folder / "corpus", is_removed, unit_bytes=UNIT_BYTES)
        kind = Conversations(ChatConfig())
        tokenizing.run(folder / "corpus", folder / "tokens", tokenizer, kind=kind, clean=clean)
    assert documents(tmp_path / "whole/tokens") == documents(tmp_path / "deleted/tokens")
    assert masks(tmp_path / "whole/tokens") == masks(tmp_path / "deleted/tokens")
    assert len(documents(tmp_path / "whole/tokens")["train"]) > 100


@pytest.mark.parametrize("trained", [True, False])
def test_a_changed_selection_encodes_all_units_again(
    corpus: Corpus,
    tmp_path: Path,
    given: GivenTokenizerConfig,
    trained: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out, tokenizer = tmp_path / "out", BPE if trained else given
    units = run(corpus, out, None, tokenizer).units
    assert units > 4
    assert run(corpus, out, None, tokenizer).units == 0
    key = TokensManifest.read(out).key
    write_selection(corpus.folder, is_third, unit_bytes=UNIT_BYTES)
    before = sums(out)
    with caplog.at_level("INFO"):
        again = run(corpus, out, CLEAN, tokenizer)
    assert again.units == units
    assert "token files: made again, as `dtt clean` removes other documents now" in caplog.text
    assert again.manifest.key != key
    run(corpus, tmp_path / "fresh", CLEAN, tokenizer)
    assert sums(out) == sums(tmp_path / "fresh")
    # Without the section, they get their documents back.
    assert run(corpus, out, None, tokenizer).units == units
    assert sums(out) == before


def test_a_selection_that_removes_nothing_changes_no_unit(corpus: Corpus, tmp_path: Path) -> None:
    first = run(corpus, tmp_path / "out")
    before = shard_times(tmp_path / "out")
    write_selection(corpus.folder, lambda text: False, unit_bytes=UNIT_BYTES)
    again = run(corpus, tmp_path / "out", CLEAN)
    assert (again.units, shard_times(tmp_path / "out")) == (0, before)
    assert again.manifest.key == first.manifest.key
    assert TokensManifest.read(tmp_path / "out").selection is not None


def test_folders_of_earlier_versions_are_complete_without_a_selection(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Those versions knew no field of a selection, in any of their files."""
    out = tmp_path / "out"
    run(corpus, out)
    for path in (*out.glob(".units/*.json"), out / TokensManifest.filename):
        content = json.loads(path.read_text())
        fields = {"removed", "selection"} & content.keys()
        assert fields
        path.write_text(json.dumps({k: v for k, v in content.items() if k not in fields}))
    before = sums(out)
    assert run(corpus, out).units == 0
    assert sums(out) == before
    manifest = TokensManifest.read(out)
    assert manifest.key_parts.keys() == {"corpus", "tokenizer", "tokenize"}
    facts = json.dumps(
        [manifest.key_parts, manifest.tokenizer_sha256],
        sort_keys=True, separators=(",", ":"), ensure_ascii=False,
    )  # fmt: skip
    assert manifest.key == hashlib.sha256(facts.encode()).hexdigest()


@pytest.mark.parametrize("damage", ["byte", "missing"])
def test_a_damaged_file_of_a_selection_is_refused(
    corpus: Corpus, tmp_path: Path, damage: str
) -> None:
    place = write_selection(corpus.folder, is_third, unit_bytes=UNIT_BYTES)
    victim = place / "00002.removed.parquet"
    content = bytearray(victim.read_bytes())
    content[60] ^= 1
    victim.unlink()
    if damage == "byte":
        victim.write_bytes(content)
    with pytest.raises(DamagedError, match=r"(?s)selection is damaged or missing.*00002"):
        run(corpus, tmp_path / "out", CLEAN)
    assert not TokensManifest.exists(tmp_path / "out")


def test_a_corpus_that_was_not_cleaned_is_refused_with_what_to_run(
    corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="run `dtt clean` with the same configuration first"):
        run(corpus, tmp_path / "out", CLEAN)


def test_another_unit_size_than_the_selections_is_refused_with_what_to_type(
    corpus: Corpus, tmp_path: Path
) -> None:
    write_selection(corpus.folder, is_third, unit_bytes=UNIT_BYTES)
    with pytest.raises(ConfigError, match=f"tokenize.unit_bytes={UNIT_BYTES}, or omit it"):
        run(corpus, tmp_path / "out", CLEAN, unit_bytes=30_000)
    omitted = run(corpus, tmp_path / "out", CLEAN, unit_bytes=None).manifest
    assert omitted.key_parts["tokenize"]["unit_bytes"] == UNIT_BYTES


def test_a_unit_with_another_number_of_documents_is_refused(
    corpus: Corpus, tmp_path: Path, given: GivenTokenizerConfig
) -> None:
    """A file of the same size, of which a line is no JSON any more."""
    write_selection(corpus.folder, is_third, unit_bytes=UNIT_BYTES)
    with corpus.path(0).open("r+b") as file:
        file.write(b"?")
    with pytest.raises(DamagedError, match="the selection names other documents"):
        run(corpus, tmp_path / "out", CLEAN, given)
    assert not TokensManifest.exists(tmp_path / "out")


def test_a_selection_that_removes_everything_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    write_selection(corpus.folder, lambda text: True, unit_bytes=UNIT_BYTES)
    with pytest.raises(InputError, match=f"{len(TEXTS)} are removed by the section `clean`"):
        run(corpus, tmp_path / "out", CLEAN)


def test_the_command_says_what_was_removed_and_train_refuses_other_tokens(
    corpus: Corpus, tmp_path: Path
) -> None:
    dtt = Dtt(tmp_path)
    write_selection(corpus.folder, is_third, unit_bytes=UNIT_BYTES)
    options = (
        f"download.out={corpus.folder}", "tokenize.out=tokens", "tokenizer.vocab_size=300",
        "tokenize.validation_fraction=0.1",
    )  # fmt: skip
    removed = len(TEXTS) - len(KEPT)
    told = dtt("tokenize", *options, "clean.exact=true")
    assert f"removed     {removed} documents: rules {removed}" in told.stdout
    assert f"removed            {removed} documents" in dtt("data", "inspect", "tokens").stdout
    train = (
        "train", *options, "model.dim=16", "model.n_layers=1", "model.n_heads=2",
        "train.seq_len=16", "train.micro_batch=1", "train.global_batch_tokens=16",
        "train.steps=1", "train.device=cpu", "train.eval_every=0",
    )  # fmt: skip
    refused = dtt(*train, expect=2)
    assert "other documents were removed from the token files" in refused.stderr
    assert "dtt tokenize with the same options" in refused.stderr
    dtt(*train, "clean.exact=true")
    seen = dtt("data", "at-step", "jobs/run", 1).stdout
    assert f"tokens is without {removed} documents: rules {removed}" in seen
