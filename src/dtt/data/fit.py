"""Whether token files and a run fit each other: arithmetic and file sizes, nothing is read.

Imports neither torch nor numpy: a login node asks this before it submits a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dtt.artifacts import CheckpointManifest, TokenShard, TokensManifest
from dtt.config.train import TrainConfig
from dtt.errors import ConfigError, DamagedError, DttError, InputError
from dtt.runtime.jobdir import JobDir

BYTES = {"uint16": 2, "int32": 4}


def sequences_per_step(train: TrainConfig, processes: int) -> int:
    """Sequences in one optimizer step; ConfigError if they do not divide over the processes."""
    sequences = train.global_batch_tokens // train.seq_len
    if sequences % processes:
        enough = -(-sequences // processes) * processes * train.seq_len
        raise ConfigError(
            f"a global batch of {sequences} sequences does not divide over {processes} processes",
            why="train.global_batch_tokens / train.seq_len must be a multiple of the processes",
            next=f"train.global_batch_tokens={enough}",
        )
    return sequences


def check_length(tokens: TokensManifest, windows: int, seq_len: int) -> None:
    """ConfigError if the training text has not a single window of `seq_len` tokens."""
    if windows == 0:
        total = tokens.counts("train").tokens
        fits = 2 ** max(0, (total // 2).bit_length() - 1)  # divides the usual batch sizes
        raise ConfigError(
            "the training data is shorter than one sequence",
            why=f"{total} tokens in all, train.seq_len = {seq_len}",
            next=f"train.seq_len={fits}, or more text",
        )


def check_data_key(checkpoint: CheckpointManifest, tokens: TokensManifest, job: JobDir) -> None:
    """ConfigError if a checkpoint of `job` comes from other token files."""
    if checkpoint.data_key != tokens.key:
        raise ConfigError(
            f"{job.root} was trained on other token files than those that are there now",
            why="their corpus, tokenizer or options differ from those of the checkpoint",
            next="name the old ones with data.tokens=FOLDER, or start a new job with name=ANOTHER",
        )


def shard_problems(folder: Path, tokens: TokensManifest) -> Iterator[DttError]:
    """What is wrong with the shards of a folder, by the sizes that its manifest implies."""
    for shard in tokens.shards:
        for path, expected in _expected_sizes(folder, shard, tokens.dtype):
            if not path.is_file():
                yield InputError(
                    "a token file is missing", where=path, next="make it again: dtt tokenize"
                )
            elif path.stat().st_size != expected:
                yield DamagedError(
                    "a token file is not the one the manifest names",
                    where=path,
                    why=f"{path.stat().st_size} bytes, it should have {expected}",
                    next="make it again: dtt tokenize --overwrite",
                )


def _expected_sizes(folder: Path, shard: TokenShard, dtype: str) -> Iterator[tuple[Path, int]]:
    """The two files of a shard and their bytes."""
    stem = folder / shard.stem
    yield stem.with_name(stem.name + ".bin"), shard.counts.tokens * BYTES[dtype]
    documents = shard.counts.documents
    yield stem.with_name(stem.name + ".idx"), index_bytes(documents, documents + 1)


def index_bytes(sequences: int, entries: int) -> int:
    """Size of an index file, whose parts dtt.data.tokenfile describes."""
    return 34 + 12 * sequences + 8 * entries
