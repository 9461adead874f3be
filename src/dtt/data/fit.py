"""Whether token files and a run fit each other: arithmetic and file sizes, nothing is read.

Imports neither torch nor numpy: a login node asks this before it submits a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dtt.artifacts import (
    CheckpointManifest,
    SplitCounts,
    TokensManifest,
    checked_file,
    fingerprint,
    shard_stem,
)
from dtt.config.train import TrainConfig
from dtt.data.stages import resolve
from dtt.errors import ConfigError, DamagedError, DttError, InputError
from dtt.runtime.files import sha256_file
from dtt.runtime.jobdir import JobDir

BYTES = {"uint16": 2, "int32": 4}


def check_batches(train: TrainConfig, processes: int) -> None:
    """ConfigError if a batch of the run does not divide over the processes."""
    sequences = train.global_batch_tokens // train.seq_len
    if sequences % processes:
        enough = -(-sequences // processes) * processes * train.seq_len
        raise ConfigError(
            f"a global batch of {sequences} sequences does not divide over {processes} processes",
            why="train.global_batch_tokens / train.seq_len must be a multiple of the processes "
            "that read samples of their own",
            next=f"train.global_batch_tokens={enough}",
        )
    for stage in resolve(train).stages:
        if stage.sequences % processes:
            raise ConfigError(
                f"the batch of step {stage.step + 1}, {stage.sequences} sequences, does not divide "
                f"over {processes} processes",
                why=f"train.batch_schedule begins {stage.sequences * train.seq_len} tokens there",
                next=f"batches that are multiples of {processes * train.seq_len} tokens",
            )


def check_length(name: str, tokens: int, samples: int, seq_len: int) -> None:
    """ConfigError if a source has not a single sample of `seq_len` tokens."""
    if samples == 0:
        fits = 2 ** max(0, (tokens // 2).bit_length() - 1)  # divides the usual batch sizes
        raise ConfigError(
            f"the training data is shorter than one sequence: {name}",
            why=f"{tokens} tokens in all, train.seq_len = {seq_len}",
            next=f"train.seq_len={fits}, or more text",
        )


def check_data_key(checkpoint: CheckpointManifest, key: str, job: JobDir) -> None:
    """ConfigError if a checkpoint of `job` comes from other data than that of `key`."""
    if checkpoint.data_key != key:
        raise ConfigError(
            f"{job.root} was trained on other token files or text than there are now",
            why="their corpus, tokenizer or options differ from those of the checkpoint",
            next="name the old ones with data.tokens=FOLDER (or data.sources, data.corpus), or "
            "start a new job with name=ANOTHER",
        )


def data_key(sources: Iterable[tuple[str, str]]) -> str:
    """Identity of all that a run reads: the names and the keys of its sources, in their order."""
    return fingerprint([list(source) for source in sources])


def check_tokenizer(path: Path, sha256: str) -> None:
    """InputError, DamagedError unless `path` is the tokenizer.json with this hash."""
    if not path.is_file():
        raise InputError(
            "the tokenizer is missing", where=path, next="make its folder again, or copy it back"
        )
    if sha256_file(path) != sha256:
        raise DamagedError(
            "the tokenizer is not the one the token files were made with",
            where=path,
            next="copy the right one back, or dtt tokenize --overwrite",
        )


def check_one_tokenizer(sources: Sequence[tuple[str, Path, str]]) -> None:
    """ConfigError unless all sources have one tokenizer; of each: name, tokenizer.json, sha256."""
    name, path, sha256 = sources[0]
    for other, its, its_sha256 in sources[1:]:
        if its_sha256 != sha256:
            raise ConfigError(
                f"{name} and {other} have different tokenizers",
                where=f"{path}, {its}",
                why="the same ids would mean other text",
                next=f"tokenize {other} again with tokenizer.type=file tokenizer.path={path}",
            )


def check_files(paths: Iterable[Path]) -> None:
    """Look at every token file now, not when training comes to it; DamagedError, InputError."""
    for path in paths:
        for problem in file_problems(path):
            raise problem


def file_problems(path: Path) -> Iterator[DttError]:
    """What is wrong with the token files at `path`, by the sizes that dtt's manifest implies.

    Of files of others only whether there are any.
    """
    if not TokensManifest.is_in(path):
        if not (path.exists() or path.with_name(f"{path.name}.idx").exists()):
            yield InputError(
                f"no token files in {path}",
                next="make them with `dtt tokenize`, or name others with data.tokens=FOLDER",
            )
        return
    try:
        tokens = TokensManifest.read(path)
    except DttError as error:
        yield error
    else:
        yield from _shard_problems(path, tokens)


def _shard_problems(folder: Path, tokens: TokensManifest) -> Iterator[DttError]:
    for shard in tokens.shards:
        try:
            stem = shard_stem(folder, shard)
        except InputError as error:
            yield error
            continue
        for path, expected in _expected_sizes(stem, shard.counts, tokens.dtype):
            try:
                if path.parent == folder:
                    checked_file(path.name, folder / TokensManifest.filename)
                size = path.stat().st_size  # once: a file server answers each of these calls
            except FileNotFoundError:
                yield InputError(
                    "a token file is missing", where=path, next="make it again: dtt tokenize"
                )
                continue
            except DamagedError as error:
                yield error
                continue
            if size != expected:
                yield DamagedError(
                    "a token file is not the one the manifest names",
                    where=path,
                    why=f"{size} bytes, it should have {expected}",
                    next="make it again: dtt tokenize --overwrite",
                )


def _expected_sizes(stem: Path, counts: SplitCounts, dtype: str) -> Iterator[tuple[Path, int]]:
    """The two files of a shard and their bytes."""
    yield stem.with_name(f"{stem.name}.bin"), counts.tokens * BYTES[dtype]
    documents = counts.documents
    yield stem.with_name(f"{stem.name}.idx"), index_bytes(documents, documents + 1)


def index_bytes(sequences: int, entries: int) -> int:
    """Size of an index file, whose parts dtt.data.tokenfile describes."""
    return 34 + 12 * sequences + 8 * entries
