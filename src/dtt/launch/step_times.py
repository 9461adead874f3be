"""How long a step of a chain may take, by what is known before any of them has run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dtt.artifacts.corpus import CorpusManifest
from dtt.base.errors import DttError
from dtt.config.run import RunConfig
from dtt.data.corpus.file_choice import FilePatterns
from dtt.data.corpus.local_files import local_files
from dtt.model import count
from dtt.model.scaling import scaled

START = 10.0
"""Seconds until a process has imported torch from the file system of a cluster."""
RATES = {"download": 500e6, "clean": 50e6, "tokenize": 50e6}
"""Bytes a second that a process hashes, cleans or tokenizes: about half of what benchmarks/log.md
has for long documents, because those of the Web are shorter, and nodes are shared."""
TEXT_IN_A_BYTE = {".parquet": 2.5, ".gz": 3.0, ".zst": 3.0}
"""Bytes of text in a byte of a file; other files are text."""
EXPORT = 5e-8
"""Seconds a parameter, which is read, written, and computed twice in fp32 on the CPU: 308M take two
slow cores 22 s."""


def expected_seconds(command: str, cfg: RunConfig, processes: int) -> float | None:
    """Return the duration of a step other than a training; None if too little is known.

    Of a corpus of the Hub or of a bucket that is not here yet, neither the size nor the speed of
    the network is known.
    """
    try:
        if command == "export":
            return START + EXPORT * _parameters(cfg)
        files = [file for one in cfg.corpora for file in _files(one)]
    except DttError:
        return None
    if not files or command not in RATES:
        return None
    if command == "download":  # of local files: one process hashes them as they are
        return START + sum(size for _, size in files) / RATES[command]
    text = sum(size * TEXT_IN_A_BYTE.get(path.suffix, 1) for path, size in files)
    return START + text / (RATES[command] * processes)


def _files(cfg: RunConfig) -> Iterator[tuple[Path, int]]:
    """Yield the files of a corpus that is here, or comes from a folder on this machine."""
    if CorpusManifest.exists(cfg.corpus_dir):
        manifest = CorpusManifest.read(cfg.corpus_dir)
        yield from ((Path(file.path), file.bytes) for file in manifest.files)
    elif (folder := Path(str(cfg.download.dataset)).expanduser()).exists():
        chosen = local_files(folder, cfg.download.split, FilePatterns(cfg.download))
        yield from ((path, path.stat().st_size) for path in chosen[: cfg.download.max_files])


def _parameters(cfg: RunConfig) -> int:
    from dtt.estimate.estimates import vocabulary_and_steps  # it loads torch

    # The vocabulary is known where the number of steps, which an export does not need, is not.
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 1})})
    size, _, cfg = vocabulary_and_steps(cfg)
    return count.parameters(scaled(cfg, size).arch)
