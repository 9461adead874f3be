"""Validation of token files against a run, by arithmetic and file sizes.

Token ids are not read. The module imports neither torch nor numpy, because a login node runs these
checks before it submits a job.
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
from dtt.config.data import TokensDataConfig
from dtt.config.load import Resolved
from dtt.config.train import TrainConfig
from dtt.data.stages import resolve
from dtt.errors import ConfigError, DamagedError, DttError, InputError
from dtt.runtime.files import sha256_file
from dtt.runtime.jobdir import JobDir

BYTES = {"uint16": 2, "int32": 4}


def check_batches(train: TrainConfig, processes: int) -> None:
    """Raise ConfigError if a batch of the run is not divisible by the number of processes."""
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
    """Raise ConfigError if a source has no sample of `seq_len` tokens."""
    if samples == 0:
        fits = 2 ** max(0, (tokens // 2).bit_length() - 1)  # a divisor of common batch sizes
        raise ConfigError(
            f"the training data is shorter than one sequence: {name}",
            why=f"{tokens} tokens in all, train.seq_len = {seq_len}",
            next=f"train.seq_len={fits}, or more text",
        )


def check_data_key(checkpoint: CheckpointManifest, key: str, job: JobDir) -> None:
    """Raise ConfigError if the data key of a checkpoint of `job` differs from `key`."""
    if checkpoint.data_key != key:
        raise ConfigError(
            f"{job.root} was trained on other token files or text than there are now",
            why="their corpus, tokenizer or options differ from those of the checkpoint",
            next="name the old ones with data.tokens=FOLDER (or data.sources, data.corpus), or "
            "start a new job with name=ANOTHER",
        )


def data_key(sources: Iterable[tuple[str, str]]) -> str:
    """Return the fingerprint of all data of a run, from its sources' names and keys, in order."""
    return fingerprint([list(source) for source in sources])


def check_tokenizer(path: Path, sha256: str) -> None:
    """Raise InputError if the tokenizer `path` is missing, DamagedError if its sha256 differs."""
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


def check_vocabulary(resolved: Resolved, job: JobDir, vocab_size: int | None = None) -> list[str]:
    """Compare `tokenizer.vocab_size`, if it was set, with the vocabulary of the token files.

    Training always uses the vocabulary of the token files. If the two differ, the function raises
    ConfigError for token files that `dtt tokenize` makes from this configuration, and returns a
    warning for token files that `data` names, since their tokenizer was not made by this
    `tokenizer` section. It returns an empty list if they agree, or if the user did not set the key:
    it is the default, or comes from the configuration that `job` has stored. If `vocab_size` is
    None, it is read from the manifest of the token files.
    """
    cfg, origin = resolved.config, resolved.origin("tokenizer.vocab_size")
    if not isinstance(cfg.data, TokensDataConfig) or cfg.tokenizer.type != "bpe":
        return []
    asked = cfg.tokenizer.vocab_size
    if asked == vocab_size or origin == "default" or origin.startswith(f"{job.config}:"):
        return []
    for manifest in (TokensManifest.read(p) for p in cfg.token_paths if TokensManifest.is_in(p)):
        vocab_size = manifest.vocab_size
        # Training the tokenizer may have stopped before it reached the requested size.
        if asked in (vocab_size, manifest.key_parts.get("tokenizer", {}).get("vocab_size")):
            return []
    if vocab_size is None:
        return []
    told = f"tokenizer.vocab_size={asked} ({origin}), but the token files have {vocab_size} entries"
    if cfg.data.tokens is not None or cfg.data.sources:
        return [f"{told}, which training uses"]
    raise ConfigError(
        told,
        where=cfg.tokenize_dir,
        next=f"tokenizer.vocab_size={vocab_size}; or make them again: dtt tokenize --overwrite; or "
        "tokenize.out=ANOTHER for both commands",
    )


def check_one_tokenizer(sources: Sequence[tuple[str, Path, str]]) -> None:
    """Raise ConfigError unless all sources have the same tokenizer.

    Each element of `sources` is (name, path of its tokenizer.json, sha256 of that file).
    """
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
    """Check all token files at the start, rather than when training first reads them.

    Raises InputError for a missing file and DamagedError for a damaged one.
    """
    for path in paths:
        for problem in file_problems(path):
            raise problem


def file_problems(path: Path) -> Iterator[DttError]:
    """Yield an error for each problem with the token files at `path`.

    File sizes are compared with those that dtt's manifest implies. Token files without a manifest
    are only checked for existence.
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
                size = path.stat().st_size  # one call only: each is a request to the file server
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
    """Yield the two files of a shard with their expected sizes in bytes."""
    yield stem.with_name(f"{stem.name}.bin"), counts.tokens * BYTES[dtype]
    documents = counts.documents
    yield stem.with_name(f"{stem.name}.idx"), index_bytes(documents, documents + 1)


def index_bytes(sequences: int, entries: int) -> int:
    """Return the size of an index file in bytes; dtt.data.tokenfile documents the format."""
    return 34 + 12 * sequences + 8 * entries
