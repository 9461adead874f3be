"""Validation of token files against a run, by arithmetic and file sizes.

Token ids are not read. The module imports neither torch nor numpy, because a login node runs these
checks before it submits a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import CheckpointManifest, DataManifest, TokensManifest
from dtt.artifacts.token_folders import files_of, token_paths
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.base.files import sha256_file
from dtt.base.safe_names import checked_file
from dtt.config.merging import Resolved
from dtt.config.parallel import Sizes
from dtt.config.train import TrainConfig
from dtt.data.samples.step_sizes import step_sizes_of


def check_batches(train: TrainConfig, sizes: Sizes, done: int = 0) -> None:
    """Raise ConfigError if a batch of the run cannot be divided among the ranks of a mesh.

    The batches of the first `done` steps, which are trained, need not be.
    """
    processes = sizes.data
    sequences = train.global_batch_tokens // train.seq_len
    if sequences % processes:
        enough = -(-sequences // processes) * processes * train.seq_len
        raise ConfigError(
            f"a global batch of {sequences} sequences cannot be divided evenly among "
            f"{processes} processes",
            why="train.global_batch_tokens / train.seq_len must be a multiple of the number "
            "of processes that read different samples",
            next=f"train.global_batch_tokens={enough}",
        )
    # `train.epochs` is resolved when the data is open.
    steps = step_sizes_of(train).ranges_from(done) if train.steps else ()
    for step in steps:
        if step.sequences % processes:
            raise ConfigError(
                f"the batch of step {step.step + 1}, {step.sequences} sequences, cannot be "
                f"divided evenly among {processes} processes",
                why=f"train.batch_schedule begins {step.sequences * train.seq_len} tokens there",
                next=f"batches that are multiples of {processes * train.seq_len} tokens",
            )
    if (ranks := sizes.pipeline) == 1:
        return
    own = [train.global_batch_tokens // train.seq_len, *(sizes.sequences for sizes in steps)]
    if uneven := [n // processes for n in own if n // processes % train.micro_batch]:
        raise ConfigError(
            "a pipeline needs micro-batches of one size",
            where="train.micro_batch",
            why=f"{uneven[0]} sequences of a process are not a multiple of {train.micro_batch}",
            next="a train.micro_batch that divides them",
        )
    if (count := own[0] // processes // train.micro_batch) < ranks:
        raise ConfigError(
            f"a pipeline of {ranks} ranks needs at least {ranks} micro-batches in a step",
            where="parallel.pipeline",
            why=f"a batch is {count} of {train.micro_batch} sequences on each process",
            next="a larger train.global_batch_tokens or a smaller train.micro_batch",
        )


def check_length(name: str, tokens: int, samples: int, seq_len: int) -> None:
    """Raise ConfigError if a source has no sample of `seq_len` tokens."""
    if samples == 0:
        fits = 2 ** max(0, (tokens // 2).bit_length() - 1)  # a divisor of common batch sizes
        raise ConfigError(
            f"the training data is shorter than one sequence: {name}",
            why=f"{tokens} tokens in total, train.seq_len = {seq_len}",
            next=f"train.seq_len={fits}, or more text",
        )


def check_data(
    checkpoint: CheckpointManifest, sources: Sequence[tuple[str, str]], job: JobDir
) -> None:
    """Raise ConfigError if the data of a checkpoint of `job` differs from `sources`.

    Each element of `sources` is (name, key).
    """
    if checkpoint.data_key == data_key(sources):
        return
    then = now = {name for name, _ in sources}
    with suppress(DttError):  # a branch has no record of its own yet
        then = {source.name for source in DataManifest.read(job.root).sources}
    parts = (("new", now - then), ("missing", then - now))
    others = [f"{what}: {', '.join(sorted(names))}" for what, names in parts if names]
    raise ConfigError(
        f"{job.root} was trained on token files or text that have changed since",
        why="; ".join(others)
        or "their corpus, removed documents, tokenizer or options differ from those of the "
        "checkpoint",
        next="specify the previous ones with data.tokens=FOLDER (or data.sources, download.out), "
        "or start a new job with name=ANOTHER",
    )


def data_key(sources: Iterable[tuple[str, str]]) -> str:
    """Return the fingerprint of all data of a run, from its sources' names and keys, in order."""
    return fingerprint([list(source) for source in sources])


def check_tokenizer(path: Path, sha256: str) -> None:
    """Raise InputError if the tokenizer `path` is missing, DamagedError if its sha256 differs."""
    if not path.is_file():
        raise InputError("the tokenizer is missing", where=path)
    if sha256_file(path) != sha256:
        raise DamagedError(
            "the tokenizer is not the one the token files were made with",
            where=path,
            next="restore the original, or run dtt tokenize --overwrite",
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
    if not cfg.data.reads_token_files or cfg.tokenizer.type != "bpe":
        return []
    asked = cfg.tokenizer.vocab_size
    if asked == vocab_size or origin == "default" or origin.startswith(f"{job.config}:"):
        return []
    for manifest in (TokensManifest.read(p) for p in token_paths(cfg) if TokensManifest.is_in(p)):
        vocab_size = manifest.vocab_size
        # Training the tokenizer may have stopped before it reached the requested size.
        if asked in (vocab_size, manifest.key_parts.get("tokenizer", {}).get("vocab_size")):
            return []
    if vocab_size is None:
        return []
    mismatch = (
        f"tokenizer.vocab_size={asked} ({origin}), but the token files have {vocab_size} entries"
    )
    if cfg.data.tokens is not None or cfg.data.sources or cfg.download.datasets:
        return [f"{mismatch}, which training uses"]
    raise ConfigError(
        mismatch,
        where=cfg.tokenize_dir,
        next=f"tokenizer.vocab_size={vocab_size}; or create them again: dtt tokenize "
        f"--overwrite; or "
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
                why="the same ids would represent different text",
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
                next="create them with `dtt tokenize`, or specify others with data.tokens=FOLDER",
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
        for path, expected, _ in files_of(folder / shard.stem, shard, tokens.dtype):
            try:
                checked_file(path.name, folder / TokensManifest.filename)
                size = path.stat().st_size  # one call only: each is a request to the file server
            except FileNotFoundError:
                yield InputError(
                    "a token file is missing", where=path, next="create it again: dtt tokenize"
                )
                continue
            except DamagedError as error:
                yield error
                continue
            if size != expected:
                yield DamagedError(
                    "a token file is not the one that the manifest records",
                    where=path,
                    why=f"{size} bytes, expected {expected}",
                    next="create it again: dtt tokenize --overwrite",
                )
