"""Classes of a user's own, of each kind, as a user writes them into a file."""

from __future__ import annotations

from support.running import ROOT

POLYNOMIAL = (ROOT / "examples/polynomial.py").read_text()
LION = (ROOT / "examples/lion.py").read_text()
LOSS = """
import dtt


class Mine(dtt.Objective):
    def loss(self, out, batch):
        return out.sum()
"""
NORMS = """
import dtt


class Norms(dtt.Action):
    every: int = 2
    _seen: int = 0

    def run(self, run):
        self._seen += 1
        found = {"norm": run.full("embed.weight").norm(), "seen": self._seen}
        return found | {"rank": run.mean(run.rank)}

    def state(self):
        return {"seen": self._seen}

    def restore(self, state):
        self._seen = state["seen"]
"""
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
ROWS = """
import dtt


class Mine(dtt.Rows):
    count: int = 12

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return GIVEN
"""
WORDS = """
from pathlib import Path
import dtt


class Words(dtt.Documents):
    count: int = 3
    said: str = "word"

    def parts(self):
        return 2

    def rows(self, part):
        with Path("calls").open("a") as calls:
            calls.write(f"{part} ")
        for i in range(self.count):
            yield f"{self.said} {part} {i}"

    def version(self):
        return Path("version").read_text()
"""

NOTHING = """

import dtt


class Nothing(dtt.Action):
    def run(self, run):
        return {}
"""
"""With it, code that spoils a part of dtt or torch runs in a forked dtt, on every rank: a program
around dtt would import torch anew."""
