"""Samples of a user's own: how they are ordered, counted and checked."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import resumed
from support.own_classes import NUMBERS
from support.running import ROOT, Dtt

from dtt.base.errors import ConfigError
from dtt.base.targets import IGNORE_INDEX
from dtt.config.load import resolve
from dtt.config.own import trained_files
from dtt.config.run import RunConfig
from dtt.config.source import Leaf
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.protocol import SOURCE_SHIFT

ARITHMETIC = f"{ROOT}/examples/arithmetic.py:Arithmetic"


@pytest.fixture
def configured(tmp_path: Path) -> Any:
    def resolved(code: str = NUMBERS, **data: object) -> RunConfig:
        (tmp_path / "mine.py").write_text(code)
        where = f"{tmp_path}/c.yaml:1"
        layer = {("data", key): Leaf(value, where) for key, value in data.items()}
        keys = ["train.seq_len=8", "train.global_batch_tokens=16", "train.steps=4"]
        return resolve(layer, keys, env={}).config

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


def test_the_example_trains_on_its_results_and_a_resume_changes_no_bit(
    dtt: Dtt, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        f"data.type={ARITHMETIC}", f"data.tokenizer={tokens}/tokenizer.json", "data.held_out=100",
        "data.number=1000", "train.eval_every=2",
    )  # fmt: skip
    others = tuple(key for key in resumed.SETTINGS if not key.startswith("data."))
    monkeypatch.setattr(resumed, "SETTINGS", others)
    assert resumed.differing(dtt, "shard=2", *settings) == []
    done = dtt("plan", *others, *settings)
    assert "memory" in done.stdout


def test_a_class_is_one_of_several_sources(configured: Any, tokens: Path) -> None:
    own = {"type": "mine.py:Numbers", "tokenizer": f"{tokens}/tokenizer.json"}
    files = {"path": f"{tokens}", "weight": 1.0, "validation": own | {"count": 5}}
    mine = own | {"name": "n", "weight": 3.0, "validation": f"{tokens}"}
    cfg = configured(sources=[files, mine], mask_documents=True)
    dataset = open_dataset(cfg)
    assert dataset.shares() == {"tokens": 0.25, "n": 0.75}
    counted, held_out = dataset.validation
    assert [len(one) for one in (dataset.sources[1], counted)] == [12, 5]
    assert (counted.name, held_out.name) == ("tokens", "n")
    samples = dataset.order(0, 8)
    rows, parts = dataset.read(samples), [*dataset.by_source(samples)]
    assert rows.ids.shape == rows.doc_ids.shape == (8, 9)
    for source, number, where in parts:
        assert np.array_equal(source.read(number).ids, rows.ids[where])
    mine_first = int(parts[1][1][0]) + (1 << SOURCE_SHIFT)
    source, (span,) = dataset.origin(mine_first)
    assert (source.name, str(span.file), span.document) == ("n", "n", int(parts[1][1][0]))
    assert list(trained_files(cfg)) == ["mine.py"]
    assert trained_files(cfg)["mine.py"][0] == "data.sources"
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    other = configured(sources=[files, mine | {"count": 13}], mask_documents=True)
    assert open_dataset(other).manifest.key != dataset.manifest.key


REFUSED = {
    "an unknown key": ({"cuont": 3}, "data.sources.0.cuont: unknown key"),
    "another type": ({"type": "token"}, "data.sources.0.type: input should be 'tokens'"),
    "both": ({"held_out": 3, "validation": "tokens"}, "data.sources.0.held_out: must be 0"),
    "a key of an entry": ({"count": 3}, "Numbers has a key of every entry of data.sources: weight"),
    "pairs": ({}, "data.type=preference needs token files"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_entry_cannot_have_is_refused(configured: Any, case: str) -> None:
    more, said = REFUSED[case]
    code = NUMBERS.replace("    count:", "    weight: int = 1\n    count:")
    entry = {"type": "mine.py:Numbers", "tokenizer": "tokenizer.json"} | more
    kind = "preference" if case == "pairs" else "tokens"
    with pytest.raises(ConfigError) as caught:
        configured(code if "a key" in case else NUMBERS, type=kind, sources=[entry])
    assert said in str(caught.value)


@pytest.mark.slow
def test_a_mixture_with_a_class_resumes_without_another_bit(
    dtt: Dtt, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dtt.folder / "mine.py").write_text(NUMBERS)
    own = f"type: mine.py:Numbers, tokenizer: {tokens}/tokenizer.json"
    sources = f"data.sources=[{{path: {tokens}}}, {{{own}, count: 50, validation: {{{own}}}}}]"
    others = tuple(key for key in resumed.SETTINGS if not key.startswith("data."))
    monkeypatch.setattr(resumed, "SETTINGS", others)
    assert resumed.differing(dtt, "shard=2", sources, "train.eval_every=2") == []
    shown = dtt("data", "at-step", "jobs/t", "4")
    assert "Numbers" in shown.stdout


def test_samples_that_differ_when_they_are_read_again_are_refused(numbers: Any) -> None:
    changing = NUMBERS.replace(
        "import dtt", "import itertools\nimport dtt\n\nN = itertools.count()"
    )
    with pytest.raises(Exception, match="differs when it is read again"):
        numbers(changing.replace("[number + 1]", "[next(N) % 9]"))
