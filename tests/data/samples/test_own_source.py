"""Samples of a user's own: how they are ordered, counted and checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import resumed, tokenized_conversations
from support.conversation_files import write_tokenizer
from support.forked_runs import run
from support.own_classes import NUMBERS, ROWS
from support.running import ROOT, Dtt
from support.token_files import every, read_documents

from dtt.base.targets import IGNORE_INDEX
from dtt.config.layers import Leaf
from dtt.config.load import resolve
from dtt.config.own import trained_files
from dtt.config.run import RunConfig
from dtt.data.samples import own_source
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.protocol import SOURCE_SHIFT

SMALL = ("train.seq_len=8", "train.global_batch_tokens=16", "train.steps=4")
TEXT = "'row ' * (1 + row % 3)"
IDS = "[row + 1] * (1 + row % 3)"
TALK = "[{'role': r, 'content': f'{row}'} for r in ('user', 'assistant') * 2]"


def rows(given: str) -> str:
    return ROWS.replace("GIVEN", given)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small one with the special tokens of conversations."""
    return f"{write_tokenizer(tmp_path_factory.mktemp('tokenizer')).path}/tokenizer.json"


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)  # encoded rows are kept in `data/rows`

    def resolved(code: str = NUMBERS, *keys: str, **data: object) -> RunConfig:
        (tmp_path / "mine.py").write_text(code)
        where = f"{tmp_path}/c.yaml:1"
        layer = {("data", key): Leaf(value, where) for key, value in data.items()}
        return resolve(layer, [*SMALL, *keys], env={}).config

    return resolved


@pytest.fixture
def numbers(configured: Any, tokens: Path) -> Any:
    given = {"type": "mine.py:Numbers", "tokenizer": f"{tokens}/tokenizer.json", "held_out": 3}

    def opened(code: str = NUMBERS, **more: object) -> Dataset:
        return open_dataset(configured(code, **(given | more)))

    return opened


def test_samples_are_shuffled_padded_masked_and_counted(numbers: Any) -> None:
    dataset = numbers()
    (source,), (validation,) = dataset.sources, dataset.validation
    assert (len(source), len(validation)) == (9, 3)
    order = source.order(0, 18)
    assert sorted(order[:9]) == sorted(order[9:]) == [*range(9)]
    assert [*order[:9]] != [*range(9)]
    rows = source.read(np.array([0, 6], np.uint64))
    pad = IGNORE_INDEX
    assert rows.ids.tolist() == [[1, 1] + [pad] * 7, [7] * 8 + [pad]]
    assert rows.targets.tolist() == [[pad] * 8, [pad] + [7] * 6 + [pad]]
    assert source.counts(np.array([0, 6], np.uint64)) == (6, 6, 10)
    assert validation.read(np.array([0], np.uint64)).ids[0, 0] == 10


def test_another_class_version_or_tokenizer_is_other_data(numbers: Any) -> None:
    key = numbers().manifest.key
    assert numbers().manifest.key == key
    version = "\n    def version(self):\n        return '2'\n"
    assert numbers(NUMBERS + version).manifest.key != key
    assert numbers(count=13).manifest.key != key


EXAMPLES = {
    "arithmetic": ("data.number=1000", "data.held_out=100"),
    "times": ("train.seq_len=60", "train.eval_answers=4"),
}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("arithmetic", "shard=2"),
        pytest.param("times", "replicate=1", marks=pytest.mark.slow),
        pytest.param("times", "shard=2", marks=pytest.mark.slow),
    ],
)
def test_an_example_trains_and_a_resume_changes_no_bit(
    dtt: Dtt, tokenizer: str, case: str, layout: str
) -> None:
    others = resumed.WITHOUT_DATA
    settings = ("-c", f"{ROOT}/examples/{case}.yaml", f"data.tokenizer={tokenizer}")
    settings += (*EXAMPLES[case], "train.eval_every=2", "optim.type=adamw")
    assert resumed.differing(dtt, layout, *settings, settings=others) == []
    if case == "times":
        job = dtt.folder / "jobs/t"
        assert (job / "chat_template.jinja").is_file()
        shown = dtt("data", "at-step", "jobs/t", "4").stdout
        assert re.search(r"What is (\d+) times (\d+)\?", shown)
    assert "memory" in dtt("plan", *others, *settings).stdout


def test_a_class_is_one_of_several_sources(configured: Any, tokens: Path) -> None:
    own = {"type": "mine.py:Numbers", "tokenizer": f"{tokens}/tokenizer.json"}
    files = {"path": f"{tokens}", "weight": 1.0, "validation": own | {"count": 5}}
    mine = own | {"name": "n", "weight": 3.0, "validation": f"{tokens}"}
    texts = own | {"type": "mine.py:Mine", "weight": 4.0, "held_out": 2}
    keys = "data.mask_documents=true", "train.seq_len=16", "train.global_batch_tokens=128"
    code = NUMBERS + rows(TEXT)
    cfg = configured(code, *keys, sources=[files, mine, texts])
    dataset = open_dataset(cfg)
    assert dataset.shares() == {"tokens": 0.125, "n": 0.375, "Mine": 0.5}
    counted, held_out, _ = dataset.validation
    assert [len(one) for one in (dataset.sources[1], counted)] == [12, 5]
    assert (counted.name, held_out.name) == ("tokens", "n")
    samples = dataset.order(0, 8)
    batch, parts = dataset.read(samples), [*dataset.by_source(samples)]
    assert batch.ids.shape == batch.doc_ids.shape == (8, 17)
    for source, number, where in parts:
        assert np.array_equal(source.read(number).ids, batch.ids[where])
    mine_first = int(parts[1][1][0]) + (1 << SOURCE_SHIFT)
    source, (span,) = dataset.origin(mine_first)
    assert (source.name, str(span.file), span.document) == ("n", "n", int(parts[1][1][0]))
    assert list(trained_files(cfg)) == ["mine.py"]
    assert trained_files(cfg)["mine.py"][0] == "data.sources"
    other = configured(code, *keys, sources=[files, mine | {"count": 13}, texts])
    assert open_dataset(other).manifest.key != dataset.manifest.key


@pytest.mark.slow
def test_a_mixture_with_a_class_resumes_without_another_bit(dtt: Dtt, tokens: Path) -> None:
    (dtt.folder / "mine.py").write_text(NUMBERS)
    own = f"type: mine.py:Numbers, tokenizer: {tokens}/tokenizer.json"
    sources = f"data.sources=[{{path: {tokens}}}, {{{own}, count: 50, validation: {{{own}}}}}]"
    more, others = (sources, "train.eval_every=2"), resumed.WITHOUT_DATA
    assert resumed.differing(dtt, "shard=2", *more, settings=others) == []
    shown = dtt("data", "at-step", "jobs/t", "4")
    assert "Numbers" in shown.stdout
    (dtt.folder / "mine.py").write_text(f"{NUMBERS}# the same\n")
    longer = ("train.steps=5", "--allow-change", "train.steps", "parallel.shard=2")
    taken = run(dtt, "train", *others, *more, *longer, "--allow-change", "data.sources", ranks=2)
    assert "has changed" not in taken.stderr
    assert (dtt.folder / "jobs/t/own_code/mine.py").read_text().endswith("# the same\n")


@pytest.mark.parametrize("given", [TEXT, IDS, TALK])
def test_rows_are_encoded_once_packed_whole_and_found_again(
    configured: Any, tokenizer: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "train.seq_len=64", "train.global_batch_tokens=128"
    mine = {"type": "mine.py:Mine", "tokenizer": tokenizer, "held_out": 3}
    dataset = open_dataset(configured(rows(given), *keys, **mine))
    (source,), (validation,) = dataset.sources, dataset.validation
    samples = every(source)
    read = source.read(samples)
    assert source.counts(samples).targets == (read.targets != IGNORE_INDEX).sum()
    spans = [span for sample in samples.tolist() for span in source.origin(sample)]
    assert sorted(span.document for span in spans) == [*range(9)]
    assert {str(span.file) for span in spans} == {"Mine"}
    assert (read.ids >= 0).sum() == source.tokens == sum(span.stop - span.start for span in spans)
    assert validation is not None
    assert (dataset.chat_template is not None) == (given == TALK)
    if given == IDS:
        ((start, stop),) = [(s.start, s.stop) for s in source.origin(0) if s.document == 5]
        assert read.ids[0, start:stop].tolist() == [6, 6, 6, dataset.manifest.end_of_document]
    again = configured(rows(given), *keys, "train.steps=0", "train.epochs=2", **mine)
    longer = configured(rows(given), *keys, **mine, count=13)
    assert open_dataset(longer).manifest.key != dataset.manifest.key
    monkeypatch.setattr(own_source, "_write", lambda *_: pytest.fail("encoded again"))
    other = open_dataset(again)
    assert other.manifest.key == dataset.manifest.key
    assert other.requested_steps == 2 * len(source) // 2


def test_rows_of_conversations_are_encoded_as_dtt_tokenize_does(
    configured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids and loss masks, also of several sequences of a conversation."""
    tokens = tokenized_conversations.write_conversations(tmp_path, 40)
    code = "ALL = __import__('support.tokenized_conversations', fromlist=['x']).conversations(40)"
    mine = {"type": "mine.py:Mine", "tokenizer": f"{tmp_path}/tokenizer.json", "count": 40}
    keys = "train.seq_len=512", "train.global_batch_tokens=512"

    def sequences(folder: Path) -> list[tuple[bytes, bytes]]:
        found = []
        for path in folder.glob("*.idx"):
            mask = path.with_suffix(".mask").read_bytes()
            for one in read_documents(path.with_suffix("")):
                found.append((bytes(one), mask[: len(one)]))
                mask = mask[len(one) :]
        return sorted(found)

    unread = code + rows("ALL[row] | {'rating': 5}")
    open_dataset(configured(unread, *keys, **mine))
    assert "keys of rows that are not used: rating" in caplog.text
    (folder,) = tmp_path.glob("data/rows/Mine-*/")
    assert sequences(folder) == sequences(tokens)
    expanded = open_dataset(configured(code + rows("ALL[row]"), *keys, "chat.turns=expand", **mine))
    found = [s.document for n in range(len(expanded.sources[0])) for s in expanded.origin(n)[1]]
    answers = [
        sum(m["role"] == "assistant" and m.get("train", True) for m in row["messages"])
        for row in tokenized_conversations.conversations(40)
    ]
    assert [found.count(row) for row in range(40)] == answers
