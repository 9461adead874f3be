"""`dtt.testing.check` accepts the examples, and says what is wrong with others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from support.conversation_files import write_tokenizer
from support.running import ROOT

from dtt.base.errors import DttError
from dtt.testing import check


def class_in(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return getattr(importlib.import_module(path.stem), name)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lion", "times"])
def test_an_example_is_right(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = class_in(ROOT / f"examples/{case}.py", case.capitalize(), monkeypatch)
    if case == "lion":
        check(cls, lr=1e-3)
    else:
        # On one layout: the other example is compared on all of them.
        keys = "train.seq_len=64", "train.global_batch_tokens=512", "parallel.shard=1"
        check(cls, *keys, tokenizer=f"{write_tokenizer(tmp_path).path}/tokenizer.json")


WRONG = {
    "forgets": (
        "Action",
        """
    every: int = 1
    _seen: int = 0
    def run(self, run):
        self._seen += 1
        return {"seen": self._seen}
""",
        "a resume records other numbers",
    ),
    "random": (
        "Schedule",
        "    def multiplier(self, step, run):\n        return __import__('random').random()\n",
        "a resume after step 2 changes",
    ),
    "changes": (
        "Documents",
        "    def rows(self, part):\n        yield str(__import__('time').time_ns())\n",
        "yields others when it is called again",
    ),
    "hashes": (
        "Rows",
        """
    def __len__(self):
        return 99
    def __getitem__(self, row):
        return [hash(letter) % 99 for letter in "abcdefgh"]
""",
        "another process (reads other|cannot read the) samples",
    ),
    "unfinished": ("Objective", "", "NotImplementedError"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) for c in WRONG])
def test_a_mistake_is_named(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, body, said = WRONG[case]
    path = tmp_path / "mine.py"
    path.write_text(f"import dtt\n\n\nclass Mine(dtt.{base}):\n    x: int = 1\n{body}")
    keys = (
        {"tokenizer": f"{write_tokenizer(tmp_path).path}/tokenizer.json"} if base == "Rows" else {}
    )
    with pytest.raises((DttError, AssertionError), match=said):
        check(class_in(path, "Mine", monkeypatch), **keys)
