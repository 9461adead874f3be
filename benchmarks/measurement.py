"""What the scripts share: running dtt, small token folders, timing in turns, tables."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
DTT = [sys.executable, "-m", "dtt.main"]
SHARED_DATA = Path(os.environ.get("DTT_SHARED", Path(__file__).parents[2] / "shared")) / "data"
"""Corpora and tokenizers for benchmarks: `$DTT_SHARED/data`, by default `../shared/data`."""


def dtt(*arguments: object, folder: Path | None = None) -> str:
    """Run a dtt command, which must succeed, in `folder` and return its standard output."""
    command = [*DTT, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def parser_of(script: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a script."""
    return argparse.ArgumentParser(
        description=script, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def wait_until(true: Callable[[], object], limit: float, pause: float = 0.001) -> bool:
    """Poll until `true()` holds; return False if it does not within `limit` seconds."""
    end = time.monotonic() + limit
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank on this machine."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


# ---- token folders -------------------------------------------------------------------------------


def make_tokens(folder: Path) -> Path:
    """Create `folder/tokens`, the tokens of 400 short synthetic documents, and return its path."""
    write_documents(folder / "counting.jsonl")
    dtt("download", "-d", "counting.jsonl", folder=folder)
    several_units = "tokenize.unit_bytes=8192"
    dtt(
        "tokenize", "-d", "counting.jsonl", "tokenizer.vocab_size=300", several_units,
        "tokenize.out=tokens", "tokenize.validation_fraction=0.1", folder=folder,
    )  # fmt: skip
    return folder / "tokens"


def write_documents(path: Path, step: int = 7) -> None:
    """Write 400 short synthetic documents as JSON lines; another `step` makes other text."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = (
        " ".join(words[(i * step + j * j) % 10] for j in range(40 + i % 30)) for i in range(400)
    )
    text = "".join(json.dumps({"text": f"{i} {line}"}) + "\n" for i, line in enumerate(lines))
    path.write_text(text)


# ---- timing and tables ---------------------------------------------------------------------------


def in_turns(
    alternatives: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[T]]:
    """Call every alternative once per round and return the results of each by name.

    The alternatives alternate so that other load on the machine affects all alike. The results of
    the first `warm_up` rounds, which fill caches and allocate buffers, are dropped.
    """
    results: dict[str, list[T]] = {name: [] for name in alternatives}
    for number in range(warm_up + rounds):
        for name, run in alternatives.items():
            result = run()
            if number >= warm_up:
                results[name].append(result)
    return results


def column_medians(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


class Table:
    """A table printed row by row: a left-aligned label, then right-aligned cells."""

    def __init__(self, label: str, label_width: int, columns: Mapping[str, int]) -> None:
        """Print the headings; `columns` maps the heading of each column to its width."""
        self._label_width, self._widths = label_width, tuple(columns.values())
        self.row(label, *columns)

    def row(self, label: str, *cells: str, note: str = "") -> None:
        """Print one row: formatted cells, from the first column on, and a note after them."""
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=False))
        line = f"{label:<{self._label_width}}" + "".join(padded) + (f"  {note}" if note else "")
        print(line.rstrip(), flush=True)
