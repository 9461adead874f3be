"""Start dtt as processes, create small token folders for them, and compare finished jobs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError
from dtt.checkpoint import store
from dtt.track import jsonl

DTT = [sys.executable, "-m", "dtt.main"]
SHARED_DATA = Path(os.environ.get("DTT_SHARED", Path(__file__).parents[2] / "shared")) / "data"
"""Corpora and tokenizers for benchmarks: `$DTT_SHARED/data`, by default `../shared/data`."""
METRICS = "metrics"
"""Name of the metrics among the `results` of a job."""


def dtt(*arguments: object, folder: Path | None = None) -> str:
    """Run a dtt command, which must succeed, in `folder` and return its standard output."""
    command = [*DTT, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def require_programs(*programs: str) -> None:
    """Exit with one line unless all `programs` are on PATH, as inside dtt's environment."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        command = f"./env.sh python benchmarks/{Path(sys.argv[0]).name}"
        sys.exit(f"not on PATH: {', '.join(missing)}. Run this script as `{command}`.")


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
    several_units = "tokenize.unit_bytes=8192"
    return _tokenize(
        folder, "counting.jsonl", 300, several_units, "tokenize.validation_fraction=0.1"
    )


def write_documents(path: Path, step: int = 7) -> None:
    """Write 400 short synthetic documents as JSON lines; another `step` makes other text."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = (
        " ".join(words[(i * step + j * j) % 10] for j in range(40 + i % 30)) for i in range(400)
    )
    text = "".join(json.dumps({"text": f"{i} {line}"}) + "\n" for i, line in enumerate(lines))
    path.write_text(text)


def make_novel_tokens(folder: Path, novels: Path, vocab_size: int) -> Path:
    """Create `folder/tokens` from a Parquet file, with a tokenizer trained on it."""
    return _tokenize(folder, novels.resolve(), vocab_size)


def _tokenize(folder: Path, dataset: Path | str, vocab_size: int, *settings: str) -> Path:
    dtt("download", "-d", dataset, folder=folder)
    dtt(
        "tokenize", "-d", dataset, f"tokenizer.vocab_size={vocab_size}", "tokenize.out=tokens",
        *settings, folder=folder,
    )  # fmt: skip
    return folder / "tokens"


# ---- results of jobs -----------------------------------------------------------------------------


def results(job: JobDir, step: int) -> dict[str, Any]:
    """Return what equal jobs have in common, by name.

    These are the files of the verified checkpoint of `step`, its position in the run, and all
    training and evaluation losses and samples. Raises `DttError` if the checkpoint is damaged.
    """
    checkpoint = store.verify(store.folder_of(job.checkpoints, step))
    files = {f.path: (checkpoint.path / f.path).read_bytes() for f in checkpoint.manifest.files}
    position = checkpoint.position()
    position.pop("run_id", None)  # differs between jobs
    metrics = [r for r in jsonl.read(job.metrics) if r["kind"] in ("train", "eval", "sample")]
    return files | {store.POSITION: position, METRICS: metrics}


def differences(job: JobDir, step: int, reference: dict[str, Any]) -> list[str]:
    """Return the names of the results of a finished job that differ from `reference`, sorted.

    A damaged or missing checkpoint is returned as the text of its error.
    """
    try:
        actual = results(job, step)
    except DttError as error:
        return [str(error)]
    return differing_names(actual, reference)


def differing_names(actual: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or which only one of both has, sorted."""
    names = actual.keys() | expected.keys()
    return sorted(name for name in names if actual.get(name) != expected.get(name))
