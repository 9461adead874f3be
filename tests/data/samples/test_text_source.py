"""Text tokenized on the way: every token once an epoch, the same order however it is read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.corpora import comma_separated as csv
from support.corpora import json_lines, parquet
from tokenizers import Tokenizer

from dtt.base.errors import DamagedError, InputError
from dtt.base.targets import IGNORE_INDEX
from dtt.config.data import TrainedTokenizerConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.document_sampling import held_out
from dtt.data.corpus.units import Corpus
from dtt.data.samples import encoded_documents, text_source
from dtt.data.samples.encoded_documents import CorpusDocuments
from dtt.data.samples.text_source import HeldOutText, TextSource
from dtt.data.text.encoder import Encoder
from dtt.data.text.tokenizer import train_tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXTS = [
    f"{i}: " + " ".join(WORDS[(i * 7 + j * j) % 10] for j in range(5 + i * i % 90))
    for i in range(300)
]
FRACTION = 0.1
SEQ_LEN = 16


FILES: dict[str, dict[str, bytes]] = {
    "parquet": {"a.parquet": parquet(TEXTS[:150]), "b.parquet": parquet(TEXTS[150:])},
    "jsonl": {"a.jsonl": json_lines(TEXTS)},
    "jsonl.gz": {
        "a.jsonl.gz": gzip.compress(json_lines(TEXTS[:250])),
        "b.jsonl.gz": gzip.compress(json_lines(TEXTS[250:])),
    },
    "csv": {"a.csv": csv(TEXTS[:100]), "b.csv": csv(TEXTS[100:])},
    "txt": {f"{i:03}.txt": text.encode() for i, text in enumerate(TEXTS)},
}


@pytest.fixture(scope="module")
def content() -> bytes:
    return train_tokenizer(TrainedTokenizerConfig(vocab_size=300), [TEXTS]).encode()


@pytest.fixture(scope="module")
def encoder(content: bytes) -> Encoder:
    return Encoder(content, None, "here")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units, and files that take several parts."""
    monkeypatch.setattr(encoded_documents, "UNIT_BYTES", 8_000)
    monkeypatch.setattr(text_source, "PART_BYTES", 10_000)


@pytest.fixture(params=FILES)
def corpus(request: pytest.FixtureRequest, corpora: Any) -> Corpus:
    made: Corpus = corpora.make(FILES[request.param])
    return made


Open = Callable[..., TextSource]


@pytest.fixture
def open_source(encoder: Encoder) -> Open:
    """Opens a corpus as training does, each time anew."""

    def open_(corpus: Corpus, **changes: Any) -> TextSource:
        options: dict[str, Any] = {
            "seq_len": SEQ_LEN, "seed": 1, "validation_fraction": FRACTION
        } | changes  # fmt: skip
        return TextSource(CorpusDocuments(corpus), encoder, **options)

    return open_


def gone_through(source: TextSource, epochs: int) -> list[list[int]]:
    """The samples of the first epochs, asked for by 50, and one by one where an epoch ends."""
    found: list[list[int]] = [[] for _ in range(epochs)]
    place = 0
    while (epoch := source.state(place)["epoch"]) < epochs:
        count = 50 if source.state(place + 49)["epoch"] == epoch else 1
        found[epoch] += source.order(place, count).tolist()
        place += count
    return found


def borders(source: TextSource, places: int) -> list[int]:
    """The places where a part begins."""
    return sorted({source.state(place)["place"] for place in range(places)})


def as_array(samples: list[int]) -> Any:
    return np.array(samples, dtype=np.uint64)


def by_file(kind: str) -> dict[tuple[str, int], str]:
    """The text of each document, by its file and its number there."""
    if kind == "txt":
        return {(f"{i:03}.txt", 0): text for i, text in enumerate(TEXTS)}
    cut = {"parquet": 150, "jsonl": 300, "jsonl.gz": 250, "csv": 100}[kind]
    return {(f"a.{kind}", i): text for i, text in enumerate(TEXTS[:cut])} | {
        (f"b.{kind}", i): text for i, text in enumerate(TEXTS[cut:])
    }


@pytest.mark.slow(except_for=["jsonl"])
@pytest.mark.parametrize("kind", FILES)
def test_every_token_of_every_document_is_a_target_once_an_epoch(
    kind: str, corpora: Any, content: bytes, open_source: Open
) -> None:
    corpus = corpora.make(FILES[kind])
    source = open_source(corpus)
    tokenizer = Tokenizer.from_buffer(content)
    expected = {
        place: [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
        for place, text in by_file(kind).items()
        if not held_out(text.encode(), FRACTION)
    }
    assert 0 < len(expected) < len(TEXTS)
    epochs = gone_through(source, 2)
    rows = len(borders(open_source(corpus), len(epochs[0])))
    assert rows > 5
    for samples in epochs:
        assert len(set(samples)) == len(samples)
        seen = {place: [IGNORE_INDEX] * len(ids) for place, ids in expected.items()}
        times = {place: [0] * len(ids) for place, ids in expected.items()}
        for sample, ids in zip(samples, source.read(as_array(samples)).ids.tolist(), strict=True):
            for piece in source.origin(sample):
                place = (piece.file.name, piece.document)
                for i in range(piece.stop - piece.start):
                    seen[place][piece.offset + i] = ids[piece.start + i]
                    times[place][piece.offset + i] += piece.start + i > 0
            filled = source.origin(sample)[-1].stop
            assert IGNORE_INDEX not in ids[:filled]
            assert set(ids[filled:]) <= {IGNORE_INDEX}
            assert source.counts(as_array([sample])).targets == filled - 1
        assert seen == expected
        assert {n for counts in times.values() for n in counts} == {0, 1}
        assert sum(counts.count(0) for counts in times.values()) == rows  # the first of each row
        assert all(counts[1:].count(0) == 0 for counts in times.values())


@pytest.mark.slow
def test_a_few_integers_suffice_to_resume_at_any_position(
    corpus: Corpus, open_source: Open
) -> None:
    source = open_source(corpus)
    epochs = gone_through(source, 2)
    end = len(epochs[0])
    order = open_source(corpus).order(0, 2 * end + 200)
    begins = borders(source, 2 * end)
    near = [place + d for place in (*begins[1:4], end, begins[-1]) for d in (-1, 0, 1)]
    for place in {0, *near, end // 2, 2 * end - 1}:
        state = json.loads(json.dumps(source.state(place)))
        assert all(type(value) is int for value in state.values())
        assert state["place"] <= place
        later = open_source(corpus)
        later.restore(state)
        samples = later.order(place, 200)
        assert samples.tolist() == order[place : place + 200].tolist()
        assert later.read(samples).ids.tolist() == source.read(samples).ids.tolist()
        assert later.state(place) == state


def test_held_out_documents_are_never_trained_on(
    corpus: Corpus, encoder: Encoder, open_source: Open
) -> None:
    documents = CorpusDocuments(corpus)
    held = HeldOutText(
        documents, encoder, seq_len=SEQ_LEN, validation_fraction=FRACTION, text_bytes=10**9
    )
    samples = held.order(0, len(held))
    ids = held.read(samples).ids
    row_ids = [*ids[:, :-1].ravel().tolist(), ids[-1, -1]]
    texts = (d.text for unit in documents.units for d in documents.of(unit, BadDocuments()))
    expected = [text for text in texts if held_out(text, FRACTION)]
    assert [i for i in row_ids if i != IGNORE_INDEX] == encoder.encode(expected)[0].tolist()
    assert held.counts(samples).targets == held.tokens - 1
    some = HeldOutText(
        documents, encoder, seq_len=SEQ_LEN, validation_fraction=FRACTION, text_bytes=1000
    )
    assert some.read(some.order(0, 5)).ids.tolist() == ids[:5].tolist()
    assert 0 < len(some) < len(held)


def test_only_a_few_parts_of_a_large_file_are_in_memory(corpora: Any, open_source: Open) -> None:
    source = open_source(corpora.make({"a.jsonl.gz": gzip.compress(json_lines(TEXTS * 20))}))
    ahead = 0
    for first in range(0, 8000, 40):
        source.read(source.order(first, 40))
        ahead = max(ahead, len(source._rows))
    assert source.state(8000)["part"] > 50
    assert ahead <= 3


BROKEN = json_lines(TEXTS[:200]) + b'{"text": 1}\n{broken\n' + json_lines(TEXTS[200:])


def test_unreadable_documents_are_skipped(
    corpora: Any, open_source: Open, caplog: pytest.LogCaptureFixture
) -> None:
    whole = open_source(corpora.make({"a.jsonl": json_lines(TEXTS)}))
    tokens = whole.counts(as_array(gone_through(whole, 1)[0])).targets
    source = open_source(corpora.make({"a.jsonl": BROKEN}))
    with caplog.at_level("INFO", "dtt"):
        (samples,) = gone_through(source, 1)
    assert source.counts(as_array(samples)).targets == pytest.approx(tokens, abs=5)
    assert "skipped 2 documents, such as" in caplog.text
    assert "a.jsonl:201: the text is int" in caplog.text


def test_unreadable_documents_end_the_run_if_configured(corpora: Any, open_source: Open) -> None:
    source = open_source(corpora.make({"a.jsonl": BROKEN}), stop_on_bad_document=True)
    with pytest.raises(DamagedError, match=r"a\.jsonl:20[12]"):
        gone_through(source, 1)


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "csv", "txt"])
def test_a_failing_disk_is_not_reported_as_a_bad_document(
    kind: str, corpora: Any, open_source: Open
) -> None:
    """One rank that left documents out would see other samples than the rest."""
    corpus = corpora.make(FILES[kind])
    source = open_source(corpus)
    corpus.path(1).unlink()
    with pytest.raises(FileNotFoundError):
        gone_through(source, 1)


def test_a_corpus_without_text_is_refused(corpora: Any, open_source: Open) -> None:
    with pytest.raises(
        InputError, match=r"no documents to learn from[^$]*5 are empty[^$]*download\.text_column="
    ):
        open_source(corpora.make({"a.jsonl": b'{"text": ""}\n' * 5}))
    corpora.folder /= "blank"
    with pytest.raises(InputError, match="contains only white space"):
        open_source(corpora.make({"a.jsonl": b'{"text": " \\n "}\n'}))
    corpora.folder /= "other"
    with pytest.raises(InputError, match="contains no documents"):
        open_source(corpora.make({"a.parquet": parquet([])}))
