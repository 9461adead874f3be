"""Samples of a user's own: how they are ordered, counted and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import resumed
from support.running import ROOT, Dtt

from dtt.base.errors import ExitCode
from dtt.base.targets import IGNORE_INDEX
from dtt.config.load import resolve
from dtt.config.source import Leaf
from dtt.data.samples.dataset import Dataset, open_dataset

ARITHMETIC = f"{ROOT}/examples/arithmetic.py:Arithmetic"
NUMBERS = """
import dtt


class Numbers(dtt.Source):
    count: int = 12

    def samples(self):
        return self.count

    def read(self, number, tokens):
        ids = [number + 1] * (2 + number % (tokens - 2))
        return ids, [place != 1 for place in range(len(ids))]
"""


@pytest.fixture
def numbers(tmp_path: Path, tokens: Path) -> Any:
    def opened(code: str = NUMBERS, **more: object) -> Dataset:
        (tmp_path / "mine.py").write_text(code)
        where = f"{tmp_path}/c.yaml:1"
        given = {
            "type": "mine.py:Numbers", "tokenizer": f"{tokens}/tokenizer.json", "held_out": 3,
        }  # fmt: skip
        layer = {("data", key): Leaf(value, where) for key, value in (given | more).items()}
        keys = ["train.seq_len=8", "train.global_batch_tokens=16", "train.steps=4"]
        return open_dataset(resolve(layer, keys, env={}).config)

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


WRONG = {
    "too long": ("(2 + number % (tokens - 2))", "(tokens + 1)", "not 2 to 9 token ids"),
    "no ids": ("return ids, ", "return 'ab', ", "not 2 to 9 token ids"),
    "of no token": ("number + 1", "10**6", "sample 0 has ids from 1000000"),
    "a mask of another length": ("range(len(ids))]", "range(1)]", "2 ids and a mask of 1"),
    "an exception": ("return ids, ", "return self.ids, ", "has no attribute 'ids'"),
    "none": ("return self.count", "return 0", "`samples` returned 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_names_what_is_wrong(dtt: Dtt, tokens: Path, case: str) -> None:
    old, new, said = WRONG[case]
    assert old in NUMBERS
    (dtt.folder / "mine.py").write_text(NUMBERS.replace(old, new))
    keys = ("data.type=mine.py:Numbers", f"data.tokenizer={tokens}/tokenizer.json")
    more = ("train.seq_len=8", "train.global_batch_tokens=16", "train.device=cpu", "train.steps=1")
    done = dtt("train", *keys, *more, expect=ExitCode.USAGE)
    assert said in done.stderr
    assert "data.type=mine.py:Numbers" in done.stderr


def test_samples_that_differ_when_they_are_read_again_are_refused(numbers: Any) -> None:
    changing = NUMBERS.replace(
        "import dtt", "import itertools\nimport dtt\n\nN = itertools.count()"
    )
    with pytest.raises(Exception, match="differs when it is read again"):
        numbers(changing.replace("[number + 1]", "[next(N) % 9]"))
